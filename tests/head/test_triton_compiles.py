"""Triton's interpreter takes more than its compiler does: kernels are compiled for GPUs here, which needs none.

``python benchmarks/compiled_kernels.py`` compiles all of them; here it is those that most depends on.
"""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from benchmarks.compiled_kernels import GPUS, PASSES, Row, Variant, compiled, problem, read, variants

GPU = {gpu.name: gpu for gpu in GPUS}
INSTRUCTION = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}
RECOMPILED = [Variant(kernel, gpu) for gpu in GPUS for kernel in ("first_pass", "sgd_pass")] + [
    Variant("gradient_pass", GPU["sm_90a"], listed=True),
    Variant("adamw_pass", GPU["sm_90a"], centers=3),
    Variant("first_pass", GPU["sm_80"], "fp32", "tf32"),
    Variant("sgd_pass", GPU["sm_90a"], "fp32", "bf16x3"),
    Variant("sgd_rows", GPU["sm_80"]),
    Variant("adamw_rows", GPU["sm_90a"], listed=True),
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
        if row.kernel in PASSES and row.dtype == "bf16" and row.dim == 512:
            assert row.instruction == INSTRUCTION[row.gpu], row


@pytest.mark.slow
@pytest.mark.parametrize("variant", RECOMPILED, ids=lambda v: f"{v.kernel}-{v.gpu.name}-{v.dtype}-{v.precision}")
def test_kernels_compile_as_in_the_table(tmp_path, monkeypatch, table, variant):
    """Another Triton than the table's may count other registers, but spills none and uses the same units."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = compiled(variant)
    committed = table[key(row)]
    assert problem(row) is None
    assert row.instruction == committed.instruction
    if row.triton == committed.triton:
        assert row.tile == committed.tile
        assert row.shared <= committed.shared * 1.1
        assert row.registers <= min(committed.registers * 1.1, 255)
