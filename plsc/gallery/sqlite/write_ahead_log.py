"""The write-ahead log of a store's SQLite file, verified whenever the store is opened."""

import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plsc.gallery.sqlite.database import corrupt
from plsc.index.rows import Mask

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

_HEADER, _FRAME_HEADER = 32, 24
_MAGIC = {0x377F0682: "<u4", 0x377F0683: ">u4"}  # the byte order of the words that checksums sum
_FRAMES_AT_ONCE = 1024


def verify_log(database: Path, page_bytes: int) -> None:
    """Verify that the write-ahead log of ``database`` still holds every acknowledged transaction.

    After a crash, committed transactions may exist only in the log. SQLite replays it up to the first frame with a
    wrong checksum and takes the rest for the torn end of a last transaction. One flipped bit therefore undoes,
    silently, all that was acknowledged behind it: an operator who promised a person deletion would find that person
    again. So the checksums are verified before SQLite opens the file. The last transaction cannot be told from one that
    a power failure tore; for it alone SQLite's judgement stands.

    Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log.

    Args:
        database: the SQLite file; without a log beside it nothing is wrong.
        page_bytes: the page size to assume if the log's own header is damaged.

    Raises:
        IntegrityError: a transaction was lost; names the frame.
    """
    path = database.with_name(database.name + "-wal")
    if not path.exists() or path.stat().st_size < _HEADER + _FRAME_HEADER:
        return
    with path.open("rb") as file:
        header = file.read(_HEADER)
    magic, _, size = struct.unpack(">3I", header[:12])
    order = _MAGIC.get(magic, "<u4")
    sums = np.frombuffer(header[24:], dtype=">u4").astype(np.uint32)
    intact = magic in _MAGIC and np.array_equal(_checksums(np.frombuffer(header[:24], order)[None])[0], sums)
    frames = _map_frames(path, size if intact else page_bytes)
    commits = np.any(frames[:, 4:8], axis=1)  # a frame that commits holds the database's size in pages, others zero
    if not intact:
        if commits.any():
            raise corrupt(path, "its header is not what was written")
        return
    valid = _valid_frames(frames, np.frombuffer(header[16:24], np.uint8), order, sums)
    bad, lost = _lost_transactions(valid, commits)
    if lost > 1:
        raise corrupt(path, f"frame {bad + 1} is not what was written, and {lost} transactions from there on are lost")


def _map_frames(path: Path, page_bytes: int) -> Bytes:
    """Map the log's frames, (F, 24 + page_bytes)."""
    width = _FRAME_HEADER + page_bytes
    count = (path.stat().st_size - _HEADER) // width
    if not count:
        return np.empty((0, width), dtype=np.uint8)
    return np.memmap(path, np.uint8, "r", offset=_HEADER, shape=(count, width))


def _lost_transactions(valid: Mask, commits: Mask) -> tuple[int, int]:
    """Return the first invalid frame, and how many transactions end in it or in the valid run behind it.

    A log that was restarted, or whose commit failed, is overwritten from some frame on: stale frames behind it are
    chained to nothing, so they are not valid. A second commit in a valid run proves that the first was synced.
    """
    bad = len(valid) if valid.all() else int(np.argmin(valid))
    # Damage in a frame's checksum field breaks the next frame as well, which continues from it.
    begin = bad + 1 if valid[bad + 1 : bad + 2].all() else bad + 2
    rest = valid[begin:]
    end = begin + (len(rest) if rest.all() else int(np.argmin(rest)))
    return bad, int(np.count_nonzero(commits[bad:end])) if commits[begin:end].any() else 0


def _valid_frames(frames: Bytes, salts: Bytes, order: str, previous: Words) -> Mask:
    """Return which frames carry the log's ``salts`` and continue the checksum (2,) of the frame before."""
    valid = np.empty(len(frames), dtype=np.bool_)
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        part = np.asarray(frames[start : start + _FRAMES_AT_ONCE])
        stored = np.ascontiguousarray(part[:, 16:24]).view(">u4").astype(np.uint32)
        summed = np.ascontiguousarray(np.concatenate([part[:, :8], part[:, _FRAME_HEADER:]], axis=1)).view(order)
        initial = np.concatenate([previous[None], stored[:-1]])
        valid[start : start + len(part)] = (_checksums(summed, initial) == stored).all(axis=1)
        valid[start : start + len(part)] &= (part[:, 8:16] == salts).all(axis=1)
        previous = stored[-1]
    return valid


def _checksums(words: Words, initial: Words | None = None) -> Words:
    """Return SQLite's checksums (F, 2) of ``words`` (F, W), W even, each continued from ``initial`` (F, 2) or zeros.

    SQLite's loop adds, per pair of words a, b: s0 += a + s1; s1 += b + s0, modulo 2^32. Unrolled, the word that is j-th
    from the end counts F(j) times in s0 and F(j+1) times in s1, F being the Fibonacci numbers. So all frames are summed
    by one integer matrix product instead of a Python loop over every word.
    """
    count = words.shape[1]
    fibonacci = _fibonacci(count + 2)
    weights = np.stack([fibonacci[:count][::-1], fibonacci[1 : count + 1][::-1]], axis=1)
    sums: Words = words.astype(np.uint32, copy=False) @ weights
    if initial is None:
        return sums
    carry = np.array([[fibonacci[count - 1], fibonacci[count]], [fibonacci[count], fibonacci[count + 1]]])
    continued: Words = sums + initial @ carry
    return continued


@lru_cache(maxsize=8)
def _fibonacci(count: int) -> Words:
    """Return the first ``count`` Fibonacci numbers from 0, 1 on, modulo 2^32."""
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append((numbers[-1] + numbers[-2]) % 2**32)
    return np.array(numbers, dtype=np.uint32)
