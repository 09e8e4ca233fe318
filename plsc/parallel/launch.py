"""Start one command as several ranks of this machine, as torchrun would, and end them together."""

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from plsc.errors import UsageError

GRACE_SECONDS = 20.0  # how long the other ranks may take to end by themselves once one has failed


def launch(argv: list[str], nproc: int) -> int:
    """Run ``plsc ARGV…`` as ``nproc`` local ranks and wait for them.

    The CPU's cores are shared out between the ranks (OMP_NUM_THREADS, unless it is set). When one rank ends with an
    error the others are ended too; SIGINT and SIGTERM are passed on, so that every rank can save its state.

    Returns:
        0 when every rank ended well, else the exit code of the first that failed (128 + N where signal N killed it).
    """
    if nproc < 1:
        raise UsageError(f"--nproc {nproc}: at least one rank is needed")
    port = _free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "plsc.tools.entry", *argv], env=_environment(rank, nproc, port)
        )
        for rank in range(nproc)
    ]

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(ranks)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _end(ranks)


def launched() -> bool:
    """Whether this process is one of several ranks already (started by :func:`launch` or torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            rank, code = failed[0]
            if code < 0:
                print(
                    f"plsc: rank {rank} was killed by {signal.Signals(-code).name}; ending the others",
                    file=sys.stderr,
                )
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Let the ranks that still run end by themselves for a while (they may be saving), then make them."""
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in ranks:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    threads = max((os.cpu_count() or 1) // nproc, 1)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
