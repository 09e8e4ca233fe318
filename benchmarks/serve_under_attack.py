"""What strangers, and one token, cost another caller: the caller's rate and p99 among them, and without them, in turns.

    python benchmarks/serve_under_attack.py [--kinds KIND ...] [--connections 2000] [--askers 32] [--again]

Starts plsc serve with two tokens, a small model and 20,000 people. For each kind of attack the rate of eight callers of
one token (with --tokens 8 of one each) is measured alone and among attackers, turn by turn, on connections that they
keep. All are on this machine, so that what the attackers' own process takes counts against the service: ``share`` is of
the rate, ``share_of_cpu`` of the answers for a second of the service's own processor time. Some kinds are many
connections that are held; with --again one that is cut off connects again a second later, otherwise it gives up. Others
are few that ask again as soon as they are answered, with the dearest requests that were found, that leave and come
anew, or that send a chunk of a byte every 3 ms. Those of a token have the role search. A row per kind is added to
benchmarks/results/serve_under_attack.csv. Ten minutes.
"""

import argparse
import asyncio
import base64
import contextlib
import http.client
import io
import itertools
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from results_file import add_row, script_parser

HEAD = b"GET /v1/info HTTP/1.1\r\nHost: x\r\n"
TOKEN = b"POST /v1/compare HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SECRET\r\nContent-Type: application/json\r\n"
BODY = 16 << 20
PEOPLE, ENROLLED_TOGETHER = 20_000, 200  # who a filter looks through
SEARCH = b"POST /v1/collections/staff/search HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SECRET\r\n"
CHUNK = b"1\r\n \r\n"
NUMBER = "######"  # another one in each request, so that nothing is known of it yet
CALLERS = 8
SETTLING_SECONDS = 3.0
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Kind:
    """An attack: what each connection sends at once, and what then.

    Attributes:
        more: sent every ``pause`` seconds.
        asks: sends ``first`` again whenever its answers have come; ``answers`` is how many those are.
        reads: takes what comes.
        leaves: closes the connection at once, and opens another.
        count: of connections, where neither --connections nor --askers says it.
    """

    first: bytes
    more: bytes = b""
    pause: float = 3.0
    asks: bool = False
    answers: int = 1
    reads: bool = True
    leaves: bool = False
    count: int | None = None


def get(target: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET %b HTTP/1.1" % target, b"Host: x", *headers, b"", b""])


def post(body: bytes, kind: bytes) -> bytes:
    return SEARCH + b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body)) + body


def small_picture() -> bytes:
    """A JPEG of 48 x 32 pixels."""
    file = io.BytesIO()
    Image.effect_noise((48, 32), 64).convert("RGB").save(file, "JPEG")
    return file.getvalue()


def dear_filter(*more: str) -> bytes:
    """A search by picture among those whom ten conditions of a hundred values each let through: all."""
    image, values = base64.b64encode(small_picture()).decode(), [*range(100 - len(more)), *more]
    query = {"query": {"image": image}, "filter": {f"k{number}": {"in": values} for number in range(10)}}
    return json.dumps(query).encode()


