"""Triton's interpreter takes more than its compiler does: kernels are compiled for a GPU here, which needs none."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from support.compiled_kernels import assembler_report, compile_kernel

TILE = {"BLOCK_N": 64, "BLOCK_B": 64}
PRODUCT = {**TILE, "BLOCK_K": 32, "dim": 500, "WIDEN": False}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("module", "name", "constants"),
    [
        ("plsc.head.backends.triton_kernels", "exponentials_of_logits", TILE),
        ("plsc.head.backends.triton_kernels", "exponentials_of_product", PRODUCT),
        ("plsc.head.backends.triton_kernels", "probabilities_of_product", PRODUCT),
        ("plsc.head.backends.triton_kernels", "scatter_targets", {"BLOCK_B": 64}),
    ],
)
def test_kernels_compile(tmp_path, monkeypatch, capability, module, name, constants):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernel(getattr(importlib.import_module(module), name), constants, capability)
    assert name in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exponentials_of_product", "probabilities_of_product"])
@pytest.mark.parametrize(
    ("capability", "architecture", "shared_kib", "instruction"),
    [(80, "sm_80", 163, "mma.sync"), (89, "sm_89", 99, "mma.sync"), (90, "sm_90a", 227, "wgmma.mma_async")],
)
def test_products_of_the_shipped_tiles_fit(
    tmp_path, monkeypatch, name, capability, architecture, shared_kib, instruction
):
    """On an A100, L40 or H100 they use the matrix units, fit into shared memory, and spill no register."""
    from plsc.head.backends import triton_kernels
    from plsc.head.backends.triton_backend import PRODUCT_BLOCKS

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block = next(block for least, block in PRODUCT_BLOCKS if shared_kib << 10 >= least)
    options = dict(block.options)
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages")}
    constants = {
        "WIDEN": False,
        "dim": 512,
        **{key: value for key, value in options.items() if key.startswith("BLOCK")},
    }
    compiled = compile_kernel(getattr(triton_kernels, name), constants, capability, aligned=True, **launch)
    assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared <= shared_kib << 10
    assert "0 bytes spill stores, 0 bytes spill loads" in assembler_report(compiled, capability, architecture)
