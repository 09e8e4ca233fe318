"""Compile the kernels on first use, for this very processor, into the user's cache.

Environment:
    PLSC_NATIVE=0: use no compiled kernels; PyTorch computes instead.
    PLSC_CPU=avx2 | avx512 | avx512-bf16 | amx, or on ARM neon | neon-bf16: compile for, and use, no more than this part
        of the processor's instructions. Unset: all that it has. The machine with the most can so test every path.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from plsc.errors import UsageError
from plsc.progress import warn

_HERE = Path(__file__).parent
_FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-funroll-loops"),
    *("-fPIC", "-shared", "-pthread"),
)
_X86_64 = platform.machine() in ("x86_64", "AMD64")
# On ARM, -march=native was long unknown to clang.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16")
# The paths of PLSC_CPU, the least first: the compiler's flags, and the macros that say that the processor has it. The
# kernels have no switch of their own: they use what the compiler may.
_PATHS = {
    "avx2": (["-march=x86-64-v3"], ["__AVX2__", "__FMA__"]),
    "avx512": ([_NATIVE, *_NO_TILES, "-mno-avx512bf16"], ["__AVX512F__", "__AVX512BW__"]),
    "avx512-bf16": ([_NATIVE, *_NO_TILES], ["__AVX512F__", "__AVX512BW__", "__AVX512BF16__"]),
    "amx": ([_NATIVE], ["__AVX512BF16__", "__AMX_BF16__"]),
    "neon": (["-march=armv8-a"], ["__ARM_NEON"]),
    "neon-bf16": ([_NATIVE], ["__ARM_FEATURE_BF16_VECTOR_ARITHMETIC"]),
}


def library(source: str = "head_kernels") -> ctypes.CDLL | None:
    """The compiled kernels of ``source``.cpp; None where no compiler works or ``PLSC_NATIVE=0`` forbids them.

    Compiling takes some seconds, once per user, processor, compiler and version of the source. The file lies in
    ``$XDG_CACHE_HOME/plsc`` (``~/.cache/plsc``), which must belong to the user: what is loaded is run. A library there
    that was made from other sources is not used.

    Raises:
        UsageError: ``PLSC_CPU`` names no path, or one that this processor lacks.
    """
    return _library_or_reason(source)[0]


def why_no_library(source: str = "head_kernels") -> str | None:
    """The reason why :func:`library` returns None; None where it returns a library."""
    return _library_or_reason(source)[1]


def _library_or_reason(source: str) -> tuple[ctypes.CDLL | None, str | None]:
    path = os.environ.get("PLSC_CPU") or None
    if path is not None and path not in _PATHS:
        raise UsageError(f"PLSC_CPU={path} is unknown: give {', '.join(_PATHS)}, or unset it for the best")
    if os.environ.get("PLSC_NATIVE") == "0":
        return None, "PLSC_NATIVE=0"
    return _load(source, os.environ.get("CXX"), path)


def paths_of_this_kind() -> list[str]:
    """The values of ``PLSC_CPU`` for this architecture, the least first, whether this processor has them or not."""
    return [path for path in _PATHS if path.startswith("neon") != _X86_64]


def available_paths() -> list[str]:
    """The values of ``PLSC_CPU`` that this machine can run, the least first; none without a compiler."""
    compiler = _find_compiler(os.environ.get("CXX"))
    if compiler is None or os.environ.get("PLSC_NATIVE") == "0":
        return []
    try:
        return [path for path in _PATHS if _lacks(compiler, path) is None]
    except (OSError, subprocess.SubprocessError):
        return []


@functools.cache
def _load(source: str, cxx: str | None, path: str | None) -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or the reason why there is none, which is logged unless it is the lack of a compiler."""
    compiler = _find_compiler(cxx)
    if compiler is None:
        return None, "no compiler"
    try:
        missing = _lacks(compiler, path) if path is not None else None
        if missing is not None:
            raise UsageError(f"PLSC_CPU={path}: {missing}; give less, or unset it for what there is")
        return _verified(*_compiled(compiler, source, path)), None
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        warn("plsc", f"the CPU kernels could not be compiled or loaded, PyTorch computes instead (slower): {reason}")
        return None, reason


def _verified(file: Path, fingerprint: str) -> ctypes.CDLL:
    """Load ``file``; OSError if it was not compiled under this fingerprint, or cannot be loaded."""
    compiled = ctypes.CDLL(str(file))
    try:
        tell = compiled.plsc_fingerprint
        tell.restype = ctypes.c_char_p
        told = tell()
    except AttributeError:
        told = None
    if told != fingerprint.encode():
        raise OSError(f"{file} was made from other sources: delete it, and it is compiled anew")
    return compiled


def _find_compiler(cxx: str | None) -> str | None:
    return cxx or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def _lacks(compiler: str, path: str) -> str | None:
    """The reason why this machine cannot run ``path``, or None."""
    macros = _native_macros(compiler)
    missing = [macro for macro in _PATHS[path][1] if f"#define {macro} ".encode() not in macros]
    if missing:
        return f"this processor lacks {path} (the compiler defines no {missing[0]})"
    if path == "amx" and not tiles_are_allowed():
        return "the system does not let this process use matrix tiles"
    return None


def tiles_are_allowed() -> bool:
    """Ask Linux for the matrix tiles' registers, which a process may use only after it asked (arch_prctl(2))."""
    request_permission, tile_data, arch_prctl = 0x1023, 18, 158
    if platform.system() != "Linux" or not _X86_64:
        return False
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def _compiled(compiler: str, source: str, path: str | None) -> tuple[Path, str]:
    """The file of the library, made if there is none, and its fingerprint."""
    architecture = _PATHS[path][0] if path is not None else [_NATIVE]
    vectors = ["-mprefer-vector-width=512"] if _X86_64 else []
    flags = [*_FLAGS, *architecture, *vectors]
    folder = private_folder()
    fingerprint = _fingerprint(compiler, flags, source)
    target = folder / f"{source}-{fingerprint}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # ranks may compile side by side; the last one wins
            built = Path(scratch) / target.name
            named = f'-DPLSC_FINGERPRINT="{fingerprint}"'
            command = [compiler, *flags, named, "-o", str(built), str(_HERE / f"{source}.cpp")]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            built.replace(target)
    return target, fingerprint


def _fingerprint(compiler: str, flags: list[str], source: str) -> str:
    """Of everything that decides what the compiler makes: source, flags, its version, and what "native" means here."""
    text = b"".join(path.read_bytes() for path in (_HERE / f"{source}.cpp", *sorted(_HERE.glob("*.h"))))
    digest = hashlib.sha256(text + " ".join(flags).encode() + _native_macros(compiler))
    return digest.hexdigest()[:20]


@functools.cache
def _native_macros(compiler: str) -> bytes:
    """The macros that the compiler defines by itself, which say its version and this processor's instructions."""
    command = [compiler, _NATIVE, "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def private_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "plsc"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
        raise PermissionError(f"{folder} can be written by others; its kernels are not loaded")
    return folder
