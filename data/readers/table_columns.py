"""The columns of a table of pictures: which is the image, the label, the key, and what their values are."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.shards import Scanned, text_labels
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
        self.label = self._found("label", _LABELS, taken, lambda kind: _label_kind(kind) != "")
        taken.add(self.label or "")
        self.key = self._found("key", [n for n in _KEYS if _is_scalar(self._types.get(n))], taken, _is_scalar)
        taken.add(self.key or "")
        self.is_key_given = "key" in given
        self.texts = [name for name, kind in self._types.items() if name not in taken and _is_scalar(kind)]
        self.has_paths = self.key is None and not self.is_key_given and self._has_field(self.image, "path")
        self.class_names = None if self.label is None else _class_names(schema, self.label)
        self.uses = dict.fromkeys(self.texts, "a further value") | {self.image: "the picture"}
        self.uses |= {self.key: "the key"} if self.key is not None else {}
        self.uses |= {self.label: f"a label, {_label_kind(self._types[self.label])}"} if self.label is not None else {}

    @property
    def wanted(self) -> list[str]:
        """The columns that are read."""
        return list(self.uses)

    def _image(self) -> str:
        name = self._given.get("image")
        if name:
            self._check("image", name, _is_picture, "binary values, or struct<bytes, path>")
            return name
        fitting = [
            name
            for name, kind in self._types.items()
            if _is_picture(kind) and (name in _IMAGES or self._has_field(name, "bytes"))
        ]
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
        texts = "texts, whole numbers, or lists of whole numbers" if option == "label" else "texts or numbers"
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
    """The rows of one shard, gathered batch by batch."""

    def __init__(self, columns: Columns, shard: Path) -> None:
        self._columns, self._name = columns, shard.name
        self._places: list[NDArray[np.int64]] = [np.empty((0, 2), np.int64)]
        self._labels: list[Any] = []  # texts, or arrays (n,) or (n, k) for each batch
        self._keys: list[str | None] = []
        self._texts: dict[str, list[str | None]] = {name: [] for name in columns.texts}
        self._faults: dict[int, str] = {}
        self._count = 0

    def add(self, batch: "pa.RecordBatch") -> "pa.Array":
        """Take the values of a batch, and return its pictures, of type binary or large_binary.

        Raises:
            ValueError: offsets or indices in it lead out of it.
        """
        column, paths = _checked(batch.column(self._columns.image)), None
        if self._columns.key is not None:
            self._keys += _texts(batch.column(self._columns.key))
        if hasattr(column, "flatten") and column.type.num_fields:
            index = column.type.get_field_index("path")
            paths = column.flatten()[index] if index >= 0 else None
            column = _checked(column.flatten()[column.type.get_field_index("bytes")])
        if self._columns.has_paths:
            self._keys += [None] * len(batch) if paths is None else _texts(paths)
        self._note_missing(column, paths)
        if self._columns.label is not None:
            column_of_labels = batch.column(self._columns.label)
            self._add_labels(_checked(column_of_labels), _label_kind(column_of_labels.type))
        for name, texts in self._texts.items():
            texts += _texts(batch.column(name))
        return column

    def add_places(self, pictures: "pa.Array", offsets: NDArray[np.int64]) -> None:
        """Take the places of the pictures that :meth:`add` returned."""
        self._places.append(np.stack([offsets, _sizes(pictures)], 1))
        self._count += len(pictures)

    def scanned(self) -> Scanned:
        """All rows, but for those with a fault."""
        labels = self._joined_labels()
        keys = self._unique_keys()
        kept = np.array([row for row in range(self._count) if row not in self._faults], np.int64)
        names: Sequence[str] | None = self._columns.class_names
        if isinstance(labels, list):
            labels, names = text_labels([labels[row] for row in kept])
        elif labels is not None:
            labels = labels[kept]
        return Scanned(
            np.concatenate(self._places)[kept],
            labels,
            kept if keys is None else [keys[row] for row in kept],
            names,
            {str(row) if keys is None else keys[row]: why for row, why in sorted(self._faults.items())},
            {name: [texts[row] or "" for row in kept] for name, texts in self._texts.items()},
        )

    def _fault(self, row: int, why: str) -> None:
        self._faults.setdefault(int(row), why)

    def _note_missing(self, pictures: "pa.Array", paths: "pa.Array | None") -> None:
        sizes = _sizes(pictures)
        for row in np.flatnonzero((sizes <= 0) | (sizes > LARGEST_PICTURE)).tolist():
            why = f"its image has {sizes[row]:,} bytes, where {LARGEST_PICTURE:,} are the most"
            if sizes[row] <= 0:
                has_path = paths is not None and paths[row].is_valid
                why = "it holds a path and no bytes" if has_path else "it holds no image"
            self._fault(self._count + row, why)

    def _add_labels(self, labels: "pa.Array", kind: str) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        if kind == "a text":
            self._labels.append(_texts(labels))
        elif kind == "a number":
            self._labels.append(_numbers(labels))
        else:
            lengths = _numbers(pc.list_value_length(labels))
            lengths[lengths < 0] = 0
            rows = np.repeat(np.arange(len(lengths)), lengths)
            order = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            for row in np.flatnonzero(lengths > _MOST_LABELS).tolist():
                self._fault(self._count + row, f"it has {lengths[row]:,} labels, where {_MOST_LABELS} are the most")
            fits = order < _MOST_LABELS
            found = np.full((len(lengths), min(max(lengths, default=1), _MOST_LABELS)), -1, np.int64)
            found[rows[fits], order[fits]] = _numbers(labels.flatten().cast(pa.int64()))[fits]
            self._labels.append(found)

    def _joined_labels(self) -> Any:
        """Labels of all rows: texts, (n,) or (n, K); those of rows that have none, or a wrong one, are faults."""
        if self._columns.label is None:
            return None
        if self._labels and isinstance(self._labels[0], list):
            texts = [text for part in self._labels for text in part]
            for row in (row for row, text in enumerate(texts) if text is None):
                self._fault(row, "it has no label")
            return texts
        width = max((part.shape[1] for part in self._labels if part.ndim > 1), default=0)
        labels = np.full((self._count, width) if width else (self._count,), -1, np.int64)
        first = 0
        for part in self._labels:
            labels[first : first + len(part), *([slice(part.shape[1])] if width else [])] = part
            first += len(part)
        most = len(self._columns.class_names) if self._columns.class_names is not None else 2**63 - 1
        by_row = labels.reshape(self._count, -1)
        for row in np.flatnonzero(((by_row < -1) | (by_row >= most)).any(1)).tolist():
            wrong = by_row[row][(by_row[row] < -1) | (by_row[row] >= most)][0]
            names = f", and {most:,} classes have names" if wrong >= 0 else ""
            self._fault(row, f"its label is {wrong}{names}")
        for row in np.flatnonzero((by_row < 0).all(1)).tolist():
            self._fault(row, "it has no label")
        return labels

    def _unique_keys(self) -> list[str] | None:
        """A key for each row; a row's number stands for one that is missing, and tells one that is there before."""
        if self._columns.key is None and not self._columns.has_paths:
            return None
        keys, seen = [], set()
        for row, key in enumerate(self._keys):
            if key is None:
                keys.append(f"{self._name}/{row}")
            elif key not in seen:
                keys.append(key)
            elif self._columns.is_key_given:
                keys.append(key)
                self._fault(row, "its key is that of a row before it")
            else:
                keys.append(f"{self._name}/{row}/{key}")
            seen.add(keys[-1])
        return keys


