"""The gallery that a quickstart leaves: its unseen people enrolled, a calibration, and pictures to search by."""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.avatars import parse_spec
from plsc.data.codec import encode_image
from plsc.data.dataset import ImageDataset, open_dataset
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.evaluation.calibration import calibrate, write_calibration
from plsc.evaluation.roc import Roc
from plsc.files import atomic_replace_dir
from plsc.gallery.backends import open_store
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson

COLLECTION = "people"
_PICTURE_SIZE = 96  # pixels of a side of thumbnails and queries: twice what the network sees
_QUERIES = 10  # people of the gallery, of each of whom a picture was kept back
_STRANGERS = 2  # people who are not in it
_BATCH = 50  # people of a transaction


@dataclass(frozen=True)
class GalleryPaths:
    """Where the gallery and what goes with it lie, all below ``out``."""

    out: Path

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.out / "gallery"

    @property
    def queries(self) -> Path:
        """Pictures to search by, of people who are in the gallery and of some who are not."""
        return self.out / "queries"

    @property
    def calibration(self) -> Path:
        """Which cosine holds which false-match rate, measured on the people of the gallery."""
        return self.out / "calibration.json"

    @property
    def serve_arguments(self) -> list[str]:
        """The arguments of plsc that serve the gallery."""
        model, store = str(self.out / "model.onnx"), f"{self.store}/"
        return [
            "serve", "--model", model, "--store", store, "--calibration", str(self.calibration), "--keep-thumbnails"
        ]  # fmt: skip

    @property
    def serve_command(self) -> str:
        """The same as a line for a shell."""
        return shlex.join(["plsc", *self.serve_arguments])


def fill_gallery(paths: GalleryPaths, unseen: str, embeddings: EmbeddingSet, roc: Roc) -> dict[str, int]:
    """Make the gallery, the calibration and the queries anew.

    Args:
        paths: where.
        unseen: ``avatars:…``, the people; the last picture of each is not enrolled.
        embeddings: of all their pictures.
        roc: of the pairs of these pictures.

    Returns:
        {"people", "faces", "queries"}.

    Raises:
        PlscError: a service runs on the gallery, or the disk is full.
    """
    pictures, contract = open_dataset(unseen, image_size=_PICTURE_SIZE), embeddings.contract_id
    calibration = calibrate({unseen: roc}, contract_id=contract, model="model.onnx", images=len(pictures))
    write_calibration(paths.calibration, calibration)
    clear_gallery(paths)
    store = open_store(paths.store)
    try:
        faces = _enrol(store, paths.store / "thumbnails", pictures, embeddings)
    finally:
        store.close()
    return {"people": pictures.num_classes, "faces": faces, "queries": _write_queries(paths.queries, unseen, pictures)}


def clear_gallery(paths: GalleryPaths) -> None:
    """Remove an earlier quickstart's gallery; :class:`PlscError` if a service still runs on it."""
    if paths.store.is_dir():
        open_store(paths.store).close()  # the lock tells
        shutil.rmtree(paths.store)


def _enrol(store: Store, folder: Path, pictures: ImageDataset, embeddings: EmbeddingSet) -> int:
    """Enrol all but the last picture of each person, with thumbnails; returns the number of faces."""
    store.create_collection(COLLECTION, embeddings.dim, embeddings.contract_id)
    vectors = embeddings.rows(0, len(embeddings))[np.argsort(embeddings.ids)]  # ids are positions among the pictures
    gallery, faces = ThumbnailStore(store, folder, keep=True), 0
    for first in range(0, pictures.num_classes, _BATCH):
        labels = range(first, min(first + _BATCH, pictures.num_classes))
        rows = [np.flatnonzero(pictures.labels == label)[:-1] for label in labels]
        people = [NewPerson(vectors[own], pictures.class_names[label]) for label, own in zip(labels, rows, strict=True)]
        crops = [[pictures.image(int(row)) for row in own] for own in rows]
        gallery.add_persons(COLLECTION, people, embeddings.contract_id, crops)
        faces += sum(len(own) for own in rows)
    store.compact(COLLECTION)
    return faces


def _write_queries(folder: Path, unseen: str, pictures: ImageDataset) -> int:
    """Write a picture of some people of the gallery that is not in it, and one each of some strangers."""
    people, _, first = parse_spec(unseen)
    strangers = open_dataset(f"avatars:{_STRANGERS}x1@{first + people}", image_size=_PICTURE_SIZE)
    images = {f"stranger-{number + 1}": strangers.image(number) for number in range(_STRANGERS)}
    for label in np.unique(np.linspace(0, people - 1, _QUERIES, dtype=np.int64)):
        images[pictures.class_names[label]] = pictures.image(int(np.flatnonzero(pictures.labels == label)[-1]))
    tmp_path = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(tmp_path, ignore_errors=True)
    tmp_path.mkdir()
    for name, image in images.items():
        (tmp_path / f"{name}.jpg").write_bytes(encode_image(image, "jpeg"))
    atomic_replace_dir(tmp_path, folder)
    return len(images)
