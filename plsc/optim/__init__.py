"""Optimizers of the class table, clipping, loss scaling and schedules."""

from plsc.optim.clipping import clip_grad_norm_ as clip_grad_norm_
from plsc.optim.grad_scaler import GradScaler as GradScaler
from plsc.optim.head_adamw import HeadAdamW as HeadAdamW
from plsc.optim.head_optimizer import HeadOptimizer as HeadOptimizer
from plsc.optim.head_sgd import HeadSGD as HeadSGD