SCRIPT = b"/docs/swagger-ui-bundle.js"
RANGES = b"Range: bytes=" + b",".join(b"%d-%d" % (start, start + 1) for start in range(0, 990, 10))
KINDS = {
    "idle": Kind(b""),
    "dripping head": Kind(HEAD, b"x"),
    "dripping body": Kind(HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    "announced body": Kind(HEAD + b"Content-Length: 30000000\r\n\r\n"),
    "unread answers": Kind(get(b"/openapi.json") * 5, reads=False),
    "unknown path": Kind(get(b"/v3"), asks=True),
    "query of 16 KiB": Kind(get(b"/health/live?" + b"a=%41&" * 2_700), asks=True),
    "query of 2 KiB": Kind(get(b"/health/live?" + b"a=%41&" * 335), asks=True),
    "cookie of 60 KB": Kind(get(b"/", b"Cookie: " + b"a=b; " * 12_000), asks=True),
    "250 headers": Kind(get(b"/", *[b"x-%03d: %b" % (number, b"y" * 20) for number in range(250)]), asks=True),
    "99 ranges": Kind(get(SCRIPT, RANGES) * 8, asks=True, answers=8),
    "script of /docs": Kind(get(SCRIPT), asks=True),
    "wrong token": Kind(get(b"/v1/info", b"Authorization: Bearer plsc_wrong"), asks=True),
    "new connections": Kind(get(b"/", *[b"x-%03d: %b" % (number, b"y" * 20) for number in range(250)]), leaves=True),
    "a token's announced bodies": Kind(TOKEN + b"Content-Length: 9\r\n\r\n{", count=520),
    "a token's idle connections": Kind(get(b"/v1/info", b"Authorization: Bearer SECRET"), count=1030),
    "a token's bodies": Kind(TOKEN + b"Content-Length: %d\r\n\r\n" % BODY + b" " * (BODY - 1), count=34),
    "a token's chunks": Kind(
        SEARCH + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n", CHUNK, pause=0.003
    ),
    "a token's small pictures": Kind(post(small_picture(), b"image/jpeg"), asks=True),
    "a token's filters": Kind(post(dear_filter(), b"application/json"), asks=True),
    "a token's new filters": Kind(post(dear_filter(NUMBER), b"application/json"), asks=True),
}


def main() -> None:
    parser = script_parser(__doc__, results="serve_under_attack")
    parser.add_argument("--connections", type=int, default=2000, help="of kinds that hold them")
    parser.add_argument("--askers", type=int, default=32, help="connections of kinds that ask again and again")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=3, help="measurements alone, and as many among attackers")
    parser.add_argument("--tokens", type=int, default=1, choices=range(1, CALLERS + 1), help="that the callers have")
    parser.add_argument("--again", action="store_true", help="attackers come again when they are cut off")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--notes", default="", help="written into the rows")
    parser.add_argument("--be-attackers", nargs=4, metavar=("PORT", "COUNT", "KIND", "SECRET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_file_limit()
    if args.be_attackers:
        port, count, kind, secret = args.be_attackers
        asyncio.run(be_attackers(int(port), int(count), KINDS[kind], secret.encode(), again=args.again))
        return
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as service:
        for kind in args.kinds:
            row = asyncio.run(measure(service, kind, args))
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            add_row("serve_under_attack", row, args.out)
        print(f"SIGTERM among dripping heads: {end_among(service, args):.1f} s")


@dataclass(frozen=True)
class Service:
    """A running service, and secrets: an admin's, those of callers (``doors``), and an attacker's (``camera``)."""

    process: "subprocess.Popen[str]"
    port: int
    secret: str
    doors: list[str]
    camera: str


@dataclass
class Measured:
    """Answers to the callers: milliseconds of each, how many were refused, and the service's processor seconds."""

    milliseconds: list[float]
    refused: int = 0
    cpu_seconds: float = 0.0

    def per_cpu_second(self) -> float:
        return len(self.milliseconds) / max(self.cpu_seconds, 0.01)

    def p99(self) -> float:
        if len(self.milliseconds) < 2:
            return float("nan")
        return statistics.quantiles(self.milliseconds, n=100, method="inclusive")[98]


async def measure(service: Service, kind: str, args: argparse.Namespace) -> dict[str, object]:
    """The callers' rates and latencies with and without an attack, and what the service grew by."""
    alone, among = Measured([]), Measured([])
    resident, grown, health_ms = resident_mib(service), 0.0, 0.0
    callers = [Caller(service, service.doors[number % args.tokens]) for number in range(CALLERS)]
    for _ in range(args.turns):
        await call(callers, args.seconds, alone)
        with attackers(service, kind, args):
            await call(callers, args.seconds, among)
            health_ms = max(health_ms, health(service))
            grown = max(grown, resident_mib(service) - resident)
        await asyncio.sleep(1)
    seconds = args.turns * args.seconds
    return {
        "kind": kind,
        "connections": count_of(kind, args),
        "again": args.again,
        "rate_alone": round(len(alone.milliseconds) / seconds),
        "rate_among_them": round(len(among.milliseconds) / seconds),
        "share": round(len(among.milliseconds) / max(len(alone.milliseconds), 1), 2),
        "share_of_cpu": round(among.per_cpu_second() / max(alone.per_cpu_second(), 0.01), 2),
        "worst_ms": round(max(among.milliseconds, default=float("nan")), 1),
        "health_ms": round(health_ms, 1),
        "grown_mib": round(grown, 1),
        "p99_alone_ms": round(alone.p99(), 1),
        "p99_ms": round(among.p99(), 1),
        "refused": among.refused,
        "notes": args.notes or (f"{args.tokens} tokens" if args.tokens > 1 else ""),
    }


def health(service: Service) -> float:
    """Milliseconds until /health/live has answered."""
    begun = time.perf_counter()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)) as connection:
        connection.request("GET", "/health/live")
        assert connection.getresponse().status == 200
    return 1000 * (time.perf_counter() - begun)


class Caller:
    """A caller with a token, on a connection that it keeps as long as it can."""

    def __init__(self, service: Service, secret: str) -> None:
        self.service = service
        head = b"GET /v1/collections/staff HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        self._request = head + secret.encode() + b"\r\n\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, stop: float, measured: Measured) -> None:
        """Ask until ``stop``, and note how long each answer took."""
        while (begun := time.perf_counter()) < stop:
            try:
                status = await asyncio.wait_for(self._ask(), PATIENCE_SECONDS)
            except (asyncio.IncompleteReadError, OSError):  # TimeoutError among them
                self._streams, status = None, b""
            if status == b"200":
                measured.milliseconds.append(1000 * (time.perf_counter() - begun))
            else:
                measured.refused += 1
                await asyncio.sleep(0.05)

    async def _ask(self) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.service.port)
        reader, writer = self._streams
        writer.write(self._request)
        return await read_answer(reader)


