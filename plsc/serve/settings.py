"""Settings of a service: address, threshold, batching and limits."""

import ipaddress
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plsc.embedding.quality import QualityGate
from plsc.errors import UsageError
from plsc.gallery.sqlite import COMPACT_WITHIN
from plsc.image_files import PixelLimits
from plsc.serve.limits import Clock, RateLimit

if TYPE_CHECKING:
    from plsc.evaluation.search_thresholds import SearchThresholds

MIB = 2**20
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:(?P<port>[0-9]{1,5}))?")  # the header, in lower case
_ITEMS = re.compile(r"(?P<one>[^\W\d_A-Z]{1,30})/(?P<plural>[^\W\d_A-Z]{1,30})|(?P<regular>[^\W\d_A-Z]{2,30}s)")


@dataclass(frozen=True)
class Limits:
    """All numbers of who may hold how much, and when; :mod:`plsc.serve.limits` says what they mean together."""

    # of a request, of a token, and of all together
    body_bytes: int = 16 * MIB  # body of one request
    memory_bytes: int = 512 * MIB  # bodies of all requests in flight; and answers that their callers have not taken
    image_pixels: int = 13_000_000  # width x height of an image as it is decoded; a file's may be twice that
    jpeg_pixels: int = 65_000_000  # of a JPEG's file; larger ones are decoded at 1/2, 1/4 or 1/8 of their sides
    inputs: int = 256  # images and vectors of one request
    k: int = 1000  # matches of one query
    matches: int = 50_000  # queries x k of one request
    answer_bytes: int = 16 * MIB  # one answer about persons, whose metadata may be long
    collections: int = 1000  # in the store
    persons: int | None = None  # of a collection; None is no limit
    store_bytes: int | None = None  # of the store's files, without snapshots and thumbnails; None is no limit
    metadata_bytes: int | None = None  # of one person, as JSON; None leaves it to the limits of keys and texts
    queue: int = 4096  # rows that wait for the device
    connections: int = 1024  # open at once, of callers with a good token, or without tokens of this machine's
    anonymous_connections: int = 2048  # open at once besides those
    requests: int = 512  # in flight at once, with their bodies, of callers who may do more than what is open to anyone
    token_share: float = 0.25  # of all that is shared, what one token may have at a time
    head_seconds: float = 10.0  # until a request's head has arrived
    body_seconds: float = 30.0  # until its body, or the next piece, has arrived; ``body_rate`` bytes earn a second
    body_rate: int = 16 * 1024  # bytes a second
    slow_body_seconds: float = 300.0  # until its body has arrived at the latest
    send_seconds: float = 30.0  # until the caller has taken an answer
    linger_seconds: float = 5.0  # for which a slow body is still read, and dropped: a reset would take the answer along
    linger_pause_seconds: float = 1.0  # the longest pause in that
    deadline_seconds: float = 30.0  # for the whole request

    # of what is read before the caller is known: all of it costs time byte by byte
    head_bytes: int = 65_536  # of a head, or of trailers or the extensions of a chunk
    headers: int = 256  # each becomes an object
    head_pieces: int = 64  # reads until a head is whole: 64 KiB are 45 packets
    target_bytes: int = 16_384  # path and query, which uvicorn and FastAPI take apart
    unknown_head_bytes: int = 8_192  # of a request without a good token
    unknown_target_bytes: int = 2_048  # likewise
    pipelined: int = 32  # requests that wait behind the one in progress: a read may hold thousands
    unknown_pipelined: int = 4  # on a connection that has carried no good token
    chunks: int = 65_536  # of one body: small ones cost a hundred times as much as their bytes
    small_bytes: int = 256  # of a piece of a body that counts as small
    small_seconds: float = 0.0005  # that a token waits besides for each small piece, beside others
    read_bytes: int = 8_192  # of what has come, parsed before others have a turn
    read_seconds: float = 0.002  # for which parsing goes on at once
    last_seconds: float = 1.0  # for an answer that an unknown caller still waits for when the service stops

    # of the time (turns)
    strangers_part: float = 0.05  # of the event loop's time, for the answers to all strangers together
    health_part: float = 0.02  # besides, for those who ask for health: who probes waits for no other
    newcomers_part: float = 0.1  # besides, for connections that are strangers' to the end; beyond, new ones wait
    newcomers_saved_seconds: float = 0.25  # of that, for many at once
    newcomer_seconds: float = 0.0003  # of making and ending a connection
    accept_pause_seconds: float = 0.01  # between two new connections while newcomers owe time
    strangers_saved_seconds: float = 0.05  # for answers at once: a page takes about twenty of a fifth of a millisecond
    step_seconds: float = 0.0005  # that a step which waited costs besides, in the kernel and around the loop
    tick_seconds: float = 0.005  # between two looks at who may go on
    lead_seconds: float = 0.005  # that a token may be ahead of its part
    least_part: float = 0.8  # of the time, that is shared even where less is taken: who waits must not wait for ever
    lately_seconds: float = 0.2  # over which it is averaged what is used
    busy_part: float = 0.6  # of the loop's time, up to which tokens may take what nobody takes
    full_part: float = 0.75  # of the loop's time and the processors', from which on nothing is to spare
    free_part: float = 0.9  # of its steps' time that the loop's thread has a processor where nobody else needs them
    crowded_part: float = 0.75  # of the same, where nothing is to spare
    idle_part: float = 0.001  # of the time lately, below which a token is not at work
    kept_part: float = 0.01  # of one that was alone: half a second passes until that is idle

    # of threads, processes and batches
    store_threads: int = 8  # that read the store
    store_share: int = 6  # of them, for one caller
    change_threads: int = 2  # the store makes one change at a time: one waits, another's passes
    change_share: int = 1  # of them, for one caller
    filter_threads: int = 3  # that look through all persons
    filter_share: int = 2  # of them, for one caller
    filtered: int = 32  # searches whose matching rows are held in memory, a byte for each face
    light_seconds: float = 0.05  # of work lately, with which one of a group still counts as a newcomer
    light_within_seconds: float = 10.0  # after which that is forgotten
    beside_seconds: float = 0.01  # that the rows of one of several owners may take in a batch
    beside_within_seconds: float = 2.0  # since its last task, for which an owner still is one of several
    collect_seconds: float = 0.05  # for which the device waits for the event loop at most: that may have ended

    @property
    def whole_pixels(self) -> int:
        """Of a picture that is no JPEG: it is decoded whole, in the memory that ``image_pixels`` are given."""
        return 2 * self.image_pixels

    @property
    def pixels(self) -> PixelLimits:
        """Of a picture, for those who decode it."""
        return PixelLimits(self.image_pixels, self.jpeg_pixels, self.whole_pixels)


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
    ``search_thresholds`` judge searches in place of ``threshold``, by how many persons a collection has at present.
    ``next_threshold`` is of the next model, in the place of the one that a move's judgement finds.
    ``link_key`` is the metadata key whose web addresses the page shows as links; the service itself follows none.
    ``items`` names what collections hold; for others than people nothing is said of faces and aligned crops.
    ``quality_gates`` by their names refuse pictures of enrolments.
    ``decode_processes`` decode pictures for one caller at a time; one more is kept for the others.
    ``clock`` is that of rates, turns, shares and batches, in seconds.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    metrics_port: int | None = None
    tokens: Path | None = None
    threshold: float | None = None
    next_threshold: float | None = None
    false_match_rate: float | None = None
    search_thresholds: "SearchThresholds | None" = None
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
    clock: Clock = time.monotonic

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
