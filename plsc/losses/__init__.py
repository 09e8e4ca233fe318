"""Margins, and the class softmax in two passes."""

from plsc.losses.margins import MARGINS as MARGINS
from plsc.losses.margins import AdaFace as AdaFace
from plsc.losses.margins import ArcFace as ArcFace
from plsc.losses.margins import Combined as Combined
from plsc.losses.margins import CosFace as CosFace
from plsc.losses.margins import CurricularFace as CurricularFace
from plsc.losses.margins import ElasticFace as ElasticFace
from plsc.losses.margins import MagFace as MagFace
from plsc.losses.margins import Margin as Margin
from plsc.losses.margins import Softmax as Softmax
from plsc.losses.margins import SphereFace as SphereFace
