"""What the machine itself allows: the rate of the one product that the softmax consists of, and of a copy."""

import time
from collections.abc import Callable

import torch

from plsc.bench.setting import Setting
from plsc.head.partition import class_range
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh

_ROWS = {"cpu": 65_536, "cuda": 524_288}  # of the table, at a time
_COPIED = {"cpu": 128 << 20, "cuda": 2 << 30}  # bytes; beyond any cache
_SECONDS = 0.2  # at least, for a rate
_PRODUCTS = 4  # two for the logits of both passes, one for the embeddings' gradient, one for the rows'


def measure_floor(setting: Setting, mesh: Mesh) -> dict[str, float | str | None]:
    """Rates of this rank while all ranks measure, and the seconds that they imply for an exact step.

    On a CPU seconds are of processor time, which other programs do not disturb.

    Returns:
        ``product_gflops`` of a chunk of rows (n, D) times the embeddings (D, B), in bfloat16, or in float32 where the
        processor is quicker at it (``note`` says so); ``copy_gb_s`` of bytes read and written; ``wall_s`` and
        ``cpu_s`` (not on a GPU) for 8·B·C·D / ranks floating-point operations.
    """
    all_reduce_sum(torch.zeros(1, device=mesh.device), mesh)  # begin together
    on_cpu = mesh.device.type == "cpu"
    rates = {torch.bfloat16: _product_rate(setting, mesh.device, torch.bfloat16)}
    if on_cpu:
        rates[torch.float32] = _product_rate(setting, mesh.device, torch.float32)
    dtype = max(rates, key=lambda key: rates[key])
    first, stop = class_range(setting.classes, mesh.rank, mesh.world_size)
    seconds = 2 * _PRODUCTS * setting.global_batch * (stop - first) * setting.dim / rates[dtype]
    return {
        "product_gflops": rates[dtype] / 1e9,
        "copy_gb_s": _copy_rate(setting, mesh.device) / 1e9,
        "wall_s": seconds,
        "cpu_s": seconds * setting.threads if on_cpu else None,
        "note": str(dtype).removeprefix("torch."),
    }


def _product_rate(setting: Setting, device: torch.device, dtype: torch.dtype) -> float:
    rows = min(setting.classes, _ROWS[device.type])
    table = torch.randn(rows, setting.dim, device=device).to(dtype)
    embeddings = torch.randn(setting.global_batch, setting.dim, device=device).to(dtype)
    out = torch.empty(rows, setting.global_batch, device=device, dtype=dtype)
    seconds = _seconds_each(lambda: torch.mm(table, embeddings.t(), out=out), setting, device)
    return 2 * rows * setting.dim * setting.global_batch / seconds


def _copy_rate(setting: Setting, device: torch.device) -> float:
    size = _COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _seconds_each(lambda: target.copy_(source), setting, device)


def _seconds_each(work: Callable[[], object], setting: Setting, device: torch.device) -> float:
    work()
    count, start = 0, _now(setting, device)
    while (passed := _now(setting, device) - start) < _SECONDS:
        for _ in range(8):
            work()
        count += 8
    return passed / count


def _now(setting: Setting, device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time() / setting.threads
    torch.cuda.synchronize(device)
    return time.perf_counter()
