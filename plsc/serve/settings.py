"""Settings of a service: address, threshold, batching and limits."""

import ipaddress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of all of them together.

    Attributes:
        body_bytes: body of one request.
        memory_bytes: bodies of all requests in flight.
        image_pixels: width x height of an image, read from its header.
        inputs: images and vectors of one request.
        k: matches of one query.
        matches: queries x k of one request.
        answer_bytes: one answer about persons, whose metadata may be long.
        collections: in the store.
        queue: rows that wait for the device.
        connections: open at once.
        requests: in flight at once, of callers who may do more than what is open to anyone.
        head_seconds: until a request's head has arrived.
        body_seconds: until its body has arrived.
        send_seconds: until the caller has taken an answer.
        deadline_seconds: for the whole request.
    """

    body_bytes: int = 32 * MIB
    memory_bytes: int = 512 * MIB
    image_pixels: int = 25_000_000
    inputs: int = 256
    k: int = 1000
    matches: int = 50_000
    answer_bytes: int = 16 * MIB
    collections: int = 1000
    queue: int = 4096
    connections: int = 1024
    requests: int = 512
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    deadline_seconds: float = 30.0


@dataclass(frozen=True)
class Settings:
    """Settings of one service; ``snapshots`` and ``audit`` are None where the store has no folder.

    ``thumbnails`` is the folder of thumbnails, which are deleted with their faces also by a service that keeps none;
    ``link_key`` is the metadata key whose web addresses the page shows as links; the service itself follows none.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    metrics_port: int | None = None
    tokens: Path | None = None
    threshold: float | None = None
    false_match_rate: float | None = None
    flip: bool = False
    max_batch: int = 64
    max_wait_ms: float = 2.0
    decode_threads: int = 2
    drain_seconds: float = 20.0
    snapshots: Path | None = None
    audit: Path | None = None
    link_key: str | None = None
    thumbnails: Path | None = None
    keep_thumbnails: bool = False
    limits: Limits = field(default_factory=Limits)


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """True if a host name or address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
