"""Triton kernels compiled for GPUs that are not here, and what NVIDIA's assembler says of them."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

TYPES = {
    **dict.fromkeys(("weight", "features", "out", "second_moment"), "*bf16"),
    **dict.fromkeys(("logits", "inverse_norm", "partial", "log_z", "scale", "values", "gradient", "skip"), "*fp32"),
    **dict.fromkeys(("buffer", "first_moment"), "*i8"),
    **dict.fromkeys(("buffer_scale", "first_scale"), "*fp32"),
    **dict.fromkeys(("position", "index", "numbers"), "*i64"),
    **dict.fromkeys(("n", "batch", "start", "first", "first_number", "key"), "i32"),
    **dict.fromkeys(("s", "lr", "momentum", "weight_decay", "factor", "smallest_norm"), "fp32"),
    **dict.fromkeys(("rate1", "beta2", "rate2", "step_size", "correction2", "eps", "decay"), "fp32"),
}


def compile_kernel(
    kernel: Any, constants: dict[str, Any], capability: int, aligned: bool = False, **options: Any
) -> Any:
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


def assembler_report(compiled: Any, capability: int, architecture: str) -> str:
    """The report of ptxas on a compiled kernel: registers, shared memory and spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(capability).path, "-v", "--gpu-name", architecture, str(source)]
        command += ["-o", str(Path(folder) / "kernel")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
