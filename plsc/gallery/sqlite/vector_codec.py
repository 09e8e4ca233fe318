"""How vectors are stored in the table ``vectors``: as they are, or encrypted (plsc.gallery.sqlite.encryption)."""

import sqlite3
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from plsc.gallery.store import Float32
from plsc.index.rows import Int64


class VectorCodec:
    """Vectors as they are: little-endian float32. The methods about transactions let keys follow what is committed.

    Attributes:
        overhead: bytes of a stored vector besides 4 for each number.
        has_keys: True where a vector is readable as long as a key is.
    """

    overhead = 0
    has_keys = False

    def encode(self, db: sqlite3.Connection, faces: Int64, persons: Int64, vectors: Float32) -> Sequence[bytes]:
        """Return the stored form of new vectors (n, dim), whose rows are not inserted yet."""
        return [vector.astype("<f4", copy=False).tobytes() for vector in vectors]

    def decode(self, db: sqlite3.Connection, faces: Sequence[int], stored: Sequence[bytes], dim: int) -> Float32:
        """Return the vectors (n, dim); a row of zeros is one whose key was erased while the caller was reading."""
        return np.frombuffer(b"".join(stored), dtype="<f4").astype(np.float32, copy=False).reshape(-1, dim)

    def recover(self, db: sqlite3.Connection) -> None:
        """Finish what a crash interrupted; called once, after the store was read."""

    def check(self, db: sqlite3.Connection) -> None:
        """Verify, under the write lock, that nothing keeps a key that has to be erased."""

    def leave(self, person: int, stored: bytes) -> None:
        """Note that the running transaction deletes a face of ``person``, whose vector is ``stored``."""

    def begin(self) -> None:
        """Prepare a transaction; raises :class:`plsc.errors.StorageError` where keys cannot follow."""

    def prepare_commit(self, db: sqlite3.Connection) -> None:
        """Find out, at the end of a transaction, whose keys it erases."""

    def committed(self) -> None:
        """Let the keys follow what was committed."""

    def rolled_back(self) -> None:
        """Forget what the transaction noted."""

    def require_erased(self) -> None:
        """Raise :class:`plsc.errors.StorageError` if a key could not be erased that has to be."""

    def sync_erased(self) -> None:
        """Return when every key erased before is so on the disk, else raise :class:`plsc.errors.StorageError`."""

    def close(self) -> None:
        """Release what the codec holds."""


PLAIN = VectorCodec()


def vector_checksum(face: int, stored: bytes) -> bytes:
    """Return 5 bytes that begin with 1, so never those of an erased vector (``database.ERASED``)."""
    return b"\1" + zlib.crc32(stored, zlib.crc32(struct.pack("<q", face))).to_bytes(4, "little")
