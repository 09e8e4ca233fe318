"""What a launch of a Triton kernel touches: from its intermediate representation (TTIR), by intervals of integers.

A kernel is compiled as far as TTIR, which needs no GPU. With the launch's grid and integer arguments, every integer of
it lies in an interval that is worked out line by line. Hence, for each operand, the span of offsets that the launch can
reach, how many elements its loads and stores name, and whether an integer on the way to an address leaves 32 bits.

Intervals know nothing of masks: a span is that of whole blocks. Numbers that are loaded may be anything; a span then is
the whole operand.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

CAPABILITY = 90
_LIMITS = {bits: (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (1, 8, 16, 32, 64)}
_NAME = r"%[\w.$]+(?:#\d+)?"
_LINE = re.compile(r"\s*(?:(?P<results>%[\w.$:, %]+?) = )?\"?(?P<op>[\w.]+)\"?(?P<rest>.*)")
_VALUE = re.compile(_NAME)
_CARRIED = re.compile(rf"({_NAME}) = ({_NAME})")
_FOR = re.compile(
    rf"(?: unsigned)? ({_NAME}) = ({_NAME}) to ({_NAME}) step ({_NAME})(?: iter_args\((?P<carried>[^)]*)\))?"
)
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_SHAPE = re.compile(r"tensor<((?:\d+x)*)")


@dataclass(frozen=True)
class Interval:
    """The integers from ``low`` to ``high`` in ``bits`` bits; ``wraps`` names an operation that may have left them."""

    low: int
    high: int
    bits: int = 64
    wraps: str = ""


@dataclass(frozen=True)
class Pointer:
    """Addresses ``argument`` + [low, high], in elements."""

    argument: str
    low: int
    high: int
    wraps: str = ""


@dataclass
class Access:
    """What a launch does to an operand: offsets reached, elements that loads and stores name, a 32-bit hazard."""

    low: int | None = None
    high: int = 0
    loaded: int = 0
    stored: int = 0
    wraps: str = ""

    def touch(self, pointer: Pointer, loaded: int, stored: int) -> None:
        """Add a load or a store of so many elements."""
        self.low = pointer.low if self.low is None else min(self.low, pointer.low)
        self.high = max(self.high, pointer.high)
        self.loaded += loaded
        self.stored += stored
        self.wraps = self.wraps or pointer.wraps

    def elements(self, size: int) -> int:
        """Elements moved: those reached, of an operand of ``size``, once for loads and once for stores."""
        low = max(self.low or 0, 0)
        reached = max(min(self.high, size - 1) - low + 1, 0)
        return min(self.loaded, reached) + min(self.stored, reached)


@dataclass
class Block:
    """Lines of a region, which may hold regions of their own; its arguments, where it is no loop's body."""

    arguments: list[str] = field(default_factory=list)
    lines: list["Line"] = field(default_factory=list)


@dataclass
class Line:
    """An operation, its results, its text behind the name, and its regions."""

    results: list[str]
    op: str
    rest: str
    regions: list[Block] = field(default_factory=list)

    @functools.cached_property
    def operands(self) -> list[str]:
        """The values that it names."""
        return _VALUE.findall(self.rest)


