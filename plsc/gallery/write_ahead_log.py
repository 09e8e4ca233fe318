"""Whether SQLite's write-ahead log still holds every transaction that was acknowledged.

SQLite reads the log up to the first frame whose checksum is wrong and takes the rest for the torn end of a last
transaction; a flipped bit would silently undo all that was committed behind it. So the log is looked through first.
Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log.

The last transaction cannot be told from one that a power failure tore: for it alone SQLite's judgement stands.
"""

import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plsc.errors import IntegrityError

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

_HEADER, _FRAME_HEADER = 32, 24
_MAGIC = {0x377F0682: "<u4", 0x377F0683: ">u4"}  # the order of the bytes that checksums add up
_FRAMES = 1024  # looked through at a time


def check_log(database: Path, page_bytes: int) -> None:
    """Raise :class:`IntegrityError` if the log of ``database`` has lost a transaction; without a log nothing is wrong.

    ``page_bytes`` is what the pages have where the log's own header is damaged.
    """
    path = database.with_name(database.name + "-wal")
    if not path.exists() or path.stat().st_size < _HEADER + _FRAME_HEADER:
        return
    with path.open("rb") as file:
        header = file.read(_HEADER)
    magic, _, size = struct.unpack(">3I", header[:12])
    order = _MAGIC.get(magic, "<u4")
    sums = np.frombuffer(header[24:], dtype=">u4").astype(np.uint32)
    sound = magic in _MAGIC and np.array_equal(_sums(np.frombuffer(header[:24], order)[None])[0], sums)
    frames = _frames(path, size if sound else page_bytes)
    commits = np.any(frames[:, 4:8], axis=1)
    if not sound:
        if commits.any():
            raise _corrupt(path, "its header is not what was written")
        return
    bad, lost = _lost_transactions(_follows(frames, np.frombuffer(header[16:24], np.uint8), order, sums), commits)
    if lost > 1:
        raise _corrupt(path, f"frame {bad + 1} is not what was written, and {lost} transactions from there on are lost")


def _frames(path: Path, page_bytes: int) -> Bytes:
    """(F, 24 + page_bytes), mapped."""
    width = _FRAME_HEADER + page_bytes
    count = (path.stat().st_size - _HEADER) // width
    if not count:
        return np.empty((0, width), dtype=np.uint8)
    return np.memmap(path, np.uint8, "r", offset=_HEADER, shape=(count, width))


def _lost_transactions(follows: Mask, commits: Mask) -> tuple[int, int]:
    """The first frame that does not follow on the one before, and how many transactions end in it and in those that do
    follow on it.

    Whatever was written after a failed commit begins where that began; what is left of the failed one then follows on
    nothing. A second transaction in one sequence was begun only when the first was on disk.
    """
    bad = len(follows) if follows.all() else int(np.argmin(follows))
    begin = bad + 1 if follows[bad + 1 : bad + 2].all() else bad + 2  # its own checksum may be what was damaged
    rest = follows[begin:]
    end = begin + (len(rest) if rest.all() else int(np.argmin(rest)))
    return bad, int(np.count_nonzero(commits[bad:end])) if commits[begin:end].any() else 0


def _follows(frames: Bytes, salts: Bytes, order: str, before: Words) -> Mask:
    """Which frames (F, bytes) are of the log with ``salts`` and continue the checksums (2,) of the frame before."""
    follows = np.empty(len(frames), dtype=np.bool_)
    for start in range(0, len(frames), _FRAMES):
        part = np.asarray(frames[start : start + _FRAMES])
        stored = np.ascontiguousarray(part[:, 16:24]).view(">u4").astype(np.uint32)
        summed = np.ascontiguousarray(np.concatenate([part[:, :8], part[:, _FRAME_HEADER:]], axis=1)).view(order)
        previous = np.concatenate([before[None], stored[:-1]])
        follows[start : start + len(part)] = (_sums(summed, previous) == stored).all(axis=1)
        follows[start : start + len(part)] &= (part[:, 8:16] == salts).all(axis=1)
        before = stored[-1]
    return follows


def _sums(words: Words, before: Words | None = None) -> Words:
    """SQLite's checksums (F, 2) of ``words`` (F, W), W even, each continued from ``before`` (F, 2) or from zeros.

    For each pair of words a, b the sums become s0 + a + s1 and s1 + b + that, modulo 2^32: the word that is j-th from
    the end counts F(j) times in the first and F(j+1) times in the second, F being Fibonacci's numbers.
    """
    count = words.shape[1]
    numbers = _fibonacci(count + 2)
    weights = np.stack([numbers[:count][::-1], numbers[1 : count + 1][::-1]], axis=1)
    sums: Words = words.astype(np.uint32, copy=False) @ weights
    if before is None:
        return sums
    onward = np.array([[numbers[count - 1], numbers[count]], [numbers[count], numbers[count + 1]]])
    continued: Words = sums + before @ onward
    return continued


@lru_cache(maxsize=8)
def _fibonacci(count: int) -> Words:
    """The first ``count`` of Fibonacci's numbers from 0, 1 on, modulo 2^32."""
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append((numbers[-1] + numbers[-2]) % 2**32)
    return np.array(numbers, dtype=np.uint32)


def _corrupt(path: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{path} is corrupt: {what}; restore a snapshot with plsc gallery restore")
