"""Collectives over the ranks of a mesh, for strategies, gradient hooks and loops of your own.

Each takes the mesh of :func:`plsc.init`, or a part of it, last, and is the identity where there is one rank. All ranks
of that mesh must call them in the same order. Tensors travel by NCCL between GPUs, objects by gloo between hosts.
``examples/all_reduce.py`` builds a hierarchical and a two-dimensional all-reduce of them.
"""

from plsc.parallel.collectives import all_gather_equal as all_gather_equal
from plsc.parallel.collectives import all_gather_numbers as all_gather_numbers
from plsc.parallel.collectives import all_gather_object as all_gather_object
from plsc.parallel.collectives import all_gather_rows as all_gather_rows
from plsc.parallel.collectives import all_reduce_max as all_reduce_max
from plsc.parallel.collectives import all_reduce_sum as all_reduce_sum
from plsc.parallel.collectives import all_reduce_sum_async as all_reduce_sum_async
from plsc.parallel.collectives import barrier as barrier
from plsc.parallel.collectives import broadcast as broadcast
from plsc.parallel.collectives import broadcast_object as broadcast_object
from plsc.parallel.collectives import on_main as on_main
from plsc.parallel.collectives import raise_on_all_ranks as raise_on_all_ranks
from plsc.parallel.collectives import reduce_scatter_rows as reduce_scatter_rows
from plsc.parallel.mesh import subgroup as subgroup
