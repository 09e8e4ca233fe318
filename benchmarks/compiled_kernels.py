"""Compile the Triton kernels of head and exact search for every kind of GPU, without one: registers, instructions.

    python benchmarks/compiled_kernels.py [--only TEXT] [--processes N]

writes benchmarks/results/compiled_kernels.csv anew, or prints alone with --only. It
needs triton, whose ptxas compiles for GPUs that are not there. Every kind of matrix instruction is counted, and the
factor is the multiply-adds that the instructions of a program do over those that its products need. The command fails
where a kernel spills registers, where a factor is not 1, or is above 2.5 of a float32 table. Nothing is timed.
"""
# mypy: disable-error-code="import-untyped"

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.triton_passes import SUMMED_CLASSES
from plsc.head.backends.triton_stored import has_wide_blocks, launch_options, row_options
from plsc.head.backends.triton_tiles import Pass, Tile, gpu_kind, shipped_tile
from plsc.index.triton_scan import block_options, pair_options

TABLE = Path(__file__).with_name("results") / "compiled_kernels.csv"
PASSES = ("first_pass", "gradient_pass")
STORED = ("exponentials", "probabilities")  # between products of PyTorch's
ROWS = ("row_exponentials", "row_probabilities")  # which make the first of them
WIDE = tuple(f"{kernel} wide" for kernel in ROWS)  # in blocks of more samples
SEARCHES = {"group_maxima": 1000, "group_maxima of one": 1, "group_scores": 1000}  # with so many queries
_CODED = "i8"  # dtype of codes
# A rule is compiled into a kernel: the kernel, and what it is compiled for.
_NO_SECOND = dict.fromkeys(("second_moment", "second_scale", "beta2", "rate2", "correction2", "eps"))
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd_rows": ("update_rows", {"RULE": "sgd", **_NO_SECOND}),
    "adamw_rows": ("update_rows", {"RULE": "adamw", "second_scale": None}),
    "sgd_rows kept": ("update_rows", {"RULE": "sgd", "BY_ROWS": True, **_NO_SECOND}),  # by kept exponentials
}
_MOST = {"bf16": 1.0, "i8": 1.0, "fp32": 2.5}  # factor: bf16x3 without duplicates spills registers
_LABEL = re.compile(r"^(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")
_SHAPED = re.compile(r"\b(wgmma\.mma_async|mma\.sync)\.[\w.:]*?m(\d+)n(\d+)k(\d+)\.[\w.]+")
_TENSOR_MEMORY = re.compile(r"\btcgen05\.mma\.[\w.:]*kind::(\w+)\s+\[[^]]*\],\s*\S+\s*,\s*\S+\s*,\s*([%\w]+)")
_CONSTANT = re.compile(r"mov\.[bu]32\s+(%r\d+),\s*(-?\d+);")
_WARPS = {"mma.sync": 1, "wgmma.mma_async": 4}  # that run one of them together; all of a program, of tcgen05.mma
_DEPTH = {"f16": 16, "tf32": 8, "i8": 32}  # of tcgen05.mma: 32 bytes of a row
_POINTERS = {
    **dict.fromkeys(("index", "position", "row_numbers", "numbers"), "*i64"),
    **dict.fromkeys(("member",), "*u8"),
    **dict.fromkeys(("total",), "*fp64"),
    **dict.fromkeys(("first_moment",), "*i8"),
    **dict.fromkeys(("second_moment",), "*bf16"),
    **dict.fromkeys(("inverse_norm", "pull", "log_z", "scale", "target_grad", "gradient"), "*fp32"),
    **dict.fromkeys(("first_scale", "skip", "scores"), "*fp32"),
    **dict.fromkeys(("residue", "step", "length", "highest", "lowest"), "*fp32"),
    **dict.fromkeys(("of_query", "of_group"), "*i64"),
}
# Tensor descriptors, by the sides of their blocks.
_DESCRIBED = {
    "rows": ("BLOCK_N", "BLOCK_D"),
    "features": ("BLOCK_B", "BLOCK_D"),
    "weights": ("BLOCK_N", "BLOCK_B"),
    "queries": ("BLOCK_Q", "BLOCK_D"),
}
_MULTIPLES = ("batch", "row_stride", "dim")
_INTEGERS = dict.fromkeys(("n", "batch", "key", "groups", "row_stride", "dim"), "i32") | dict.fromkeys(
    ("first", "start", "per", "first_number"), "i64"
)


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
        places = self.looped or (self.straight,)
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


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: its compute capability and the shared memory that a block of threads may have."""

    name: str
    capability: tuple[int, int]
    shared: int

    @property
    def number(self) -> int:
        """The capability as Triton takes it."""
        return 10 * self.capability[0] + self.capability[1]


GPUS = (
    Gpu("sm_80", (8, 0), 163 << 10),
    Gpu("sm_89", (8, 9), 99 << 10),
    Gpu("sm_90a", (9, 0), 227 << 10),
    Gpu("sm_100a", (10, 0), 227 << 10),
)


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled for one kind of table."""

    kernel: str
    gpu: Gpu
    dtype: str = "bf16"
    precision: Fp32Precision = "ieee"
    dim: int = 512
    centers: int = 1
    listed: bool = False

    @property
    def tile(self) -> Tile:
        """The tile that ships."""
        which: Pass = "first" if self.kernel == "first_pass" else "second"
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        device = self.gpu.capability, self.gpu.shared
        is_general = self.listed or self.centers > 1
        return shipped_tile(which, *device, dtype, self.dim, self.precision, is_general=is_general)

    @property
    def row_options(self) -> dict[str, Any] | None:
        """Constants and options of the kernels that multiply rows; None: they do not run there."""
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        kind = gpu_kind(self.gpu.capability, self.gpu.shared)
        if self.kernel in WIDE and not has_wide_blocks(kind, dtype, self.dim, self.centers):
            return None
        return row_options(kind, dtype, self.dim, self.centers, is_wide=self.kernel in WIDE)

    @property
    def search_options(self) -> dict[str, Any]:
        """Constants and options of a kernel of the exact search."""
        if self.kernel == "group_scores":
            return pair_options()
        kind = gpu_kind(self.gpu.capability, self.gpu.shared)
        return block_options(kind, is_coded=self.dtype == _CODED, queries=SEARCHES[self.kernel])


