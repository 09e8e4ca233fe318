"""The embedding set: a folder of embeddings with their keys and labels, memory-mapped and protected by hashes.

    EMB/
      manifest.json              with its own digest; begun with "complete": false, ended with true
      class_names.npy, class_names.offsets.npy    the name of each label (string column: plsc.embedding.columns)
      shard-00000/               rows [0, shard_rows); the next shard follows; only the last may be shorter
        manifest.json            with its own digest: start, rows, errors, and {file: {"bytes", "sha256"}}
        embeddings.npy           (n, dim) float32 or float16, as the model gave them: NOT normalised,
                                 because the norm tells the image's quality
        ids.npy                  (n,) int64, unique in the set
        labels.npy               (n,) int64 into class_names, -1 for none
        keys.npy, keys.offsets.npy                      the origin of each row: a path or a record's key
        metadata.npy, metadata.offsets.npy              a JSON object of each row, if the source has such columns
        errors.jsonl             a line {"row", "error"} for each row without an embedding (a zero vector)

Everything is mapped, nothing unpickled; 10^8 rows are about 3,000 shards. The manifest names the contract:
the id of the model's weights and preprocessing. Vectors of two contracts mean different things, and
:func:`same_contract` keeps them apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from plsc.embedding.columns import Array, ChainedStringColumn, Float32, Int64, open_array, open_strings, string_files
from plsc.embedding.contracts import may_search
from plsc.embedding.metadata import METADATA_FILES, open_metadata, read_metadata
from plsc.embedding.table_formats import format_at
from plsc.errors import DataError, IntegrityError, UsageError, first_line
from plsc.files import (
    MANIFEST,
    Manifest,
    holds_manifest,
    manifest_value,
    open_described,
    pinned,
    read_manifest,
    verify_files,
)
from plsc.signing import is_asked_for, require_signed
from plsc.text_files import text_lines

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

FORMAT = "plsc embedding set"
SHARD_FORMAT = "plsc embedding shard"
VERSION = 1
LARGEST_DIM = 1 << 20
SHARD_FILES = ("embeddings.npy", "ids.npy", "labels.npy", *string_files("keys"), "errors.jsonl")


def shard_name(number: int) -> str:
    """Name of the folder of shard ``number``."""
    return f"shard-{number:05d}"


def is_embedding_set(source: str | Path) -> bool:
    """Whether ``source`` is the folder of an embedding set, or a table of one in Parquet or Lance."""
    if format_at(Path(source)) is not None:
        from plsc.embedding.table_sets import is_table_set

        return is_table_set(Path(source))
    return Path(source).is_dir() and holds_manifest(Path(source), FORMAT)


class Shard:
    """Rows [start, start + len) of a set.

    Attributes:
        embeddings: (n, dim) float32 or float16; like the next three, memory-mapped.
        ids, labels: (n,) int64.
        keys: n strings.
        metadata: n JSON objects, as they are stored.
        errors: {row of the set: error}.
        start: the first row.
    """

    def __init__(self, folder: Path, manifest: Manifest, dim: int, dtype: str, *, verify: bool) -> None:
        rows, described = manifest["rows"], manifest["files"]

        def file(name: str) -> BinaryIO:
            return open_described(folder, name, described[name], verify=verify)

        self.folder, self.start = folder, int(manifest["start"])
        self.embeddings: Array = open_array(file("embeddings.npy"), (rows, dim), dtype)
        self.ids: Int64 = open_array(file("ids.npy"), (rows,), "int64")
        self.labels: Int64 = open_array(file("labels.npy"), (rows,), "int64")
        self.keys: Sequence[str] = open_strings(file, "keys", rows)
        self.metadata = open_metadata(file, described, rows)
        self.errors = _read_errors(file("errors.jsonl"), range(self.start, self.start + rows))

    def __len__(self) -> int:
        return len(self.ids)


class EmbeddingSet:
    """A finished embedding set, opened for reading.

    Opening checks the manifest's digest and every file's presence, length and header.

    Args:
        folder: of the set; or a table of embeddings in Parquet or Lance (:mod:`plsc.embedding.table_sets`).
        verify: hash every file, too.
        own: this process wrote it: a signature is not asked for (:mod:`plsc.signing`).

    Attributes:
        path: what was named: the folder, or the table that it was made of.
        contract_id: of the model and preprocessing that made the embeddings.
        compatible_with: contract ids of other models whose embeddings these may be compared with.
        dim: numbers in an embedding.
        class_names: by label.
        manifest: the content of manifest.json.
        shards: in order.

    Raises:
        UsageError: there is no such folder.
        DataError: ``folder`` is no finished set.
        IntegrityError: a file is damaged.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False, own: bool = False) -> None:
        self.path = self.folder = Path(folder)
        if (table := format_at(self.path)) is not None:
            from plsc.embedding.table_sets import set_of_table

            self.folder = set_of_table(self.path, table)
        if not self.folder.is_dir():
            raise UsageError(f"there is no folder {folder}")
        self.manifest = read_manifest(self.folder, FORMAT, VERSION)
        if not own:
            require_signed(self.folder, "embedding set", self.manifest)
            verify = verify or is_asked_for()  # else the signature is of hashes that nobody compares
        if not manifest_value(self.folder, self.manifest, "complete", bool):
            raise DataError(f"{self.folder} is not finished; run plsc embed again with the same arguments")
        self._check_manifest()
        self.contract_id: str = self.manifest["contract_id"]
        self.compatible_with: list[str] = self.manifest.get("compatible_with", [])
        self.dim: int = self.manifest["dim"]
        self.class_names: Sequence[str] = open_strings(
            lambda name: open_described(self.folder, name, self.manifest["files"][name], verify=verify),
            "class_names",
            self.manifest["classes"],
        )
        self.shards: list[Shard] = []
        for entry in self.manifest["shards"]:
            path = self.folder / entry["name"]
            if verify:
                read_manifest(path, SHARD_FORMAT, VERSION)
            self.shards.append(Shard(path, entry, self.dim, self.manifest["dtype"], verify=verify))

    def __repr__(self) -> str:
        """Return its shape, and the folder."""
        return f"<EmbeddingSet at {self.path}: {len(self):,} embeddings of {self.dim}>"

    def __len__(self) -> int:
        return int(self.manifest["rows"])

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.shards)

    def verify(self) -> None:
        """Hash every file; :class:`IntegrityError` names the first that is missing, cut or changed."""
        verify_files(self.folder, self.manifest["files"])
        for entry in self.manifest["shards"]:
            folder = self.folder / entry["name"]
            read_manifest(folder, SHARD_FORMAT, VERSION)
            verify_files(folder, entry["files"])

    def rows(self, start: int, stop: int) -> Float32:
        """Copy rows [start, stop) into (stop − start, dim) float32.

        Raises:
            UsageError: not 0 <= start <= stop <= len.
        """
        if not 0 <= start <= stop <= len(self):
            raise UsageError(f"rows [{start}, {stop}) do not lie in the {len(self)} rows of {self.path}")
        rows = np.empty((stop - start, self.manifest["dim"]), dtype=np.float32)
        for shard in self.shards:
            first, last = max(start, shard.start), min(stop, shard.start + len(shard))
            if first < last:
                rows[first - start : last - start] = shard.embeddings[first - shard.start : last - shard.start]
        return rows

    def marks(self, start: int, stop: int) -> Float32:
        """Numbers (n, any) by which :func:`plsc.embedding.columns.searchable` tells what it tells by the rows."""
        return self.rows(start, stop)

    @cached_property
    def labels(self) -> Int64:
        """(N,) int64: the class of each row in ``class_names``, -1 for none."""
        return np.concatenate([np.empty(0, np.int64), *(shard.labels for shard in self.shards)])

    @cached_property
    def ids(self) -> Int64:
        """(N,) int64, unique."""
        return np.concatenate([np.empty(0, np.int64), *(shard.ids for shard in self.shards)])

    @cached_property
    def keys(self) -> Sequence[str]:
        """N strings: the origin of each row."""
        return ChainedStringColumn([shard.keys for shard in self.shards])

    def metadata(self, row: int) -> dict[str, Any]:
        """What the source said of ``row`` besides its key and label, by names; {} where it said nothing."""
        return read_metadata(self.metadata_column, row, self.path)

    @cached_property
    def metadata_column(self) -> Sequence[str]:
        """N JSON objects, as they are stored."""
        return ChainedStringColumn([shard.metadata for shard in self.shards])

    @property
    def has_metadata(self) -> bool:
        """Whether any row has some."""
        return any(entry["files"].keys() >= METADATA_FILES for entry in self.manifest["shards"])

    def to_batches(self) -> "Iterator[pa.RecordBatch]":
        """Yield an Arrow batch of each shard, with the columns that :mod:`plsc.embedding.arrow_tables` lists.

        Raises:
            UsageError: pyarrow is not installed.
        """
        from plsc.embedding.arrow_tables import batches_of, schema_of

        return batches_of(self, schema_of(self))

    def to_arrow(self) -> "pa.Table":
        """Return the whole set as an Arrow table: :meth:`to_batches` one behind the other."""
        from plsc.embedding.arrow_tables import batches_of, load_pyarrow, schema_of

        schema = schema_of(self)
        return load_pyarrow().Table.from_batches(batches_of(self, schema), schema)

    def to_pandas(self) -> "pd.DataFrame":
        """Return :meth:`to_arrow` as a DataFrame, whose embeddings are an array for each row."""
        return self.to_arrow().to_pandas()

    @cached_property
    def errors(self) -> Mapping[int, str]:
        """{row: error} of the rows without an embedding."""
        return {row: text for shard in self.shards for row, text in shard.errors.items()}

    def _check_manifest(self) -> None:
        """Check what the manifest's digest does not: whoever writes a manifest writes its digest."""
        for name, kind in (("contract_id", str), ("dtype", str), ("files", dict)):
            manifest_value(self.folder, self.manifest, name, kind)
        rows, _, dim = (manifest_value(self.folder, self.manifest, name, int) for name in ("rows", "classes", "dim"))
        others = self.manifest.get("compatible_with", [])
        if not isinstance(others, list) or not all(isinstance(one, str) for one in others):
            raise IntegrityError(
                f"{self.folder / MANIFEST} has a compatible_with that lists no models; use another copy"
            )
        start = 0
        for number, entry in enumerate(manifest_value(self.folder, self.manifest, "shards", list)):
            is_next = isinstance(entry, dict) and (entry.get("name"), entry.get("start")) == (shard_name(number), start)
            files = manifest_value(self.folder, entry, "files", dict) if is_next else {}
            if files.keys() - METADATA_FILES != set(SHARD_FILES):
                raise IntegrityError(f"{self.folder / MANIFEST} describes shard {number} wrongly; use another copy")
            start += manifest_value(self.folder, entry, "rows", int)
        if start != rows or self.manifest["dtype"] not in ("float32", "float16") or not 0 < dim <= LARGEST_DIM:
            raise IntegrityError(f"{self.folder / MANIFEST} does not describe its shards; use another copy")


