"""Pictures of enrolled crops: files beside any store, for people to verify a match by, or to embed by another model.

FOLDER/NAME@CREATED/BUCKET/PERSON-FACE.jpg      one per face; NAME@CREATED is the collection, BUCKET is PERSON // 1000
FOLDER/NAME@CREATED/BUCKET/PERSON-FACE.png      the very pixels that were embedded, without loss
FOLDER/NAME@CREATED/BUCKET/PERSON-FACE.sealed   either, encrypted under the person's key where the store is encrypted

A store's own files, snapshots, copies and exports never hold one: a deleted face's is removed before the face is, and a
crash in between leaves a face without a picture, never the reverse. A sealed one is no picture any more, wherever it
was copied to, once the person's key is erased. Of services that share a store, each with a folder of its own, others
remove theirs of that face by a sweep (:class:`plsc.gallery.retention.Retention`). A folder is of one gallery.
"""

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import torch

from plsc.data.codec import Encoding, encode_image, image_pixels
from plsc.errors import DataError, NotFoundError, PlscError, first_line
from plsc.files import make_private_folder, open_private, restrict, storage_errors, sync
from plsc.gallery.store import Store
from plsc.gallery.validation import check_external_id
from plsc.gallery.values import Collection, IdempotentRequest, NewPerson, Person, Precondition
from plsc.progress import note, warn
from plsc.regular_files import read_bytes

_BUCKET_PERSONS = 1000  # of one folder: file systems and people dislike a million entries
_EXPIRED_AT_ONCE = 100  # persons, so that changes do not wait long behind them
_COLLECTION = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}@\d+")
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
_SEALED, _PLAIN = ".sealed", (".jpg", ".png")
_NAME = re.compile(r"(\d+)-(\d+)\.(?:jpg|png|sealed)")

Crop = torch.Tensor | None


