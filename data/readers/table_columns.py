"""The columns of a table of pictures: which is the image, the label, the key, and what their values are."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.dataset import PackedStringColumn
from plsc.data.shards import NO_LABEL, Scanned, text_labels
from plsc.errors import UsageError
from plsc.regular_files import LARGEST_PICTURE

if TYPE_CHECKING:
    import pyarrow as pa

_IMAGES = ("image", "img", "jpg", "picture")
_LABELS = ("label", "labels", "cls", "identity", "class_id")
_KEYS = ("key", "id", "__key__", "path")
_MOST_LABELS = 256  # of a picture
_LISTED = 20  # columns in an error


class Columns:
    """Which columns of a schema hold what.

    Attributes:
        image: the pictures' column.
        label: that of labels; None: there are none.
        key: that of the pictures' names; None: the image's own paths where it has them, else the rows' numbers.
        texts: those of single further values.
        uses: what each of them is used for, to be compared with another shard's.
        class_names: of numbered labels, as ``datasets`` keeps them; None: their numbers.
        is_key_given: a key that is there twice is then a fault.

    Raises:
        UsageError: a column that is asked for is missing or of a type that does not fit; or there is no image column.
    """

    def __init__(self, schema: "pa.Schema", given: Mapping[str, str], shard: Path) -> None:
        names = list(schema.names)
        self._types = {name: schema.field(names.index(name)).type for name in names if names.count(name) == 1}
        self._given, self._shard = given, shard
        self.image = self._image()
        taken = {self.image}
        self.label = self._found("label", _LABELS, taken, lambda kind: label_kind(kind) != "")
        taken.add(self.label or "")
        self.key = self._found("key", [n for n in _KEYS if is_scalar(self._types.get(n))], taken, is_scalar)
        taken.add(self.key or "")
        self.is_key_given = "key" in given
        self.texts = [name for name, kind in self._types.items() if name not in taken and is_scalar(kind)]
        self.has_paths = self.key is None and not self.is_key_given and self._has_field(self.image, "path")
        self.class_names = None if self.label is None else _class_names(schema, self.label)
        self.uses = dict.fromkeys(self.texts, "a further value") | {self.image: "the picture"}
        self.uses |= {self.key: "the key"} if self.key is not None else {}
        self.uses |= {self.label: f"a label, {label_kind(self._types[self.label])}"} if self.label is not None else {}

    @property
    def wanted(self) -> list[str]:
        """The columns that are read."""
        return list(self.uses)

    def pictures(self, batch: "pa.RecordBatch") -> "tuple[pa.Array, pa.Array | None]":
        """The pictures of a batch, of type binary or large_binary, and their own paths.

        Raises:
            ValueError: offsets or indices in it lead out of it.
        """
        column, paths = checked(batch.column(self.image)), None
        if hasattr(column, "flatten") and column.type.num_fields:
            index = column.type.get_field_index("path")
            paths = column.flatten()[index] if index >= 0 else None
            column = checked(column.flatten()[column.type.get_field_index("bytes")])
        return column, paths

    def _image(self) -> str:
        name = self._given.get("image")
        if name:
            self._check("image", name, _is_picture, "binary values, or struct<bytes, path>")
            return name
        pictures = [name for name, kind in self._types.items() if _is_picture(kind)]
        fitting = [name for name in pictures if name in _IMAGES or self._has_field(name, "bytes")] or pictures
        if len(fitting) != 1:
            problem = "several columns that can be pictures" if fitting else "no column that is known for pictures"
            raise UsageError(f"{self._shard} has {problem}; name it by ?image=: {self._listed()}")
        return str(fitting[0])

    def _found(self, option: str, usual: Sequence[str], taken: set[str], fits: Callable[[Any], bool]) -> str | None:
        name = self._given.get(option)
        if name is None:
            name = next((name for name in usual if name in self._types and name not in taken), "")
        if not name:
            return None
        texts = "texts, whole numbers, or lists of these" if option == "label" else "texts or numbers"
        self._check(option, name, fits, texts)
        return name

    def _check(self, option: str, name: str, fits: Callable[[Any], bool], wanted: str) -> None:
        kind = self._types.get(name)
        if kind is None:
            raise UsageError(f"{self._shard} has no column {name!r} for ?{option}=, but {self._listed()}")
        if not fits(kind):
            raise UsageError(
                f"the column {name!r} of {self._shard} is {_short(kind)}, and ?{option}= takes one of {wanted}: "
                f"{self._listed()}"
            )

    def _listed(self) -> str:
        listed = [f"{name} ({_short(kind)})" for name, kind in self._types.items()]
        return ", ".join(listed[:_LISTED] + ["…"] * (len(listed) > _LISTED)) or "it has no columns"

    def _has_field(self, name: str, field: str) -> bool:
        import pyarrow as pa

        return bool(pa.types.is_struct(self._types[name]) and self._types[name].get_field_index(field) >= 0)


class Rows:
    """The rows of one shard, gathered batch by batch as Arrow's arrays: a table may have tens of millions."""

    def __init__(self, columns: Columns, shard: Path) -> None:
        self._columns, self._name = columns, shard.name
        self._places: list[NDArray[np.int64]] = []
        self._keys: list[pa.Array] = []
        self._labels: list[Any] = []  # texts, or integers (n,): of lists, all their values
        self._lengths: list[NDArray[np.int64]] = []  # of lists
        self._texts: dict[str, list[pa.Array]] = {name: [] for name in columns.texts}
        self._faults: dict[int, str] = {}
        self._count = 0

    def add(
        self,
        batch: "pa.RecordBatch",
        places: NDArray[np.int64],
        faults: Mapping[int, str],
        paths: "pa.Array | None" = None,
    ) -> None:
        """Take the values of a batch, whose n pictures lie at ``places`` (n, P) and have ``paths`` of their own.

        ``faults`` are those of its pictures, by their numbers in it.

        Raises:
            ValueError: offsets or indices in it lead out of it.
        """
        self._faults |= {self._count + row: why for row, why in faults.items()}
        if self._columns.key is not None:
            self._keys.append(as_texts(batch.column(self._columns.key)))
        elif self._columns.has_paths and paths is not None:
            self._keys.append(as_texts(paths))
        if self._columns.label is not None:
            self._add_labels(batch.column(self._columns.label))
        for name, texts in self._texts.items():
            texts.append(as_texts(batch.column(name)))
        self._places.append(places)
        self._count += len(places)

    def scanned(self) -> Scanned:
        """All rows, but for those with a fault."""
        labels, texts = self._joined_labels()
        keys = self._unique_keys()
        kept = np.delete(np.arange(self._count), list(self._faults))
        names: Sequence[str] | None = self._columns.class_names
        labels = None if labels is None else labels[kept]
        if labels is not None and texts is not None:
            present = np.flatnonzero(np.bincount(labels[labels >= 0]))
            numbers = np.full(len(texts) + 1, -1, np.int64)
            numbers[present], names = text_labels(packed(texts.take(present)))
            labels = numbers[labels]
        return Scanned(
            np.concatenate(self._places or [np.empty((0, 1), np.int64)])[kept],
            labels,
            kept if keys is None else packed(keys.take(kept)),
            names,
            {str(row) if keys is None else _decoded(keys[row]): self._faults[row] for row in sorted(self._faults)},
            {name: packed(_joined(parts).take(kept)) for name, parts in self._texts.items()},
        )

    def _fault(self, row: int, why: str) -> None:
        self._faults.setdefault(int(row), why)

    def _add_labels(self, labels: "pa.Array") -> None:
        import pyarrow.compute as pc

        kind, labels = label_kind(labels.type), checked(labels)
        if "list" in kind:
            self._lengths.append(np.maximum(as_numbers(pc.list_value_length(labels)), 0))
            labels = labels.flatten()
        self._labels.append(as_texts(labels) if "text" in kind else as_numbers(labels))

    def _joined_labels(self) -> "tuple[NDArray[np.int64] | None, pa.Array | None]":
        """Labels (n,) or (n, K) of all rows, and the texts that they number; rows without, or with wrong ones, fail."""
        if self._columns.label is None:
            return None, None
        texts = None
        if self._labels and not isinstance(self._labels[0], np.ndarray):
            labels, texts = _numbered(self._labels)
        else:
            labels = np.concatenate([np.empty(0, np.int64), *self._labels])
        if self._lengths:
            labels = self._by_row(labels, np.concatenate(self._lengths))
        most = len(self._columns.class_names) if self._columns.class_names is not None else 2**63 - 1
        by_row = labels.reshape(self._count, -1) if self._count else labels[:, None]
        for row in np.flatnonzero(((by_row < -1) | (by_row >= most)).any(1)).tolist():
            wrong = by_row[row][(by_row[row] < -1) | (by_row[row] >= most)][0]
            names = f", and {most:,} classes have names" if wrong >= 0 else ""
            self._fault(row, f"its label is {wrong}{names}")
        for row in np.flatnonzero((by_row < 0).all(1)).tolist():
            self._fault(row, NO_LABEL)
        return labels, texts

    def _by_row(self, values: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ``values`` of lists that follow one another as (n, K), with -1 behind those of a row."""
        for row in np.flatnonzero(lengths > _MOST_LABELS).tolist():
            self._fault(row, f"it has {lengths[row]:,} labels, where {_MOST_LABELS} are the most")
        rows = np.repeat(np.arange(len(lengths)), lengths)
        order = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        fits = order < _MOST_LABELS
        found = np.full((len(lengths), min(max(int(lengths.max(initial=1)), 1), _MOST_LABELS)), -1, np.int64)
        found[rows[fits], order[fits]] = values[fits]
        return found

    def _unique_keys(self) -> "pa.Array | None":
        """A key for each row; a row's number stands for one that is missing, and tells one that is there before."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._columns.key is None and not self._columns.has_paths:
            return None
        codes, _ = _numbered(self._keys)
        is_other = np.diff(np.maximum.accumulate(codes), prepend=-1) == 0  # texts are numbered as they come
        keys, others = _joined(self._keys), []
        for row in np.flatnonzero(is_other).tolist():
            own = f"{self._name}/{row}".encode("utf-8", "surrogateescape")
            others.append(own if codes[row] < 0 else own + b"/" + keys[row].as_py())
            if codes[row] >= 0 and self._columns.is_key_given:
                self._fault(row, "its key is that of a row before it")
        return pc.replace_with_mask(keys, pa.array(is_other), pa.array(others, pa.large_binary()))


def picture_faults(sizes: NDArray[np.int64], paths: "pa.Array | None" = None) -> dict[int, str]:
    """Why pictures of ``sizes`` (n,) in bytes are not read, by number; one of 0 or less is not there."""
    faults = {}
    for row in np.flatnonzero((sizes <= 0) | (sizes > LARGEST_PICTURE)).tolist():
        faults[row] = f"its image has {sizes[row]:,} bytes, where {LARGEST_PICTURE:,} are the most"
        if sizes[row] <= 0:
            has_path = paths is not None and paths[row].is_valid
            faults[row] = "it holds a path and no bytes" if has_path else "it holds no image"
    return faults


def picture_sizes(pictures: "pa.Array") -> NDArray[np.int64]:
    """The bytes of each picture (n,); -1 where there is none."""
    import pyarrow.compute as pc

    return as_numbers(pc.binary_length(pictures))


def checked(array: "pa.Array") -> "pa.Array":
    """A column without dictionary, views or the claim to be UTF-8, whose offsets lie in its buffers."""
    import pyarrow as pa

    kind = pa.types
    if kind.is_string(array.type):
        array = array.view(pa.binary())
    elif kind.is_large_string(array.type):
        array = array.view(pa.large_binary())
    array.validate(full=True)
    if kind.is_dictionary(array.type):
        return checked(array.dictionary_decode())
    is_view = kind.is_string_view(array.type) or kind.is_binary_view(array.type)
    return array.cast(pa.large_binary()) if is_view else array


def as_texts(array: "pa.Array") -> "pa.Array":
    """The values of a column as the bytes of texts, of type large_binary."""
    import pyarrow as pa

    array = checked(array)
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp(array.type.unit))  # zones need a table that not each machine has
    is_text = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
    return (array if is_text else array.cast(pa.string())).cast(pa.large_binary())


