"""Speeds of collectives over the links of ranks, in a node and between nodes."""

import math
from dataclasses import dataclass

from plsc.plan.devices import LINK_SHARE, LINKS

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
