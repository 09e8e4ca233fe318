"""plsc: train recognition models over tens of millions of classes, and put them to work."""

from plsc.client import Client as Client
from plsc.errors import PlscError as PlscError
from plsc.head import ShardedHead as ShardedHead
from plsc.losses.margins import *  # noqa: F403  (every margin, by its __all__)
from plsc.optim import HeadAdamW as HeadAdamW
from plsc.optim import HeadSGD as HeadSGD
from plsc.parallel import data_parallel as data_parallel
from plsc.parallel import init as init

__version__ = "0.1.0"