def _joined(parts: "list[pa.Array]") -> "pa.Array":
    import pyarrow as pa

    return pa.chunked_array(parts, pa.large_binary()).combine_chunks()


def _numbered(parts: "list[pa.Array]") -> "tuple[NDArray[np.int64], pa.Array]":
    """Texts as numbers (n,), -1 where there is none, and the text of each number."""
    encoded = _joined(parts).dictionary_encode()
    return as_numbers(encoded.indices), encoded.dictionary


def packed(texts: "pa.Array") -> PackedStringColumn:
    """Texts, of which no string is made before it is asked for."""
    texts = texts.fill_null(b"")
    _, ends, content = texts.buffers()
    offsets = (
        np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        if len(texts)
        else np.zeros(1, np.int64)
    )
    return PackedStringColumn(np.frombuffer(content or b"", np.uint8), offsets, "surrogateescape")


def _decoded(text: Any) -> str:
    return str(text.as_py().decode("utf-8", "surrogateescape"))


def as_numbers(array: "pa.Array") -> NDArray[np.int64]:
    """Integers as int64 (n,), -1 for null."""
    import pyarrow as pa

    found: NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False).copy()
    return found


def _is_picture(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _is_picture(kind.field(index).type)
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def label_kind(kind: Any) -> str:
    """What labels of this type are; "": it is of none."""
    import pyarrow as pa

    if kind is None:
        return ""
    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_integer(kind):
        return "a number"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "a text"
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    of = label_kind(kind.value_type) if is_list else ""
    return f"a list of {of.removeprefix('a ')}s" if of in ("a number", "a text") else ""


def is_scalar(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if kind is None or types.is_dictionary(kind):
        return label_kind(kind) != ""
    return label_kind(kind) in ("a text", "a number") or any(
        is_one(kind)
        for is_one in (types.is_floating, types.is_boolean, types.is_date, types.is_timestamp, types.is_decimal)
    )


def _short(kind: Any) -> str:
    return str(kind)[:80]


def _class_names(schema: "pa.Schema", label: str) -> list[str] | None:
    """The names that ``datasets`` notes in a schema for a ClassLabel, or a list of them."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        for _ in range(2):
            feature = feature[0] if isinstance(feature, list) else feature
            names = feature.get("names")
            if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
                return names
            feature = feature["feature"]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError):
        pass  # none, or another program's
    return None
