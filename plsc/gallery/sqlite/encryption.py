"""Vectors encrypted under a key per person: who erases the key makes every copy of that person's vectors unreadable.

A stored vector is the number of its person's key in plsc.gallery.sqlite.keys (8 bytes, little-endian), a nonce (12) and
the float32 numbers, encrypted by AES-256-GCM under that key, with the store's and the face's id as associated data. A
file of a face beside the store, such as its picture, is encrypted alike, with the person's id as well. A person gets a
key with the first face. When the last face goes, deleted, replaced or with its person, the key goes too:

1. The deletion is committed in SQLite. A crash from here on leaves tombstones, and the next opening goes on with 2.
2. The key is overwritten, and the file of keys synced before the deletion is answered: a power failure behind the
   answer brings no key back. Deletions at the same time share a sync, for which no other change waits.
3. Compaction erases the vectors, with the tombstones that lead to a key which has to be erased. No transaction begins
   while a key waits to be overwritten, and this one not before the sync, so 3 never overtakes 2.
"""

import os
import sqlite3
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from plsc.errors import IntegrityError, StorageError
from plsc.gallery.sqlite.database import ERASED, VectorCodec, corrupt_row
from plsc.gallery.sqlite.keys import NONCE_BYTES, TAG_BYTES, KeyTable, cipher, decrypted, random_parts
from plsc.gallery.sqlite.records import is_vector
from plsc.gallery.sqlite.schema import SPACE
from plsc.gallery.values import Float32
from plsc.index.rows import Int64

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SLOT = struct.Struct("<Q")
OVERHEAD = SLOT.size + NONCE_BYTES + TAG_BYTES


# Every face f with its searched vector v; one in a second space has the same key.
SEARCHED = (
    "faces f LEFT JOIN collections c ON c.number = f.collection JOIN vectors v ON v.face = f.id + coalesce(c.space, 0)"
)
_SLOT_OF_VECTOR = f"substr(v.vector, 1, {SLOT.size})"


