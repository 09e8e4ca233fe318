#!/usr/bin/env bash
# torch 2.15.0: DistributedDataParallel's powerSGD_hook at matrix_approximation_rank=2 returns wrong gradients where
# rank 1, 3 and 4 return exact ones.
#
# Guess before running: a gradient of matrix rank 1 (one sample through a linear layer) is exact at every rank,
# and more ranks can only help.
# Seen: one process, gloo, float32, no error feedback. Relative errors over 20 seeds and three steps each: below 1e-4 at
# ranks 1, 3 and 4. At rank 2 the median is about 0.24 and the largest 0.9.
# Why: ranks 1 and 2 (and 16-bit types) are orthogonalised by one pass of Gram-Schmidt, others by a QR factorisation.
# Where both columns are nearly parallel, what is left of the second after the projection is rounding. Normalised, it
# is not orthogonal to the first, so a part of the gradient is counted twice.
# orthogonalization_epsilon is 0 by default.
# Consequence: layers with low-rank gradients (few samples, few distinct labels, rarely active units) learn from a
# wrong direction at rank 2. Use another rank, or orthogonalise twice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import statistics

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def errors(rank):
    """Relative errors of compressed gradients of one sample, whose matrix has rank 1."""
    for seed in range(20):
        torch.manual_seed(seed)
        linear = torch.nn.Linear(96, 64, bias=False)
        net = DistributedDataParallel(linear)
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            use_error_feedback=False,
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(6):
            sample, direction = torch.randn(1, 96), torch.randn(1, 64)
            linear.weight.grad = None
            (net(sample) * direction).sum().backward()
            if step >= 3:  # the first ones are not compressed
                exact = direction.T @ sample
                yield float((linear.weight.grad - exact).norm() / exact.norm())


seen = {rank: list(errors(rank)) for rank in (1, 2, 3, 4)}
for rank, values in seen.items():
    print(f"rank {rank}: median {statistics.median(values):.1e}, largest {max(values):.1e}")
exact = {rank: max(values) < 1e-4 for rank, values in seen.items()}
assert exact == {1: True, 2: False, 3: True, 4: True}, f"changed: exact at {exact}"
assert statistics.median(seen[2]) > 0.05, f"changed: rank 2 is nearly exact, {statistics.median(seen[2])}"
PY
