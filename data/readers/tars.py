"""Tars of samples, as webdataset's TarWriter, img2dataset and hubs of data sets write them.

A sample is the members of one folder that have the same name up to its first dot; what follows the dot is the field.
Tars of a folder per identity are read too: there each picture is a sample. No member is ever unpacked into a file.
"""

import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plsc.data.objects import open_ranges
from plsc.data.packed_tars import PACKED_SUFFIXES, packer_of
from plsc.data.shards import NO_LABEL, Scanned, ShardFormat, text_labels
from plsc.errors import DataError, UsageError, first_line
from plsc.image_files import readable_suffixes
from plsc.regular_files import LARGEST_PICTURE, open_regular
from plsc.text_files import text_lines

# Hidden files, macOS's and pax's own among them, and webdataset's __names__ of metadata.
_PASSED_OVER = re.compile(r"(?:^|/)(?:\.(?!\.?/)|PaxHeaders?[./]|__MACOSX/)|^__[^/]*__$").search
_LARGEST_HEADER = 1 << 16  # bytes: of a long name, or of pax's attributes
_LARGEST_TEXT = 1 << 12  # bytes
_LARGEST_JSON = 1 << 20
_MOST_COLUMNS = 64
_MOST_LABELS = 256  # of a picture

Samples = dict[str, dict[str, "_Member"]]  # members by sample and field


class _Member(NamedTuple):
    name: str
    offset: int  # of its bytes
    size: int


