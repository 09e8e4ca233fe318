"""The matrix instructions of a compiled Triton kernel, counted in its PTX: what they compute, and how often.

A warp group runs a ``wgmma``, a warp an ``mma.sync``, and one thread of the whole program a ``tcgen05.mma``. A layout
that gives several of them the same block of a product has each compute it: the multiply-adds of a program are then a
multiple of those that the arithmetic needs.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_LABEL = re.compile(r"^(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")
_SHAPED = re.compile(r"\b(wgmma\.mma_async|mma\.sync)\.[\w.:]*?m(\d+)n(\d+)k(\d+)\.[\w.]+")
_TENSOR_MEMORY = re.compile(r"\btcgen05\.mma\.[\w.:]*kind::(\w+)\s+\[[^]]*\],\s*\S+\s*,\s*\S+\s*,\s*([%\w]+)")
_CONSTANT = re.compile(r"mov\.[bu]32\s+(%r\d+),\s*(-?\d+);")
_WARPS = {"mma.sync": 1, "wgmma.mma_async": 4}  # that run one of them together; all of a program, of tcgen05.mma
_DEPTH = {"f16": 16, "tf32": 8}  # of tcgen05.mma: 32 bytes of a row


@dataclass(frozen=True)
class Instruction:
    """A matrix instruction and its shape."""

    name: str
    m: int
    n: int
    k: int

    def multiply_adds(self, warps: int) -> int:
        """Of a program of so many warps, all of which pass it."""
        return self.m * self.n * self.k * (warps // _WARPS.get(self.name, warps))

    def __str__(self) -> str:
        return f"{self.name} {self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class Products:
    """The matrix instructions of a kernel.

    Attributes:
        looped: those of each loop that has any, with the loops within it.
        straight: those outside of loops.
    """

    looped: tuple[Counter[Instruction], ...]
    straight: Counter[Instruction]

    def __str__(self) -> str:
        """Every kind with its count, the most frequent first."""
        total = sum(self.looped, self.straight.copy())
        return "; ".join(f"{count} {kind}" for kind, count in total.most_common())

    def factor(self, warps: int, needed: int) -> float:
        """The multiply-adds of a round of a loop over those that it needs: 1 where none is made twice.

        A kernel whose products stand in several loops, or before one, has been unrolled or pipelined: each of those
        places has to be a whole round.
        """
        places = [*self.looped, *filter(None, [self.straight])]
        made = [sum(kind.multiply_adds(warps) * count for kind, count in place.items()) for place in places]
        return max(made, default=0) / needed


def products(ptx: str) -> Products:
    """Count the matrix instructions of a kernel in PTX, by its loops."""
    lines = ptx.splitlines()
    loops = list(_loops(lines))
    constants = {found[1]: int(found[2]) for line in lines if (found := _CONSTANT.search(line))}
    by_loop: dict[tuple[int, int] | None, Counter[Instruction]] = {}
    for number, line in enumerate(lines):
        instruction = _instruction(line, constants)
        if instruction is not None:
            around = [loop for loop in loops if loop[0] <= number <= loop[1]]
            outermost = max(around, key=lambda loop: loop[1] - loop[0], default=None)  # waits are loops within it
            by_loop.setdefault(outermost, Counter())[instruction] += 1
    straight = by_loop.pop(None, Counter())
    return Products(tuple(by_loop.values()), straight)


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """The first and the last line of each loop: a label, and a branch back to it."""
    labels = {found[1]: number for number, line in enumerate(lines) if (found := _LABEL.match(line))}
    for number, line in enumerate(lines):
        found = _BRANCH.search(line)
        if found and labels.get(found[1], number) < number:
            yield labels[found[1]], number


def _instruction(line: str, constants: dict[str, int]) -> Instruction | None:
    if found := _SHAPED.search(line):
        return Instruction(found[1], *(int(size) for size in found.groups()[1:]))
    if found := _TENSOR_MEMORY.search(line):
        kind, given = found.groups()
        described = constants[given] if given.startswith("%") else int(given)
        # N/8 and M/16 of the instruction descriptor (PTX ISA, tcgen05)
        return Instruction("tcgen05.mma", (described >> 24 & 31) * 16, (described >> 17 & 63) * 8, _DEPTH[kind])
    return None
