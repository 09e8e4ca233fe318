"""Settings of a service: address, threshold, batching and limits."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from plsc.embedding.quality import QualityGate
from plsc.errors import UsageError
from plsc.gallery.sqlite import COMPACT_WITHIN
from plsc.serve.access import RateLimit

MIB = 2**20
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:(?P<port>[0-9]{1,5}))?")  # the header, in lower case
_ITEMS = re.compile(r"(?P<one>[^\W\d_A-Z]{1,30})/(?P<plural>[^\W\d_A-Z]{1,30})|(?P<regular>[^\W\d_A-Z]{2,30}s)")


@dataclass(frozen=True)
class Limits:
    """Limits of one request, of one token, and of all of them together.

    Attributes:
        body_bytes: body of one request.
        memory_bytes: bodies of all requests in flight; and answers that their callers have not taken.
        image_pixels: width x height of an image, read from its header, or of a JPEG as it is decoded.
        jpeg_pixels: width x height of a JPEG, which is decoded at 1/2, 1/4 or 1/8 of its sides to hold the former.
        inputs: images and vectors of one request.
        k: matches of one query.
        matches: queries x k of one request.
        answer_bytes: one answer about persons, whose metadata may be long.
        collections: in the store.
        persons: of a collection; None is no limit.
        store_bytes: of the store's files, without snapshots and thumbnails; None is no limit.
        metadata_bytes: of one person, as JSON; None leaves it to the limits of metadata's keys and texts.
        queue: rows that wait for the device.
        connections: open at once, of callers with a good token, or without tokens of this machine's.
        anonymous_connections: open at once besides those.
        requests: in flight at once, with their bodies, of callers who may do more than what is open to anyone.
        token_share: of ``connections``, ``requests`` and ``memory_bytes``, what one token may have at a time.
        head_seconds: until a request's head has arrived.
        body_seconds: until its body, or the next piece, has arrived; ``body_rate`` bytes earn the body a second more.
        body_rate: bytes a second.
        slow_body_seconds: until its body has arrived at the latest.
        send_seconds: until the caller has taken an answer.
        deadline_seconds: for the whole request.
    """

    body_bytes: int = 16 * MIB
    memory_bytes: int = 512 * MIB
    image_pixels: int = 13_000_000
    jpeg_pixels: int = 65_000_000
    inputs: int = 256
    k: int = 1000
    matches: int = 50_000
    answer_bytes: int = 16 * MIB
    collections: int = 1000
    persons: int | None = None
    store_bytes: int | None = None
    metadata_bytes: int | None = None
    queue: int = 4096
    connections: int = 1024
    anonymous_connections: int = 2048
    requests: int = 512
    token_share: float = 0.25
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_rate: int = 16 * 1024
    slow_body_seconds: float = 300.0
    send_seconds: float = 30.0
    deadline_seconds: float = 30.0


class Items(NamedTuple):
    """What collections hold, in words: one of it and many, as the page and answers name it."""

    one: str = "person"
    many: str = "people"

    @classmethod
    def parse(cls, text: str) -> "Items":
        """The words of ``--items``: a plural that ends in s, or SINGULAR/PLURAL.

        Raises:
            UsageError: what is no such word.
        """
        if text == PEOPLE.many:
            return PEOPLE
        match = _ITEMS.fullmatch(text)
        if match is None:
            raise UsageError(f"--items {text}: give a plural in lower case, such as products, or both as in mouse/mice")
        one, plural, regular = match["one"], match["plural"], match["regular"]
        if regular is None:
            return cls(one, plural)
        return cls(regular[:-3] + "y" if regular.endswith("ies") else regular[:-1], regular)


PEOPLE = Items()


@dataclass(frozen=True)
class Settings:
    """Settings of one service; ``snapshots`` and ``audit`` are None where the store has no folder.

    ``thumbnails`` is the folder of thumbnails, which are deleted with their faces also by a service that keeps none;
    ``keep_pictures`` keeps them without loss, and shows them with ``keep_thumbnails`` alone;
    ``compact_within`` seconds those may stay of whom another service deleted from a shared store;
    ``score_step`` is what scores are multiples of for callers who may not send vectors, 0 leaves them exact.
    ``rate_limits`` are those of every caller, for kinds of which its token has none.
    ``audit_events`` are the events of :mod:`plsc.serve.audit` that get a line; of its rotated files, ``audit_keep`` are
    kept, None keeps all.
    ``next_threshold`` is of the next model, in the place of the one that a move's judgement finds.
    ``link_key`` is the metadata key whose web addresses the page shows as links; the service itself follows none.
    ``items`` names what collections hold; for others than people nothing is said of faces and aligned crops.
    ``quality_gates`` by their names refuse pictures of enrolments.
    ``decode_processes`` decode pictures for one caller at a time; one more is kept for the others.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    metrics_port: int | None = None
    tokens: Path | None = None
    threshold: float | None = None
    next_threshold: float | None = None
    false_match_rate: float | None = None
    score_step: float = 0.01
    rate_limits: tuple[RateLimit, ...] = ()
    flip: bool = False
    max_batch: int = 64
    max_wait_ms: float = 2.0
    decode_processes: int = 2
    drain_seconds: float = 20.0
    snapshots: Path | None = None
    audit: Path | None = None
    audit_events: frozenset[str] = frozenset({"write"})
    audit_rotated_bytes: int = 64 * MIB
    audit_keep: int | None = None
    link_key: str | None = None
    items: Items = PEOPLE
    quality_gates: Mapping[str, QualityGate] = field(default_factory=dict)
    thumbnails: Path | None = None
    keep_thumbnails: bool = False
    keep_pictures: bool = False
    compact_within: float = COMPACT_WITHIN
    limits: Limits = field(default_factory=Limits)

    @property
    def share(self) -> float:
        """Of what all callers have, the part that one may have; without tokens all are one."""
        return 1.0 if self.tokens is None else self.limits.token_share


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """True if a host name or address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