class TarFormat(ShardFormat):
    """Pictures of tars. Texts of ``.txt``, and values at the top of ``.json``, become columns."""

    suffixes = (".tar", *PACKED_SUFFIXES)
    noun = "sample"
    options = {  # noqa: RUF012 (ShardFormat's is a ClassVar)
        "label": "a text field, as cls, which is the usual one; json:KEY; or folder, of a tar of a folder per identity",
        "list": "a file of lines key<TAB>label",
        "image": "the field of the picture, as jpg, where samples have several",
    }

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        if {"label", "list"} <= options.keys():
            raise UsageError("?label= and ?list= both name labels; drop one")
        self._label = options.get("label", "cls")
        self._image = options.get("image", "").lower().removeprefix(".")

    def scan(self, shard: Path) -> Scanned:
        """See :meth:`ShardFormat.scan`."""
        damaged: dict[str, str] = {}
        places, keys, labels = [], [], []
        columns: dict[str, list[str]] | None = None
        with _open_tar(shard) as file:
            if packer_of(file):
                bare = shard.with_name(shard.name.removesuffix(".tgz").partition(".tar")[0])
                options = "&".join(f"{name}={value}" for name, value in self.given.items())
                source = shlex.quote(f"{shard}?{options}") if options else shard
                why = "is compressed, so that no picture is at a place of its own"
                raise DataError(f"{shard} {why}: plsc data convert {source} {bare}.rec")
            samples = self._samples(file, shard, damaged)
            is_labelled = bool(self.given.keys() & {"label", "list"}) or any("cls" in each for each in samples.values())
            for key, fields in samples.items():
                try:
                    picture = self._picture(shard, key, fields)
                    texts = {name: _text(file, member) for name, member in fields.items() if name in ("txt", "json")}
                    content = _parsed(texts.pop("json", ""))
                    own = self._labels(file, key, fields, content) if is_labelled else []
                except ValueError as fault:
                    damaged[key] = str(fault)
                    continue
                if isinstance(content, dict):
                    texts |= {_printed(name): value for name, value in content.items()}
                if columns is None:
                    columns = {name: [] for name in self._column_names(key, texts)}
                for name, column in columns.items():
                    column.append(_printed(texts.get(name)))
                places.append((picture.offset, picture.size))
                keys.append(picture.name)
                labels.append(own)
        of_rows, names = _label_columns(labels) if is_labelled else (None, None)
        found = np.array(places, np.int64).reshape(-1, 2)
        return Scanned(found, of_rows, keys, names, damaged, columns or {})

    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """See :meth:`ShardFormat.read`."""
        offset, size = place.tolist()
        try:
            content = self.opened(shard, open_ranges).read(offset, size)
        except OSError as error:
            raise ValueError(f"the file cannot be opened: {error.strerror or 'it is missing'}") from None
        if len(content) < size:
            raise ValueError("the file ends inside it")
        return content

    def companions(self, shard: Path) -> list[Path]:
        """See :meth:`ShardFormat.companions`."""
        return [Path(self.given["list"])] if "list" in self.given else []

    def _samples(self, file: io.BufferedReader, shard: Path, damaged: dict[str, str]) -> Samples:
        samples: Samples = {}
        folders: dict[str, str] = {}
        is_per_folder = self._label == "folder"
        for member in _members(file, shard, damaged):
            folder, slash, last = member.name.rpartition("/")
            stem, dot, field = last.rpartition(".") if is_per_folder else last.partition(".")
            field = field.lower()
            key = member.name if is_per_folder else f"{folder}{slash}{stem}"
            if not dot or (is_per_folder and f".{field}" not in readable_suffixes()):
                continue
            if is_per_folder and folders.setdefault(folder.rpartition("/")[2], folder) != folder:
                raise DataError(f"{shard}: {folder} has the name of another folder; name labels by ?list=FILE")
            sample = samples.setdefault(key, {})
            if field in sample:
                damaged[f"{member.name} (at byte {member.offset:,})"] = f"the sample has a .{field} before it"
            else:
                sample[field] = member
        return samples

    def _picture(self, shard: Path, key: str, fields: dict[str, _Member]) -> _Member:
        """The field of a sample that is its picture; ValueError tells why none is."""
        found = [self._image] if self._image in fields else []
        if not self._image:
            found = [name for name in fields if f".{name}" in readable_suffixes()]
            found = found or [name for name in fields if name.endswith(readable_suffixes())]
        if len(found) > 1:
            raise DataError(
                f"sample {key} of {shard} has several pictures: choose one by ?image={' or ?image='.join(found)}"
            )
        if not found:
            raise ValueError(f"it has no {self._image or 'picture'}, but {', '.join(fields)}")
        picture = fields[found[0]]
        if not 0 < picture.size <= LARGEST_PICTURE:
            raise ValueError(f"its {found[0]} has {picture.size:,} bytes, where 1 to {LARGEST_PICTURE:,} may be")
        return picture

    def _labels(self, file: io.BufferedReader, key: str, fields: dict[str, _Member], content: Any) -> list[str]:
        """The labels of a sample as texts; ValueError where it has none."""
        others: list[str] = []
        if "list" in self.given:
            path = Path(self.given["list"])
            labels = self.opened(path, _read_list)
            names = [key, *(member.name for member in fields.values())]
            found: Any = next((labels[name] for name in names if name in labels), None)
            where = path.name
        elif self._label == "folder":
            found, where = key.rpartition("/")[0].rpartition("/")[2] or None, "folder"
        elif self._label.startswith("json:"):
            where, found = self._label, content
            others = [*fields, *(f"json:{name}" for name in content)] if isinstance(content, dict) else [*fields]
            for name in self._label.removeprefix("json:").split("."):
                found = found.get(name) if isinstance(found, dict) else None
        else:
            where, others = self._label.lower().removeprefix("."), [*fields]
            member = fields.get(where)
            found = None if member is None else _text(file, member).strip() or None
        every = found if isinstance(found, list) else [found]
        if not 0 < len(every) <= _MOST_LABELS or not all(type(each) in (int, str) and each != "" for each in every):
            is_missing = others and where not in others
            why = f"but {_printed(', '.join(others)[:200])}" if is_missing else "an integer or a text"
            raise ValueError(f"{NO_LABEL} in {where}, {why}")
        return [_printed(each) for each in every]

    def _column_names(self, key: str, texts: dict[str, Any]) -> list[str]:
        """The texts that are kept of a shard: those that its first sample has, but for its label and key."""
        own = {self._label, self._label.removeprefix("json:")} | {name for name, text in texts.items() if text == key}
        found = [name for name, text in texts.items() if not isinstance(text, dict | list)]
        return [name for name in found if name not in own][:_MOST_COLUMNS]


