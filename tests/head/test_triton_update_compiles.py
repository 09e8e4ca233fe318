"""The update's kernels compiled for GPUs, which takes none: in registers, without spills, by wide loads."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from support.compiled_kernels import assembler_report, compile_kernel

SHIPPED = {"BLOCK_N": 4, "BLOCK_D": 512, "STOCHASTIC": True}
LISTED = {"dim": 500, **SHIPPED}
CONSECUTIVE = {"dim": 512, "index": None, **SHIPPED}
WIDEST = {"dim": 1024, "index": None, "BLOCK_N": 2, "BLOCK_D": 1024, "STOCHASTIC": False}
PLAIN = {"buffer": None, "buffer_scale": None, "NESTEROV": False}
NESTEROV = {"NESTEROV": True}


KERNELS = [
    ("sgd_rows", LISTED | NESTEROV),
    ("sgd_rows", CONSECUTIVE | PLAIN),
    ("adamw_rows", LISTED | {"second_scale": None}),
    ("adamw_rows", CONSECUTIVE | {"second_scale": None}),
    ("adamw_rows", WIDEST | {"second_scale": None, "first_scale": None}),
]
ARCHITECTURES = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "name", "constants"),
    [
        (capability, *kernel)
        for capability in ARCHITECTURES
        for kernel in KERNELS[:: 1 if capability in (80, 90) else 3]
    ],
)
def test_updates_compile_without_spills(tmp_path, monkeypatch, capability, name, constants):
    from plsc.head.backends import triton_update_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernel(getattr(triton_update_kernels, name), constants, capability, aligned=True, num_warps=4)
    if constants["dim"] == constants["BLOCK_D"]:
        assert "ld.global.v4" in compiled.asm["ptx"]  # 16 bytes at a time
    report = assembler_report(compiled, capability, ARCHITECTURES[capability])
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
