"""The machine as plsc finds it: versions and whether they are supported, processor, memory, GPUs and their links."""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy
import torch

import plsc
from plsc.bench.harness import processor_name
from plsc.data.decoders import decoder_name
from plsc.devices import cpu_flags
from plsc.doctor.report import Line, absent, checked, failed, found
from plsc.native import build
from plsc.sizes import available_bytes

# At least the first, below the second: what pyproject.toml admits.
SUPPORTED = {"Python": ("3.11", None), "torch": ("2.11", "2.16"), "numpy": ("2", None)}
_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_LEAST_SPACE = 256 << 20  # bytes, for kernels that are compiled and for files beside a run
_GIB = 2**30
_QUERY_SECONDS = 15.0


def versions() -> list[Line]:
    """The versions of everything that computes, and whether they go together."""
    lines = [found("plsc", plsc.__version__)]
    have = {"Python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    lines += [_version(name, version) for name, version in have.items()]
    return [*lines, _triton(), _cuda_runtime(), _nccl(), _jpeg_decoder()]


def _version(name: str, version: str) -> Line:
    least, below = SUPPORTED[name]
    is_supported = _numbers(version) >= _numbers(least) and (below is None or _numbers(version) < _numbers(below))
    text = f"{version} (at least {least}" + (f", below {below})" if below else ")")
    wanted = f"'{name}>={least}" + (f",<{below}'" if below else "'")
    advice = f"install a supported one: pip install {wanted}"
    return checked(name, version if is_supported else text, is_supported, advice)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 15, 0) of 2.15.0+cu132."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _triton() -> Line:
    """Triton's version, and whether it is the one that torch was released with: others compile other code."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        needed = torch.version.cuda is not None and torch.cuda.is_available()
        advice = "install the triton that torch asks for: pip install triton"
        return failed("triton", "not installed", advice) if needed else absent("triton", "not installed: for GPUs only")
    wanted = _required_by_torch("triton")
    if wanted is not None and _numbers(wanted) != _numbers(version):
        return failed("triton", f"{version}, and this torch needs {wanted}", f"pip install triton=={wanted}")
    return found("triton", version)


def _required_by_torch(name: str) -> str | None:
    """The version of a package that the installed torch pins; None: it pins none, or torch was built here."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    matches = (re.match(rf"{name}==([\w.+]+)", requirement) for requirement in requirements)
    return next((match[1] for match in matches if match), None)


def _cuda_runtime() -> Line:
    if torch.version.cuda is None:
        return absent("CUDA runtime", "torch was built without CUDA")
    return found("CUDA runtime", torch.version.cuda)


def _nccl() -> Line:
    """NCCL as it is loaded; torch says which one it was released with."""
    if not torch.cuda.is_available():
        return absent("NCCL", "no GPU: ranks use gloo")
    loaded = ".".join(map(str, torch.cuda.nccl.version()))
    pins = (_required_by_torch(f"nvidia-nccl-cu{major}") for major in (12, 13))
    wanted = next((pin for pin in pins if pin is not None), None)
    if wanted is not None and _numbers(wanted) != _numbers(loaded):
        text = f"{loaded} is loaded, and this torch needs {wanted}"
        return failed("NCCL", text, "another libnccl comes first: look at LD_LIBRARY_PATH and LD_PRELOAD")
    return found("NCCL", loaded)


def _jpeg_decoder() -> Line:
    """The library that decodes JPEG."""
    name = decoder_name()
    note = "; torchvision takes half of its time" if name == "Pillow" else ""
    try:
        return found("JPEG decoder", f"{name} {metadata.version(name)}{note}")
    except metadata.PackageNotFoundError:
        return absent("JPEG decoder", "no library reads pictures: pip install pillow torchvision")


def machine() -> list[Line]:
    """Driver, processor, memory and space."""
    return [_driver(), *_processor(), *_compiled_kernels(), _memory(), *_space()]


