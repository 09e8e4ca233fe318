"""Triton's interpreter takes more than its compiler does: kernels are compiled for a GPU here, which needs none."""

import importlib.util
import subprocess

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
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernel(getattr(importlib.import_module(module), name), constants, capability)
    assert name in compiled.asm["ptx"]


def compile_kernel(kernel, constants, capability, aligned=False, **options):
    """Compile for a GPU of ``capability``; ``aligned`` pointers are those of whole 16 bytes, as torch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {argument: "constexpr" if argument in constants else TYPES[argument] for argument in names}
    places = {(names.index(argument),): value for argument, value in constants.items()}
    pointers = [names.index(argument) for argument in names if signature[argument].startswith("*")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in pointers} if aligned else {}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})


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
    from triton.backends.nvidia.compiler import get_ptxas

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
    source = tmp_path / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    command = [
        get_ptxas(capability).path,
        "-v",
        "--gpu-name",
        architecture,
        str(source),
        "-o",
        str(tmp_path / "kernel"),
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
