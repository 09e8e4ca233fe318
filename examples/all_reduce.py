"""All-reduces of one's own on plsc.collectives: a hierarchical and a two-dimensional one.

    torchrun --nproc-per-node 4 examples/all_reduce.py --machine-ranks 2

The ranks are a grid: its rows are the consecutive ranks of a machine, its columns those at the same place of every
machine. ``plsc.init(head_ranks=K)`` makes both: ``mesh.head`` is this rank's row, ``mesh.replicas`` its column.
With N bytes on each of m machines of k ranks, between machines go 2·N·(m - 1)/m bytes

- of the hierarchical one from one rank of each machine, and nothing from the others;
- of the two-dimensional one from each machine's ranks together, a k-th from each: over k network cards at a time.
"""

import argparse

import torch
from torch import Tensor

import plsc
from plsc.collectives import all_gather_rows, all_reduce_max, all_reduce_sum, broadcast, reduce_scatter_rows
from plsc.parallel import Mesh, shutdown


def hierarchical_all_reduce(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Sum ``tensor`` over all ranks, in place: within machines, between their first ranks, and back."""
    machine, across = mesh.head, mesh.replicas
    all_reduce_sum(tensor, machine)
    if machine.is_main:
        all_reduce_sum(tensor, across)
    return broadcast(tensor, machine)


def two_dimensional_all_reduce(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of ``tensor`` over all ranks: each sums its part of a machine's sum between machines.

    ``tensor`` is overwritten.
    """
    machine, across = mesh.head, mesh.replicas
    count, ranks = tensor.numel(), machine.world_size
    sizes = [(count + ranks - 1 - rank) // ranks for rank in range(ranks)]
    part = reduce_scatter_rows(tensor.flatten(), sizes, machine)
    all_reduce_sum(part, across)
    return all_gather_rows(part, machine, sizes).view_as(tensor)


def main(argv: list[str] | None = None) -> float:
    """Sum a tensor in both ways; return how far they are from torch's own all-reduce, at most."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine-ranks", type=int, default=2)
    parser.add_argument("--numbers", type=int, default=1001)
    args = parser.parse_args(argv)
    mesh = plsc.init(head_ranks=args.machine_ranks)
    own = torch.randn(args.numbers, generator=torch.Generator().manual_seed(mesh.rank)).to(mesh.device)
    expected = all_reduce_sum(own.clone(), mesh)
    ways = (hierarchical_all_reduce, two_dimensional_all_reduce)
    worst = torch.stack([(way(own.clone(), mesh) - expected).abs().max() for way in ways])
    return float(all_reduce_max(worst, mesh).max())


if __name__ == "__main__":
    print(f"largest difference: {main():.1e}")
    shutdown()
