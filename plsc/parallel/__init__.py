"""Ranks, their collectives, and the strategies that keep the backbone's replicas equal."""

from plsc.parallel.mesh import Mesh as Mesh
from plsc.parallel.mesh import init as init
from plsc.parallel.mesh import shutdown as shutdown
from plsc.parallel.mesh import with_head_groups as with_head_groups
from plsc.parallel.strategies.ddp import data_parallel as data_parallel
from plsc.parallel.sync_batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