@dataclass(frozen=True)
class Row:
    """What a variant was compiled to, by which Triton. Shared memory is in bytes."""

    triton: str
    kernel: str
    gpu: str
    dtype: str
    precision: str
    dim: int
    centers: int
    listed: bool
    tile: str
    registers: int
    spilled: int
    shared: int
    instructions: str
    factor: float


def variants() -> Iterator[Variant]:
    """Everything that ships: every kernel and GPU, by widths, dtypes, centres and lists of rows."""
    for gpu in GPUS:
        for kernel in PASSES:
            main = Variant(kernel, gpu)
            yield from (replace(main, dim=dim) for dim in (96, 256, 512, 768) if _has_tile(gpu, dim))
            yield from (replace(main, listed=True), replace(main, centers=3), replace(main, centers=3, listed=True))
            yield replace(main, dtype="fp32", precision="bf16x3")
        for kernel in RULES:
            yield Variant(kernel, gpu)
            yield Variant(kernel, gpu, listed=True)
        for kernel in STORED:
            yield from (Variant(kernel, gpu), Variant(kernel, gpu, centers=8), Variant(kernel, gpu, "fp32"))
        yield from (Variant(kernel, gpu) for kernel in ROWS + WIDE if Variant(kernel, gpu).row_options is not None)
        for kernel in SEARCHES:
            yield from (Variant(kernel, gpu), Variant(kernel, gpu, _CODED))
        yield Variant("group_scores", gpu, "fp32")


def _has_tile(gpu: Gpu, dim: int) -> bool:
    return dim >= 128 or gpu.name != "sm_100a"  # whose matrix units do not take products of narrower tiles