class ThumbnailStore:
    """The changes of a store that touch faces, each together with the faces' thumbnails.

    Every other method is called on ``store`` itself. Faces that other processes delete from a shared store are shown
    no more at once, and their files are removed by :meth:`sweep` and :meth:`compact`.

    Args:
        store: the store to change.
        folder: where the thumbnails are; None: there are none.
        keep: write thumbnails of new faces and show them. Without it those that an earlier service wrote are still
            deleted with their faces.
        lossless: write the very pixels of new faces, as PNG files; without ``keep`` they are not shown.

    Attributes:
        keeps: thumbnails are shown.
    """

    def __init__(self, store: Store, folder: Path | None, *, keep: bool, lossless: bool = False) -> None:
        self._store, self._folder = store, folder
        self.keeps = keep and folder is not None
        self._writes = (keep or lossless) and folder is not None
        self._encoding: Encoding = "png" if lossless else "jpeg"
        self._seen = set[Path]()  # folders of collections that the store held
        # A deletion must not come between an enrolment's commit and the writing of its thumbnails.
        self._lock: AbstractContextManager[object] = nullcontext() if folder is None else threading.Lock()
        if folder is not None and folder.is_dir():
            for path in folder.iterdir():
                if _COLLECTION.fullmatch(path.name) and path.stat().st_mode & 0o077:
                    restrict(path)

    def add_persons(
        self,
        collection: str,
        persons: Sequence[NewPerson],
        contract_id: str,
        crops: Sequence[Sequence[Crop]],
        *,
        compatible_with: Sequence[str] = (),
        idempotent: IdempotentRequest | None = None,
    ) -> list[Person]:
        """Enrol ``persons``; ``crops`` holds uint8 (3, S, S) for each face of each, None where there is no image."""
        with self._lock:
            options: dict[str, Any] = {"compatible_with": compatible_with, "idempotent": idempotent}
            added = self._store.add_persons(collection, persons, contract_id, **options)
            for person, own in zip(added, crops, strict=True):
                self._write(collection, person.id, person.faces, own)
        return added

    def put_person(
        self,
        collection: str,
        person: NewPerson,
        contract_id: str,
        crops: Sequence[Crop],
        *,
        compatible_with: Sequence[str] = (),
        precondition: Precondition | None = None,
    ) -> tuple[Person, bool]:
        """Enrol ``person``, or replace the one with its external id; returns True beside one that is new."""
        with self._lock:
            removed: dict[Path, bytes] = {}
            if self._folder is not None:
                with suppress(NotFoundError):
                    former = self._store.find_person(collection, check_external_id(person.external_id))
                    if precondition is not None:
                        precondition.check(former)
                    paths = self._paths(collection, former.id, former.faces)
                    removed = {path: path.read_bytes() for path in paths if path.is_file()}
                    _remove(paths)
            options: dict[str, Any] = {"compatible_with": compatible_with, "precondition": precondition}
            try:
                put, is_new = self._store.put_person(collection, person, contract_id, **options)
            except BaseException:  # refused, or the disk is full: the person is as before
                for path, content in removed.items():
                    _write_file(path, content)
                    sync(path.parent)
                raise
            self._write(collection, put.id, put.faces, crops)
        return put, is_new

    def add_faces(
        self,
        collection: str,
        person: int,
        vectors: npt.ArrayLike,
        contract_id: str,
        crops: Sequence[Crop],
        *,
        compatible_with: Sequence[str] = (),
        others: Mapping[str, npt.ArrayLike] = MappingProxyType({}),
        keys: Sequence[str | None] = (),
        idempotent: IdempotentRequest | None = None,
    ) -> list[int]:
        """Add faces to a person; returns their ids. ``crops`` as for :meth:`add_persons`."""
        with self._lock:
            options: dict[str, Any] = {"others": others, "keys": keys, "compatible_with": compatible_with}
            faces = self._store.add_faces(collection, person, vectors, contract_id, idempotent=idempotent, **options)
            # A face that was there already, by its key, has its picture.
            lacking = [
                None if any(keys) and self._has(collection, person, face) else crop
                for face, crop in zip(faces, crops, strict=True)
            ]
            self._write(collection, person, faces, lacking)
        return faces

    def delete_person(self, collection: str, person: int, *, precondition: Precondition | None = None) -> None:
        """Delete a person with all faces and thumbnails."""
        with self._lock:
            self._remove(collection, person, precondition, lambda _: True)
            self._store.delete_person(collection, person, precondition=precondition)

    def delete_face(self, collection: str, person: int, face: int, *, precondition: Precondition | None = None) -> None:
        """Delete a face and its thumbnail."""
        with self._lock:
            self._remove(collection, person, precondition, lambda other: other == face)
            self._store.delete_face(collection, person, face, precondition=precondition)

    def delete_expired(self, deleted: Callable[[str, Sequence[int]], None] = lambda *_: None) -> bool:
        """Delete some of the persons whose time has come, with their thumbnails; returns False once there are none.

        Args:
            deleted: called with each collection and the ids of the persons who were deleted from it.
        """
        with self._lock:
            found = self._store.expired(_EXPIRED_AT_ONCE)
            for collection, persons in found.items():
                with suppress(NotFoundError):  # somebody deleted the collection meanwhile
                    for person in persons:
                        _remove(self._paths(collection, person.id, person.faces))
                    gone = self._store.delete_expired(collection, [person.id for person in persons])
                    if gone:
                        deleted(collection, gone)
        return any(found.values())

    def delete_collection(self, collection: str) -> None:
        """Delete a collection with everybody and all thumbnails in it."""
        with self._lock:
            if self._folder is not None:
                _remove_folder(self._collection_folder(self._folder, collection))
            self._store.delete_collection(collection)

    def compact(self, collection: str) -> None:
        """Compact the collection, and remove thumbnails of faces and collections that somebody else deleted."""
        self._store.compact(collection)
        for folder, name in self._collection_folders():
            if name is None:
                _remove_folder(folder)
            elif name == collection:
                for _ in self._sweep(folder, name):
                    pass

    def sweep(self) -> Iterator[None]:
        """Remove thumbnails of what other services deleted from a shared store, a part after each ``next``.

        The folder of an unknown collection is removed where this object has seen the collection: else it may be another
        gallery's.
        """
        for folder, name in self._collection_folders():
            if name is not None:
                self._seen.add(folder)
                yield from self._sweep(folder, name)
            elif folder in self._seen:
                _remove_folder(folder)

    def read(self, collection: str, person: int, face: int) -> bytes:
        """The thumbnail of a face, a JPEG or PNG file; :class:`NotFoundError` if there is no such face or file."""
        if self.keeps and face in self._store.person(collection, person).faces:
            for path in self._paths(collection, person, [face]):
                with suppress(FileNotFoundError):
                    content = self._opened(path, person, face, path.read_bytes())
                    if content is not None:
                        return content
        raise NotFoundError(f"there is no thumbnail of face {face} of person {person} in {collection}")

    def contents(self, collection: str, person: Person) -> dict[int, bytes]:
        """A person's pictures by face, JPEG or PNG files, also those of an earlier service; some faces have none.

        What is no whole picture is left out with a warning: a service was killed while it wrote it, or it was altered.
        """
        if self._folder is None:
            return {}
        found, below = dict[int, bytes](), self._folder.resolve()
        for face in person.faces:
            for path in filter(Path.is_file, self._paths(collection, person.id, [face])):
                try:
                    content = self._opened(path, person.id, face, read_bytes(path, below=below))
                    if content is None:
                        raise DataError("it cannot be decrypted")
                    image_pixels(content)
                    if is_lossless(content) and not content.endswith(_PNG_END):
                        raise DataError("it is cut short")
                    found.setdefault(face, content)
                except DataError as error:
                    why = str(error).removeprefix(f"cannot read {path}: ")
                    warn("plsc.gallery", f"left out: {path}: {why}")
        return found

    def _opened(self, path: Path, person: int, face: int, content: bytes) -> bytes | None:
        """What a file holds, decrypted if it is sealed; None where that is not possible."""
        return self._store.unsealed(person, face, content) if path.suffix == _SEALED else content

    def _write(self, collection: str, person: int, faces: Sequence[int], crops: Sequence[Crop]) -> None:
        if not self._writes:
            return
        pairs = zip(faces, crops, strict=True)
        contents = {face: encode_image(crop, self._encoding) for face, crop in pairs if crop is not None}
        folders = set[Path]()
        suffix = _SEALED if self._store.seals else {"jpeg": ".jpg", "png": ".png"}[self._encoding]
        try:
            for face, content in self._store.sealed(person, contents).items():
                (path,) = self._paths(collection, person, [face], [suffix])
                make_private_folder(path.parent)
                _write_file(path, content)
                folders.add(path.parent)
            for folder in folders:  # the files' names: a power failure takes none of an enrolment that is answered
                sync(folder)
        except (OSError, PlscError) as error:  # the enrolment is committed: it has not failed, and is not said to have
            note(f"plsc gallery: a thumbnail was not kept: {getattr(error, 'strerror', None) or first_line(error)}")

    def _has(self, collection: str, person: int, face: int) -> bool:
        return any(path.is_file() for path in self._paths(collection, person, [face]))

    def _remove(
        self, collection: str, person: int, precondition: Precondition | None, is_going: Callable[[int], bool]
    ) -> None:
        """Remove the thumbnails of faces that are to be deleted, if the person meets the precondition."""
        if self._folder is None:
            return
        owner = self._store.person(collection, person)
        going = [face for face in owner.faces if is_going(face)]
        if going and precondition is not None:
            precondition.check(owner)
        _remove(self._paths(collection, person, going))

    def _collection_folders(self) -> list[tuple[Path, str | None]]:
        """The folders of collections, with the names of those that the store holds; of other folders none."""
        if self._folder is None or not self._folder.is_dir():
            return []
        # Looked for before the store is asked, as are files below: what comes meanwhile is of somebody who is there.
        there = [folder for folder in self._folder.iterdir() if _COLLECTION.fullmatch(folder.name)]
        known = {_folder_name(info): info.name for info in self._store.collections()}
        return [(folder, known.get(folder.name)) for folder in there]

    def _sweep(self, folder: Path, collection: str) -> Iterator[None]:
        """Remove files of faces that the store does not hold from a collection's folder, a bucket at a time."""
        for bucket in [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]:
            named = [(path, name) for path in bucket.iterdir() if (name := _NAME.fullmatch(path.name))]
            first = int(bucket.name) * _BUCKET_PERSONS
            try:
                persons = self._store.persons(collection, after=first - 1, limit=_BUCKET_PERSONS)
            except NotFoundError:  # deleted meanwhile, or made anew: the next sweep knows
                return
            faces = {(person.id, face) for person in persons for face in person.faces}
            _remove([path for path, name in named if (int(name[1]), int(name[2])) not in faces])
            yield

    def _paths(self, collection: str, person: int, faces: Sequence[int], suffixes: Sequence[str] = ()) -> list[Path]:
        """Where the pictures of faces may be, by default any that the store can have; none where there is no folder."""
        if self._folder is None:
            return []
        bucket = self._collection_folder(self._folder, collection) / str(int(person) // _BUCKET_PERSONS)
        # Beside an encrypted store no other picture was ever written, and none is taken that somebody put there.
        endings = suffixes or ((_SEALED,) if self._store.seals else _PLAIN)
        return [bucket / f"{int(person)}-{int(face)}{ending}" for face in faces for ending in endings]

    def _collection_folder(self, root: Path, collection: str) -> Path:
        return root / _folder_name(self._store.collection(collection))


def _folder_name(info: Collection) -> str:
    """The name of a collection's folder. It has the time of creation: a new collection of the name is another."""
    created = re.sub(r"\D", "", info.created)
    return f"{info.name}@{created}"


def is_lossless(content: bytes) -> bool:
    """True if a kept picture has the very pixels that were embedded: it is a PNG file."""
    return content.startswith(_PNG_START)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        with storage_errors(path):
            path.unlink(missing_ok=True)
    for parent in {path.parent for path in paths if path.parent.is_dir()}:
        with storage_errors(parent):
            sync(parent)


def _write_file(path: Path, content: bytes) -> None:
    with os.fdopen(open_private(path), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove_folder(folder: Path) -> None:
    with storage_errors(folder):
        if folder.is_dir():
            shutil.rmtree(folder)
            sync(folder.parent)