def _driver() -> Line:
    """The NVIDIA driver, and whether torch can use it."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists() and not torch.cuda.is_available():
        return absent("driver", "no NVIDIA driver")
    match = re.search(r"\s(\d+\.\d+[\d.]*)\s", path.read_text()) if path.exists() else None
    version = match[1] if match else "version unknown"
    if torch.cuda.is_available():
        return found("driver", version)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return absent("driver", f"{version}; CUDA_VISIBLE_DEVICES hides the GPUs")
    built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    advice = "install a torch for a CUDA that this driver knows (nvidia-smi shows it), or a newer driver"
    return failed("driver", f"{version}, but torch, built {built}, sees no GPU", advice)


def _processor() -> Iterator[Line]:
    features = [feature for feature in _FEATURES if feature in cpu_flags()]
    yield found("processor", processor_name(), features=features)
    yield found("processor features", ", ".join(features) or "none that kernels use")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield found("threads", f"{torch.get_num_threads()} of torch, {usable} cores usable", torch=torch.get_num_threads())


def _compiled_kernels() -> Iterator[Line]:
    """The compiled CPU kernels: that those in the cache are those of these sources."""
    paths = build.available_paths()
    if not paths:
        reason = "PLSC_NATIVE=0" if os.environ.get("PLSC_NATIVE") == "0" else "no C++ compiler"
        yield absent("compiled CPU kernels", f"{reason}: PyTorch computes")
        return
    for source in ("head_kernels", "scan_kernels"):
        name = f"compiled {source.replace('_', ' ')}"
        problem = build.why_no_library(source)
        forced = os.environ.get("PLSC_CPU")
        have = f"paths {', '.join(paths)}" + (f"; PLSC_CPU={forced}" if forced else "; the best runs")
        advice = "delete what it names under ~/.cache/plsc, or repair the compiler; PLSC_NATIVE=0 does without"
        yield checked(name, problem or have, problem is None, advice, paths=paths)


def _memory() -> Line:
    free, limit = available_bytes(), Path("/sys/fs/cgroup/memory.max")
    text = "unknown" if free is None else f"{free / _GIB:.1f} GiB available"
    if limit.exists() and limit.read_text().strip().isdigit():
        text += f", limited to {int(limit.read_text()) / _GIB:.1f} GiB"
    return found("memory", text, available=free)


def _space() -> Iterator[Line]:
    """Free space where runs, temporary files and the loader's shared memory lie."""
    folders = {"space, current folder": Path.cwd(), "space, temporary files": Path(tempfile.gettempdir())}
    if Path("/dev/shm").exists():
        folders["space, shared memory"] = Path("/dev/shm")
    for name, folder in folders.items():
        free = shutil.disk_usage(folder).free
        text = f"{free / _GIB:.1f} GiB free at {folder}"
        advice = f"make room at {folder}, or mount it larger"
        yield checked(name, text, free >= _LEAST_SPACE, advice, free=free)


def devices() -> list[Line]:
    """The GPUs that torch sees, and the links between them and to the host."""
    if not torch.cuda.is_available():
        return [absent("GPUs", "none")]
    return [*(line for index in range(torch.cuda.device_count()) for line in _gpu(index)), *_links()]


def _gpu(index: int) -> Iterator[Line]:
    properties = torch.cuda.get_device_properties(index)
    capability = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    text = f"{properties.name}, sm_{capability[0]}{capability[1]}, {total / _GIB:.1f} GiB, {free / _GIB:.1f} free"
    yield found(f"GPU {index}", text, device=properties.name, capability=list(capability), total=total, free=free)
    built = torch.cuda.get_arch_list()
    if built and not any(_runs(architecture, capability) for architecture in built):
        text = f"this torch has code for {', '.join(built)}, and none for sm_{capability[0]}{capability[1]}"
        advice = "install a torch for this GPU: torch 2.11 to 2.14 built for CUDA 12.6 have code for P100 and V100"
        yield failed(f"GPU {index}, code", text, advice)


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``sm_MN`` runs, or that of ``compute_MN`` is compiled, on a GPU of this capability."""
    kind, _, digits = architecture.rstrip("af").partition("_")
    number = re.fullmatch(r"(\d+)(\d)", digits)
    if number is None:
        return True  # of a kind that is not known here: no reason to complain
    major, minor = int(number[1]), int(number[2])
    return (major, minor) <= capability if kind == "compute" else major == capability[0] and minor <= capability[1]


def _links() -> Iterator[Line]:
    count = torch.cuda.device_count()
    pcie = query("nvidia-smi", "--query-gpu=pcie.link.gen.current,pcie.link.width.current", "--format=csv,noheader")
    if pcie is None:
        yield absent("PCIe links", "nvidia-smi does not answer")
    else:
        yield found("PCIe links", "; ".join(f"generation {line.replace(', ', ' x')}" for line in pcie.splitlines()))
    if count == 1:
        yield absent("GPU-to-GPU links", "one GPU")
        return
    apart = [
        f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)
    ]
    topology = query("nvidia-smi", "topo", "-m")
    text = f"no peer access between {', '.join(apart)}: slower, through the host" if apart else "peer access everywhere"
    yield found("GPU-to-GPU links", text, without_peer_access=apart, topology=topology)


def query(*command: str) -> str | None:
    """The output of a command of the system; None if it does not exist, fails, or does not answer in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
