"""The first loading and running of a model from elsewhere: in a process that may take so much and no more.

A graph is a program. A few hundred bytes of it can ask for any memory, and for any time, already while it is loaded:
onnxruntime computes what is constant, and puts functions in place of their calls. Neither onnxruntime nor torch has a
limit. So a model is first tried in a process of its own, whose limits grow with the file and with the pictures; only
one that stays below them is loaded into this one.

That holds for every later run, because no run differs from those that were tried. No size in the model depends on the
pictures' values, as :mod:`plsc.embedding.onnx_model` proves of an ONNX graph, and as the trial of a program looks at
every operation for. And a model is run with batches of the sizes that were tried alone (:func:`pieces`).

The process of an ONNX model is this file, run as a script: it needs numpy and onnxruntime alone. That of a program is a
fork of the caller's, which has imported torch already: a new one would take four seconds for that.

A backbone whose options come from a file (timm's) is tried likewise, in a fork that builds it. Its parameters are in
the file, but neither the tables that it computes of its options nor its activations are.
"""

import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

# Batches that models from elsewhere are run with. On a CPU larger ones take no less time for each picture.
CPU_BATCHES, GPU_BATCHES = (4, 1), (64, 8, 1)

MEMORY = 160 << 20  # bytes that any model may take, beyond the libraries …
MEMORY_PER_BYTE = 4  # … and for each byte of its file: as parsed, as initialised, and packed for products …
MEMORY_PER_NUMBER = 256  # … and for each number of the largest input: activations of 64 times as many
CPU_SECONDS = {"onnx": 1.0, "program": 4.0, "backbone": 4.0}  # of any model: torch takes a second to load 10 MB …
BYTES_PER_CPU_SECOND = 2 << 20  # … and a second for so many bytes of its file
_POLL_SECONDS = 0.01
LARGEST_INPUT = 1 << 26  # numbers: 445 pictures of 224x224

Model = bytes | Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """What a model is tried on.

    Attributes:
        name: of the input; no program has one.
        dtype: numpy's name of its type.
        shapes: of the batches.
    """

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]


