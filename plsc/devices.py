"""GPUs by the numbers of their data sheets, and this machine's as measured: products, memory, links."""

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30
# Of a card sold as "80GB", 80 GiB are built in and the driver keeps some: an H100 shows 78 to 79.6 GiB, a V100-32GB
# 31.7. The smallest share seen is taken.
USABLE_SHARE = 0.975
# What large products and copies reach of the data sheet's peak: an H100 80GB SXM multiplied bfloat16 at 798 of 989
# TFLOP/s and copied at 3.0 of 3.35 TB/s.
PRODUCT_SHARE = 0.8
COPY_SHARE = 0.9
TF32_SHARE = 0.5  # of bfloat16's speed on matrix units, on all of NVIDIA's data sheets from Ampere on


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    ``products`` are FLOP/s that large products reach in each precision ("fp32", "tf32", "bf16", "fp16"), ``bandwidth``
    bytes per second that a copy reads and writes together, ``memory`` usable bytes (None: unknown), ``nvlink`` bytes
    per second and direction of its NVLinks together (0: none), ``has_kernels`` whether the fused Triton kernels run.
    """

    name: str
    kind: str
    products: dict[str, float]
    bandwidth: float
    memory: int | None = None
    nvlink: float = 0.0
    has_kernels: bool = True


def _sheet(
    name: str,
    gigabytes: float,
    bf16: float,
    fp16: float,
    fp32: float,
    terabytes_per_second: float,
    nvlink: float,
    has_kernels: bool = True,
) -> Device:
    tf32 = bf16 * TF32_SHARE if has_kernels else fp32
    peaks = {"bf16": bf16, "fp16": fp16, "tf32": tf32, "fp32": fp32}
    return Device(
        name,
        "cuda",
        {key: value * 1e12 * PRODUCT_SHARE for key, value in peaks.items()},
        terabytes_per_second * 1e12 * COPY_SHARE,
        int(gigabytes * GIB * USABLE_SHARE),
        nvlink * 1e9,
        has_kernels,
    )


# NVIDIA's data sheets: memory as sold, dense TFLOP/s with float32 sums, TB/s, NVLink GB/s per direction.
# float32 is that of the CUDA cores, PyTorch's default. A V100 has no bfloat16 units: it computes that in float32.
DEVICES = {
    device.name: device
    for device in (
        _sheet("b200", 180, 2250, 2250, 75, 8.0, 900),
        _sheet("h200", 141, 989, 989, 67, 4.8, 450),
        _sheet("h100", 80, 989, 989, 67, 3.35, 450),
        _sheet("a100", 80, 312, 312, 19.5, 2.04, 300),
        _sheet("a100-40gb", 40, 312, 312, 19.5, 1.555, 300),
        _sheet("l40s", 48, 362, 362, 91.6, 0.864, 0),
        _sheet("rtx4090", 24, 165, 165, 82.6, 1.008, 0),
        _sheet("v100", 32, 15.7, 125, 15.7, 0.9, 150, has_kernels=False),
        _sheet("a30", 24, 165, 165, 10.3, 0.933, 0),
        _sheet("a10", 24, 125, 125, 31.2, 0.6, 0),
        _sheet("rtx3090", 24, 71, 71, 35.6, 0.936, 0),
        _sheet("rtx3080", 10, 59.5, 59.5, 29.8, 0.76, 0),
    )
}


def measure_device() -> Device:
    """This machine's GPU, or its CPU where there is none: how fast it multiplies and copies. Takes seconds."""
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    side, copied = (8192, 2 << 30) if kind == "cuda" else (1024, 256 << 20)
    device = torch.device(kind)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * copied / shortest_seconds(lambda: target.copy_(source), kind)
    products = {name: product_flops(side, name, device) for name in ("bf16", "fp16", "fp32", "tf32")}
    if kind == "cpu":
        return Device("this CPU, measured", kind, products, copy)
    properties = torch.cuda.get_device_properties(0)
    known = known_device(properties.name)
    nvlink = known.nvlink if known is not None else 0.0
    kernels = torch.cuda.get_device_capability(0) >= (8, 0)
    return Device(f"{properties.name}, measured", kind, products, copy, properties.total_memory, nvlink, kernels)


def known_device(name: str) -> Device | None:
    """The data sheet of a GPU by the name that its driver gives; None where it is not among :data:`DEVICES`."""
    given = name.lower().replace("rtx ", "rtx")
    # no digit may follow: an RTX A3000 is no A30
    return next((known for known in DEVICES.values() if re.search(rf"{known.name}(?!\d)", given)), None)


def peak_flops(device: "torch.device", precision: str) -> float:
    """The FLOP/s of dense products that utilisation is a share of.

    Args:
        device: of this rank.
        precision: "fp32", "tf32", "bf16" or "fp16".

    Returns:
        The data sheet's peak of a GPU that has one here. Of other devices, what this process measures at a product of
        square matrices: once, in about 0.1 s.
    """
    import torch

    sheet = known_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if sheet is not None:
        return sheet.products[precision] / PRODUCT_SHARE
    return _measured_flops(str(device), precision)


@functools.cache
def _measured_flops(device: str, precision: str) -> float:
    import torch

    side = 8192 if device.startswith("cuda") else 512
    return product_flops(side, precision, torch.device(device), least=0.05)


def product_flops(side: int, precision: str, device: "torch.device", least: float = 0.2) -> float:
    """FLOP/s of a product of two square matrices of ``side``: the best of the runs that ``least`` seconds hold."""
    import torch

    from plsc.head.backends.products import Fp32Precision, product

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    fp32_precision: Fp32Precision = "tf32" if precision == "tf32" else "ieee"
    a = torch.full((side, side), 0.01, dtype=dtype, device=device)
    return float(2 * side**3 / shortest_seconds(lambda: product(a, a, fp32_precision), device.type, least))


def shortest_seconds(work: Callable[[], object], kind: str, least: float = 0.2, *, runs: int = 1) -> float:
    """The shortest of at least ``runs`` runs that take ``least`` seconds together, after one that does not count."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        work()
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    times = [once()]
    while len(times) < runs or sum(times) < least:
        times.append(once())
    return min(times)
