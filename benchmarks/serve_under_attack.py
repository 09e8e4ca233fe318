"""What strangers cost a caller with a token: the caller's rate beside 2,000 connections of each kind, and without them.

    python benchmarks/serve_under_attack.py [--connections 2000] [--seconds 3] [--again]

Starts plsc serve with a token and a small model. For each kind of stranger the rate of eight callers is measured
before, during and after; all are on this machine, so that what the strangers' own process takes counts against the
service. With --again a stranger that is cut off connects again a second later, otherwise it gives up. A row per kind is
added to benchmarks/results/serve_under_attack.csv. One minute.
"""

import argparse
import asyncio
import contextlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from results_file import RESULTS, add_row

from plsc import models
from plsc.serve.tokens import add_token

HEAD = b"GET /v1/info HTTP/1.1\r\nHost: x\r\n"
# What a stranger of each kind sends at once, and then every three seconds.
KINDS: dict[str, tuple[bytes, bytes]] = {
    "idle": (b"", b""),
    "dripping head": (HEAD, b"x"),
    "dripping body": (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    "announced body": (HEAD + b"Content-Length: 30000000\r\n\r\n", b""),
    "unread answers": (b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 20, b""),
}
CALLERS = 8
SETTLING_SECONDS = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--again", action="store_true", help="strangers come again when they are cut off")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where serve_under_attack.csv is")
    parser.add_argument("--be-strangers", nargs=3, metavar=("PORT", "COUNT", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_file_limit()
    if args.be_strangers:
        port, count, kind = args.be_strangers
        asyncio.run(be_strangers(int(port), int(count), kind, again=args.again))
        return
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (process, port, secret):
        for kind in args.kinds:
            row = measure(process, port, secret, kind, args)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            add_row("serve_under_attack", row, args.out)
        print(f"SIGTERM among them: {end_among(process, port, args):.1f} s")


def measure(
    process: "subprocess.Popen[str]", port: int, secret: str, kind: str, args: argparse.Namespace
) -> dict[str, object]:
    """The callers' rates and latencies around an attack, and what the service grew by."""
    before, _ = asyncio.run(rate(port, secret, args.seconds))
    resident = resident_mib(process.pid)
    with strangers(port, kind, args):
        during, worst = asyncio.run(rate(port, secret, args.seconds))
        begun = time.perf_counter()
        health = httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=30).status_code
        health_ms = 1000 * (time.perf_counter() - begun)
        grown = resident_mib(process.pid) - resident
    time.sleep(1)
    after, _ = asyncio.run(rate(port, secret, args.seconds))
    if health != 200:
        raise SystemExit(f"/health/live answers {health} among connections of the kind {kind}")
    return {
        "kind": kind,
        "connections": args.connections,
        "again": args.again,
        "rate_alone": round((before + after) / 2),
        "rate_among_them": round(during),
        "share": round(2 * during / (before + after), 2),
        "worst_ms": round(worst, 1),
        "health_ms": round(health_ms, 1),
        "grown_mib": round(grown, 1),
    }


async def rate(port: int, secret: str, seconds: float) -> tuple[float, float]:
    """Requests a second of callers with a token, each on a connection of its own, and the worst milliseconds."""
    request = f"GET /v1/collections/staff HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
    stop, worst, count = time.perf_counter() + seconds, 0.0, 0

    async def call() -> None:
        while time.perf_counter() < stop:  # a connection that has not said who it is may have to make room
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await call_on_one_connection()

    async def call_on_one_connection() -> None:
        nonlocal worst, count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (begun := time.perf_counter()) < stop:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
            if b" 200 " not in head[:20]:
                raise SystemExit(f"a caller with a token got {head[:60]!r}")
            worst, count = max(worst, 1000 * (time.perf_counter() - begun)), count + 1
        writer.close()

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return count / seconds, worst


async def be_strangers(port: int, count: int, kind: str, *, again: bool) -> None:
    """Hold ``count`` connections of a kind until killed."""
    first, more = KINDS[kind]
    loop = asyncio.get_running_loop()

    async def hold() -> None:
        with socket.socket() as link:
            link.setblocking(False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(link, ("127.0.0.1", port))
            await loop.sock_sendall(link, first)
            while more:
                await asyncio.sleep(3)
                await loop.sock_sendall(link, more)
            if kind == "unread answers":
                await asyncio.sleep(3600)
            while await loop.sock_recv(link, 65536):
                pass

    async def be_one() -> None:
        while True:
            with contextlib.suppress(OSError):  # cut off
                await hold()
            await asyncio.sleep(1 if again else 3600)

    await asyncio.gather(*(be_one() for _ in range(count)))


@contextlib.contextmanager
def strangers(port: int, kind: str, args: argparse.Namespace) -> Iterator[None]:
    """Attack meanwhile, from a process of its own."""
    more = ["--again"] if args.again else []
    command = [sys.executable, __file__, *more, "--be-strangers", str(port), str(args.connections), kind]
    process = subprocess.Popen(command)
    try:
        time.sleep(SETTLING_SECONDS)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", int, str]]:
    """A service with a collection, its port, and the secret of an admin's token."""
    models.save_model(models.create("mobilefacenet", embedding_dim=128, image_size=48), folder / "model.safetensors")
    secret = add_token(folder / "tokens.toml", "admin", "admin")
    command = [sys.executable, "-m", "plsc.tools.entry", "serve", "--model", str(folder / "model.safetensors")]
    command += ["--store", str(folder / "store"), "--port", "0", "--tokens", str(folder / "tokens.toml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it is a pipe"
        port = int(process.stdout.readline().split()[2].rstrip(":").rpartition(":")[2])
        made = httpx.post(
            f"http://127.0.0.1:{port}/v1/collections",
            json={"name": "staff"},
            headers={"Authorization": f"Bearer {secret}"},
        )
        made.raise_for_status()
        yield process, port, secret
    finally:
        process.kill()
        process.wait()


def end_among(process: "subprocess.Popen[str]", port: int, args: argparse.Namespace) -> float:
    """Seconds from SIGTERM to the service's end among dripping heads."""
    with strangers(port, "dripping head", args):
        begun = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        return time.perf_counter() - begun


def resident_mib(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def raise_file_limit() -> None:
    """Let this process hold all connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
