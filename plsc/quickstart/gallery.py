"""The gallery that a quickstart leaves: its unseen people enrolled, a calibration, and pictures to search by."""

import shutil
from pathlib import Path

import numpy as np

from plsc.data import ImageDataset, open_dataset
from plsc.data.avatars import parse_spec
from plsc.data.codec import encode_image
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.evaluation.calibration import calibrate, write_calibration
from plsc.evaluation.roc import Roc
from plsc.files import replacing_folder
from plsc.gallery.backends import open_store
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson
from plsc.quickstart import QuickstartPaths

COLLECTION = "people"
_PICTURE_SIZE = 96  # pixels of a side of thumbnails and queries: twice what the network sees
_QUERIES = 10  # people of the gallery, of each of whom a picture was kept back
_STRANGERS = 2  # people who are not in it
_BATCH = 50  # people of a transaction


def fill_gallery(paths: QuickstartPaths, embeddings: EmbeddingSet, roc: Roc) -> dict[str, int]:
    """Make the gallery, the calibration and the queries anew.

    Args:
        paths: where; its unseen identities are the people, of each of whom the last picture is not enrolled.
        embeddings: of all their pictures.
        roc: of the pairs of these pictures.

    Returns:
        {"people", "faces", "queries"}.

    Raises:
        PlscError: a service runs on the gallery, or the disk is full.
    """
    pictures, contract = open_dataset(paths.unseen, image_size=_PICTURE_SIZE), embeddings.contract_id
    calibration = calibrate({paths.unseen: roc}, contract_id=contract, model="model.onnx", images=len(pictures))
    write_calibration(paths.calibration, calibration)
    clear_gallery(paths)
    store = open_store(paths.gallery)
    try:
        faces = _enrol(store, paths.gallery / "thumbnails", pictures, embeddings)
    finally:
        store.close()
    return {"people": pictures.num_classes, "faces": faces, "queries": _write_queries(paths, pictures)}


def clear_gallery(paths: QuickstartPaths) -> None:
    """Remove an earlier quickstart's gallery; :class:`PlscError` if a service still runs on it."""
    if paths.gallery.is_dir():
        open_store(paths.gallery).close()  # the lock tells
        shutil.rmtree(paths.gallery)


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


def _write_queries(paths: QuickstartPaths, pictures: ImageDataset) -> int:
    """Write a picture of some people of the gallery that is not in it, and one each of some strangers."""
    people, _, first = parse_spec(paths.unseen)
    strangers = open_dataset(f"avatars:{_STRANGERS}x1@{first + people}", image_size=_PICTURE_SIZE)
    images = {f"stranger-{number + 1}": strangers.image(number) for number in range(_STRANGERS)}
    for label in np.unique(np.linspace(0, people - 1, _QUERIES, dtype=np.int64)):
        images[pictures.class_names[label]] = pictures.image(int(np.flatnonzero(pictures.labels == label)[-1]))
    tmp_path = paths.queries.with_name(f".{paths.queries.name}.tmp")
    with replacing_folder(paths.queries, tmp_path, Path.mkdir):
        for name, image in images.items():
            (tmp_path / f"{name}.jpg").write_bytes(encode_image(image, "jpeg"))
    return len(images)