def pieces(count: int, batches: Sequence[int]) -> list[int]:
    """Cut a batch of ``count`` into some of the sizes ``batches``, which fall to 1."""
    found: list[int] = []
    for size in batches:
        found += [size] * (count // size)
        count %= size
    return found


def require_trial(path: Path, kind: str, model: Model, inputs: Inputs, size: int | None = None) -> None:
    """Load a model and run it in a process of its own: on each shape on noise, and on the smallest on zeros.

    Args:
        path: for the message.
        kind: "onnx"; "program", of which :mod:`plsc.embedding.program` made sure that it runs no code; or "backbone".
        model: the content of the file, which holds all weights; or what builds the backbone, a torch module.
        inputs: what it is run on.
        size: bytes of its weights; None: the file's.

    Raises:
        DataError: it takes too much memory or time, or has sizes that no trial could tell. Where it keeps to its
            limits, whether it runs or not, nothing is said.
    """
    from plsc.errors import DataError  # here: the trial itself, this file as a script, has numpy and onnxruntime alone

    fault = _trial_fault(kind, model, inputs, len(model) if isinstance(model, bytes) else size or 0)
    if fault is not None:
        raise DataError(f"{path} is refused: it {fault}; use another copy")


def _trial_fault(kind: str, model: Model, inputs: Inputs, size: int) -> str | None:
    largest = max(map(math.prod, inputs.shapes))
    if largest > LARGEST_INPUT:
        return f"takes inputs of {largest:,} numbers"
    memory = MEMORY + MEMORY_PER_BYTE * size + MEMORY_PER_NUMBER * largest
    seconds = CPU_SECONDS[kind] + size / BYTES_PER_CPU_SECOND
    task = {"kind": kind, "memory": memory, "seconds": seconds, "inputs": asdict(inputs)}
    try:
        timeout = 60 + 20 * seconds
        if kind == "onnx" and isinstance(model, bytes):
            code, output = _spawned(task, model, timeout)
        else:
            code, output = _forked(task, model, timeout)
    except subprocess.TimeoutExpired:
        code, output = -signal.SIGPROF, b""
    if code == -signal.SIGPROF:
        return f"takes more than {seconds:.1f} seconds to load and run, as no model of its size does"
    if code != 0:
        return "ends the process that runs it"
    answer: str | None = json.loads(output)
    return answer


def _spawned(task: dict[str, Any], content: bytes, timeout: float) -> tuple[int, bytes]:
    """Run this file as a script; returns its exit code, or the negative signal that ended it, and its answer."""
    done = subprocess.run(
        [sys.executable, "-I", __file__],
        input=json.dumps(task).encode() + b"\n" + content,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


def _forked(task: dict[str, Any], model: Model, timeout: float) -> tuple[int, bytes]:
    """Do the same in a fork of this process."""
    if task["kind"] == "program":  # imported once, before the fork, by whoever loads a program
        import torch._dynamo
        import torch.export.pt2_archive  # noqa: F401

    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork needs none of them
        child = os.fork()
    if child == 0:
        _be_trial(task, model, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        deadline = time.monotonic() + timeout
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise subprocess.TimeoutExpired("the trial", timeout)
            time.sleep(_POLL_SECONDS)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, answers.read()


def _be_trial(task: dict[str, Any], model: Model, writing: int) -> NoReturn:
    """Try a program or a backbone in this process, a fork, and end it."""
    import torch

    code = 1
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        torch.set_num_threads(1)  # those of the pool are not in the fork
        os.write(writing, json.dumps(_tried(task, model)).encode())
        code = 0
    finally:
        os._exit(code)


# --- in the process of the trial ---


class _DataSizesError(Exception):
    """A size depends on the values of the input."""


def _onnx_runner(content: bytes, inputs: Inputs) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session: Any = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda values: session.run(None, {inputs.name: values})


def _program_runner(content: bytes, inputs: Inputs) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class StaticSizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _has_data_sizes(func, args):
                raise _DataSizesError(str(func))
            return func(*args, **(kwargs or {}))

    make: Any = StaticSizes
    sizes = make()
    module = torch.export.load(io.BytesIO(content)).module()

    def run(values: Any) -> None:
        with torch.inference_mode(), sizes:
            module(torch.from_numpy(values))

    return run


def _backbone_runner(build: Callable[[], Any], inputs: Inputs) -> Any:
    import torch

    module = build().eval()

    def run(values: Any) -> None:
        with torch.inference_mode():
            module(torch.from_numpy(values))

    return run


def _has_data_sizes(function: Any, arguments: Any) -> bool:
    """True of an operation whose result has a size, or is a number for Python, that its arguments' values decide."""
    import torch

    if function in (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor):  # by a mask, or by places
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    return not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(function.tags)


_RUNNERS: dict[str, Callable[[Any, Inputs], Any]] = {
    "onnx": _onnx_runner,
    "program": _program_runner,
    "backbone": _backbone_runner,
}


def _attempt(kind: str, model: Model, inputs: Inputs) -> str | None:
    try:
        run = _RUNNERS[kind](model, inputs)
        for values in _batches(inputs):
            try:
                run(values)
            except Exception as error:
                if (fault := _fault(error)) is not None:
                    return fault
    except Exception as error:
        return _fault(error)
    return None


def _batches(inputs: Inputs) -> Iterator[Any]:
    import numpy as np

    random = np.random.default_rng(0)
    for shape in inputs.shapes:
        noise = random.random(shape, dtype=np.float32) * (255 if inputs.dtype == "uint8" else 2)
        yield noise.astype(inputs.dtype)
    yield np.zeros(min(inputs.shapes, key=math.prod), dtype=inputs.dtype)


def _fault(error: Exception) -> str | None:
    """What an error says against the model; None if it does not run, as the process that loads it will find out."""
    if isinstance(error, _DataSizesError):
        return f"has sizes that depend on the pictures ({error})"
    cause: BaseException | None = error
    while cause is not None:  # whoever built it may have put the error into words of its own
        if isinstance(cause, MemoryError) or re.search("bad_alloc|allocate memory|bad allocation", str(cause)):
            return "takes more memory than a model of its size"
        cause = cause.__context__
    return None


def _main() -> None:
    warnings.simplefilter("ignore")
    task = json.loads(sys.stdin.buffer.readline())
    content = sys.stdin.buffer.read()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
        answers.write(json.dumps(_tried(task, content)))


def _tried(task: dict[str, Any], model: Model) -> str | None:
    if task["kind"] == "onnx":
        import onnxruntime  # noqa: F401  (what it takes by itself is not the model's)

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + task["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # its signal ends the process
    return _attempt(task["kind"], model, Inputs(**task["inputs"]))


if __name__ == "__main__":
    _main()
