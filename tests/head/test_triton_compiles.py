"""Triton's interpreter takes more than its compiler does: kernels are compiled for a GPU here, which needs none."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

TYPES = {
    **dict.fromkeys(("weight", "features", "out"), "*bf16"),
    **dict.fromkeys(("logits", "inverse_norm", "partial", "log_z", "scale", "values", "gradient"), "*fp32"),
    **dict.fromkeys(("position", "index", "numbers"), "*i64"),
    **dict.fromkeys(("n", "batch", "start", "first", "first_number", "key"), "i32"),
    **dict.fromkeys(("s", "lr", "momentum", "weight_decay", "factor", "smallest_norm"), "fp32"),
    "buffer": "*i8",
    "buffer_scale": "*fp32",
}
TILE = {"BLOCK_N": 64, "BLOCK_B": 64}
PRODUCT = {**TILE, "BLOCK_K": 32, "dim": 500, "WIDEN": False}
UPDATE = {"dim": 500, "BLOCK_N": 4, "BLOCK_D": 512, "NESTEROV": True, "STOCHASTIC": True}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("module", "name", "constants"),
    [
        ("plsc.head.backends.triton_kernels", "exponentials_of_logits", TILE),
        ("plsc.head.backends.triton_kernels", "exponentials_of_product", PRODUCT),
        ("plsc.head.backends.triton_kernels", "probabilities_of_product", PRODUCT),
        ("plsc.head.backends.triton_kernels", "scatter_targets", {"BLOCK_B": 64}),
        ("plsc.head.backends.triton_kernels", "sgd_rows", UPDATE),
        (
            "plsc.head.backends.triton_kernels",
            "sgd_rows",
            {**UPDATE, "index": None, "buffer": None, "buffer_scale": None},
        ),
    ],
)
def test_kernels_compile(tmp_path, monkeypatch, capability, module, name, constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(importlib.import_module(module), name)
    names = kernel.arg_names
    signature = {argument: "constexpr" if argument in constants else TYPES[argument] for argument in names}
    places = {(names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})
    assert name in compiled.asm["ptx"]
