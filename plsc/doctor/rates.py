"""Rates of this rank's device (products, copies, the bus), and of the collectives between the ranks."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from plsc.devices import (
    Device,
    copy_rate,
    known_device,
    low_precision_units,
    measured_precisions,
    product_flops,
    shortest_seconds,
)
from plsc.doctor.report import Line, Tick, absent, checked, failed, found
from plsc.errors import first_line
from plsc.head.backends.triton_backend import runs_on
from plsc.parallel.collectives import all_gather_equal, all_reduce_sum, reduce_scatter_rows
from plsc.parallel.mesh import Mesh

_SIDE = {"cpu": 512, "cuda": 8192}  # of square factors
_COPIED = {"cpu": 64 << 20, "cuda": 2 << 30}  # bytes, beyond any cache
_BUS_BYTES = 256 << 20
_MESSAGE = {"cpu": 4 << 20, "cuda": 256 << 20}  # bytes of a collective's larger side
_LEAST_SECONDS = 0.1
# Below this share of what plan assumes of a known GPU, something else runs on it, or its clocks are limited.
_LEAST_SHARE = 0.5


def device_rates(device: torch.device, tick: Tick) -> tuple[list[Line], Device]:
    """Lines of products, memory and bus; and the device as ``plsc plan`` takes it, with these speeds."""
    known = known_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    speeds: dict[str, float] = {}
    lines = []
    own = measured_precisions(device)
    for name in ("bf16", "tf32", "fp32") if "bf16" in own else ("bf16", "fp16", "tf32", "fp32"):
        label = f"product, {name}"
        tick(label)
        if name not in own:
            lines.append(absent(label, low_precision_units(device).reason if device.type == "cuda" else "on GPUs only"))
            continue
        speeds[name] = product_flops(_SIDE[device.type], name, device, _LEAST_SECONDS)
        lines.append(_rate(label, speeds[name], 1e12, "TFLOP/s", known.products.get(name) if known else None))
    tick("memory")
    bandwidth = copy_rate(_COPIED[device.type], device, _LEAST_SECONDS)
    lines.append(_rate("memory, copy", bandwidth, 1e9, "GB/s", known.bandwidth if known else None))
    tick("bus")
    lines += _bus(device)
    products = {"fp16": speeds["bf16"], **speeds} if "bf16" in speeds else speeds
    return lines, Device("this device, measured", device.type, products, bandwidth, has_kernels=runs_on(device))


def _rate(name: str, value: float, unit: float, unit_name: str, planned: float | None) -> Line:
    text = f"{value / unit:.3g} {unit_name}"
    if planned is None:
        return found(name, text, per_second=value)
    text += f"; plsc plan assumes {planned / unit:.3g}"
    advice = "look with nvidia-smi -q -d PERFORMANCE,POWER for limited clocks, and for other programs on the GPU"
    return checked(name, text, value >= _LEAST_SHARE * planned, advice, per_second=value, planned=planned)


def _bus(device: torch.device) -> list[Line]:
    """Copies between pinned host memory and the GPU, each direction by itself."""
    names = ("bus, host to device", "bus, device to host")
    if device.type != "cuda":
        return [absent(name, "no GPU") for name in names]
    host = torch.empty(_BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_BUS_BYTES, dtype=torch.uint8, device=device)
    rates = [
        _BUS_BYTES / shortest_seconds(partial(to.copy_, source, non_blocking=True), device.type, _LEAST_SECONDS)
        for to, source in ((there, host), (host, there))
    ]
    lines = [_rate(name, rate, 1e9, "GB/s", None) for name, rate in zip(names, rates, strict=True)]
    there.fill_(7)
    host.copy_(there)
    arrived = bool((host == 7).all())
    advice = "copies lose bytes: look for Xid errors in dmesg, and at the riser or the slot"
    return [*lines, checked("bus, contents", "what was copied arrived" if arrived else "", arrived, advice)]


# Collectives ---------------------------------------------------------------------------------------------------------


def collectives(mesh: Mesh, tick: Tick) -> list[Line]:
    """Lines of each collective that training uses: exact on whole numbers; bus bandwidth as nccl-tests defines it."""
    total = mesh.world_size * (mesh.world_size + 1) / 2

    def all_gather(tensor: Tensor) -> tuple[Tensor, Tensor]:
        own = tensor[: len(tensor) // mesh.world_size]
        numbers = torch.arange(1, mesh.world_size + 1, device=tensor.device, dtype=tensor.dtype)
        return all_gather_equal(own, mesh), numbers[:, None].expand(-1, len(own)) * 1

    def reduce_scatter(tensor: Tensor) -> tuple[Tensor, Tensor]:
        part = len(tensor) // mesh.world_size
        return reduce_scatter_rows(tensor, [part] * mesh.world_size, mesh), torch.full_like(tensor[:part], total)

    runs: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "all-reduce": lambda tensor: (all_reduce_sum(tensor, mesh), torch.full_like(tensor, total)),
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
    }
    if mesh.world_size == 1:
        return [absent(name, "one rank: start with --nproc N, or torchrun, to see it") for name in runs]
    return [_collective(name, run, mesh, tick) for name, run in runs.items()]


def _collective(name: str, run: Callable[[Tensor], tuple[Tensor, Tensor]], mesh: Mesh, tick: Tick) -> Line:
    """``run`` gives a result and what it should be; small and unequal sizes first, then the one that is timed."""
    backend = "NCCL" if mesh.device.type == "cuda" else "gloo"
    world, numbers = mesh.world_size, _MESSAGE[mesh.device.type] // 4 // mesh.world_size
    try:
        for count in (1, 1000, numbers):
            tick(f"{name} of {4 * count * world:,} bytes")
            got, want = run(torch.full((count * world,), float(mesh.rank + 1), device=mesh.device))
            if not torch.equal(got, want):
                advice = "run nccl-tests with NCCL_DEBUG=INFO; a link, or a rank's library, is broken"
                return failed(name, f"{backend}: wrong numbers at {4 * count * world:,} bytes", advice)
        tick(f"{name}, rate")
        ones = torch.ones(numbers * world, device=mesh.device)
        # the shortest of five: every rank runs as many, no rank's clock decides
        seconds = shortest_seconds(lambda: run(ones), mesh.device.type, 0.0, runs=5)
    except RuntimeError as error:
        return failed(name, f"{backend}: {first_line(error)}", "see docs: when the machines do not find each other")
    size = 4 * numbers * world
    factor = (2 if name == "all-reduce" else 1) * (world - 1) / world
    rate = factor * size / seconds
    text = f"{backend}, {world} ranks: exact; {rate / 1e9:.3g} GB/s bus bandwidth at {size >> 20} MiB"
    return found(name, text, bus_bandwidth=rate, bytes=size, seconds=seconds, backend=backend)