@functools.cache
def intermediate(kernel: Any, signature: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...]) -> Block:
    """The body of ``kernel`` in TTIR, for types by argument and the values of its constants."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource

    add_stages = CUDABackend.add_stages

    def until_ttir(backend: Any, stages: dict[str, Any], *arguments: Any) -> None:
        add_stages(backend, stages, *arguments)
        stages["ttgir"] = _stop  # the next stage, which a GPU's layouts begin with

    names = kernel.arg_names
    places = {(names.index(name),): value for name, value in constants}
    source = ASTSource(kernel, dict(signature), constexprs=places, attrs={})
    with patch.object(CUDABackend, "add_stages", until_ttir):
        try:
            compile_kernel(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"enable_fp_fusion": True})
        except _Compiled as stop:
            return parse(stop.text)
    raise RuntimeError(f"{kernel.fn.__name__}: Triton's compiler did not come to TTIR")


class _Compiled(Exception):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def _stop(module: Any, metadata: Any) -> None:
    raise _Compiled(str(module))


def parse(text: str) -> Block:
    """The lines of the public function of a module, nested as its regions are."""
    body = text[text.index("tt.func public") :].split("\n")[1:]
    stack = [Block()]
    for raw in body:
        line = _LOCATION.sub("", raw).rstrip()
        if line.lstrip().startswith("^"):
            stack[-1].arguments = _VALUE.findall(line)
            continue
        if line.lstrip().startswith("}"):
            if len(stack) == 1:
                break
            stack.pop()
            if line.endswith("{"):  # of scf.if's else, and of scf.while's do
                stack[-1].lines[-1].regions.append(Block())
                stack.append(stack[-1].lines[-1].regions[-1])
            continue
        match = _LINE.match(line)
        if match is None or not line.strip():
            continue
        results = _results(match["results"] or "")
        stack[-1].lines.append(Line(results, match["op"], match["rest"]))
        if line.endswith("{"):
            stack[-1].lines[-1].regions.append(Block())
            stack.append(stack[-1].lines[-1].regions[-1])
    return stack[0]


def _results(text: str) -> list[str]:
    """``%a:2, %b`` as %a#0, %a#1, %b."""
    names = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        base, _, count = name.partition(":")
        names += [f"{base}#{number}" for number in range(int(count))] if count else [base]
    return names


def accesses(body: Block, arguments: Mapping[str, int | None], grid: Sequence[int]) -> dict[str, Access]:
    """What a launch does to its operands, by argument.

    Args:
        body: of the kernel.
        arguments: by name; integers by value, None for a pointer.
        grid: programs along each axis.
    """
    launch = _Launch(arguments, (*grid, 1, 1))
    launch.run(body, 1)
    return launch.found


