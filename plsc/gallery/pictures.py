"""The pictures that a service keeps of a gallery's faces, as a data set to train on: a folder for each person.

OUT/PERSON/FACE.jpg     the thumbnails as they are kept; PERSON and FACE are ids, which no change of a name touches
OUT/PERSON/FACE.png     those that are kept without loss
OUT/images.tsv          a line for each as plsc.data.convert writes it; its last column is person/PERSON/face/FACE
OUT/persons.json        {"PERSON": name, or null}, where names are asked for

All of it is open to its owner alone. It is a copy: who is deleted from the gallery later stays in it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from plsc.data.codec import image_pixels
from plsc.data.convert import LIST_NAME
from plsc.data.recordio import write_key
from plsc.errors import DataError
from plsc.files import atomic_private_folder, new_folder, open_private, remove_leftovers, storage_errors, write_json
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore, is_lossless
from plsc.gallery.transfer import all_persons
from plsc.gallery.values import Person
from plsc.progress import Progress

NAMES = "persons.json"


@dataclass
class _Written:
    """What was written, and what there was no picture of."""

    classes: int = 0
    images: int = 0
    persons_without_picture: int = 0
    faces_without_picture: int = 0
    persons_below_least: int = 0
    sizes: Counter[str] = field(default_factory=Counter)  # WIDTHxHEIGHT
    smallest_side: int | None = None
    names: dict[str, str | None] = field(default_factory=dict)

    def add(self, person: Person, pictures: dict[int, bytes]) -> None:
        self.classes += 1
        self.images += len(pictures)
        self.names[str(person.id)] = person.name
        for height, width in map(image_pixels, pictures.values()):
            self.sizes[f"{width}x{height}"] += 1
            self.smallest_side = min(height, width, self.smallest_side or height)


def write_pictures(
    store: Store,
    collection: str,
    thumbnails: Path,
    out: Path,
    *,
    least: int = 1,
    names: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write the thumbnails of a collection's people as a data set, the folder ``out``, in the place of one that exists.

    Args:
        store: holds the collection.
        collection: its name.
        thumbnails: the folder of the thumbnails of the store's faces.
        out: becomes the data set once it is complete.
        least: people of whom fewer pictures are kept are left out.
        names: write persons.json.
        quiet: print no progress.

    Returns:
        ``{"out", "collection", "classes", "images", "persons_without_picture", "faces_without_picture",
        "persons_below_least", "sizes": {"WIDTHxHEIGHT": images}, "smallest_side"}``. Faces without a picture are those
        of all people.

    Raises:
        NotFoundError: there is no such collection.
        DataError: nobody in it has ``least`` pictures.
        StorageError: there is no room. After any of them nothing is left of ``out``'s folder.
    """
    written = _Written()
    remove_leftovers(out)
    with storage_errors(out), new_folder(out.absolute().parent), atomic_private_folder(out) as folder:
        progress = Progress("pictures", store.collection(collection).faces, "faces", quiet=quiet)
        with os.fdopen(open_private(folder / LIST_NAME), "wb") as lines:
            for person, pictures in _pictures(store, collection, thumbnails, written, progress):
                if len(pictures) >= least:
                    _write_person(folder, lines, person, pictures)
                    written.add(person, pictures)
                elif pictures:
                    written.persons_below_least += 1
        progress.finish()
        _refuse_none(written, collection, thumbnails, least)
        if names:
            write_json(folder / NAMES, written.names)
    result = {name: value for name, value in vars(written).items() if name != "names"}
    return {"out": str(out), "collection": collection, **result, "sizes": dict(written.sizes)}


def _pictures(
    store: Store, collection: str, folder: Path, written: _Written, progress: Progress
) -> Iterator[tuple[Person, dict[int, bytes]]]:
    """Yield everybody with the pictures that are kept, by face; count those that are not."""
    thumbnails = ThumbnailStore(store, folder, keep=False)
    for person in all_persons(store, collection):
        pictures = thumbnails.contents(collection, person)
        written.faces_without_picture += len(person.faces) - len(pictures)
        written.persons_without_picture += not pictures
        progress.advance(len(person.faces))
        yield person, pictures


def _write_person(folder: Path, lines: BinaryIO, person: Person, pictures: dict[int, bytes]) -> None:
    (folder / str(person.id)).mkdir(mode=0o700)
    for face, data in pictures.items():
        name = f"{person.id}/{face}.{'png' if is_lossless(data) else 'jpg'}"
        with os.fdopen(open_private(folder / name), "wb") as file:
            file.write(data)
        write_key(lines, name, str(person.id), f"person/{person.id}/face/{face}")


def _refuse_none(written: _Written, collection: str, thumbnails: Path, least: int) -> None:
    """Raise :class:`DataError` if nobody was written."""
    if written.classes:
        return
    if written.persons_below_least:
        raise DataError(f"nobody in {collection} has {least} pictures: give a lower --least")
    raise DataError(
        f"{thumbnails} has no picture of anybody in {collection}: they are kept of faces that are enrolled while "
        "plsc serve runs with --keep-thumbnails or --keep-pictures"
    )
