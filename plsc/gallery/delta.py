"""The faces of a collection that are newer than its base, in arrays that grow."""

import numpy as np

from plsc.gallery.records import Faces
from plsc.gallery.store import Float32
from plsc.index.rows import Int64

_FIRST = 64  # rows


class Delta:
    """Rows are added at the end and never changed, so that a reader who knows a length may read up to it at any time.

    The arrays double when they are full; memory that nothing was written to is not resident.
    """

    def __init__(self, dim: int) -> None:
        self._length = 0
        self._vectors: Float32 = np.empty((0, dim), dtype=np.float32)
        self._faces: Int64 = np.empty(0, dtype=np.int64)
        self._persons: Int64 = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._length

    def reserve(self, count: int) -> None:
        """Make room for ``count`` rows more: adding them cannot fail then."""
        needed, room = self._length + count, len(self._faces)
        if needed <= room:
            return
        room = max(needed, 2 * room, _FIRST)
        vectors = np.empty((room, self._vectors.shape[1]), dtype=np.float32)
        faces, persons = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
        for new, old in ((vectors, self._vectors), (faces, self._faces), (persons, self._persons)):
            new[: self._length] = old[: self._length]
        self._vectors, self._faces, self._persons = vectors, faces, persons

    def append(self, rows: Faces) -> None:
        """Add rows, whose ids are larger than all before."""
        self.reserve(len(rows.ids))
        part = slice(self._length, self._length + len(rows.ids))
        self._vectors[part], self._faces[part], self._persons[part] = rows.vectors, rows.ids, rows.persons
        self._length += len(rows.ids)

    @property
    def rows(self) -> Faces:
        """All rows so far; what is added later does not show in it."""
        return Faces(self._faces[: self._length], self._persons[: self._length], self._vectors[: self._length])
