"""Devices and links of a plan: by name, as given on the command line, or those of this rank."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from plsc import sizes
from plsc.devices import DEVICES, GIB, TF32_SHARE, USABLE_SHARE, Device, known_device, low_precision_units
from plsc.errors import UsageError

if TYPE_CHECKING:
    import torch

LINK_SHARE = 0.8  # of a link's peak that large collectives reach

# The label of a card is the one place where GB does not mean 10^9 bytes (plsc.sizes).
_CARD_UNITS = {**sizes.UNITS, "gb": USABLE_SHARE * GIB, "tb": USABLE_SHARE * 2**40}

# Peak bytes per second, GPU and direction: PCIe 4.0 x16; NDR InfiniBand, a 400 Gb/s port per GPU; 100 Gb/s Ethernet.
LINKS = {"pcie": 32e9, "infiniband": 50e9, "ethernet": 12.5e9}
# Seconds that a collective takes to begin, and for each hop of its ring or tree inside a node and between nodes: those
# by which NCCL itself chooses its algorithm (NVIDIA/nccl, src/graph/tuning.cc: baseLat and hwLat of LL128). PAT's
# two are our estimate, not read there: hops of a 3.5th of the Simple protocol's 14 us, and 2.8 us for each rank.
_START = 10e-6
_RING_HOP = {"inside": 1.9e-6, "between": 4.0e-6}
_TREE_HOP = {"inside": 1.2e-6, "between": 8.5e-6}
_PAT_HOP, _PAT_RANK = 4.0e-6, 2.8e-6
_TREE_SHARE = 0.9  # of a ring's bandwidth (the same file)
HOST_COPY = LINKS["pcie"] * LINK_SHARE  # bytes per second and direction between host and device


Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "send"]


@dataclass(frozen=True)
class Links:
    """Bytes per second, GPU and direction that collectives reach ``inside`` a node and ``between`` nodes."""

    inside: float
    between: float
    bus: float = HOST_COPY

    def seconds(
        self,
        moved: float,
        ranks: int,
        per_node: int,
        *,
        collective: Collective = "all_gather",
        stride: int = 1,
        calls: int = 1,
    ) -> float:
        """Of collectives over ``ranks`` ranks, ``stride`` apart, in which each sends ``moved`` bytes.

        A ring that crosses nodes does so over the links of all its ranks there (NCCL opens a channel for each), so a
        group with m ranks to a node moves m times what one link does. Its latency is linear in the ranks. All-reduces
        may take NCCL's double binary tree in its place, and all-gathers and reduce-scatters of one rank per node PAT
        (since NCCL 2.23; Jeaugey, arXiv 2506.20252): whichever is faster.

        Args:
            moved: of all ``calls`` together, on a ring.
            ranks: of the group.
            per_node: ranks of a node.
            collective: what is called; a send joins two ranks.
            stride: between neighbouring ranks of the group.
            calls: collectives, each of which begins anew.
        """
        if ranks == 1:
            return 0.0
        here = min(max(per_node // stride, 1), ranks)
        nodes = -(-ranks // here)
        across = self.between * here if nodes > 1 else math.inf
        speed = min(self.inside if here > 1 else math.inf, across)
        ring = moved / speed + calls * _ring_latency(collective, ranks, nodes)
        if collective == "all_reduce":
            doubled = moved * ranks / (ranks - 1)  # up the tree and down again, all of it
            return min(ring, doubled / (speed * _TREE_SHARE) + calls * _tree_latency(ranks, nodes))
        if collective in ("all_gather", "reduce_scatter") and nodes == ranks:
            return min(ring, moved / speed + calls * (_START + _PAT_HOP * math.log2(nodes) + _PAT_RANK * ranks))
        return ring


def _ring_latency(collective: Collective, ranks: int, nodes: int) -> float:
    """Every rank's part passes every other rank: once, in an all-reduce twice."""
    if collective == "send":
        return _START + _RING_HOP["between" if nodes > 1 else "inside"]
    rounds = 2 if collective == "all_reduce" else 1
    return _START + rounds * ((ranks - nodes) * _RING_HOP["inside"] + (nodes - 1) * _RING_HOP["between"])


def _tree_latency(ranks: int, nodes: int) -> float:
    """A chain inside each node, a binary tree over the nodes; up and down."""
    return _START + 2 * ((ranks / nodes - 1) * _TREE_HOP["inside"] + math.log2(nodes) * _TREE_HOP["between"])


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
    """``device`` with product speeds (TFLOP/s of its best precisions) or a copy speed (GB/s) given."""
    for option, value in (("--tflops", tflops), ("--bandwidth", bandwidth)):
        if value is not None and not value > 0:
            raise UsageError(f"{option} {value}: it has to be above 0")
    if tflops is not None:
        given = dict.fromkeys(device.units.precisions or ("fp32",), tflops * 1e12)
        if "tf32" in device.products and "bf16" in given:
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


def check_link(text: str, option: str) -> None:
    """:class:`plsc.errors.UsageError` for what :func:`link_speed` takes of no device."""
    link_speed(text, DEVICES["a100"], option)


def present_device(device: "torch.device") -> Device:
    """Return this rank's device with the speeds of its data sheet.

    A GPU that has none here gets an A100's, without NVLink. A CPU has nominal speeds, and no memory of its own.
    """
    import torch

    units = low_precision_units(device)
    if device.type != "cuda":
        products = dict.fromkeys(("bf16", "fp16", "tf32", "fp32"), _CPU_PRODUCTS)
        return Device("cpu", "cpu", products, _CPU_BANDWIDTH, units=units)
    properties = torch.cuda.get_device_properties(device)
    known = known_device(properties.name) or replace(DEVICES["a100"], nvlink=0.0)
    kernels = (properties.major, properties.minor) >= (8, 0)
    return replace(known, name=properties.name, memory=properties.total_memory, has_kernels=kernels, units=units)
