"""The first loading and running of an ONNX model from elsewhere: in a process that may take so much and no more.

A graph is a program. A few hundred bytes of it can ask for any memory, and for any time, already while it is loaded:
onnxruntime computes what is constant, and puts functions in place of their calls. It has no limit for either. So a
model is first tried in a process of its own, whose limits grow with the file; only one that stays below them is
loaded into this one.

Run as a script, this file is that process: it needs numpy and onnxruntime alone, and no time for torch.
"""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

MEMORY = 160 << 20  # bytes that any model may take, beyond the libraries …
MEMORY_PER_BYTE = 4  # … and for each byte of its file: as read, as parsed, as initialised, and packed for products
CPU_SECONDS = 1.0  # of any model …
BYTES_PER_CPU_SECOND = 2 << 20  # … and a second for so many bytes of its file
LARGEST_INPUT = 1 << 26  # numbers: 445 pictures of 224x224
_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(uint8)": "uint8",
}


def trial_fault(path: Path, free_size: tuple[int, int]) -> str | None:
    """Load the model ``path`` and run it once, on zeros, in a process of its own.

    Args:
        path: the file, which holds all weights.
        free_size: height and width of the pictures where the model leaves them free.

    Returns:
        What the model takes too much of, in words; None where it keeps to its limits, whether it runs or not.
    """
    size = path.stat().st_size
    limits = {"memory": MEMORY + MEMORY_PER_BYTE * size, "seconds": CPU_SECONDS + size / BYTES_PER_CPU_SECOND}
    task = json.dumps({"path": str(path.absolute()), "free_size": free_size, **limits})
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    slow = f"takes more than {limits['seconds']:.1f} seconds to load and run once, as no model of its size does"
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            input=task.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=60 + 20 * limits["seconds"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return slow
    if done.returncode == -signal.SIGPROF:
        return slow
    if done.returncode != 0:
        return "ends the process that runs it"
    answer: str | None = json.loads(done.stdout)
    return answer


def _attempt(path: str, free_size: list[int]) -> str | None:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (entry,) = session.get_inputs()
        shape = _input_shape(entry.shape, free_size)
        if math.prod(shape) > LARGEST_INPUT:
            return f"takes inputs of {math.prod(shape):,} numbers"
        session.run(None, {entry.name: np.zeros(shape, dtype=_TYPES[entry.type])})
    except MemoryError:
        return "takes more memory than a model of its size"
    except Exception as error:  # of onnxruntime, without a public base class; and of what is no embedding model
        if re.search("bad_alloc|allocate memory|bad allocation", str(error)):
            return "takes more memory than a model of its size"
    return None


def _input_shape(dims: list[Any], free_size: list[int]) -> list[int]:
    """The shape of two pictures, where ``dims`` (4) leave that free."""
    batch, *rest = [dim if isinstance(dim, int) and dim > 0 else None for dim in dims]
    if rest[0] != 3 and rest[2] == 3:
        height, width, channels = rest
        last = True
    else:
        channels, height, width = rest
        last = False
    sides = [height or width or free_size[0], width or height or free_size[1]]
    return [batch or 2, *([*sides, channels or 3] if last else [channels or 3, *sides])]


def _main() -> None:
    task = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
        answers.write(json.dumps(_tried(task)))


def _tried(task: dict[str, Any]) -> str | None:
    import onnxruntime  # noqa: F401  (what it takes by itself is not the model's)

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + task["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # its signal ends the process
    return _attempt(task["path"], task["free_size"])


if __name__ == "__main__":
    _main()
