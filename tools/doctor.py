"""Report what this machine has and which implementations plsc chooses on it.

Lines: versions, processor and GPUs, the compiled CPU kernels, the class head's backend for each storage of its table,
and the exact search's. Send this output, or the file of --json, with a question or a bug report.

  plsc doctor
  PLSC_CPU=avx2 plsc doctor --json doctor.json
"""

import argparse
import os
import platform
from typing import Any

HELP = "what this machine has, and which implementations run on it"
_STORAGES = {"float32": ("float32", "float32"), "bfloat16 + int8": ("bfloat16", "int8")}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: none of its own."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the report; its values as ``--json`` stores them."""
    report = {"versions": _versions(), "machine": _machine(), "head": _head_backends(), "search": _search_backend()}
    for title, lines in report.items():
        print(title)
        for name, value in lines.items():
            print(f"  {name:<26}{value}")
    return report


def _versions() -> dict[str, str]:
    import numpy
    import torch

    import plsc

    return {
        "plsc": plsc.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def _machine() -> dict[str, str]:
    import torch

    from plsc.bench.harness import processor_name
    from plsc.native.build import available_paths

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": processor_name(),
        "threads": str(torch.get_num_threads()),
        "compiled CPU paths": ", ".join(available_paths()) or "none: no C++ compiler, or PLSC_NATIVE=0",
        "PLSC_CPU": os.environ.get("PLSC_CPU") or "not set: the best path runs",
        "GPUs": ", ".join(gpus) or "none",
    }


def _head_backends() -> dict[str, str]:
    import torch

    import plsc

    mesh = plsc.init()
    described = {}
    for storage, (weight, momentum) in _STORAGES.items():
        dtypes = {"weight_dtype": getattr(torch, weight), "momentum_dtype": getattr(torch, momentum)}
        head = plsc.ShardedHead(512, 8 * mesh.world_size, mesh, **dtypes)
        described[storage] = head.backend.describe()
    return described


def _search_backend() -> dict[str, str]:
    import numpy

    from plsc.index.scan import PRECISIONS, ExactScan

    rows = numpy.eye(32, dtype=numpy.float32)
    return {precision: f"{ExactScan(rows, precision=precision).backend} scan" for precision in PRECISIONS}
