"""The fake CUDA runtime: compiled from fake_cuda.c, and preloaded into the process that traces."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("fake_cuda.c")


def missing() -> str | None:
    """What this machine lacks to trace, for the tests' skip; None where it has everything."""
    if sys.platform != "linux":
        return f"LD_PRELOAD does not exist on {sys.platform}"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if shutil.which("gcc") is None:
        return "needs gcc, which builds the fake CUDA runtime"
    if find_spec("triton") is None:
        return "needs triton"
    return None if _headers() else "needs the header driver_types.h of NVIDIA's runtime package"


def build(folder: Path) -> Path:
    """Compile the runtime into ``folder``; returns the library to preload."""
    library = folder / "libcuda.so.1"
    includes = [f"-I{path}" for path in _headers()]
    options = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, *includes, "-o", str(library), str(SOURCE)], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment of a process that sees the fake devices."""
    hidden = ("CUDA_VISIBLE_DEVICES", "PLSC_HEAD_BACKEND", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    # no kernel computes anything here, so none agrees with float64
    return {
        **kept,
        "LD_PRELOAD": str(library),
        "OMP_NUM_THREADS": "1",
        "PLSC_SELF_CHECK": "0",
        "PLSC_HEAD_SHAPE": "computed",  # nor can it be timed
        "TRITON_CACHE_DIR": str(library.parent),
    }


def _headers() -> list[Path]:
    """The folders of driver_types.h, of the CUDA that torch was built for, and of what it includes, in that order."""
    spec = find_spec("nvidia")
    folders = [Path(entry) for entry in (spec.submodule_search_locations or [])] if spec else []
    types = sorted(path.parent for folder in folders for path in folder.glob("*/include/driver_types.h"))
    triton = find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    shared = Path(triton.origin).parent / "backends" / "nvidia" / "include"  # the runtime's package leaves crt/ out
    return [*types[:1], shared] if types else []
