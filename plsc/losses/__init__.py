"""Margins, and the class softmax in two passes."""

from plsc.losses.margins import *  # noqa: F403  (every margin, by its __all__)
from plsc.losses.margins import MARGINS as MARGINS
from plsc.losses.margins import Margin as Margin
