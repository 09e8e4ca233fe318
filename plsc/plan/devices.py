"""Speeds and memory of GPUs and links: by name, as given on the command line, or measured on this machine."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plsc import sizes
from plsc.errors import UsageError

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
LINK_SHARE = 0.8  # of a link's peak that large collectives reach

# The label of a card is the one place where GB does not mean 10^9 bytes (plsc.sizes).
_CARD_UNITS = {**sizes.UNITS, "gb": USABLE_SHARE * GIB, "tb": USABLE_SHARE * 2**40}


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
    )
}
# Peak bytes per second, GPU and direction: PCIe 4.0 x16; NDR InfiniBand, a 400 Gb/s port per GPU; 100 Gb/s Ethernet.
LINKS = {"pcie": 32e9, "infiniband": 50e9, "ethernet": 12.5e9}
LATENCY = {"inside": 10e-6, "between": 20e-6}  # seconds per doubling of the ranks that a collective joins
HOST_COPY = LINKS["pcie"] * LINK_SHARE  # bytes per second and direction between host and device


@dataclass(frozen=True)
class Links:
    """Bytes per second, GPU and direction that collectives reach ``inside`` a node and ``between`` nodes."""

    inside: float
    between: float
    bus: float = HOST_COPY

    def seconds(self, moved: float, ranks: int, per_node: int, stride: int = 1, calls: int = 1) -> float:
        """Of collectives over ``ranks`` ranks, ``stride`` apart, in which each sends ``moved`` bytes.

        A ring that crosses nodes does so over the links of all its ranks there (NCCL opens a channel for each), so a
        group with m ranks to a node moves m times what one link does.

        Args:
            moved: of all ``calls`` together.
            ranks: of the group.
            per_node: ranks of a node.
            stride: between neighbouring ranks of the group.
            calls: collectives, each of which begins anew.
        """
        if ranks == 1:
            return 0.0
        here = min(max(per_node // stride, 1), ranks)
        outside = here < ranks
        across = self.between * here if outside else math.inf
        speed = min(self.inside if here > 1 else math.inf, across)
        return moved / speed + calls * LATENCY["between" if outside else "inside"] * math.log2(ranks)


# Of a CPU's ranks, FLOP/s and bytes per second: so that plans of it can be compared with each other, and no more.
_CPU_PRODUCTS, _CPU_BANDWIDTH = 1e11, 1e10
# Bytes per second that a machine's processors read and write in an optimizer's step over offloaded weights: a third of
# the 614 GB/s of two sockets of eight DDR5-4800 channels each. Allowed for, not measured.
HOST_BANDWIDTH = 200e9


def named_device(name: str) -> Device:
    """One of :data:`DEVICES`; UsageError otherwise."""
    if name.lower() not in DEVICES:
        raise UsageError(f"--device {name}: it is one of {', '.join(DEVICES)}; others by --tflops and --bandwidth")
    return DEVICES[name.lower()]


def with_speeds(device: Device, tflops: float | None, bandwidth: float | None) -> Device:
    """``device`` with product speeds (TFLOP/s, its backbone's and its bf16 table's) or a copy speed (GB/s) given."""
    for option, value in (("--tflops", tflops), ("--bandwidth", bandwidth)):
        if value is not None and not value > 0:
            raise UsageError(f"{option} {value}: it has to be above 0")
    if tflops is not None:
        given = {"bf16": tflops * 1e12, "fp16": tflops * 1e12}
        if device.has_kernels:
            given["tf32"] = tflops * 1e12 * TF32_SHARE
        products = {**device.products, **given}
        device = replace(device, name=f"{device.name}, products as given", products=products)
    if bandwidth is not None:
        device = replace(device, name=f"{device.name}, copy as given", bandwidth=bandwidth * 1e9)
    return device


def parse_memory(text: str, option: str = "--gpu-memory") -> int:
    """Bytes of a card: ``80GB`` (as sold: 97.5% of 80 GiB), ``78GiB`` (usable) or ``84e9``; UsageError otherwise."""
    size = sizes.parse_memory(text, option, units=_CARD_UNITS, examples="80GB (as sold), 78GiB or 84e9 (bytes)")
    if size < 2**20:
        raise UsageError(f"{option} {text!r} is less than a mebibyte; write the unit too, as in 80GB")
    return size


def link_speed(text: str, device: Device, option: str) -> float:
    """Bytes per second and direction that collectives reach over ``nvlink``, ``pcie``, … or a number of GB/s."""
    name = text.lower()
    if name == "nvlink":
        if not device.nvlink:
            raise UsageError(f"{option} nvlink: a {device.name} has none that is known here; give its GB/s, or pcie")
        return device.nvlink * LINK_SHARE
    if name in LINKS:
        return LINKS[name] * LINK_SHARE
    try:
        speed = float(name)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise UsageError(f"{option} {text}: it is nvlink, {', '.join(LINKS)}, or GB/s as a number")
    return speed * 1e9


def measure_device() -> Device:
    """This machine's GPU, or its CPU where there is none: how fast it multiplies and copies. Takes seconds."""
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    side, copied = (8192, 2 << 30) if kind == "cuda" else (1024, 256 << 20)
    device = torch.device(kind)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * copied / shortest_seconds(lambda: target.copy_(source), kind)
    products = {name: _product_speed(side, name, device) for name in ("bf16", "fp16", "fp32", "tf32")}
    if kind == "cpu":
        return Device("this CPU, measured", kind, products, copy)
    properties = torch.cuda.get_device_properties(0)
    known = _known(properties.name)
    nvlink = known.nvlink if known is not None else 0.0
    kernels = torch.cuda.get_device_capability(0) >= (8, 0)
    return Device(f"{properties.name}, measured", kind, products, copy, properties.total_memory, nvlink, kernels)


def present_device(device: "torch.device") -> Device:
    """Return this rank's device with the speeds of its data sheet.

    A GPU that has none here gets an A100's, without NVLink. A CPU has nominal speeds, and no memory of its own.
    """
    import torch

    if device.type != "cuda":
        return Device("cpu", "cpu", dict.fromkeys(("bf16", "fp16", "tf32", "fp32"), _CPU_PRODUCTS), _CPU_BANDWIDTH)
    properties = torch.cuda.get_device_properties(device)
    known = _known(properties.name) or replace(DEVICES["a100"], nvlink=0.0)
    kernels = (properties.major, properties.minor) >= (8, 0)
    return replace(known, name=properties.name, memory=properties.total_memory, has_kernels=kernels)


def _known(name: str) -> Device | None:
    """The data sheet of a GPU by the name that its driver gives."""
    return next((known for known in DEVICES.values() if known.name.upper() in name.upper()), None)


def _product_speed(side: int, precision: str, device: "object") -> float:
    import torch

    from plsc.head.backends.products import Fp32Precision, product

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    fp32_precision: Fp32Precision = "tf32" if precision == "tf32" else "ieee"
    a = torch.full((side, side), 0.01, dtype=dtype, device=device)  # type: ignore[call-overload]
    return float(2 * side**3 / shortest_seconds(lambda: product(a, a, fp32_precision), a.device.type))


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
