"""Triton's interpreter takes more than its compiler does: kernels are compiled for GPUs here, which needs none.

``python benchmarks/compiled_kernels.py`` compiles all of them; here it is those that most depends on.
"""

import importlib.util
import re

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton

from benchmarks.compiled_kernels import (
    GPUS,
    PASSES,
    ROWS,
    RULES,
    STORED,
    WIDE,
    Row,
    Variant,
    assemble,
    compile_for,
    compiled,
    problem,
    read,
    variants,
)
from plsc.head.backends import triton_stored_kernels, triton_update_kernels
from plsc.head.backends.triton_stored import launch_options
from plsc.head.backends.triton_tiles import Tile
from plsc.index import triton_scan_kernels

pytestmark = pytest.mark.live

GPU = {gpu.name: gpu for gpu in GPUS}
INSTRUCTION = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}
RECOMPILED = [Variant(kernel, gpu) for gpu in GPUS for kernel in ("first_pass", "gradient_pass")] + [
    Variant("gradient_pass", GPU["sm_90a"], centers=3),
    Variant("gradient_pass", GPU["sm_90a"], "fp32", "bf16x3"),
    Variant("sgd_rows", GPU["sm_80"]),
    Variant("adamw_rows", GPU["sm_90a"], listed=True),
    Variant("exponentials", GPU["sm_90a"]),
    Variant("row_exponentials", GPU["sm_90a"]),
    Variant("row_probabilities", GPU["sm_100a"]),
    Variant("row_exponentials wide", GPU["sm_90a"]),
    Variant("sgd_rows kept", GPU["sm_90a"]),
    Variant("probabilities", GPU["sm_80"], centers=8),
    Variant("group_maxima", GPU["sm_80"]),
    Variant("group_maxima", GPU["sm_90a"], "i8"),
    Variant("group_maxima of one", GPU["sm_100a"], "i8"),
    Variant("group_scores", GPU["sm_90a"], "fp32"),
]


def key(row: Row) -> tuple:
    return row.kernel, row.gpu, row.dtype, row.precision, row.dim, row.centers, row.listed


@pytest.fixture(scope="module")
def table() -> dict[tuple, Row]:
    return {key(row): row for row in read()}


def test_the_table_holds_everything_that_ships_and_nothing_is_wrong_in_it(table):
    shipped = {
        (v.kernel, v.gpu.name, v.dtype, v.precision if v.dtype == "fp32" else "", v.dim, v.centers, v.listed)
        for v in variants()
    }
    assert set(table) == shipped
    assert {key(row): problem(row) for row in table.values() if problem(row) is not None} == {}
    for row in table.values():
        if row.kernel in PASSES + ROWS + WIDE and row.dtype == "bf16" and row.dim == 512:
            assert {part.split()[1] for part in row.instructions.split("; ")} == {INSTRUCTION[row.gpu]}, row
        if row.kernel == "group_maxima":
            assert row.instructions.split()[1] == INSTRUCTION[row.gpu], row


def test_a_tile_whose_products_are_made_twice_is_refused(tmp_path, monkeypatch):
    """Eight warps share the rows of the first product, 16 to a warp: 64 rows are computed twice."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = compiled(Variant("first_pass", GPU["sm_80"], dim=32), Tile(64, 64, 32))
    assert row.factor == 2
    assert "products are made 2 times" in problem(row)
    assert problem(compiled(Variant("first_pass", GPU["sm_80"], dim=32))) is None


@pytest.mark.parametrize("kernel", STORED)
def test_stored_logits_are_read_by_wide_loads(tmp_path, monkeypatch, kernel):
    """16 bytes at a time, of batches that 16 divides: they are all of the kernels' traffic."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = launch_options(1)
    constants = {name: options.pop(name) for name in ("CENTERS", "BLOCK_B", "BLOCK_N")} | {"member": None}
    built = compile_for(GPU["sm_90a"], getattr(triton_stored_kernels, kernel), constants, options)
    assert re.search(r"\bld\.global\S*\.v4\.b32", built.asm["ptx"])
    assert re.search(r"\bst\.global\S*\.v[24]\.b32", built.asm["ptx"])


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90a"])
def test_rows_of_a_search_are_on_their_way_while_others_are_multiplied(tmp_path, monkeypatch, gpu):
    """In asynchronous copies, 16 bytes or a whole block at a time; and no matrix of scores goes through memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = Variant("group_maxima", GPU[gpu])
    constants = {**variant.search_options, "width": 512} | dict.fromkeys(
        ("allowed", "scale", "residue", "step", "length", "lowest")
    )
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    ptx = compile_for(GPU[gpu], triton_scan_kernels.group_maxima, constants, options).asm["ptx"]
    assert ("cp.async.bulk.tensor" if gpu == "sm_90a" else "cp.async.cg") in ptx
    assert ptx.count("ld.global") == 0
    assert ptx.count("st.global") <= 4  # the best of each group


@pytest.mark.slow
@pytest.mark.parametrize("variant", RECOMPILED, ids=lambda v: f"{v.kernel}-{v.gpu.name}-{v.dtype}-{v.precision}")
def test_kernels_compile_as_in_the_table(tmp_path, monkeypatch, table, variant):
    """Another Triton than the table's may count other registers, but spills none and uses the same units."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = compiled(variant)
    committed = table[key(row)]
    assert problem(row) is None
    if row.triton == committed.triton:
        assert row.instructions == committed.instructions
        assert row.tile == committed.tile
        assert row.shared <= committed.shared * 1.1
        assert row.registers <= min(committed.registers * 1.1, 255)


SHIPPED = {"BLOCK_N": 4, "BLOCK_D": 512, "STOCHASTIC": True}
LISTED = {"dim": 500, **SHIPPED}
CONSECUTIVE = {"dim": 512, "index": None, **SHIPPED}
WIDEST = {"dim": 1024, "index": None, "BLOCK_N": 2, "BLOCK_D": 1024, "STOCHASTIC": False}
PLAIN = {"first_moment": None, "first_scale": None}
NESTEROV = {"RULE": "nesterov"}


KERNELS = [
    ("sgd_rows", LISTED | NESTEROV),
    ("sgd_rows", CONSECUTIVE | PLAIN),
    ("adamw_rows", LISTED),
    ("adamw_rows", CONSECUTIVE),
    ("adamw_rows", WIDEST | {"first_scale": None}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "name", "constants"),
    [(gpu, *kernel) for gpu in GPUS for kernel in KERNELS[:: 1 if gpu.name in ("sm_80", "sm_90a") else 3]],
    ids=lambda value: getattr(value, "name", None),
)
def test_updates_compile_without_spills(tmp_path, monkeypatch, gpu, name, constants):
    """In registers, and by wide loads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"num_warps": 4, "enable_fp_fusion": True}
    kernel, of_rule = RULES[name]
    built = compile_for(gpu, getattr(triton_update_kernels, kernel), of_rule | constants, options)
    if constants["dim"] == constants["BLOCK_D"]:
        assert "ld.global.v4" in built.asm["ptx"]  # 16 bytes at a time
    _, spilled = assemble(built, gpu)
    assert spilled <= (0 if triton.__version__ == read()[0].triton else 8)  # with the table's Triton, none
