"""GPUs by the numbers of their data sheets, and this machine's as measured: products, units, memory, links."""

import functools
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from plsc.parallel import Mesh

GIB = 2**30
# Of a card sold as "80GB", 80 GiB are built in and the driver keeps some: an H100 shows 78 to 79.6 GiB, a V100-32GB
# 31.7. The smallest share seen is taken.
USABLE_SHARE = 0.975
# What large products and copies reach of the data sheet's peak: an H100 80GB SXM multiplied bfloat16 at 798 of 989
# TFLOP/s and copied at 3.0 of 3.35 TB/s.
PRODUCT_SHARE = 0.8
COPY_SHARE = 0.9
TF32_SHARE = 0.5  # of bfloat16's speed on matrix units, on all of NVIDIA's data sheets from Ampere on

_CPU_UNITS = {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16", "bf16": "ARM BF16"}  # by Linux' names of them
# Values of ONEDNN_MAX_CPU_ISA without bf16 units: it limits the library that computes a backbone on CPUs.
_ISAS_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


class Units(NamedTuple):
    """What a device has units for: the precisions faster than fp32, the better ones first, and a reason in words."""

    precisions: tuple[str, ...]
    reason: str

    @property
    def best(self) -> str:
        """What ``precision = "auto"`` is on such a device."""
        return (*self.precisions, "fp32")[0]


_UNKNOWN_UNITS = Units((), "no units are known")


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    ``products`` are FLOP/s that large products reach in each precision ("fp32", "tf32", "bf16", "fp16") that the device
    has, ``bandwidth`` bytes per second that a copy reads and writes together, ``memory`` usable bytes (None: unknown),
    ``nvlink`` bytes per second and direction of its NVLinks together (0: none), ``has_kernels`` whether the fused
    Triton kernels run, ``units`` those for low precision.
    """

    name: str
    kind: str
    products: dict[str, float]
    bandwidth: float
    memory: int | None = None
    nvlink: float = 0.0
    has_kernels: bool = True
    units: Units = _UNKNOWN_UNITS

    def product_speed(self, precision: str) -> float:
        """FLOP/s of large products; what the device has no units for is computed at the speed of fp32."""
        return self.products.get(precision, self.products["fp32"])


def _sheet(
    name: str,
    gigabytes: float,
    bf16: float,
    fp16: float,
    fp32: float,
    terabytes_per_second: float,
    nvlink: float,
) -> Device:
    """Speeds of 0 are of units that the device lacks. TF32, and our kernels, came with those for bf16."""
    has_kernels = bf16 > 0
    peaks = {"bf16": bf16, "fp16": fp16, "tf32": bf16 * TF32_SHARE, "fp32": fp32}
    precisions = tuple(key for key in ("bf16", "fp16") if peaks[key])
    return Device(
        name,
        "cuda",
        {key: value * 1e12 * PRODUCT_SHARE for key, value in peaks.items() if value},
        terabytes_per_second * 1e12 * COPY_SHARE,
        int(gigabytes * GIB * USABLE_SHARE),
        nvlink * 1e9,
        has_kernels,
        Units(precisions, name if has_kernels else lacking_units(name, precisions)),
    )


def lacking_units(name: str, precisions: tuple[str, ...]) -> str:
    """What a GPU before Ampere has no units for, in words."""
    return f"{name} has no bf16 units" if precisions else f"{name} has units for neither bf16 nor fp16"


# NVIDIA's data sheets: memory as sold, dense TFLOP/s with float32 sums, TB/s, NVLink GB/s per direction.
# float32 is that of the CUDA cores, PyTorch's default. A P100's float16 is twice as fast with sums in float16 alone.
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
        _sheet("v100", 32, 0, 125, 15.7, 0.9, 150),
        _sheet("t4", 16, 0, 65, 8.1, 0.32, 0),
        _sheet("p100", 16, 0, 0, 9.3, 0.732, 0),
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
    copy = copy_rate(copied, device)
    products = {name: product_flops(side, name, device) for name in measured_precisions(device)}
    if kind == "cpu":
        return Device("this CPU, measured", kind, products, copy, units=low_precision_units(device))
    properties = torch.cuda.get_device_properties(0)
    known = known_device(properties.name)
    nvlink = known.nvlink if known is not None else 0.0
    kernels = torch.cuda.get_device_capability(0) >= (8, 0)
    return Device(
        f"{properties.name}, measured",
        kind,
        products,
        copy,
        properties.total_memory,
        nvlink,
        kernels,
        low_precision_units(device),
    )


def low_precision_units(device: "torch.device") -> Units:
    """Return what ``device`` has units for; nothing is measured, so that it is the same each time.

    Of a CPU, those for bf16 count that oneDNN may use: ``ONEDNN_MAX_CPU_ISA`` takes them from it. ``PLSC_CPU`` limits
    our own kernels, those of the class head and of searches, and changes nothing here. CPUs' fp16 units do not count.
    """
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"sm_{major}{minor}"
        if major >= 8:
            return Units(("bf16", "fp16"), name)
        precisions = ("fp16",) if major == 7 else ()
        return Units(precisions, lacking_units(name, precisions))
    names = [name for flag, name in _CPU_UNITS.items() if flag in cpu_flags()]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if names and limit in _ISAS_WITHOUT_BF16:
        return Units((), f"ONEDNN_MAX_CPU_ISA={limit} leaves out {names[0]}")
    return Units(("bf16",), names[0]) if names else Units((), "this CPU has no bf16 units")


def measured_precisions(device: "torch.device") -> tuple[str, ...]:
    """The precisions whose products are measured: those of a GPU's units and fp32; a CPU emulates what it lacks."""
    if device.type != "cuda":
        return "bf16", "fp16", "fp32"
    precisions = low_precision_units(device).precisions
    return (*precisions, *(("tf32",) if "bf16" in precisions else ()), "fp32")


def shared_units(mesh: "Mesh") -> Units:
    """Return what all ranks' devices have units for; every rank calls, and learns the same."""
    from plsc.parallel.collectives import all_gather_object

    every = all_gather_object(low_precision_units(mesh.device), mesh)
    common = tuple(name for name in every[0].precisions if all(name in units.precisions for units in every))
    return Units(common, ", ".join(dict.fromkeys(units.reason for units in every)))


def cpu_flags() -> frozenset[str]:
    """The words of /proc/cpuinfo, among them the processor's features; none where there is no such file."""
    path = Path("/proc/cpuinfo")
    return frozenset(path.read_text(encoding="utf-8").split() if path.exists() else ())


_EMULATED_SECONDS = 2.0  # after which what is that slow is not measured again


@functools.cache
def low_precision_speed(precision: str, device: "torch.device") -> float:
    """How many times as fast as in fp32 a convolution, forward and backward, is under autocast in ``precision``.

    Measured once, in about 0.3 s, or in some seconds where it is emulated. Products of matrices say less: their
    backward pass is as fast as their forward pass, which of convolutions without units is not so.
    """
    import torch

    layer = torch.nn.Conv2d(64, 64, 3, padding=1).to(device)
    shape = (256, 64, 56, 56) if device.type == "cuda" else (8, 64, 28, 28)  # a GPU would wait for launches
    images = torch.full(shape, 0.01, device=device, requires_grad=True)

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def step(enabled: bool) -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            out = layer(images)
        out.float().sum().backward()

    def seconds(enabled: bool) -> float:
        return shortest_seconds(lambda: step(enabled), device.type, 0.0)

    started, rounds = time.perf_counter(), list[tuple[float, float]]()
    while len(rounds) < 5 and time.perf_counter() - started < _EMULATED_SECONDS:
        rounds.append((seconds(False), seconds(True)))  # in turns: others may use the machine
    return min(plain for plain, _ in rounds) / min(low for _, low in rounds)


def known_device(name: str) -> Device | None:
    """The data sheet of a GPU by the name that its driver gives; None where it is not among :data:`DEVICES`."""
    given = name.lower().replace("rtx ", "rtx")
    # no digit may follow: an RTX A3000 is no A30
    return next((known for known in DEVICES.values() if re.search(rf"{known.name}(?!\d)", given)), None)


class Peak(NamedTuple):
    """FLOP/s of a device's fastest dense products, and their precision."""

    flops: float
    precision: str


def peak_flops(device: "torch.device") -> Peak:
    """The peak that utilisation is a share of: that of the fastest dense products, whatever a run computes in.

    Returns:
        The data sheet's of a GPU that has one here. Of other devices, what this process measures at a product of square
        matrices, in fp32 and in the precision that the device has units for: once, in about 0.1 s.
    """
    import torch

    sheet = known_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if sheet is not None:
        return Peak(sheet.product_speed(sheet.units.best) / PRODUCT_SHARE, sheet.units.best)
    tried = dict.fromkeys(("fp32", low_precision_units(device).best))
    return max(Peak(_measured_flops(str(device), precision), precision) for precision in tried)


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

    def multiply() -> None:
        if device.type == "cpu":  # the backbone's; the head's, with sums in float32, copies bfloat16 factors there
            a @ a
        else:
            product(a, a, fp32_precision)

    return float(2 * side**3 / shortest_seconds(multiply, device.type, least))


def copy_rate(size: int, device: "torch.device", least: float = 0.2) -> float:
    """Bytes per second that a copy of ``size`` bytes reads and writes together, measured as products are."""
    import torch

    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / shortest_seconds(lambda: target.copy_(source), device.type, least)


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
