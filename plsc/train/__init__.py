"""The training run: loop, steps, checkpoints, metrics. The way in is ``train``."""

from plsc.train.interrupt import Interrupted as Interrupted
from plsc.train.loop import train as train
