"""The training run: loop, steps, checkpoints, metrics. The way in is ``train``."""

from plsc.train.failures import Interrupted as Interrupted
from plsc.train.trainer import train as train
