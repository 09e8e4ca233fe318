#!/usr/bin/env bash
# torch 2.15.0: mse_loss of sharded DTensors has the right value, and gradients as many times too large as there are
# ranks. smooth_l1_loss, huber_loss, binary_cross_entropy and soft_margin_loss do the same.
#
# Guess before running: a DTensor computes what the whole tensor would, or raises an error. F.mse_loss(a, b) is
# (a - b).square().mean(), value and gradient, and that mean is right for uneven shards too.
# Seen: three processes, gloo, rows sharded, a replicated weight. Six rows: each loss is right, and the gradient of the
# weight is 3.000 times the right one for these five losses. l1_loss, binary_cross_entropy_with_logits and the mean
# written out are right. Columns sharded, as tensor-parallel layers give them: 3.000 times again.
# Seven rows (3, 3 and 1): the five gradients also point elsewhere, by cosines of 0.87 to 0.95. The values are wrong for
# the five and binary_cross_entropy_with_logits: mse_loss gives 4.92 for 5.63. Four rows (2, 2, 0): these six are nan.
# Why: these operators have no sharding rule of their own. Placements come from a trace of their decomposition over a
# mesh of one rank, where every shard is even and whole. Then the operator itself, not its decomposition, runs on each
# shard. Its backward divides by the number of elements of the shard.
# Consequence: the reported loss is right, yet SGD runs at a multiple of its learning rate that grows with the ranks.
# Clipping by norm bites earlier. Adam hides it. Take reduction="sum" and divide by numel(), which is right here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - "$folder" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS = 3
SCALED = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, 2 * y - 1),
}
UNEVEN = {"binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits}
RIGHT = {
    "l1_loss": F.l1_loss,
    "mean written out": lambda x, y: (x - y).square().mean(),
    "mse_loss, sum by numel": lambda x, y: F.mse_loss(x, y, reduction="sum") / x.numel(),
}
LOSSES = SCALED | UNEVEN | RIGHT


def cases():
    for rows, dim in ((6, 0), (6, 1), (7, 0), (4, 0)):
        torch.manual_seed(0)
        yield rows, dim, torch.randn(rows, 5), torch.randn(5, 6), torch.rand(rows, 6)


def plain(loss, inputs, weight, targets):
    """Value and gradient of the weight, of whole tensors in float64."""
    weight = weight.double().requires_grad_()
    value = loss(inputs.double() @ weight, targets.double())
    value.backward()
    return value.detach(), weight.grad


def sharded(loss, inputs, weight, targets, dim, mesh):
    """The same of DTensors: rows (dim 0) or columns (dim 1) of the outputs are sharded."""
    rows, columns = (Shard(0), Replicate()) if dim == 0 else (Replicate(), Shard(1))
    weight = distribute_tensor(weight, mesh, [columns]).requires_grad_()
    outputs = distribute_tensor(inputs, mesh, [rows]) @ weight
    value = loss(outputs, distribute_tensor(targets, mesh, [Shard(dim)]))
    value.backward()
    return value.full_tensor().double(), weight.grad.full_tensor().double()


def close(one, other):
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for rows, dim, inputs, weight, targets in cases():
        even = rows % RANKS == 0
        for name, loss in LOSSES.items():
            wanted, gradient = plain(loss, inputs, weight, targets)
            value, found = sharded(loss, inputs, weight, targets, dim, mesh)
            # The multiple of the right gradient nearest to the one found, and the cosine between the two.
            times = float((found * gradient).sum() / gradient.square().sum())
            cosine = float(F.cosine_similarity(found.flatten(), gradient.flatten(), dim=0))
            if rank == 0:
                print(f"{rows} rows, dim {dim} sharded, {name}: {value:.4f} for {wanted:.4f};", end=" ")
                print(f"gradient {times:.3f} times the right one, cosine {cosine:.4f}", flush=True)
            assert close(value, wanted) == (even or name in RIGHT), f"changed: value of {name}, {rows} rows"
            assert close(found, gradient) == (name not in SCALED), f"changed: gradient of {name}, {rows} rows"
            if name in SCALED and even:
                assert close(found, RANKS * gradient), f"changed: gradient of {name}, {rows} rows"
            if rows < RANKS + 2 and name not in RIGHT:
                assert value.isnan(), f"changed: {name} with an empty shard"
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=RANKS, start_method="fork")
    print("as described")
PY
