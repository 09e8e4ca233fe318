"""That deleted faces are forgotten, for benchmarks/gallery_durability.py: in a store's files, and in older snapshots.

After a compaction no file of a store holds the bytes of a deleted vector, nor, encrypted, those of anybody's. Of an
encrypted store a snapshot is kept for some rounds: who was deleted since cannot be read in it any more, and a store
restored from it is without them.
"""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from gallery_killed_worker import GALLERY, KEY_FILE, MODEL, SAME, Float32, vector, vectors
from gallery_moving_store import SECOND_MODEL, in_second_space

from plsc.errors import NotFoundError
from plsc.gallery.sqlite import KEYS, SQLITE
from plsc.gallery.sqlite.backup import find_readable, open_keys, reading_snapshot, restore
from plsc.gallery.sqlite.encryption import living_keys
from plsc.gallery.sqlite.keys import KeyTable, read_key_file
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import Person

LOOKED_FOR = 20_000  # deleted vectors, the latest
CONTROLS = 50  # living ones
_WORDS = slice(64, 72)  # the bytes of a vector that are looked for first
_NEEDLE = slice(64, 96)  # those that say that it is that vector


def everyone(store: SqliteStore) -> Iterator[Person]:
    """All persons; none where the collection was not made yet."""
    after = 0
    with contextlib.suppress(NotFoundError):
        while page := store.persons(GALLERY, after=after, limit=1000):
            yield from page
            after = page[-1].id


def verify_forgotten(store: SqliteStore, gone: Sequence[int], living: Sequence[int]) -> None:
    """After a compaction no file holds the vectors of the keys ``gone``; a plain store's hold all of ``living``."""
    store.compact()
    assert store.check()["tombstones"] == 0, "a compaction left something that was deleted"
    encrypted = (store.folder / KEYS).exists()
    contract_id, is_moving = store.collection(GALLERY).contract_id, store.migration(GALLERY) is not None
    controls = [stored_form(key, contract_id) for key in living[-CONTROLS:]]
    deleted = [stored_form(key, model) for key in gone[-LOOKED_FOR:] for model in (MODEL, SECOND_MODEL)]
    if not is_moving:  # what was ended, or never begun, has left no vector
        other = MODEL if contract_id == SECOND_MODEL else SECOND_MODEL
        deleted += [stored_form(key, other) for key in living[-LOOKED_FOR:]]
    seen = set[bytes]()
    for path in (path for path in store.folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        found = vectors_in(content, deleted)
        assert not found, f"{path} holds {len(found)} vectors that were deleted"
        seen |= vectors_in(content, controls)
    if encrypted:
        assert not seen, "a file of an encrypted store holds a vector"
        verify_keys(store.folder)
    else:
        assert len(seen) == len(controls), "a living vector is not in the files: this looks for the wrong bytes"


def vectors_in(content: bytes, wanted: Sequence[bytes]) -> set[bytes]:
    """Return the needles of those vectors among ``wanted`` that occur in ``content``, at any offset."""
    words = np.unique(np.frombuffer(b"".join(one[_WORDS] for one in wanted), dtype=np.uint64))
    needles = {one[_NEEDLE] for one in wanted}
    size = _NEEDLE.stop - _NEEDLE.start
    found = set[bytes]()
    for shift in range(min(8, len(content))):
        part = np.frombuffer(content, np.uint64, (len(content) - shift) // 8, shift)
        for index in np.flatnonzero(np.isin(part, words)):
            begin = shift + 8 * int(index)
            found.add(content[begin : begin + size])
    return found & needles


def verify_keys(folder: Path) -> None:
    """The keys of all who were deleted are erased: those that are left below the last one in use are somebody's."""
    table = KeyTable(folder / KEYS, read_key_file(folder.parent / KEY_FILE), writable=False)
    with contextlib.closing(table), contextlib.closing(sqlite3.connect(folder / SQLITE)) as db:
        living, kept = living_keys(db), np.flatnonzero(~table.erased())
    assert set(living) <= set(kept), "the key of somebody was erased"
    assert set(kept[kept <= living.max(initial=-1)]) == set(living), "a key of somebody who was deleted is left"


def stored_form(key: int, contract_id: str = MODEL) -> bytes:
    """A key's vector as it is stored, of either model."""
    row = (in_second_space(vector(key)) if contract_id == SECOND_MODEL else vector(key)).astype(np.float64)
    row /= np.abs(row).max()
    unit: Float32 = (row / np.linalg.norm(row)).astype(np.float32)
    return unit.tobytes()


class KeptSnapshot:
    """A snapshot of an encrypted store that is kept while the store changes, on another disk.

    Attributes:
        unreadable: persons that later deletions made unreadable in it, over all snapshots.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._restored = folder / "kept", folder / "restored"
        self.unreadable = 0

    def verify(self, store: SqliteStore) -> None:
        """In the snapshot, if there is one, nobody is readable who was deleted since; restore it so.

        A person is readable in it who has a face of it still, and may be who has others that came before those went.
        """
        if not self._path.exists():
            return
        persons = list(everyone(store))
        alive = {face for person in persons for face in person.faces}
        replaced_alone = {person.id for person in persons if person.external_id is not None}
        with_faces = {person.id for person in persons if person.faces}
        key_file = store.folder.parent / KEY_FILE
        table = open_keys(self._path, key_file, store.folder / KEYS)
        assert table is not None, "it is encrypted"
        with contextlib.closing(table), reading_snapshot(self._path) as db:
            readers = find_readable(db, table)
            rows = db.execute("SELECT person, id FROM faces").fetchall()
        readable, kept = {person for _, person in readers.readable}, {person for person, face in rows if face in alive}
        assert readable <= kept | (with_faces - replaced_alone), "somebody who was deleted is readable in a snapshot"
        assert kept <= readable, "somebody who was not deleted is unreadable in a snapshot"
        self.unreadable += len(readers.gone)
        self._verify_restored(store.folder / KEYS, key_file, {person for _, person in readers.gone})

    def _verify_restored(self, keys: Path, key_file: Path, gone: set[int]) -> None:
        result = restore(self._path, self._restored, key_file=key_file, keys=keys)
        assert result["left_out"] == len(gone), "a restored store leaves out others than those who were deleted"
        restored = SqliteStore(self._restored, key_file=key_file)
        try:
            restored.check()
            assert not gone & {person.id for person in everyone(restored)}, "a restored store has who was deleted"
        finally:
            restored.close()
            shutil.rmtree(self._restored)

    def take(self, store: SqliteStore) -> None:
        """Keep the present state in place of the former snapshot."""
        shutil.rmtree(self._path, ignore_errors=True)
        store.snapshot(self._path)


def verify_gone(store: SqliteStore, persons: Sequence[int]) -> None:
    """Nobody of ``persons`` can be asked for by id."""
    for person in persons:
        for ask in (store.person, store.vectors):
            try:
                ask(GALLERY, person)
            except NotFoundError:
                continue
            raise AssertionError(f"the deletion of person {person} was acknowledged and {ask.__name__} answers")
    assert not store.person_summaries(GALLERY, persons), "the name of a person is told who was deleted"


def verify_not_found(store: SqliteStore, gone: Sequence[tuple[int, int]]) -> None:
    """No search for the vector of a deleted face (face, key) finds it."""
    for start in range(0, len(gone), 512):
        deleted = gone[start : start + 512]
        answers = store.search(GALLERY, vectors([key for _, key in deleted]), k=1)
        for (face, _), answer in zip(deleted, answers, strict=True):
            assert not answer or answer[0].score < SAME, f"face {face} was deleted and is found"