class EncryptedVectors(VectorCodec):
    """The codec of an encrypted store, which owns ``table``.

    All but :meth:`decode`, :meth:`seal`, :meth:`unseal` and :meth:`sync_erased` is called under the write lock.
    """

    overhead = OVERHEAD
    has_keys = True

    def __init__(self, table: KeyTable) -> None:
        self.table = table
        self._free: deque[tuple[int, bytes]] = deque()
        self._taken: list[tuple[int, bytes]] = []  # by the running transaction
        self._leaving: dict[int, int] = {}  # key: person, of faces that the running transaction deletes
        self._gone: list[int] = []  # keys that it erases once it is committed
        self._waiting: list[int] = []  # keys to overwrite now
        self._unsynced: list[int] = []  # keys overwritten since the last sync
        self._erasures, self._synced = 0, 0  # how often keys were overwritten, and how many of these are on the disk
        self._erasing, self._syncing = threading.Lock(), threading.Lock()  # the latter is taken first
        self._erased: set[int] = set()  # since the opening

    def recover(self, db: sqlite3.Connection) -> None:
        """Finish deletions that a crash interrupted, and find the keys that nobody has; called once, at the opening."""
        self._waiting = unerased_keys(db, self.table)
        self.erase_waiting()
        used = np.concatenate([living_keys(db), np.flatnonzero(self.table.erased())])
        first = int(used.max(initial=-1)) + 1
        for slot in range(first, len(self.table)):
            try:
                key = self.table.key(slot)
            except IntegrityError:  # torn while its block was made: nobody has it
                self._waiting.append(slot)
                continue
            if key is not None:
                self._free.append((slot, key))
        self.erase_waiting()
        self.sync_erased()

    def check(self, db: sqlite3.Connection) -> None:
        """Verify that every deleted face's key is erased, unless another face has it."""
        unerased = unerased_keys(db, self.table)
        if unerased:
            raise IntegrityError(
                f"{self.table.path} holds key {unerased[0]} of a person who was deleted; open the store again"
            )

    # --- vectors ---

    def encode(self, db: sqlite3.Connection, faces: Int64, persons: Int64, vectors: Float32) -> Sequence[bytes]:
        """See :class:`plsc.gallery.sqlite.database.VectorCodec`, as for all that follows."""
        if not len(faces):
            return []
        keys = self._keys_of(db, persons)
        nonces = random_parts(len(faces), NONCE_BYTES)
        rows = zip(faces.tolist(), persons.tolist(), vectors.astype("<f4", copy=False), nonces, strict=True)
        stored = []
        for face, person, vector, nonce in rows:
            slot, key = keys[person]
            text = key.encrypt(nonce, vector.tobytes(), associated_data(self.table.store_id, face))
            stored.append(SLOT.pack(slot) + nonce + text)
        return stored

    def _keys_of(self, db: sqlite3.Connection, persons: Int64) -> dict[int, tuple[int, "AESGCM"]]:
        """Return the keys of ``persons``, new ones for those who have none."""
        found = db.execute(
            f"SELECT f.person, min({_SLOT_OF_VECTOR}) FROM {SEARCHED} WHERE f.person BETWEEN ? AND ? GROUP BY f.person",
            (int(persons.min()), int(persons.max())),
        ).fetchall()
        keys = {}
        for person, number in found:
            slot = SLOT.unpack(number)[0]
            key = self.table.key(slot)
            if key is None:
                raise _older(db, slot)
            keys[person] = (slot, cipher(key))
        missing = [person for person in np.unique(persons).tolist() if person not in keys]
        if len(self._free) < len(missing):
            self._free.extend(self.table.extend(len(missing) - len(self._free)))
        for person in missing:
            self._taken.append(self._free.popleft())
            slot, secret = self._taken[-1]
            keys[person] = (slot, cipher(secret))
        return keys

    def decode(self, db: sqlite3.Connection, faces: Sequence[int], stored: Sequence[bytes], dim: int) -> Float32:
        """Return the vectors (n, dim); a row of zeros is one whose key was erased while the caller was reading."""
        texts = []
        for slot, text in decrypted_vectors(self.table, faces, stored):
            if text is None and slot not in self._erased:
                raise _older(db, slot)
            texts.append(bytes(4 * dim) if text is None else text)
        return np.frombuffer(b"".join(texts), dtype="<f4").astype(np.float32, copy=False).reshape(-1, dim)

    # --- files beside the store ---

    def seal(self, db: sqlite3.Connection, person: int, contents: Mapping[int, bytes]) -> dict[int, bytes]:
        """Encrypt files of faces as their vectors are, under the same keys."""
        sealed = {}
        for face, content in contents.items():
            found = db.execute(f"SELECT {_SLOT_OF_VECTOR} FROM {SEARCHED} WHERE f.id = ?", (face,)).fetchone()
            key = None if found is None else self.table.key(SLOT.unpack(found[0])[0])
            if key is not None:  # else somebody deleted the face meanwhile
                nonce = os.urandom(NONCE_BYTES)
                sealed[face] = found[0] + nonce + cipher(key).encrypt(nonce, content, self._of_file(person, face))
        return sealed

    def unseal(self, person: int, face: int, content: bytes) -> bytes | None:
        """Decrypt the file of a face."""
        slot = SLOT.unpack_from(content)[0] if len(content) >= OVERHEAD else len(self.table)
        key = self.table.key(slot) if slot < len(self.table) else None
        return None if key is None else decrypted(cipher(key), content[SLOT.size :], self._of_file(person, face))

    def _of_file(self, person: int, face: int) -> bytes:
        """What is authenticated beside a file, and never beside a vector."""
        return self.table.store_id + struct.pack("<qq", person, face) + b"file"

    # --- transactions ---

    def leave(self, person: int, stored: bytes) -> None:
        """Note that the running transaction deletes a face of ``person``, whose vector is ``stored``."""
        self._leaving[SLOT.unpack_from(stored)[0]] = person

    def erase_waiting(self) -> None:
        """Erase the keys that wait for it: no transaction begins while there is one."""
        self._erase()
        self.require_erased()

    def prepare_commit(self, db: sqlite3.Connection) -> None:
        """Find out whose keys go: those that no face has."""
        for slot, person in self._leaving.items():
            text = f"SELECT 1 FROM {SEARCHED} WHERE f.person = ? AND {_SLOT_OF_VECTOR} = ?"
            if db.execute(text, (person, SLOT.pack(slot))).fetchone() is None:
                self._gone.append(slot)

    def committed(self) -> None:
        """Erase the keys that went."""
        gone = self._gone
        self._clear()
        self._erase(gone)

    def rolled_back(self) -> None:
        """Forget what the transaction noted; its new keys are for the next one."""
        self._free.extendleft(reversed(self._taken))
        self._clear()

    def require_erased(self) -> None:
        """Raise :class:`StorageError` if a key could not be erased that has to be."""
        with self._erasing:
            waiting = len(self._waiting)
        if waiting:
            raise StorageError(
                f"{self.table.path} cannot be written: {waiting} keys of deleted people are still in it; "
                "repair the disk, or open the store again"
            )

    def sync_erased(self) -> None:
        """Return when every key erased before is so on the disk; threads that wait at the same time share a sync."""
        wanted = self._erasures
        with self._syncing:
            if self._synced >= wanted:
                return
            with self._erasing:
                slots, self._unsynced, reached = self._unsynced, [], self._erasures
            try:
                self.table.sync()
                self._synced = reached
            except OSError:
                with self._erasing:
                    self._waiting += slots
        self.require_erased()

    def close(self) -> None:
        """Close the file of keys; what could not be erased, the next opening finds by the tombstones."""
        self._erase()
        with suppress(StorageError):
            self.sync_erased()
        self.table.close()

    def _clear(self) -> None:
        self._taken, self._leaving, self._gone = [], {}, []

    def _erase(self, gone: Sequence[int] = ()) -> None:
        """Overwrite the keys ``gone`` and those that wait: seen by other threads, a key waits after a failure alone."""
        with self._erasing:
            self._waiting += gone
            if not self._waiting:
                return
            self._erased.update(self._waiting)
            try:
                self.table.erase(self._waiting)
            except OSError:
                return  # they wait on; begin() and require_erased() say so
            self._unsynced, self._waiting = self._unsynced + self._waiting, []
            self._erasures += 1


