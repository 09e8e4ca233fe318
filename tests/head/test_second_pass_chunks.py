"""Pass 2 on a CPU has the same chunks for any number of samples: replicas of unequal batches sum them one by one."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

import plsc
from plsc.native import head_kernels
from plsc.parallel import Mesh

CLASSES, DIM = 5000, 32


def chunks(mesh: Mesh, sizes: list[int], **options: Any) -> list[tuple[int, int]]:
    """The classes [start, stop) of each chunk on this rank, which has its own of ``sizes`` samples, and three cores."""
    count = sizes[mesh.rank]
    with patch.object(torch, "get_num_threads", return_value=3):  # PyTorch cuts bfloat16 rows as the kernels on two do
        head = plsc.ShardedHead(DIM, CLASSES, mesh, chunk_classes=3072, **options)
        plsc.HeadSGD(head)
        x = torch.randn(count, DIM, generator=torch.Generator().manual_seed(0), requires_grad=True)
        head(x, torch.arange(count)).backward()
        return [(chunk.start, chunk.stop) for chunk, _ in head.softmax.gradient_chunks(head.softmax.pending.batches)]


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
    one, other = ranks(2, chunks, sizes, head_ranks=1, **options)
    assert one == other
    assert len(one) == 2
