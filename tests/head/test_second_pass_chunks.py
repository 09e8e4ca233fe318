"""Pass 2 on a CPU has the same chunks for any number of samples: replicas of unequal batches sum them one by one."""

import pytest
import torch

import plsc
from plsc.native import head_kernels

CLASSES, DIM = 5000, 32


@pytest.mark.skipif(head_kernels.why_no_passes(torch.float32, DIM) is not None, reason="no compiled passes")
@pytest.mark.parametrize("options", [{}, {"exponentials_memory": "1MiB"}], ids=["", "exponentials kept"])
def test_few_samples_are_cut_as_many(options):
    cut = []
    for samples in (16, 8):
        head = plsc.ShardedHead(DIM, CLASSES, chunk_classes=3072, **options)
        plsc.HeadSGD(head)
        x = torch.randn(samples, DIM, generator=torch.Generator().manual_seed(0), requires_grad=True)
        head(x, torch.arange(samples)).backward()
        chunks = head.softmax.gradient_chunks(head.softmax.pending.batches)
        cut.append([(chunk.start, chunk.stop) for chunk, _ in chunks])
    assert cut[0] == cut[1]
