"""Tables in Lance: ``X.lance``, a folder that pylance writes, is one shard."""

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from plsc.data.dataset import PackedStringColumn
from plsc.data.shards import Scanned, ShardFormat, text_labels
from plsc.errors import DataError, UsageError, first_line
from plsc.regular_files import ALLOW_OUTSIDE, LARGEST_PICTURE, check_links

_IMAGES, _LABELS, _KEYS = (
    ("image", "img", "jpg"),
    ("label", "labels", "cls", "identity", "class_id"),
    ("key", "id", "path"),
)
_EXTERNAL = 3  # the kind of a blob that is a file of any place
_MOST_LABELS = 256  # of a row
_LARGEST_LABEL = 2**53
_PLACE_IN_SOURCE = re.compile(r", /\S+:\d+:\d+.*")  # of the library's own, in its messages


class LanceFormat(ShardFormat):
    """Rows of one version of a table, the newest one there is when the data set is opened.

    Images are a column of binary values, of structs (bytes, path) or of blobs. Rows are located by their numbers in the
    version, which never changes. A table is opened anew in each process: what is open does not survive a fork.
    """

    suffixes = (".lance",)
    are_folders = True
    noun = "row"
    options: ClassVar[Mapping[str, str]] = {
        "image": "the column of images",
        "label": "the column of labels: integers, texts, or lists of them",
        "key": "the column of the images' names",
        "version": "of the table",
    }

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._versions: dict[Path, int] = {}

    def check(self, shards: Sequence[Path]) -> None:
        """See :meth:`ShardFormat.check`; fixes the version of each table."""
        text = self.given.get("version")
        if text is not None and not text.isdecimal():
            raise UsageError(f"?version={text} is no number of a table's version")
        for shard in shards:
            if not shard.exists():
                raise UsageError(f"there is no {shard}")
            newest = _table(shard, None).version
            if text is not None and not any(path.exists() for path in _manifests(shard, int(text))):
                raise UsageError(f"{shard} has no version {text}; its newest one is {newest}")
            self._versions[shard] = newest if text is None else int(text)

    def stamped(self, shard: Path) -> list[Path]:
        """See :meth:`ShardFormat.stamped`; a version's files are never changed, and its manifest names them."""
        return [next(filter(Path.exists, _manifests(shard, self._versions[shard])), shard / "_versions")]

    def size(self, shard: Path, stamped: int) -> int:
        """See :meth:`ShardFormat.size`."""
        with os.scandir(shard / "data") as entries:
            return sum(entry.stat().st_size for entry in entries)

    def scan(self, shard: Path) -> Scanned:
        """See :meth:`ShardFormat.scan`."""
        check_links(shard, below=shard)
        table = _table(shard, self._versions[shard])
        columns = _Columns(shard, table.schema, self.given)
        try:
            with _faults():
                rows = table.to_table(columns=columns.scanned)
        except ValueError as error:
            raise DataError(f"{shard} cannot be read: {error}") from None
        return columns.scan(rows)

    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """See :meth:`ShardFormat.read`."""
        table, columns = self.opened(shard / str(os.getpid()), lambda _: self._open(shard))
        with _faults():
            if columns.is_blob:
                blob = table.take_blobs(columns.image, indices=[int(place[0])])[0]
                image = None if blob is None else blob.read(LARGEST_PICTURE + 1)
            else:
                image = table.take([int(place[0])], columns=[columns.image]).column(0)[0].as_py()
        image = image["bytes"] if isinstance(image, dict) else image
        if not image:
            raise ValueError("it holds no image")
        if len(image) > LARGEST_PICTURE:
            raise ValueError(f"its image has more than {LARGEST_PICTURE:,} bytes")
        return bytes(image)

    def _open(self, shard: Path) -> tuple[Any, "_Columns"]:
        table = _table(shard, self._versions[shard])
        return table, _Columns(shard, table.schema, self.given)


def _table(shard: Path, version: int | None) -> Any:
    import lance

    warnings.filterwarnings("ignore", "lance is not fork-safe")  # of each fork; see LanceFormat
    try:
        with _faults():
            return lance.dataset(str(shard.absolute()), version=version)
    except ValueError as error:
        raise DataError(f"{shard} cannot be read as a table in Lance: {error}") from None


