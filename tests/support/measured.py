"""``plsc`` commands in processes of their own, which tell what reading a file cost: CPU seconds and memory.

A server process imports the libraries once, and forks for each command; so what a command takes beyond them is its own.
A command that exceeds a limit is killed, and its answer says so.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from plsc.sizes import status_bytes
from support.hermetic import harness

LIBRARIES = (
    "faiss", "numpy", "onnx", "onnx.numpy_helper", "onnxruntime", "PIL.Image", "safetensors.torch", "timm", "torch",
    "torch.distributed.checkpoint", "torch.export", "torch.export.passes", "torchvision.transforms.v2",
    "torch._dynamo", "torch.export.pt2_archive",
    "plsc.embedding.embedder", "plsc.embedding.onnx_engine", "plsc.evaluation", "plsc.gallery.store",
    "plsc.gallery.sqlite.store", "plsc.gallery.transfer", "plsc.index.query", "plsc.train.trainer",
    "plsc.train.checkpoint_inspection", "plsc.tools.train",
)  # fmt: skip
KILL_SECONDS = 20  # of CPU: far beyond the contract, so that the figure of a slow refusal is still told
KILL_BYTES = 4 << 30  # of address space beyond the libraries'
HANG_SECONDS = 120
CHECKOUT = os.pathsep.join(str(folder) for folder in Path(__file__).parents[1:3])  # not the package that is installed


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        code: its exit code; negative where a signal ended it.
        output: its standard output and error.
        seconds: of CPU, its own and its children's.
        mib: memory at the peak, beyond that of the libraries.
    """

    code: int
    output: str
    seconds: float
    mib: float


class Commands:
    """Runs ``plsc`` commands in forks of a process that has imported the libraries."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}
        with harness():
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )

    def __call__(self, *arguments: str | Path) -> Outcome:
        """Run ``plsc ARGUMENTS``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(word) for word in arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def serve() -> None:
    """Answer each line of standard input, a command's arguments as JSON, by a line of :class:`Outcome` as JSON."""
    import importlib
    import warnings

    warnings.simplefilter("ignore")
    for name in LIBRARIES:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(arguments: list[str]) -> dict[str, object]:
    with tempfile.TemporaryFile() as output:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _be_command(arguments, output.fileno(), writing)
        os.close(writing)
        status, used = _wait(child)
        with os.fdopen(reading) as pipe:
            peak = pipe.read()
        output.seek(0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "output": output.read().decode(errors="replace"),
            "seconds": used.ru_utime + used.ru_stime,
            "mib": float(peak) if peak else float("inf"),
        }


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            return status, used
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def _be_command(arguments: list[str], output: int, result: int) -> None:
    """Run a command in this process, and end it."""
    code = 99
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (KILL_SECONDS, KILL_SECONDS))
        limit = status_bytes("VmSize") + KILL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is in memory
        before = status_bytes("VmHWM")
        from plsc.tools.entry import main

        try:
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(result, str((status_bytes("VmHWM") - before) / 2**20).encode())
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
