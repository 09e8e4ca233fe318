"""Compiling the kernels on first use, for this very processor, into the user's cache."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-funroll-loops",
    "-fPIC",
    "-shared",
    "-pthread",
)
_LOG = logging.getLogger("plsc")


@functools.cache
def library(source: str = "head_kernels") -> ctypes.CDLL | None:
    """The compiled kernels of ``source``.cpp; None where no compiler works or ``PLSC_NATIVE=0`` forbids them.

    Compiling takes some seconds, once per user, processor, compiler and version of the source. The file lies in
    ``$XDG_CACHE_HOME/plsc`` (``~/.cache/plsc``), which must belong to the user: what is loaded is run.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if os.environ.get("PLSC_NATIVE") == "0" or not compiler:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, source)))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or error
        _LOG.warning("the CPU kernels could not be compiled, PyTorch computes instead (slower): %s", output)
        return None


def _compiled(compiler: str, source: str) -> Path:
    flags = [*_FLAGS, *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else [])]
    folder = _private_folder()
    target = folder / f"{source}-{_fingerprint(compiler, flags, source)}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # ranks may compile side by side; the last one wins
            built = Path(scratch) / target.name
            command = [compiler, *flags, "-o", str(built), str(_HERE / f"{source}.cpp")]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            built.replace(target)
    return target


def _fingerprint(compiler: str, flags: list[str], source: str) -> str:
    """Of everything that decides what the compiler makes: source, flags, its version, and what "native" means here."""
    native = subprocess.run(
        [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull], check=True, capture_output=True, timeout=60
    )
    text = b"".join(path.read_bytes() for path in (_HERE / f"{source}.cpp", *sorted(_HERE.glob("*.h"))))
    return hashlib.sha256(text + " ".join(flags).encode() + native.stdout).hexdigest()[:20]


def _private_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "plsc"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
        raise PermissionError(f"{folder} can be written by others; its kernels are not loaded")
    return folder