def compiled(variant: Variant, tile: Tile | None = None) -> Row:
    """Compile a variant, with ``tile`` instead of its own if given."""
    import triton

    from plsc.head.backends import triton_pass_kernels, triton_stored_kernels, triton_update_kernels
    from plsc.index import triton_scan_kernels

    tile = tile or (variant.tile if variant.kernel in PASSES else None)
    module = triton_pass_kernels if variant.kernel in PASSES else triton_update_kernels
    module = triton_stored_kernels if variant.kernel in STORED + ROWS + WIDE else module
    module = triton_scan_kernels if variant.kernel in SEARCHES else module
    options, constants = _constants(variant, tile)
    name, of_rule = RULES.get(variant.kernel, (variant.kernel.split()[0], {}))
    built = compile_for(variant.gpu, getattr(module, name), constants | of_rule, options, variant.dtype)
    registers, spilled = assemble(built, variant.gpu)
    found = products(built.asm["ptx"])
    return Row(
        triton.__version__,
        variant.kernel,
        variant.gpu.name,
        variant.dtype,
        variant.precision if variant.dtype == "fp32" else "",
        variant.dim,
        variant.centers,
        variant.listed,
        _named(variant, tile),
        registers,
        spilled,
        built.metadata.shared,
        str(found),
        _factor(variant, tile, found),
    )


def _factor(variant: Variant, tile: Tile | None, found: Products) -> float:
    if variant.kernel.startswith("group_maxima"):
        block = variant.search_options
        digits = 2 if variant.dtype == _CODED else 1
        return found.factor(block["num_warps"], digits * block["BLOCK_N"] * block["BLOCK_Q"] * block["BLOCK_D"])
    if variant.kernel in ROWS + WIDE:
        block = variant.row_options or {}
        return found.factor(block["num_warps"], block["BLOCK_N"] * block["BLOCK_B"] * block["BLOCK_D"])
    return 0.0 if tile is None else found.factor(tile.warps, _needed(variant, tile))


def _needed(variant: Variant, tile: Tile) -> int:
    """Multiply-adds of a program's block in both products of a pass."""
    each = 3 if (variant.dtype, variant.precision) == ("fp32", "bf16x3") else 1
    return 2 * each * tile.samples * tile.slots * variant.dim


def _named(variant: Variant, tile: Tile | None) -> str:
    if variant.kernel.startswith("group_maxima"):
        block = variant.search_options
        return f"{block['BLOCK_Q']}x{block['BLOCK_N']}x{block['BLOCK_D']} s{block['num_stages']} w{block['num_warps']}"
    if variant.kernel in ROWS + WIDE:
        block = variant.row_options or {}
        return f"{block['BLOCK_B']}x{block['BLOCK_N']}x{block['BLOCK_D']} s{block['num_stages']} w{block['num_warps']}"
    if tile is None:
        return ""
    size = f"{tile.samples}x{tile.slots}x{tile.columns} s{tile.stages} w{tile.warps}"
    return size + (" flipped" if tile.flipped else "")


