"""Optimizers of the class table, clipping, loss scaling and schedules."""

from plsc.optim.gradients import GradScaler as GradScaler
from plsc.optim.gradients import clip_grad_norm_ as clip_grad_norm_
from plsc.optim.head_optimizers import HeadAdamW as HeadAdamW
from plsc.optim.head_optimizers import HeadOptimizer as HeadOptimizer
from plsc.optim.head_optimizers import HeadSGD as HeadSGD
from plsc.optim.head_optimizers import HeadState as HeadState
