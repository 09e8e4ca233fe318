"""First rows by name, of tables whose classes come and go: ``head.init_rows`` together with ``dynamic.max_classes``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import DataError, UsageError
from plsc.features.dynamic.dynamic_head import DynamicHead
from plsc.features.dynamic.first_rows import FirstRows
from plsc.features.dynamic.named_table import class_names
from plsc.files import read_json
from plsc.head.class_table import SMALLEST_NORM
from plsc.regular_files import map_npy
from plsc.train.checkpoint import CHECKPOINTS
from plsc.train.checkpoint_inspection import find_checkpoints
from plsc.train.init_rows import class_sums
from plsc.train.stored_table import open_table
from plsc.train.table_file import TableFile, class_names_beside

_CLASSES = 65536  # of a source that are read at a time


@dataclass(frozen=True)
class NamedRows:
    """Rows of classes that have names.

    Attributes:
        names: of each class.
        centers, dim: shape of a class's rows.
        read: gives classes [start, stop), (n, centers, dim), in floating point.
    """

    names: list[list[str]]
    centers: int
    dim: int
    read: Callable[[int, int], Tensor]


def insert_first_rows(head: DynamicHead, source: str) -> int:
    """Give those classes of the data rows that ``source`` has under their names; others come when they are first seen.

    Directions are the source's, lengths those that random rows have. Sub-centres begin at the source's own, or all near
    its one row, apart by random rows. Every rank calls.

    Args:
        head: that has no rows, and knows the names of the data's classes.
        source: a run or a checkpoint; FILE.safetensors or FILE.npy with the names beside it, as ``plsc table export``
            and ``plsc checkpoint export --centres`` write them; or an embedding set of labelled images.

    Returns:
        How many classes have a row now.

    Raises:
        UsageError: it does not exist, has no names or none of the data's, or rows of another width.
        DataError: it cannot be read.
    """
    wanted = set(head.names)
    with _opened(source) as rows:
        if rows.dim != head.dim or rows.centers not in (1, head.centers):
            found, needed = (f"{each.centers} x {each.dim}" for each in (rows, head))
            raise UsageError(
                f"head.init_rows = {source} has {found} numbers for each class (sub-centres x D), and the class table "
                f"{needed}; give such a table"
            )
        places = [(place, name) for place, names in enumerate(rows.names) for name in names if name in wanted]
        for start in range(0, len(rows.names), _CLASSES):
            part = [(place, name) for place, name in places if start <= place < start + _CLASSES]
            if part:
                values = rows.read(start, min(start + _CLASSES, len(rows.names))).double()
                keys = head.key_map.keys_of(name for _, name in part)
                values = values[torch.tensor([place - start for place, _ in part])]
                head.insert(torch.from_numpy(keys), _first_values(head, values, keys))
    if not places:
        raise UsageError(
            f"head.init_rows = {source} has a row of none of the data's classes; names have to be the same"
        )
    return head.num_classes


def _first_values(head: DynamicHead, values: Tensor, keys: NDArray[np.int64]) -> Tensor:
    """First rows (m, K, D) in the directions of ``values`` (m, 1 or K, D); random ones where these have none."""
    first = FirstRows(head.dim, head.centers, head.seed)
    if values.shape[1] == 1:
        return first.around(values[:, 0], keys)
    lengths = torch.linalg.vector_norm(values, dim=2, keepdim=True)
    known = torch.isfinite(lengths) & (lengths > SMALLEST_NORM)
    return torch.where(known, values / lengths * first.length, first.random(keys))


@contextmanager
def _opened(source: str) -> Iterator[NamedRows]:
    path = Path(source)
    if not path.exists():
        raise UsageError(
            f"there is no head.init_rows = {source}; give a run, a table that was exported, or an embedding set"
        )
    if path.suffix == ".safetensors":
        table = TableFile.named_by("head.init_rows", source)
        yield NamedRows(class_names_beside(path, table.classes), table.centers, table.dim, table.read)
    elif path.suffix == ".npy":
        yield _of_array(path)
    elif (path / CHECKPOINTS).is_dir() or path.name == CHECKPOINTS or path.name.startswith("step-"):
        with _of_run(path) as rows:
            yield rows
    else:
        yield _of_set(source)


def _of_array(path: Path) -> NamedRows:
    centres = map_npy(path, f"head.init_rows = {path}")
    if not isinstance(centres, np.ndarray) or centres.dtype.kind != "f" or centres.ndim not in (2, 3):
        raise DataError(f"head.init_rows = {path} is no array (classes, D) of floating point numbers")
    rows = centres.reshape(len(centres), -1, centres.shape[-1])
    names = class_names_beside(path, len(rows))
    return NamedRows(names, rows.shape[1], rows.shape[2], lambda start, stop: torch.tensor(rows[start:stop]))


@contextmanager
def _of_run(path: Path) -> Iterator[NamedRows]:
    checkpoint = find_checkpoints(path)[-1]
    names = class_names(checkpoint) or _names_of_data(checkpoint)
    with open_table(checkpoint, state=False) as table:
        if len(names) != table.classes:
            raise UsageError(f"head.init_rows = {path} has {table.classes:,} classes, and {len(names):,} names of them")
        yield NamedRows(names, table.centers, table.dim, table.rows_of)


def _names_of_data(checkpoint: Path) -> list[list[str]]:
    """The names that a run's folder has of the classes of its data, by number."""
    file = checkpoint.parent.parent / "classes.json"
    content = read_json(file) if file.exists() else None
    names = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"head.init_rows = {checkpoint} has no names of its classes, nor a classes.json of its run")
    return [[name] for name in names]


def _of_set(source: str) -> NamedRows:
    embeddings = EmbeddingSet(source)
    sums = class_sums(embeddings, 0, len(embeddings.class_names))
    names = [[name] for name in embeddings.class_names]
    return NamedRows(names, 1, embeddings.dim, lambda start, stop: torch.from_numpy(sums[start:stop])[:, None])