def same_contract(sets: Sequence[EmbeddingSet]) -> str:
    """The contract id that all ``sets`` share, as they share dim; :class:`UsageError` names two that differ."""
    first = sets[0]
    for other in sets[1:]:
        require_contract(other.contract_id, first.contract_id, str(other.path), str(first.path))
        if other.dim != first.dim:
            raise UsageError(f"{other.path} holds vectors of {other.dim} and {first.path} of {first.dim}")
    return first.contract_id


def require_contract(actual: str, expected: str, source: str, target: str, compatible_with: Sequence[str] = ()) -> None:
    """Refuse to compare vectors of two models with :class:`UsageError`, but where they are said to be compatible.

    Args:
        actual, expected: the contract ids.
        source, target: where the vectors with each are, for the message.
        compatible_with: the models whose vectors those of ``source`` may be compared with, too.
    """
    if not may_search(actual, compatible_with, expected):
        raise UsageError(
            f"{source} was embedded by another model or preprocessing ({actual}) than {target} ({expected}); "
            "vectors of two models cannot be compared: embed both with one"
        )


def _read_errors(file: BinaryIO, rows: range) -> dict[int, str]:
    try:
        errors = {}
        with file:
            for _, line in text_lines(pinned(file)):
                entry = json.loads(line)
                errors[rows[rows.index(entry["row"])]] = str(entry["error"])
        return errors
    except (ValueError, KeyError, TypeError, RecursionError, DataError) as error:
        raise IntegrityError(f"{file.name} is corrupt: {first_line(error)}; use another copy") from None