def _manifests(shard: Path, version: int) -> list[Path]:
    """Where the manifest of a version may be: later tables count down, so that the newest is listed first."""
    return [shard / "_versions" / f"{name}.manifest" for name in (f"{2**64 - 1 - version:020d}", version)]


@contextmanager
def _faults() -> Iterator[None]:
    """Turn what the library raises for damaged files into ValueError; a failed assertion of its is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, DataError | UsageError) or not (
            isinstance(error, OSError | ValueError | RuntimeError | LookupError)
            or type(error).__name__ == "PanicException"
        ):
            raise
        raise ValueError(_PLACE_IN_SOURCE.sub("", first_line(error))) from None


class _Columns:
    """The columns of a table that are images, labels and keys.

    Attributes:
        image: the name of the images' column.
        is_blob: they are blobs, of which a scan gives where they lie.
        scanned: the names of the columns that a scan reads.
    """

    def __init__(self, shard: Path, schema: Any, given: Mapping[str, str]) -> None:
        self._shard, self._types = shard, {column.name: column.type for column in schema}
        for option in ("image", "label", "key"):
            if option in given and given[option] not in self._types:
                raise UsageError(f"{shard} has no column {given[option]}; its columns are {', '.join(self._types)}")
        blobs = [column.name for column in schema if _is_blob(column)]
        self.image = self._image(blobs, given.get("image"))
        self.is_blob = self.image in blobs
        self._label = given.get("label") or next(filter(self._types.__contains__, _LABELS), None)
        self._key = given.get("key") or next(filter(self._is_text, _KEYS), None)
        if self._key is not None and not self._is_text(self._key):
            raise UsageError(f"{shard} has {self._types[self._key]} in the column {self._key}, and keys are texts")
        own = [name for name in (self._label, self._key) if name is not None]
        self._others = [name for name in self._types if name not in (self.image, *own) and self._is_text(name)]
        self.scanned = [*dict.fromkeys(own), *self._others, *([self.image] if self.is_blob else [])]

    def scan(self, rows: Any) -> Scanned:
        """Tell what ``rows`` hold, a table of the columns that a scan reads."""
        import pyarrow as pa
        import pyarrow.compute as pc

        count = rows.num_rows
        numbers = pa.array(np.arange(count)).cast(pa.large_string())
        keys = None
        faults: dict[int, str] = {}
        labels, names = (None, None) if self._label is None else self._labels(rows[self._label])
        if self._key is not None:
            keys = rows[self._key]
            if keys.null_count or not pa.types.is_integer(keys.type) or pa.types.is_uint64(keys.type):
                keys = pc.coalesce(keys.cast(pa.large_string()), pa.chunked_array([numbers]))
            codes = pc.dictionary_encode(keys).combine_chunks().indices.to_numpy()
            first = np.unique(codes, return_index=True)[1]
            faults |= dict.fromkeys(np.setdiff1d(np.arange(count), first).tolist(), "its name is another row's")
        if labels is not None:
            best = labels if labels.ndim == 1 else labels.max(1, initial=-1)
            faults |= dict.fromkeys(np.flatnonzero(best < 0).tolist(), "it has no label")
        if self.is_blob:
            faults |= _faults_of_blobs(rows[self.image])
        damaged = {
            f"{row}" if keys is None else f"{keys[row]} in row {row}": why for row, why in sorted(faults.items())
        }
        kept = np.setdiff1d(np.arange(count), np.fromiter(faults, np.int64, len(faults)))
        columns = {name: _texts(rows[name].take(kept)) for name in self._others}
        found: Any = None
        if keys is not None:
            found = keys.take(kept)
            found = found.to_numpy().astype(np.int64) if pa.types.is_integer(found.type) else _texts(found)
        return Scanned(kept[:, None], None if labels is None else labels[kept], found, names, damaged, columns)

    def _image(self, blobs: list[str], given: str | None) -> str:
        candidates = [name for name in self._types if name in blobs or _holds_bytes(self._types[name])]
        if given is not None and given not in candidates:
            raise UsageError(f"{self._shard} has {self._types[given]} in the column {given}, and images are binary")
        named = [given] if given else [name for name in _IMAGES if name in candidates] or candidates
        if not named:
            types = ", ".join(f"{name} ({kind})" for name, kind in self._types.items())
            raise DataError(f"{self._shard} has no column of encoded images, which are binary; it has {types}"[:400])
        if len(named) > 1 and named == candidates:
            raise UsageError(f"{self._shard} has several columns of images: {', '.join(named)}; give ?image=")
        return named[0]

    def _is_text(self, name: str) -> bool:
        """Whether the values of a column have a text: strings, numbers, dates."""
        import pyarrow.types as types

        kind = self._types.get(name)
        if kind is not None and types.is_dictionary(kind):
            kind = kind.value_type
        return kind is not None and (types.is_primitive(kind) or types.is_string(kind) or types.is_large_string(kind))

    def _labels(self, column: Any) -> tuple[NDArray[np.int64], Sequence[str] | None]:
        """Labels (n,), or (n, K) of lists, with -1 where there is none; and the names of the classes."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kind, values = column.type, column.combine_chunks()
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return self._flat_labels(values)
        lengths = np.asarray(pc.list_value_length(values).fill_null(0))
        if (most := int(lengths.max(initial=1))) > _MOST_LABELS:
            raise DataError(f"{self._shard} has {most:,} labels in a row, where {_MOST_LABELS} are the most")
        flat, names = self._flat_labels(pc.list_flatten(values))
        labels = np.full((len(lengths), most), -1, np.int64)
        labels[np.arange(most) < lengths[:, None]] = flat
        return (labels[:, 0] if most == 1 else labels), names

    def _flat_labels(self, values: Any) -> tuple[NDArray[np.int64], Sequence[str] | None]:
        import pyarrow as pa

        if pa.types.is_integer(values.type):
            numbers = np.asarray(values.fill_null(0))
            if len(numbers) and int(numbers.max()) > _LARGEST_LABEL:
                raise DataError(f"{self._shard} has a label past {_LARGEST_LABEL:,}; number the classes from 0 on")
            return np.where(np.asarray(values.is_null()), -1, np.maximum(numbers.astype(np.int64), -1)), None
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise DataError(
                f"{self._shard} has {values.type} in the column {self._label}, and labels are integers or texts; name "
                "another by ?label="
            )
        encoded = values.dictionary_encode()
        labels, names = text_labels(encoded.dictionary.to_pylist())
        return np.append(labels, -1)[encoded.indices.fill_null(len(labels)).to_numpy()], names


