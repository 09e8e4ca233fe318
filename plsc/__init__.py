"""plsc: train recognition models over tens of millions of classes, and put them to work."""

from plsc.client import Client as Client
from plsc.errors import PlscError as PlscError
from plsc.head import ShardedHead as ShardedHead
from plsc.losses import AdaFace as AdaFace
from plsc.losses import ArcFace as ArcFace
from plsc.losses import Combined as Combined
from plsc.losses import CosFace as CosFace
from plsc.losses import CurricularFace as CurricularFace
from plsc.losses import ElasticFace as ElasticFace
from plsc.losses import MagFace as MagFace
from plsc.losses import Softmax as Softmax
from plsc.losses import SphereFace as SphereFace
from plsc.optim import HeadAdamW as HeadAdamW
from plsc.optim import HeadSGD as HeadSGD
from plsc.parallel import data_parallel as data_parallel
from plsc.parallel import init as init

__version__ = "0.1.0"
