"""Filling a collection's second space: from pictures that were kept or are sent again, else by an adapter's estimates.

Every step is stored as it is done, so who is stopped or killed goes on with what still lacks a vector.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from plsc.data.codec import decode_image
from plsc.embedding.contracts import is_of
from plsc.embedding.embedder import EmbeddingModel, embed_images
from plsc.errors import ConflictError, DataError, NotFoundError
from plsc.gallery.migration.adapter import Adapter, fit_with_estimates
from plsc.gallery.rows import SAME_PICTURE
from plsc.gallery.sqlite.database import PAGE_BYTES
from plsc.gallery.store import Store
from plsc.gallery.transfer import all_persons
from plsc.gallery.values import Collection, Float32, Migration, Person
from plsc.index.rows import Int64, unit_vectors
from plsc.models.preprocessing import resize_image
from plsc.native.allocator import return_freed_memory
from plsc.progress import Progress

Embed = Callable[[Sequence[torch.Tensor]], Float32]  # uint8 (3, H, W) each -> (n, dim)
Pictures = Callable[[str, Person], Mapping[int, bytes]]  # of a collection's person: image files by face
_MOST_PAIRS, _FEWEST = 50_000, 5_000  # faces that an adapter is learned from: more change it little
_MOST_FACES = 100  # of a person among them: the faces of a few would leave no room for others
_SHARE = 40  # of a gallery: to learn from a face of 512 numbers takes 30 KB, to hold one 1 or 2
_PERSONS_AT_ONCE = 32
_PICTURES_AT_ONCE = 64  # decoded, of the same people
_CELL_BYTES = 64  # of a vector's row in SQLite besides its numbers, encrypted or not
_BATCH = 8  # pictures embedded at once, which others may wait for
_SEED = 0
LEARNED = "learned"  # of a migration's details: faces that the adapter of its estimates was learned from


class Pairs(NamedTuple):
    """Faces with both vectors: ``searched`` (n, d), ``second`` (n, e), and ``persons`` (n,), whose they are."""

    searched: Float32
    second: Float32
    persons: Int64


class Room(NamedTuple):
    """Bytes of disk that vectors of another model will take, of ``faces``, and those ``free``: None of a server's."""

    faces: int
    needed: int
    free: int | None

    @property
    def shortage(self) -> str | None:
        """What is wrong where too few are free."""
        if self.free is None or self.free >= self.needed:
            return None
        return f"vectors of the new model need {self.needed:,} bytes of disk, and {self.free:,} are free; make room"


@dataclass
class Filled:
    """What a filling did.

    Attributes:
        filled: faces that got their own vector.
        estimated: faces that got an estimate.
        without_picture: faces of which no picture is kept, or none that can be read.
    """

    filled: int = 0
    estimated: int = 0
    without_picture: int = 0


def require_spaces(store: Store, collection: str) -> tuple[Collection, Migration]:
    """Return a collection and its migration, of one moment; :class:`NotFoundError` if it is not being moved."""
    info, found = store.spaces(collection)
    if found is None:
        raise NotFoundError(f"{collection} is not being moved to another model; begin a migration")
    return info, found


def require_migration(store: Store, collection: str) -> Migration:
    """Return the migration of a collection; :class:`NotFoundError` if it is not being moved."""
    return require_spaces(store, collection)[1]


