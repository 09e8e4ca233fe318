"""The kernels for processors other than this one: compiled for them, and run where this one or an emulator can."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from plsc.native import build

pytestmark = [pytest.mark.slow, pytest.mark.live]

SOURCES = Path(build.__file__).parent
PROGRAMS = [Path(__file__).with_name(f"check_{name}_kernels.cpp") for name in ("head", "scan")]
FLAGS = [flag for flag in build._FLAGS if flag != "-shared"]
ARM = [
    ("armv8-a", "neon", "portable"),
    ("armv8.2-a+dotprod", "neon", "neon-dot"),
    ("armv8.6-a+bf16", "neon-bf16", "neon-dot"),
]

on_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ for x86-64"
)
with_arm_compiler = pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None, reason="needs aarch64-linux-gnu-g++ (g++-aarch64-linux-gnu)"
)
with_emulator = pytest.mark.skipif(
    shutil.which("qemu-aarch64-static") is None, reason="needs qemu-aarch64-static (qemu-user-static)"
)


def compiled(compiler: str, march: str, source: Path, output: Path, *options: str) -> Path:
    command = [compiler, *FLAGS, f"-march={march}", *options, "-I", str(SOURCES), "-o", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return output


def check(program: Path, *emulator: str) -> str:
    """What the program prints: the units that multiply, and nothing else where all agrees with float64."""
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def named(source: Path, bf16: str, fp32: str, codes: str) -> str:
    """What the program of ``source`` says that it multiplies by."""
    return f"bfloat16 by {bf16}, float32 by {fp32}" + (f", codes by {codes}" if "scan" in source.name else "")


@with_arm_compiler
@with_emulator
@pytest.mark.parametrize(("march", "bf16", "codes"), ARM)
@pytest.mark.parametrize("source", PROGRAMS, ids=["head", "scan"])
def test_kernels_on_arm_agree_with_float64(tmp_path, source, march, bf16, codes):
    program = compiled("aarch64-linux-gnu-g++", march, source, tmp_path / "check", "-static")
    assert check(program, "qemu-aarch64-static") == named(source, bf16, "neon", codes)


@on_x86_64
@pytest.mark.parametrize("path", [None, "avx2", "avx512"])
@pytest.mark.parametrize("source", PROGRAMS, ids=["head", "scan"])
def test_kernels_for_older_x86_processors_agree_with_float64(tmp_path, source, path):
    if path is not None and path not in build.available_paths():
        pytest.skip(f"this machine cannot run {path}")
    march = {None: "x86-64-v2", "avx2": "x86-64-v3", "avx512": "skylake-avx512"}[path]
    units = path or "portable"
    program = compiled("g++", march, source, tmp_path / "check")
    assert check(program) == named(source, units, units, units)


@on_x86_64
@pytest.mark.parametrize("source", ["head_kernels", "scan_kernels"])
def test_the_matrix_tiles_compile(tmp_path, source):
    """A processor that has them runs them in test_head_kernels.py and index/test_scan.py."""
    made = compiled("g++", "sapphirerapids", SOURCES / f"{source}.cpp", tmp_path / "tiles.o", "-c")
    disassembled = subprocess.run(["objdump", "-d", str(made)], capture_output=True, text=True, check=True)
    assert "tdpbf16ps" in disassembled.stdout
