"""The gallery that a quickstart leaves: its unseen people enrolled, a calibration, and pictures to search by."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.api import embed
from plsc.data import ImageDataset, open_dataset
from plsc.data.avatars import parse_spec
from plsc.data.codec import encode_image
from plsc.embedding.embedder import EmbeddingModel, open_embedder
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.evaluation.calibration import calibrate, write_calibration
from plsc.evaluation.roc import Roc
from plsc.gallery.backends import open_store
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson, Person
from plsc.quickstart import QuickstartPaths
from plsc.quickstart.queries import BEST, Trial, choose_queries, write_queries

COLLECTION = "people"
_PICTURE_SIZE = 96  # pixels of a side of thumbnails and queries: twice what the network sees
_STRANGERS = 40  # people who are not in it, each with a picture
_BATCH = 50  # people of a transaction


def fill_gallery(paths: QuickstartPaths, embeddings: EmbeddingSet, roc: Roc) -> dict[str, Any]:
    """Make the gallery, the calibration and the queries anew.

    Args:
        paths: where, with the exported model; its unseen identities are the people, of each of whom the last picture is
            not enrolled, but tried as a query.
        embeddings: of all their pictures.
        roc: of the pairs of these pictures.

    Returns:
        {"people", "faces"}, and the figures of :func:`plsc.quickstart.queries.choose_queries`.

    Raises:
        PlscError: a service runs on the gallery, or the disk is full.
    """
    pictures, contract = open_dataset(paths.unseen, image_size=_PICTURE_SIZE), embeddings.contract_id
    calibration = calibrate({paths.unseen: roc}, contract_id=contract, model="model.onnx", images=len(pictures))
    write_calibration(paths.calibration, calibration)
    clear_gallery(paths)
    number, _, first = parse_spec(paths.unseen)
    strangers = open_dataset(f"avatars:{_STRANGERS}x1@{first + number}", image_size=_PICTURE_SIZE)
    store = open_store(paths.gallery)
    try:
        people = _enrol(store, paths.gallery / "thumbnails", pictures, embeddings)
        embedder = open_embedder(paths.model)  # which the service will have
        kept_back = [_rows(pictures, label)[-1] for label in range(len(people))]
        known = _try(store, embedder, pictures, kept_back, [person.id for person in people])
        unknown = _try(store, embedder, strangers, range(len(strangers)), [None] * len(strangers))
    finally:
        store.close()
    files, figures = choose_queries(known, unknown, calibration.threshold_at(calibration.default_fmr))
    write_queries(paths.queries, files)
    return {"people": len(people), "faces": sum(len(person.faces) for person in people), **figures}


def clear_gallery(paths: QuickstartPaths) -> None:
    """Remove an earlier quickstart's gallery; :class:`PlscError` if a service still runs on it."""
    if paths.gallery.is_dir():
        open_store(paths.gallery).close()  # the lock tells
        shutil.rmtree(paths.gallery)


def _rows(pictures: ImageDataset, label: int) -> list[int]:
    rows: list[int] = np.flatnonzero(pictures.labels == label).tolist()
    return rows


def _enrol(store: Store, folder: Path, pictures: ImageDataset, embeddings: EmbeddingSet) -> list[Person]:
    """Enrol all but the last picture of each person, with thumbnails; returns the people in the order of labels."""
    store.create_collection(COLLECTION, embeddings.dim, embeddings.contract_id)
    vectors = embeddings.rows(0, len(embeddings))[np.argsort(embeddings.ids)]  # ids are positions among the pictures
    gallery, enrolled = ThumbnailStore(store, folder, keep=True), list[Person]()
    for first in range(0, pictures.num_classes, _BATCH):
        labels = range(first, min(first + _BATCH, pictures.num_classes))
        rows = [_rows(pictures, label)[:-1] for label in labels]
        people = [NewPerson(vectors[own], pictures.class_names[label]) for label, own in zip(labels, rows, strict=True)]
        crops = [[pictures.image(row) for row in own] for own in rows]
        enrolled += gallery.add_persons(COLLECTION, people, embeddings.contract_id, crops)
    store.compact(COLLECTION)
    return enrolled


def _try(
    store: Store, embedder: EmbeddingModel, pictures: ImageDataset, rows: Sequence[int], persons: Sequence[int | None]
) -> list[Trial]:
    """Search by pictures as files, of which person each is; as the service does, which gets the same bytes."""
    files = [encode_image(pictures.image(row), "jpeg") for row in rows]
    found = store.search(COLLECTION, embed(embedder, files), k=BEST)
    names = [pictures.class_names[pictures.labels[row]] for row in rows]
    return [Trial(*values) for values in zip(files, names, persons, found, strict=True)]