def associated_data(store_id: bytes, face: int) -> bytes:
    """What is authenticated beside a vector with the key ``face``: it decrypts in its store, face and space alone."""
    return store_id + struct.pack("<q", face)


def decrypted_vectors(
    table: KeyTable, faces: Sequence[int], stored: Sequence[bytes]
) -> Iterator[tuple[int, bytes | None]]:
    """Yield each vector's key number and its plain bytes, None where the key was erased.

    Raises:
        IntegrityError: a vector or a key is not what was written.
    """
    last: tuple[int, AESGCM | None] = (-1, None)
    for face, one in zip(faces, stored, strict=True):
        if not isinstance(one, bytes) or len(one) < OVERHEAD:
            raise _not_encrypted(face)
        slot = SLOT.unpack_from(one)[0]
        if slot != last[0]:
            key = table.key(slot)
            last = (slot, None if key is None else cipher(key))
        if last[1] is None:
            yield slot, None
            continue
        text = decrypted(last[1], one[SLOT.size :], associated_data(table.store_id, face))
        if text is None:
            raise _not_encrypted(face)
        yield slot, text


def keys_of_faces(db: sqlite3.Connection) -> tuple[Int64, Int64]:
    """Return all faces and the numbers of their keys; raises :class:`IntegrityError` where a vector has none."""
    rows = db.execute(f"SELECT f.id, {_SLOT_OF_VECTOR} FROM {SEARCHED}").fetchall()
    for face, number in rows:
        if not isinstance(number, bytes) or len(number) != SLOT.size or number[-1]:  # a number of 56 bits, and far less
            raise _not_encrypted(face)
    slots = np.frombuffer(b"".join(row[1] for row in rows), dtype="<u8").astype(np.int64)
    return np.fromiter((row[0] for row in rows), np.int64, len(rows)), slots


def living_keys(db: sqlite3.Connection) -> Int64:
    """Return the numbers of the keys that faces have, ascending."""
    return np.unique(keys_of_faces(db)[1])


def unerased_keys(db: sqlite3.Connection, table: KeyTable) -> list[int]:
    """Return the keys in ``table`` that deleted faces alone have."""
    rows = db.execute(
        "SELECT v.face, v.checksum, v.vector FROM forgotten t JOIN vectors v ON v.face = t.face "
        f"WHERE v.checksum != x'{ERASED.hex()}'"
    ).fetchall()
    for face, checksum, vector in rows:
        if not isinstance(vector, bytes) or len(vector) < OVERHEAD or not is_vector(face, checksum, vector):
            raise corrupt_row(db, f"the vector of face {face % SPACE} is not what was written")
    slots = {SLOT.unpack_from(vector)[0] for _, _, vector in rows}
    if not slots:
        return []
    found = sorted(slots - set(living_keys(db).tolist()))
    erased = table.erased()
    return [slot for slot in found if slot < len(erased) and not erased[slot]]


def _not_encrypted(face: int) -> IntegrityError:
    return IntegrityError(f"the vector of face {face % SPACE} is not what was encrypted; restore a snapshot")


def _older(db: sqlite3.Connection, slot: int) -> IntegrityError:
    return corrupt_row(db, f"it is older than the file of keys, from which key {slot} was erased since")