def _is_blob(column: Any) -> bool:
    of_type = getattr(column.type, "extension_name", "") == "lance.blob.v2"
    return of_type or (column.metadata or {}).get(b"lance-encoding:blob") == b"true"


def _holds_bytes(kind: Any) -> bool:
    """Whether values are binary, or structs as Hugging Face's, whose bytes are."""
    import pyarrow.types as types

    if types.is_struct(kind) and (number := kind.get_field_index("bytes")) >= 0:
        kind = kind.field(number).type
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _faults_of_blobs(blobs: Any) -> dict[int, str]:
    """Why blobs are not read, by row: a table from elsewhere may name files of the reader's own."""
    places = blobs.combine_chunks()
    faults = dict.fromkeys(np.flatnonzero(places.is_null()).tolist(), "it holds no image")
    if places.type.get_field_index("kind") >= 0 and os.environ.get(ALLOW_OUTSIDE) != "1":
        outside = np.flatnonzero(np.asarray(places.field("kind").fill_null(0)) == _EXTERNAL)
        faults |= dict.fromkeys(outside.tolist(), f"it lies outside of the table; --allow-outside ({ALLOW_OUTSIDE}=1)")
    return faults


def _texts(column: Any) -> PackedStringColumn:
    """The texts of a column, of which no string is made before it is asked for."""
    import pyarrow as pa

    values = column.cast(pa.large_string()).fill_null("").combine_chunks()
    if not len(values):
        return PackedStringColumn.of([])
    _, ends, data = values.buffers()
    offsets = np.frombuffer(ends, np.int64)[values.offset : values.offset + len(values) + 1]
    return PackedStringColumn(np.frombuffer(data or b"", np.uint8), offsets)