class _Launch:
    """Evaluates a kernel's integers and pointers."""

    def __init__(self, arguments: Mapping[str, int | None], grid: Sequence[int]) -> None:
        self.grid = grid
        self.programs = grid[0] * grid[1] * grid[2]
        self.found: dict[str, Access] = {}
        self.values: dict[str, Interval | Pointer] = {
            f"%{name}": Pointer(name, 0, 0)
            if value is None
            else Interval(value, value, 32 if abs(value) < 2**31 else 64)
            for name, value in arguments.items()
        }

    def run(self, block: Block, trips: int) -> list[Interval | Pointer | None]:
        """Evaluate a region that each program passes ``trips`` times; returns what it yields."""
        for line in block.lines:
            if line.op in ("scf.yield", "scf.condition"):
                passed = line.operands[1:] if line.op == "scf.condition" else line.operands
                return [self.values.get(name) for name in passed]
            if line.op == "scf.for":
                self._loop(line, trips)
            elif line.op == "scf.while":
                self._while(line, trips)
            elif line.op == "scf.if":
                self._branch(line, trips)
            elif line.regions:
                for region in line.regions:
                    self.run(region, trips)
            else:
                self._evaluate(line, trips)
        return []

    def _loop(self, line: Line, trips: int) -> None:
        """Run the body once to see by how much its values grow, and again with what they become in the last round."""
        header = _FOR.match(line.rest)
        assert header is not None, line.rest
        start, stop, step = (self._integer(header[group]) for group in (2, 3, 4))
        count = max(-(-(stop.high - start.low) // max(step.low, 1)), 0)
        self.values[header[1]] = Interval(start.low, max(stop.high - 1, start.low), start.bits)
        pairs = _CARRIED.findall(header["carried"] or "")
        before = [self.values.get(value) for _, value in pairs]
        found, self.found = self.found, {}
        yielded = self._round(line, pairs, before, 0)
        self.found = found
        after = [_extrapolated(first, later, count) for first, later in zip(before, yielded, strict=False)]
        self._round(line, pairs, after, trips * count)
        for name, value in zip(line.results, after, strict=False):
            self._set(name, value)

    def _round(
        self, line: Line, pairs: list[tuple[str, str]], values: list[Interval | Pointer | None], trips: int
    ) -> list[Interval | Pointer | None]:
        for (name, _), value in zip(pairs, values, strict=True):
            self._set(name, value)
        return self.run(line.regions[0], trips)

    def _while(self, line: Line, trips: int) -> None:
        """A loop of unknown length: what is carried is what it was before, or what a round makes of that."""
        pairs = _CARRIED.findall(line.rest)
        carried = before = [self.values.get(value) for _, value in pairs]
        condition, body = line.regions
        for counted in (0, trips):
            for (name, _), value in zip(pairs, carried, strict=True):
                self._set(name, value)
            passed = self.run(condition, counted)
            for name, value in zip(body.arguments, passed, strict=True):
                self._set(name, value)
            yielded = self.run(body, counted)
            carried = [_union([first, later]) for first, later in zip(before, yielded, strict=True)]
        for name, value in zip(line.results, passed, strict=True):
            self._set(name, value)

    def _branch(self, line: Line, trips: int) -> None:
        yielded = [self.run(region, trips) for region in line.regions]
        for number, name in enumerate(line.results):
            self._set(name, _union([values[number] for values in yielded if len(values) > number]))

    def _set(self, name: str, value: Interval | Pointer | None) -> None:
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def _integer(self, name: str, bits: int = 64) -> Interval:
        value = self.values.get(name)
        return value if isinstance(value, Interval) else Interval(*_LIMITS[bits], bits)

    def _evaluate(self, line: Line, trips: int) -> None:
        bits = _bits(line.rest)
        if line.op in ("tt.load", "tt.store", "tt.descriptor_load", "tt.descriptor_store") or "atomic" in line.op:
            self._access(line, trips)
        if not line.results:
            return
        self._set(line.results[0], self._result(line, bits))

    def _access(self, line: Line, trips: int) -> None:
        pointer = self.values.get(line.operands[0])
        if not isinstance(pointer, Pointer):
            return
        if "descriptor" in line.op:  # the hardware computes its addresses, in 64 bits
            pointer = Pointer(pointer.argument, 0, _LIMITS[64][1])
        count = _count(line.rest) * self.programs * trips
        loads = "load" in line.op or "atomic" in line.op
        stores = "store" in line.op or "atomic" in line.op
        self.found.setdefault(pointer.argument, Access()).touch(pointer, loads * count, stores * count)

    def _result(self, line: Line, bits: int | None) -> Interval | Pointer | None:
        operands = line.operands
        if line.op == "tt.addptr":
            pointer, offset = self.values.get(operands[0]), self._integer(operands[1], _bits(line.rest) or 64)
            if not isinstance(pointer, Pointer):
                return None
            low, high = pointer.low + offset.low, pointer.high + offset.high
            return Pointer(pointer.argument, low, high, pointer.wraps or offset.wraps)
        if line.op in _THROUGH or (line.op == "tt.make_tensor_descriptor"):
            return self.values.get(operands[0])
        if bits is None:
            return None
        if line.op == "arith.constant":
            number = re.search(r"(?:dense<)?(-?\d+)>? : ", line.rest)
            return Interval(int(number[1]), int(number[1]), bits) if number else None
        if line.op == "tt.make_range":
            end, start = (int(re.search(rf"{name} = (\d+)", line.rest)[1]) for name in ("end", "start"))  # type: ignore[index]
            return Interval(start, end - 1, 32)
        if line.op in ("tt.get_program_id", "tt.get_num_programs"):
            size = self.grid["xyz".index(line.rest.split()[0])]
            return Interval(0, size - 1, 32) if line.op == "tt.get_program_id" else Interval(size, size, 32)
        if line.op in ("arith.trunci", "arith.index_cast"):
            return _truncated(self._integer(operands[0]), bits)
        if line.op == "arith.select":
            return _union([self.values.get(name) for name in operands[1:3]])
        if line.op in _ARITHMETIC and len(operands) == 2:
            return _computed(line.op, *(self._integer(name, bits) for name in operands), bits)
        return Interval(*_LIMITS[bits], bits)


_THROUGH = {
    "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "arith.extsi", "arith.extui", "tt.bitcast",
}  # fmt: skip


def _quotients(a: Interval, b: Interval) -> list[int]:
    divisors = [d for d in {b.low, b.high} if d > 0] or [1]
    return [int(n / d) if abs(n) < 2**52 else n // d for n in (a.low, a.high) for d in divisors]


def _remainders(a: Interval, b: Interval) -> list[int]:
    most = max(abs(b.low), abs(b.high), 1) - 1
    return [0 if a.low >= 0 else -most, min(a.high, most) if a.low >= 0 else most]


_ARITHMETIC: dict[str, Callable[[Interval, Interval], list[int]]] = {
    "arith.addi": lambda a, b: [a.low + b.low, a.high + b.high],
    "arith.subi": lambda a, b: [a.low - b.high, a.high - b.low],
    "arith.muli": lambda a, b: [x * y for x in (a.low, a.high) for y in (b.low, b.high)],
    "arith.divsi": _quotients,
    "arith.divui": _quotients,
    "arith.ceildivsi": lambda a, b: [n + 1 for n in _quotients(a, b)] + _quotients(a, b),
    "arith.remsi": _remainders,
    "arith.remui": _remainders,
    "arith.minsi": lambda a, b: [min(a.low, b.low), min(a.high, b.high)],
    "arith.maxsi": lambda a, b: [max(a.low, b.low), max(a.high, b.high)],
}


def _computed(op: str, a: Interval, b: Interval, bits: int) -> Interval:
    """The interval of an operation's result; one that leaves its bits may wrap."""
    ends = _ARITHMETIC[op](a, b)
    low, high = min(ends), max(ends)
    wraps = a.wraps or b.wraps
    least, most = _LIMITS[bits]
    if low < least or high > most:
        wraps = wraps or (
            f"{op.removeprefix('arith.')} reaches {max(-low, high):,} in {bits} bits" if bits < 64 else ""
        )
        low, high = least, most
    return Interval(low, high, bits, wraps)


def _truncated(value: Interval, bits: int) -> Interval:
    least, most = _LIMITS[bits]
    if least <= value.low and value.high <= most:
        return Interval(value.low, value.high, bits, value.wraps)
    return Interval(least, most, bits, value.wraps or f"up to {value.high:,} is cut off to {bits} bits")


def _union(values: Sequence[Interval | Pointer | None]) -> Interval | Pointer | None:
    """What may be any of ``values``."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None
    low, high = min(value.low for value in known), max(value.high for value in known)
    wraps = next((value.wraps for value in known if value.wraps), "")
    first = known[0]
    if isinstance(first, Pointer):
        return Pointer(first.argument, low, high, wraps)
    return Interval(low, high, first.bits, wraps)


def _extrapolated(
    first: Interval | Pointer | None, later: Interval | Pointer | None, rounds: int
) -> Interval | Pointer | None:
    """A value that is ``first`` before a loop and ``later`` after a round, over all rounds: growth is linear."""
    if first is None or later is None:
        return None
    more = max(rounds - 1, 0)
    low = first.low + min((later.low - first.low) * more, 0)
    high = first.high + max((later.high - first.high) * more, 0)
    if isinstance(first, Pointer):
        return Pointer(first.argument, low, high, first.wraps or later.wraps)
    least, most = _LIMITS[first.bits]
    wraps = first.wraps or later.wraps
    if high > most or low < least:
        wraps = wraps or (f"a loop's value reaches {max(-low, high):,} in {first.bits} bits" if first.bits < 64 else "")
    return Interval(max(low, least), min(high, most), first.bits, wraps)


def _bits(rest: str) -> int | None:
    """Of the integers that an operation makes, None if it makes none."""
    match = re.search(r"(?:x|\s|<)i(\d+)>?$", rest.rstrip())
    return int(match[1]) if match else None


def _count(rest: str) -> int:
    """Elements of the largest tensor that an operation names; 1 of a scalar's."""
    sizes = [1]
    for shape in _SHAPE.findall(rest):
        size = 1
        for extent in filter(None, shape.split("x")):
            size *= int(extent)
        sizes.append(size)
    return max(sizes)