class _BoundedReader(io.BufferedReader):
    """What tarfile reads headers from: a damaged one announces gigabytes of names."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_HEADER:
            raise tarfile.ReadError("its header is too long")
        return super().read(size)


@contextmanager
def _open_tar(shard: Path) -> Iterator[io.BufferedReader]:
    try:
        with _BoundedReader(open_regular(shard).detach()) as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot read {shard}: {error.strerror or error}; use another copy") from None


def _members(file: io.BufferedReader, shard: Path, damaged: dict[str, str]) -> Iterator[_Member]:
    """Yield the members that are plain files, up to where the tar is torn."""
    end = os.fstat(file.fileno()).st_size
    try:
        tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
    except Exception as error:  # tarfile raises nearly every kind on hostile bytes
        raise DataError(f"{shard} is no tar: {first_line(error)}; use another copy") from None
    try:
        while (info := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep all
            name = info.name.removeprefix("./")
            if tar.offset <= info.offset:
                raise tarfile.ReadError("its size is negative")
            if info.isdir() or _PASSED_OVER(name):
                continue
            if not info.isreg() or info.issparse():
                damaged[name] = "it is a link, a device or sparse, and no plain file"
            elif info.offset_data + info.size > end:
                damaged[name] = "the file ends inside it"
                return
            else:
                yield _Member(name, info.offset_data, info.size)
        file.seek(tar.offset)
        if any(file.read(tarfile.BLOCKSIZE)):  # neither the mark of the end nor the file's own
            raise tarfile.ReadError("no member begins there")
    except Exception as error:
        damaged[f"at byte {tar.offset:,}"] = f"{first_line(error)}; what follows is not read"


def _bytes_at(descriptor: int, offset: int, size: int) -> bytes:
    content = os.pread(descriptor, size, offset)
    if len(content) < size:
        raise ValueError("the file ends inside it")
    return content


def _text(file: io.BufferedReader, member: _Member) -> str:
    """The text of a member: of a ``.json`` whole, of others the first bytes."""
    is_json = member.name.lower().endswith(".json")
    if is_json and member.size > _LARGEST_JSON:
        return ""
    content = _bytes_at(file.fileno(), member.offset, member.size if is_json else min(member.size, _LARGEST_TEXT))
    return content.decode("utf-8", "backslashreplace")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):  # another program's matter, unless labels are in it
        return None


def _printed(value: Any) -> str:
    """A value as one text, which UTF-8 holds."""
    if value is None or isinstance(value, dict | list):
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_LARGEST_TEXT].encode("utf-8", "backslashreplace").decode()


def _label_columns(labels: list[list[str]]) -> tuple[NDArray[np.int64], Sequence[str] | None]:
    """Labels (n,) or (n, K), with -1 where a picture has fewer, and their names."""
    flat, names = text_labels([text for texts in labels for text in texts])
    counts = np.array([len(texts) for texts in labels], np.int64)
    most = int(counts.max(initial=1))
    if most == 1:
        return flat, names
    found = np.full((len(labels), most), -1, np.int64)
    found[np.arange(most) < counts[:, None]] = flat
    return found, names


def _read_list(path: Path) -> dict[str, str]:
    found = {}
    try:
        for number, line in text_lines(path):
            key, tab, label = line.partition("\t")
            if line and not (tab and label.strip()):
                raise DataError(f"{path} line {number} is no key<TAB>label")
            found[key.removeprefix("./")] = label.strip()
    except OSError as error:
        raise DataError(f"cannot read the list {path}: {error.strerror}") from None
    return found