async def call(callers: list[Caller], seconds: float, measured: Measured) -> None:
    """Ask for a while."""
    stop, cpu = time.perf_counter() + seconds, cpu_seconds(callers[0].service)
    await asyncio.gather(*(caller.ask(stop, measured) for caller in callers))
    measured.cpu_seconds += cpu_seconds(callers[0].service) - cpu


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """The status of the next answer, which is read to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
    return head.split(b" ", 2)[1]


async def be_attackers(port: int, count: int, kind: Kind, secret: bytes, *, again: bool) -> None:
    """Attack until killed."""
    numbers = itertools.count()

    def first() -> bytes:
        return kind.first.replace(b"SECRET", secret).replace(NUMBER.encode(), b"%06d" % next(numbers))

    async def attack() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        with contextlib.closing(writer):
            if not kind.reads:
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.write(first())
            if kind.leaves:
                return
            while kind.asks:
                for _ in range(kind.answers):
                    await read_answer(reader)
                writer.write(first())
            while kind.more or not kind.reads:
                await asyncio.sleep(kind.pause)
                if kind.more:
                    writer.write(kind.more)
            while await reader.read(1 << 16):
                pass

    async def be_one() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # cut off
                await attack()
            await asyncio.sleep(0 if kind.leaves else 0.1 if kind.asks else 1 if again else 3600)

    attacking = asyncio.gather(*(be_one() for _ in range(count)))
    await asyncio.sleep(SETTLING_SECONDS)
    print("attacking", flush=True)
    await attacking


def count_of(kind: str, args: argparse.Namespace) -> int:
    """Connections of a kind of attack."""
    own = KINDS[kind].count
    is_few = KINDS[kind].asks or KINDS[kind].leaves or KINDS[kind].pause < 1
    return own if own is not None else int(args.askers if is_few else args.connections)


@contextlib.contextmanager
def attackers(service: Service, kind: str, args: argparse.Namespace) -> Iterator[None]:
    """Attack meanwhile, from a process of its own."""
    more = ["--again"] if args.again else []
    who = [str(service.port), str(count_of(kind, args)), kind, service.camera]
    command = [sys.executable, __file__, *more, "--be-attackers", *who]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it is a pipe"
        assert process.stdout.readline() == "attacking\n"
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Service]:
    """A service with a collection, and tokens of an admin and of a camera."""
    from plsc import models  # here: attackers need neither
    from plsc.serve.tokens import add_token

    models.save_model(models.create("mobilefacenet", embedding_dim=128, image_size=48), folder / "model.safetensors")
    secret = add_token(folder / "tokens.toml", "admin", "admin")
    camera = add_token(folder / "tokens.toml", "camera", "search")
    doors = [add_token(folder / "tokens.toml", f"door{number}", "search") for number in range(CALLERS)]
    command = [sys.executable, "-m", "plsc.tools.entry", "serve", "--model", str(folder / "model.safetensors")]
    command += ["--store", str(folder / "store"), "--port", "0", "--tokens", str(folder / "tokens.toml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it is a pipe"
        port = int(process.stdout.readline().split()[2].rstrip(":").rpartition(":")[2])
        fill(port, secret)
        yield Service(process, port, secret, doors, camera)
    finally:
        process.kill()
        process.wait()


def fill(port: int, secret: str) -> None:
    """Make the collection, with people whom filters look through."""
    vector = base64.b64encode(np.ones(128, "<f4").tobytes()).decode()
    metadata = {f"k{number}": number for number in range(10)}
    person = {"metadata": metadata, "faces": [{"vector_b64": vector}]}
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}/v1", headers={"Authorization": f"Bearer {secret}"}, timeout=60
    ) as client:
        client.post("/collections", json={"name": "staff"}).raise_for_status()
        for _ in range(PEOPLE // ENROLLED_TOGETHER):
            client.post("/collections/staff/persons", json={"persons": [person] * ENROLLED_TOGETHER}).raise_for_status()


def end_among(service: Service, args: argparse.Namespace) -> float:
    """Seconds from SIGTERM to the service's end among dripping heads."""
    with attackers(service, "dripping head", args):
        begun = time.perf_counter()
        service.process.send_signal(signal.SIGTERM)
        service.process.wait(120)
        return time.perf_counter() - begun


def cpu_seconds(service: Service) -> float:
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(service: Service) -> float:
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def raise_file_limit() -> None:
    """Let this process hold all connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