def _checked(array: "pa.Array") -> "pa.Array":
    """A column without dictionary, views or the claim to be UTF-8, whose offsets lie in its buffers."""
    import pyarrow as pa

    kind = pa.types
    if kind.is_string(array.type):
        array = array.view(pa.binary())
    elif kind.is_large_string(array.type):
        array = array.view(pa.large_binary())
    array.validate(full=True)
    if kind.is_dictionary(array.type):
        return _checked(array.dictionary_decode())
    is_view = kind.is_string_view(array.type) or kind.is_binary_view(array.type)
    return array.cast(pa.large_binary()) if is_view else array


def _texts(array: "pa.Array") -> list[str | None]:
    import pyarrow as pa

    array = _checked(array)
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return [None if value is None else value.decode("utf-8", "surrogateescape") for value in array.to_pylist()]
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp(array.type.unit))  # zones need a table that not each machine has
    found: list[str | None] = array.cast(pa.string()).to_pylist()
    return found


def _numbers(array: "pa.Array") -> NDArray[np.int64]:
    """Integers as int64 (n,), -1 for null."""
    import pyarrow as pa

    found: NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False).copy()
    return found


def _sizes(pictures: "pa.Array") -> NDArray[np.int64]:
    import pyarrow.compute as pc

    return _numbers(pc.binary_length(pictures))


def _is_picture(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _is_picture(kind.field(index).type)
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _label_kind(kind: Any) -> str:
    """What labels of this type are; "": it is of none."""
    import pyarrow as pa

    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_integer(kind):
        return "a number"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "a text"
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return "a list of numbers" if is_list and types.is_integer(kind.value_type) else ""


def _is_scalar(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if kind is None or types.is_dictionary(kind):
        return kind is not None and _label_kind(kind) != ""
    return _label_kind(kind) in ("a text", "a number") or any(
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
