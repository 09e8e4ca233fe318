"""Two network namespaces joined by a link of a given rate and round-trip time, for benchmarks of slow networks.

Linux, root, and Debian's iproute2. The rate is that of tc's token bucket filter (tbf) on both ends of a pair of veth
devices. For a delay, which tc's netem gives only where the kernel was built with it, the ends are TUN devices, and a
thread hands each packet over after half of the round-trip time.
"""

import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plsc.bench.harness import thread_limits

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29511  # at which the ranks meet
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DELAYED_MTU = 9000  # jumbo frames: a thread in Python hands over some 20,000 packets a second
_BURST = "256kb"  # above one segment of 64 KiB, which veth passes on whole


@dataclass(frozen=True)
class Network:
    """A link's rate in each direction, in Mbit/s, and its round-trip time in milliseconds; 0: none is added."""

    mbit: int
    round_trip_ms: float = 0.0

    @property
    def name(self) -> str:
        """As tables show it."""
        rate = f"{self.mbit // 1000} Gbit/s" if self.mbit % 1000 == 0 else f"{self.mbit} Mbit/s"
        return rate + (f", {self.round_trip_ms:g} ms" if self.round_trip_ms else "")


@dataclass(frozen=True)
class End:
    """An end of a link: a namespace, the device in it, and its address."""

    namespace: str
    device: str
    address: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the command line that runs ``arguments`` in the namespace."""
        return ("ip", "netns", "exec", self.namespace, *arguments)


def require_privileges() -> None:
    """Exit with one line where no namespaces or rates can be set."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise SystemExit(f"there is no {program!r}: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise SystemExit("network namespaces are root's: run this as root")


@contextlib.contextmanager
def slow_link(network: Network) -> Iterator[tuple[End, End]]:
    """Join two new namespaces by ``network``; they and their devices are removed at the end.

    Raises:
        SystemExit: ip or tc refused.
    """
    names = [f"plsc{os.getpid()}-{number}" for number in range(2)]
    ends = tuple(End(name, f"p{name[4:]}", address) for name, address in zip(names, ADDRESSES, strict=True))
    with contextlib.ExitStack() as stack:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
            stack.callback(_run, "ip", "netns", "delete", end.namespace)
        if network.round_trip_ms:
            stack.enter_context(_DelayedPair(ends, network.round_trip_ms / 2000))
        else:
            first, second = ends
            peer = ("peer", "name", second.device, "netns", second.namespace)
            _run("ip", "link", "add", first.device, "netns", first.namespace, "type", "veth", *peer)
        for end, other in (ends, ends[::-1]):
            _configure(end, other, network)
        yield ends[0], ends[1]


def output_of_ranks(ends: Sequence[End], ranks: int, arguments: Sequence[str]) -> str:
    """Run a script as ranks of one thread, as many at each end, and return what the first one prints.

    Raises:
        SystemExit: a rank did not end well.
    """
    started = [_start(ends[rank * 2 // ranks], rank, ranks, arguments) for rank in range(ranks)]
    try:
        output, _ = started[0].communicate()
        codes = [each.wait() for each in started]
    finally:
        for each in started:
            each.kill()  # where this was interrupted
    if any(codes):
        raise SystemExit("a rank over the slow link did not end well: see above")
    return output


def _start(end: End, rank: int, ranks: int, arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": end.device,
        "LINK_DEVICE": end.device,
        **thread_limits(1),
    }
    command = end.command(sys.executable, *arguments)
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def _configure(end: End, other: End, network: Network) -> None:
    inside = ("ip", "-n", end.namespace)
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "address", "add", end.address, "peer", other.address, "dev", end.device)
    _run(*inside, "link", "set", end.device, "up")
    shaped = ("rate", f"{network.mbit}mbit", "burst", _BURST, "latency", "100ms")
    _run("tc", "-n", end.namespace, "qdisc", "add", "dev", end.device, "root", "tbf", *shaped)


class _DelayedPair(threading.Thread):
    """Two TUN devices, and the thread that hands packets from each to the other after ``seconds``."""

    def __init__(self, ends: tuple[End, ...], seconds: float) -> None:
        super().__init__(daemon=True)
        self._seconds = seconds
        self._files = [_open_tun(end.device) for end in ends]
        self._over = threading.Event()
        for end in ends:
            _run("ip", "link", "set", end.device, "mtu", str(_DELAYED_MTU), "netns", end.namespace)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        for file in self._files:
            os.close(file)

    def run(self) -> None:
        """Hand packets over until the link is taken down."""
        first, second = self._files
        others = {first: second, second: first}
        under_way: deque[tuple[float, int, bytes]] = deque()  # due time, file, packet; all wait equally long
        poll = select.poll()
        for file in self._files:
            poll.register(file, select.POLLIN)
        while not self._over.is_set():
            wait = under_way[0][0] - time.monotonic() if under_way else 0.05
            for file, _ in poll.poll(max(wait, 0.0) * 1000):
                under_way.extend((time.monotonic() + self._seconds, others[file], packet) for packet in _packets(file))
            while under_way and under_way[0][0] <= time.monotonic():
                _, file, packet = under_way.popleft()
                with contextlib.suppress(OSError):  # a device that is not up yet, or no longer
                    os.write(file, packet)


def _packets(file: int) -> Iterator[bytes]:
    for _ in range(64):  # then look at what is due
        try:
            yield os.read(file, _DELAYED_MTU)
        except OSError:
            return


def _open_tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