def room_of(store: Store, collection: str, dim: int) -> Room:
    """Return what a second space of vectors with ``dim`` numbers takes."""
    faces = store.collection(collection).faces
    cell, usable = 4 * dim + _CELL_BYTES, PAGE_BYTES - _CELL_BYTES
    in_pages = -(-PAGE_BYTES // (usable // cell)) if cell <= usable else -(-cell // usable) * PAGE_BYTES
    in_segment = 5 * dim + _CELL_BYTES  # which a cut-over writes: float32 and codes
    needed = faces * (in_pages + in_segment) + PAGE_BYTES
    return Room(faces, needed, None if store.folder is None else shutil.disk_usage(store.folder).free)


def embed_with(embedder: EmbeddingModel, flip: bool, rest: Callable[[float], object] = lambda took: None) -> Embed:
    """Return what embeds pictures of any size by ``embedder``; ``rest(seconds)`` is called after each batch."""
    size, interpolation = embedder.image_size, embedder.preprocessing.interpolation

    def embed(pictures: Sequence[torch.Tensor]) -> Float32:
        rows = []
        for images in torch.split(torch.stack([resize_image(one, size, interpolation) for one in pictures]), _BATCH):
            begun = time.monotonic()
            rows.append(embed_images(embedder, images, flip))
            rest(time.monotonic() - begun)
        vectors: Float32 = torch.cat(rows).float().cpu().numpy()
        return vectors

    return embed


def fill_from_pictures(
    store: Store,
    collection: str,
    embed: Embed,
    pictures: Pictures,
    *,
    go_on: Callable[[], bool] = lambda: True,
    quiet: bool = False,
) -> Filled:
    """Embed the kept pictures of all faces that lack a second vector of their own.

    Args:
        store: holds the collection, which has a second space.
        collection: its name.
        embed: the new model.
        pictures: what is kept of a person's faces.
        go_on: asked before every batch; False ends the filling.
        quiet: print no progress.
    """
    migration, done = require_migration(store, collection), Filled()
    lacking, estimated = store.count_second(collection)
    progress = Progress("fill", lacking + estimated, "faces", quiet=quiet)
    after = 0
    while go_on() and (page := store.lacking(collection, after=after, limit=_PERSONS_AT_ONCE, estimated=True)):
        after = page[-1][0].id
        kept = (
            (person.id, face, image)
            for person, faces in page
            for face, image in _decoded(pictures(collection, person), faces)
        )
        embedded = 0
        while go_on() and (found := list(islice(kept, _PICTURES_AT_ONCE))):
            rows: dict[int, dict[int, Float32]] = {}
            for (person, face, _), row in zip(found, embed([image for _, _, image in found]), strict=True):
                rows.setdefault(person, {})[face] = row
            done.filled += store.put_second_vectors(collection, rows, migration.contract_id)
            embedded += len(found)
            progress.advance(len(found))
        without = sum(len(lacks) for _, lacks in page) - embedded
        done.without_picture += without
        progress.advance(without)
    progress.finish()
    return done


def _decoded(contents: Mapping[int, bytes], faces: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield those of ``faces`` of which there is a picture that decodes, with its pixels."""
    for face in faces:
        if face in contents:
            with suppress(DataError):  # damaged: as if none were kept
                yield face, decode_image(contents[face], "a kept picture")


def assign_pictures(
    store: Store, collection: str, person: Person, searched: Float32, second: Float32, contracts: Sequence[str]
) -> list[int]:
    """Give a person's faces second vectors of pictures that were sent again; returns the faces.

    A picture is known by its embedding in the searched space, which the face it was enrolled as has, too: one by the
    other model where that has enrolled into it. After a cut-over that of a face may be an estimate, which no picture
    replaces there: the way is back and forth.

    Args:
        store: holds the collection, which has a second space.
        collection: its name.
        person: whose pictures these are.
        searched: embeddings (n, d) of the pictures, by the model whose vectors are searched.
        second: embeddings (n, e) of the same pictures, by the other model.
        contracts: ids of both models.

    Raises:
        ConflictError: the spaces are not of these models any more, as after a cut-over; or searches read an estimate.
    """
    own, assigned = store.face_vectors(collection, person.id, contracts), dict[int, Float32]()
    by_other = is_of(contracts[1], contracts[0])
    for picture, other in zip(*(unit_vectors(rows, rows.shape[1]) for rows in (searched, second)), strict=True):
        for face, known in own.items():  # one picture may have been enrolled twice
            if picture @ known.searched >= SAME_PICTURE or (by_other and other @ known.searched >= SAME_PICTURE):
                assigned[face] = other
            elif known.is_estimated and known.second is not None and other @ known.second.vector >= SAME_PICTURE:
                raise ConflictError(
                    f"searches of {collection} read an estimate of face {face}; roll back, send its picture, and cut "
                    "over again"
                )
    if assigned:
        store.put_second_vectors(collection, {person.id: assigned}, contracts[1])
    return sorted(assigned)


def pairs(store: Store, collection: str, contract_ids: Sequence[str], most: int | None = None) -> Pairs:
    """Collect faces with a vector of their own in both spaces, those of people with several first, a hundred of each.

    Args:
        store: holds the collection, which has a second space.
        collection: its name.
        contract_ids: of the searched space and the second one.
        most: how many at most; None: a fortieth of the gallery, but 5,000 at the least and 50,000 at the most.

    Raises:
        ConflictError: the spaces are not of these, as after a cut-over meanwhile.
    """
    info, migration = require_spaces(store, collection)
    room = min(info.faces, most or max(_FEWEST, min(_MOST_PAIRS, info.faces // _SHARE)))
    searched, second = (np.empty((room, dim), dtype=np.float32) for dim in (info.dim, migration.dim))
    persons = np.empty(room, dtype=np.int64)
    several, single = 0, room  # people's faces from the front, single ones from the back: these give way
    for person, own, other in _both(store, collection, contract_ids):
        if len(own) > 1:
            start, count = several, min(len(own), room - several)
            several += count
            single = max(single, several)
        elif single > several:
            single -= 1
            start, count = single, 1
        else:
            continue
        searched[start : start + count], second[start : start + count] = own[:count], other[:count]
        persons[start : start + count] = person
        if several == room:
            break
    count = several + room - single
    for column in (searched, second, persons):
        column[several:count] = column[single:]
    return Pairs(searched[:count], second[:count], persons[:count])


def _both(
    store: Store, collection: str, contract_ids: Sequence[str]
) -> Iterator[tuple[int, list[Float32], list[Float32]]]:
    """Yield each person with the vectors of those faces that have both."""
    for person in all_persons(store, collection):
        with suppress(NotFoundError):  # deleted meanwhile
            found = store.face_vectors(collection, person.id, contract_ids).values()
            known = [
                (one.searched, one.second.vector)
                for one in found
                if one.second and not (one.second.is_estimated or one.is_estimated)
            ][:_MOST_FACES]
            if known:
                yield person.id, [own for own, _ in known], [other for _, other in known]


def fit(found: Pairs) -> tuple[Adapter, Float32]:
    """Learn an adapter, and estimate each face by one that did not see its person."""
    learned = fit_with_estimates(found.searched, found.second, found.persons, seed=_SEED)
    return_freed_memory()
    return learned


def fill_by_adapter(store: Store, collection: str, *, quiet: bool = False) -> Filled:
    """Give every face without a second vector of its own an estimate, by an adapter learned from those that have both.

    An estimate gives way to a vector of the face's own, and to one by an adapter that learned from more faces. How many
    these were is kept in the migration's details, by which a judgement knows estimates that are out of date.

    Raises:
        ConflictError: the spaces were exchanged meanwhile; what was stored until then is right.
        DataError: too few faces have both.
    """
    (info, migration), done = require_spaces(store, collection), Filled()
    contract_ids = (info.contract_id, migration.contract_id)
    found = pairs(store, collection, contract_ids)
    learned, (adapter, _) = len(found.persons), fit(found)
    del found
    progress = Progress("estimate", sum(store.count_second(collection)), "faces", quiet=quiet)
    after = 0
    while page := store.lacking(collection, after=after, limit=_PERSONS_AT_ONCE, estimated=True):
        after = page[-1][0].id
        rows: dict[int, Mapping[int, Float32]] = {}
        for person, faces in page:
            with suppress(NotFoundError):  # deleted meanwhile
                known = store.face_vectors(collection, person.id, contract_ids)
                own = {face: known[face].searched for face in faces if face in known}
                rows[person.id] = dict(zip(own, adapter(np.stack([*own.values()])), strict=True)) if own else {}
        count = store.put_second_vectors(collection, rows, migration.contract_id, estimated=True)
        done.estimated += count
        progress.advance(count)
    store.set_migration_details(collection, {LEARNED: learned}, contract_ids)
    progress.finish()
    return done
