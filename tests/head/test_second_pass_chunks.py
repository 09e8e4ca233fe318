"""Pass 2 on a CPU has the same chunks on all replicas, which sum them one by one: of unequal batches, and threads."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

import plsc
from plsc.native import head_kernels
from plsc.parallel import Mesh

CLASSES, DIM = 5000, 32


def chunks(mesh: Mesh, sizes: list[int], threads: list[int], **options: Any) -> tuple[list[tuple[int, int]], str]:
    """The classes [start, stop) of each chunk on this rank, which has its own of ``sizes`` samples, and the backend."""
    count = sizes[mesh.rank]
    with patch.object(torch, "get_num_threads", return_value=threads[mesh.rank]):
        head = plsc.ShardedHead(DIM, CLASSES, mesh, chunk_classes=3072, **options)
        plsc.HeadSGD(head)
        x = torch.randn(count, DIM, generator=torch.Generator().manual_seed(0), requires_grad=True)
        head(x, torch.arange(count)).backward()
        made = head.softmax.gradient_chunks(head.softmax.pending.batches)
        return [(chunk.start, chunk.stop) for chunk, _ in made], head.backend.describe()


@pytest.mark.skipif(head_kernels.why_no_passes(torch.float32, DIM) is not None, reason="no compiled passes")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([64, 8], {}),
        ([8, 64], {"exponentials_memory": "1MiB"}),
        ([64, 0], {"weight_dtype": torch.bfloat16}),
    ],
    ids=["float32", "exponentials kept", "bfloat16"],
)
def test_groups_of_few_and_of_many_samples_cut_alike(ranks, sizes, options):
    # with three threads: PyTorch cuts bfloat16 rows as the kernels do with two
    (one, _), (other, _) = ranks(2, chunks, sizes, [3, 3], head_ranks=1, **options)
    assert one == other
    assert len(one) == 2


@pytest.mark.skipif(head_kernels.why_no_passes(torch.float32, DIM) is not None, reason="no compiled passes")
def test_groups_with_other_numbers_of_threads_cut_alike(ranks):
    (one, backend), (other, _) = ranks(2, chunks, [64, 64], [1, 3], head_ranks=1)
    assert one == other
    assert backend == "torch backend: replicas of this shard cannot all run cpu's passes, threads: 1"