def compile_for(
    gpu: Gpu, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, Any], dtype: str = "bf16"
) -> Any:
    """Compile a kernel for ``gpu``, which need not be there.

    Args:
        gpu: the target.
        kernel: a function of ``@triton.jit``.
        constants: values of arguments; those that the kernel does not have are left out.
        options: of Triton's compiler.
        dtype: Triton's name for the table's type.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else _type(name, dtype, constants) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    # torch's pointers are aligned to 16 bytes, and usual sizes are multiples of 16, where a kernel is compiled for that
    known = [
        types[parameter.name].startswith("*")
        or (parameter.name in set(_MULTIPLES) - set(constants) and not parameter.do_not_specialize)
        for parameter in kernel.params
    ]
    aligned = {(place,): [["tt.divisibility", 16]] for place, is_known in enumerate(known) if is_known}
    source = ASTSource(kernel, types, constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", gpu.number, 32), options=dict(options))


def assemble(built: Any, gpu: Gpu) -> tuple[int, int]:
    """Assemble a compiled kernel: registers of a thread, and bytes of them that are spilled to memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(built.asm["ptx"])
        command = [get_ptxas(gpu.number).path, "-v", "--gpu-name", gpu.name, str(source), "-o", f"{source}.o"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    stored = re.search(r"(\d+) bytes spill stores", report)
    loaded = re.search(r"(\d+) bytes spill loads", report)
    assert registers is not None
    assert stored is not None
    assert loaded is not None
    return int(registers[1]), max(int(stored[1]), int(loaded[1]))


def _constants(variant: Variant, tile: Tile | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The compiler's options, and the values of arguments that a kernel is compiled for."""
    common: dict[str, Any] = {"dim": variant.dim, "STOCHASTIC": True, "BY_ROWS": False, "WIDEN": False, "LABELS": 1}
    common |= {} if variant.listed else {"index": None, "row_numbers": None}
    if variant.kernel in ROWS + WIDE:
        options = dict(variant.row_options or {})
        blocks = {name: options.pop(name) for name in ("BLOCK_B", "BLOCK_N", "BLOCK_D", "WIDEN")}
        return options, {"dim": variant.dim, "member": None, **blocks}
    if variant.kernel in SEARCHES:
        options = variant.search_options
        names = ("num_warps", "num_stages", "enable_fp_fusion")
        settings = {name: options.pop(name) for name in names if name in options}
        of_codes = () if variant.dtype == _CODED else ("scale", "residue", "step", "length", "lowest")
        width = {"width": variant.dim} if variant.kernel != "group_scores" else {}
        return settings, {**options, **width, **dict.fromkeys(("allowed", *of_codes))}
    if variant.kernel in STORED:
        options = launch_options(variant.centers)
        return options, {name: options.pop(name) for name in ("CENTERS", "BLOCK_B", "BLOCK_N")}
    if tile is None:
        return {"num_warps": 4, "enable_fp_fusion": True}, {**common, "BLOCK_N": 2048 // variant.dim, "BLOCK_D": 512}
    options = tile.options
    sizes = {name: options.pop(name) for name in ("TILE", "BLOCK_B", "BLOCK_N", "FLIPPED")}
    return options, {
        **common,
        **sizes,
        "CENTERS": variant.centers,
        "PRECISION": variant.precision,
        "member": None,
        "SUMMED": SUMMED_CLASSES,
    }


def _type(name: str, dtype: str, sizes: Mapping[str, Any]) -> str:
    if name == "queries" and "BLOCK_Q" not in sizes:  # of group_scores
        return f"*{_CODED}" if dtype == _CODED else "*fp32"
    if name == "scores" and "GROUP" in sizes:
        return "*fp32" if dtype == _CODED else "*fp64"
    if name in _DESCRIBED and sizes.get("DESCRIBED", "GROUP" not in sizes and "BLOCK_D" in sizes):
        rows, columns = (sizes[side] for side in _DESCRIBED[name])
        return f"tensordesc<{dtype}[{rows}, {columns}]>"
    if name in ("weight", "features", "weights", "rows", "queries"):
        return f"*{dtype}"
    return (_POINTERS | _INTEGERS).get(name, "fp32")


def problem(row: Row) -> str | None:
    """What is wrong with a compiled kernel."""
    gpu = next(gpu for gpu in GPUS if gpu.name == row.gpu)
    if row.spilled:
        return f"{row.spilled} bytes of registers spilled"
    if row.shared > gpu.shared:
        return f"{row.shared} bytes of shared memory, of {gpu.shared}"
    if row.kernel not in PASSES + ROWS and not row.kernel.startswith("group_maxima"):
        return None
    if row.factor < 1:
        return f"matrix units make {row.factor:g} of the products: {row.instructions or 'no instruction'}"
    return f"products are made {row.factor:g} times: {row.instructions}" if row.factor > _MOST[row.dtype] else None


def read() -> list[Row]:
    """The committed table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [_row(record) for record in csv.DictReader(file)]


def _row(record: Mapping[str, str]) -> Row:
    kinds = {field.name: field.type for field in fields(Row)}
    read_as: dict[Any, Any] = {int: int, float: float, bool: lambda text: text == "True", str: str}
    return Row(**{name: read_as[kinds[name]](text) for name, text in record.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="print variants whose description holds this; write nothing")
    parser.add_argument("--processes", type=int, default=2, help="that compile at a time")
    arguments = parser.parse_args()
    rows, failed = [], False
    chosen = [variant for variant in variants() if arguments.only in str(variant)]
    with ProcessPoolExecutor(arguments.processes) as pool:
        for row in pool.map(compiled, chosen):
            rows.append(row)
            wrong = problem(row)
            failed |= wrong is not None
            print(*[str(value) for value in asdict(row).values()], f"WRONG: {wrong}" if wrong else "", flush=True)
    if not arguments.only and not failed:
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
