"""The update's kernels compiled for GPUs, which takes none: in registers, without spills, by wide loads."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton

from benchmarks.compiled_kernels import GPUS, RULES, assemble, compile_for, read

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
    from plsc.head.backends import triton_update_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"num_warps": 4, "enable_fp_fusion": True}
    kernel, of_rule = RULES[name]
    compiled = compile_for(gpu, getattr(triton_update_kernels, kernel), of_rule | constants, options)
    if constants["dim"] == constants["BLOCK_D"]:
        assert "ld.global.v4" in compiled.asm["ptx"]  # 16 bytes at a time
    _, spilled = assemble(compiled, gpu)
    assert spilled <= (0 if triton.__version__ == read()[0].triton else 8)  # with the table's Triton, none
