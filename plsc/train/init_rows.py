"""The class table's first rows from class centres: ``head.init_rows``."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.embedding.embedding_set import EmbeddingSet, is_embedding_set
from plsc.errors import DataError, UsageError, quoted
from plsc.head import ShardedHead
from plsc.head.class_table import SMALLEST_NORM
from plsc.regular_files import map_npy
from plsc.train.table_file import TableFile, class_names_beside

_ROWS = 65536  # of a source that are read at a time
_FIRST_NORM = 0.01  # a random row's elements have this deviation


def set_first_rows(head: ShardedHead, source: str, names: Sequence[str] | None = None) -> None:
    """Let the rows of this rank's classes begin at centres of ``source``; a class that has none keeps its random rows.

    All sub-centres of a class begin near its centre, apart by what their random rows differ, or each at its own.
    Directions are the centres'; norms are those that random rows have, so that learning rates mean what they do
    otherwise.

    Args:
        head: that has seen no batch.
        source: FILE.npy, (C, D) floating point, a row for each class; FILE.safetensors of ``plsc table``, with one row
            for each class, or for each sub-centre; or an embedding set, whose unit embeddings are averaged by label.
        names: of the classes, to compare with those that the source has: a set's, or FILE.json's beside a file.

    Raises:
        UsageError: it does not exist, or is of another number of classes or another width, or of other classes.
        DataError: it cannot be read.
    """
    first, stop = head.class_range
    read = _reader(head, source)
    if names is not None:
        _check_names(source, head.num_classes, names)
    rows = head.weight.detach().view(stop - first, head.centers, head.dim)
    norm = _FIRST_NORM * head.dim**0.5
    for start in range(0, stop - first, _ROWS):
        part = read(start, min(start + _ROWS, stop - first)).to(rows.device)
        length = torch.linalg.vector_norm(part, dim=2, keepdim=True)
        known = torch.isfinite(length) & (length > SMALLEST_NORM)
        unit = part / length.clamp(min=SMALLEST_NORM)
        before = rows[start : start + _ROWS].float()
        spread = before / 10 if head.centers > part.shape[1] else torch.zeros_like(before)
        moved = unit * norm + spread
        rows[start : start + _ROWS] = torch.where(known, moved, before).to(rows.dtype)


def _check_names(source: str, classes: int, names: Sequence[str]) -> None:
    """Refuse rows whose names, if they have any, are not those of the classes with their numbers."""
    path = Path(source)
    theirs: Sequence[Sequence[str]] = []
    if _is_set(path):
        theirs = [[name] for name in EmbeddingSet(path).class_names]
    elif path.with_suffix(".json").is_file():
        with suppress(DataError):  # of something else
            theirs = class_names_beside(path, classes)
    for number, (each, name) in enumerate(zip(theirs, names, strict=False)):
        if each and str(name) not in each:
            raise UsageError(
                f"head.init_rows = {source} is of other classes than the data: class {number:,} is {quoted(each[0])} "
                f"there and {quoted(name)} here; make it of this data, or set dynamic.max_classes, which goes by names"
            )


def _is_set(path: Path) -> bool:
    return path.is_dir() or is_embedding_set(path)


def _reader(head: ShardedHead, source: str) -> Callable[[int, int], Tensor]:
    """A function that reads some of this rank's classes, (n, 1 or sub-centres, D), in float32."""
    if Path(source).suffix == ".safetensors":
        return _of_table(head, source)
    centres = _of_set(head, source) if _is_set(Path(source)) else _of_file(head, source)
    return lambda start, stop: torch.from_numpy(np.array(centres[start:stop], dtype=np.float32))[:, None]


def _of_table(head: ShardedHead, source: str) -> Callable[[int, int], Tensor]:
    if not Path(source).exists():
        raise UsageError(f"there is no head.init_rows = {source}; plsc table writes such files")
    table = TableFile.named_by("head.init_rows", source)
    if (table.classes, table.dim) != (head.num_classes, head.dim) or table.centers not in (1, head.centers):
        found, wanted = (f"{each.centers} x {each.dim}" for each in (table, head))
        raise UsageError(
            f"head.init_rows = {source} holds {table.classes:,} classes of {found} numbers (sub-centres x D), and the "
            f"class table {head.num_classes:,} of {wanted}; give such a table"
        )
    first = head.class_range[0]
    return lambda start, stop: table.read(first + start, first + stop)


def _of_file(head: ShardedHead, source: str) -> NDArray[np.floating]:
    """The rows of this rank's classes, mapped."""
    if not Path(source).exists():
        raise UsageError(f"there is no head.init_rows = {source}; give a .npy of class centres, or an embedding set")
    centres = map_npy(Path(source), f"head.init_rows = {source}")
    if not isinstance(centres, np.ndarray) or centres.dtype.kind != "f" or centres.ndim != 2:
        raise DataError(f"head.init_rows = {source} is no array (classes, D) of floating point numbers")
    if centres.shape != (head.num_classes, head.dim):
        wanted = f"({head.num_classes}, {head.dim})"
        raise UsageError(f"head.init_rows = {source} is {centres.shape}, the class table {wanted}; give such centres")
    return centres[slice(*head.class_range)]


def _of_set(head: ShardedHead, source: str) -> NDArray[np.floating]:
    """The sums of unit embeddings of this rank's classes, in float64."""
    embeddings = EmbeddingSet(source)
    if embeddings.dim != head.dim or len(embeddings.class_names) > head.num_classes:
        raise UsageError(
            f"head.init_rows = {source} has {len(embeddings.class_names)} classes of width {embeddings.dim}, and the "
            f"class table {head.num_classes} of {head.dim}; embed the training data by a model of this width"
        )
    return class_sums(embeddings, *head.class_range)


def class_sums(embeddings: EmbeddingSet, first: int, stop: int) -> NDArray[np.floating]:
    """Sums (stop - first, D) of the unit embeddings of the classes [first, stop), in float64."""
    sums = np.zeros((stop - first, embeddings.dim))
    for start in range(0, len(embeddings), _ROWS):
        part = slice(start, min(start + _ROWS, len(embeddings)))
        own = (embeddings.labels[part] >= first) & (embeddings.labels[part] < stop)
        rows = embeddings.rows(part.start, part.stop)[own].astype(np.float64)
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), SMALLEST_NORM)
        np.add.at(sums, embeddings.labels[part][own] - first, rows)
    return sums
