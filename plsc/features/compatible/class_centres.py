"""Class centres of an old model, as a new one's ``compatible.with`` names them: read by rows, and known by names."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.embedding.columns import Int64
from plsc.embedding.embedding_set import EmbeddingSet, Shard, is_embedding_set
from plsc.errors import DataError, UsageError
from plsc.files import canonical_json, digest, read_json
from plsc.head.class_table import SMALLEST_NORM
from plsc.train.checkpoint import find_checkpoints, listed_names
from plsc.train.stored_table import class_names, open_table
from plsc.train.table_file import TableFile

_ROWS = 65536  # that a digest reads at a time


@dataclass(frozen=True)
class ClassCentres:
    """Centres of ``classes`` x ``centers`` rows of ``dim`` numbers.

    Attributes:
        source: what was asked for.
        names: of each class; several may be of one. None: classes are the numbers of the training data's.
        origin: where in the source they are from, in words.
        read: reads classes [first, stop), (n, centers, dim) in float32.
        files: names and hashes of the files that hold them and nothing else; None: they lie among other things.
    """

    source: str
    classes: int
    centers: int
    dim: int
    names: Sequence[Sequence[str]] | None
    origin: str
    read: Callable[[int, int], Tensor]
    files: dict[str, Any] | None = None

    def digest(self) -> str:
        """The SHA-256 of names and rows, in float32 whatever a run stores them in; or of the files' hashes.

        A mean of embeddings may round otherwise on another machine, so that theirs are told by the files.
        """
        if self.files is not None:
            return digest(self.files)
        found = hashlib.sha256(canonical_json(self.names).encode())
        for first in range(0, self.classes, _ROWS):
            found.update(self.read(first, min(first + _ROWS, self.classes)).contiguous().numpy().data)
        return found.hexdigest()


@contextmanager
def open_centres(source: str) -> Iterator[ClassCentres]:
    """Open the centres that ``compatible.with`` names; what they read is there until the block ends.

    Args:
        source: a run, its checkpoints or one of them, of which the newest checkpoint's class table is read; a
            FILE.safetensors of ``plsc table``, with names in FILE.json; or an embedding set, whose unit embeddings are
            averaged by label.

    Raises:
        UsageError: it does not exist, or has several class tables.
        DataError: it cannot be read, or is damaged.
    """
    path = Path(source)
    if not path.exists():
        raise UsageError(
            f"there is no compatible.with = {source}; give the old model's run, a .safetensors of plsc table export, "
            "or the embedding set that it made of data.train"
        )
    if path.suffix == ".safetensors":
        yield _of_file(source)
    elif is_embedding_set(path):
        yield _of_set(source)
    else:
        with ExitStack() as stack:
            yield _of_run(source, find_checkpoints(path)[-1], stack)


def centres_count(source: str) -> tuple[int, int] | None:
    """(Classes, sub-centres) of what ``compatible.with`` names; None where it is not here."""
    if not Path(source).exists():
        return None
    with open_centres(source) as centres:
        return centres.classes, centres.centers


def _of_run(source: str, checkpoint: Path, stack: ExitStack) -> ClassCentres:
    try:
        table = stack.enter_context(open_table(checkpoint, state=False))
    except UsageError:
        raise UsageError(
            f"compatible.with = {source} has several class tables; plsc table export {source} old.safetensors --table "
            "NAME writes one, which compatible.with takes"
        ) from None
    names = _names_of_run(checkpoint, table.classes)
    return ClassCentres(source, table.classes, table.centers, table.dim, names, f"step {table.step:,}", table.rows_of)


def _of_file(source: str) -> ClassCentres:
    path = Path(source)
    table = TableFile.named_by("compatible.with", source)
    names = _listed(path.with_suffix(".json"), table.classes) if path.with_suffix(".json").exists() else None
    origin = f"{path.stat().st_size:,} bytes"
    return ClassCentres(source, table.classes, table.centers, table.dim, names, origin, table.read)


def _of_set(source: str) -> ClassCentres:
    embeddings = EmbeddingSet(source, verify=True)
    labels = np.unique(np.concatenate([[-1], *(shard.labels[_embedded(shard)] for shard in embeddings)]))
    labels = labels[labels >= 0]
    if not len(labels):
        raise DataError(f"compatible.with = {source} has no labelled embedding; embed labelled pictures")
    if labels[-1] >= len(embeddings.class_names):
        raise DataError(f"{source} holds labels outside its {len(embeddings.class_names)} classes; embed it again")
    names = [[embeddings.class_names[label]] for label in labels.tolist()]
    origin = f"{len(embeddings):,} embeddings of the contract {embeddings.contract_id}"
    files = {name: embeddings.manifest[name] for name in ("files", "shards")}
    read = partial(_means, embeddings, labels)
    return ClassCentres(source, len(labels), 1, embeddings.dim, names, origin, read, files)


def _means(embeddings: EmbeddingSet, labels: Int64, first: int, stop: int) -> Tensor:
    """The mean directions (n, 1, D) of the unit embeddings with each of ``labels`` [first, stop), which are sorted."""
    sums = np.zeros((stop - first, embeddings.dim))
    for shard in embeddings:
        place = np.searchsorted(labels, shard.labels)
        known = np.flatnonzero((place >= first) & (place < stop) & (shard.labels >= 0))
        known = known[np.isin(known, _embedded(shard))]
        rows = shard.embeddings[known].astype(np.float64)
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), SMALLEST_NORM)
        np.add.at(sums, place[known] - first, rows)
    return torch.from_numpy(sums).float()[:, None]


def _embedded(shard: Shard) -> Int64:
    """The rows of a shard that have an embedding."""
    return np.setdiff1d(np.arange(len(shard)), [row - shard.start for row in shard.errors])


def _names_of_run(checkpoint: Path, classes: int) -> Sequence[Sequence[str]]:
    """The names of a table's classes: its own, or those that the run's folder lists, or a file beside a copy."""
    if (own := class_names(checkpoint)) is not None:
        return own
    listed = listed_names(checkpoint)
    if not listed.exists():
        raise UsageError(
            f"compatible.with: {checkpoint} has no names of its classes; copy the old run's classes.json to {listed}, "
            "or name that run"
        )
    return _listed(listed, classes)


def _listed(path: Path, classes: int) -> Sequence[Sequence[str]]:
    """The names that a file lists, a text or several for each class."""
    content = read_json(path)
    listed = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(listed, list) or len(listed) != classes:
        raise DataError(f"{path} does not list the names of {classes:,} classes; use the file that plsc wrote")
    names = [[each] if isinstance(each, str) else each for each in listed]
    if not all(isinstance(own, list) and all(isinstance(name, str) for name in own) for own in names):
        raise DataError(f"{path} lists something else than names of classes; use the file that plsc wrote")
    return names
