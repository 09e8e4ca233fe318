"""The interface of image data sets, columns of their names, and the mapping of their labels onto 0 … C-1."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.codec import Encoding, decode_image, encode_image
from plsc.data.identity import file_stamps
from plsc.data.mixture import Mixture
from plsc.errors import DataError, IntegrityError
from plsc.files import write_json
from plsc.models.preprocessing import BILINEAR, ImageSize, resize_image
from plsc.models.preprocessing import image_size as checked_image_size
from plsc.regular_files import read_bytes

MAX_BAD_RECORDS = 1000
_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}").fullmatch


class StringColumn(Sequence[str]):
    """A read-only sequence of strings, each decoded or computed when it is indexed.

    A list of 42 million paths takes gigabytes as Python objects, and every loader process copies it. A subclass defines
    ``__len__`` and :meth:`at`.
    """

    @abstractmethod
    def at(self, index: int) -> str:
        """Return string ``index``, which lies in [0, len)."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self.at(row) for row in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self.at(int(row))

    def packed(self, rows: NDArray[np.int64]) -> "Iterator[PackedStringColumn]":
        """Yield strings ``rows`` (n,) as columns that follow one another."""
        yield PackedStringColumn.of(map(self.at, rows.tolist()))


class PackedStringColumn(StringColumn):
    """N strings as their joined UTF-8 bytes, in memory or mapped from a file.

    Args:
        data: uint8; string i is the bytes [offsets[i], offsets[i + 1]).
        offsets: int64 (N + 1,).
        errors: what becomes of bytes that are not UTF-8, as :meth:`bytes.decode` has it.
    """

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.int64], errors: str = "replace") -> None:
        self._data, self._offsets, self._errors = data, offsets, errors

    @classmethod
    def of(cls, strings: Iterable[str]) -> "PackedStringColumn":
        """Join ``strings``; file names that are not UTF-8 survive."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in strings]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets, "surrogateescape")

    def parts(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The bytes of these strings alone, and the offsets (N + 1,) in them."""
        first, last = int(self._offsets[0]), int(self._offsets[-1])
        return self._data[first:last], self._offsets - first

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def packed(self, rows: NDArray[np.int64]) -> "Iterator[PackedStringColumn]":
        """See :meth:`StringColumn.packed`; no string is made."""
        firsts, lengths = self._offsets[rows], self._offsets[rows + 1] - self._offsets[rows]
        if len(rows) and (firsts.min() < 0 or lengths.min() < 0 or (firsts + lengths).max() > len(self._data)):
            raise IntegrityError("a column of text is corrupt; use another copy")
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], lengths)
        yield PackedStringColumn(self._data[places], offsets, self._errors)

    def at(self, index: int) -> str:
        """Return string ``index``."""
        first, last = int(self._offsets[index]), int(self._offsets[index + 1])
        if not 0 <= first <= last:  # strings that lie in each other could be any multiple of the file's bytes
            raise IntegrityError(f"a column of text is corrupt at row {index}; use another copy")
        return bytes(self._data[first:last]).decode("utf-8", self._errors)


class ComputedStrings(StringColumn):
    """``count`` strings, of which ``name`` computes each from its index; it pickles, as a partial function does."""

    def __init__(self, count: int, name: Callable[[int], str]) -> None:
        self._count, self._name = count, name

    def __len__(self) -> int:
        return self._count

    def at(self, index: int) -> str:
        """Return string ``index``."""
        return self._name(index)


def number_names(numbers: NDArray[np.int64]) -> StringColumn:
    """Return the names of numbered classes: the decimal digits of ``numbers``."""
    return ComputedStrings(len(numbers), partial(_digits, numbers))


def _digits(numbers: NDArray[np.int64], index: int) -> str:
    return str(numbers[index])


class ImageDataset(ABC):
    """Labelled images in a fixed order, whose labels are known without decoding any image.

    A subclass defines :meth:`key`, and :meth:`picture`, or :meth:`image` where all images have one size. Subclasses are
    sent to loader processes: they must pickle, and hold no open handle when they do.

    Attributes:
        source: the path or specification that the data set was opened from.
        labels: int64 (N,), in 0 … C-1; or (N, K), with -1 where an image has fewer than K labels.
        class_names: C names; item c is the name (or number) of class c in the source.
        image_size: side of the square images in pixels, or (height, width); None leaves each at its stored size.
        interpolation: by which they are resized to it.
        skipped: the reason why a record was left out, by the record's key.
        empty_classes: classes without an image, which have no label: what each holds instead, in words, by its name.
        left_out: numbers of files that are no pictures, or of a kind that is not read here, by suffix.
        alignment: fingerprint of the face alignment; "" where images are returned as stored.
    """

    def __init__(
        self, source: str, labels: NDArray[np.int64], class_names: Sequence[str], image_size: ImageSize | None
    ) -> None:
        self.source = source
        self.labels = labels
        self.class_names = class_names
        self.image_size = None if image_size is None else checked_image_size(image_size)
        self.interpolation = BILINEAR
        self.skipped: dict[str, str] = {}
        self.empty_classes: dict[str, str] = {}
        self.left_out: dict[str, int] = {}
        self.alignment = ""

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.class_names)

    @property
    def parts(self) -> "Sequence[ImageDataset]":
        """The data sets that this one joins, whose images and classes follow one another; else itself."""
        return [self]

    @property
    def first_classes(self) -> Sequence[int]:
        """The first class of each part, and the number of all classes."""
        return [0, self.num_classes]

    @property
    def mixture(self) -> Mixture:
        """The parts that an epoch mixes: the data set as a whole, but for one that joins several."""
        return Mixture((len(self),))

    @property
    def labels_sha256(self) -> str:
        """:func:`plsc.data.identity.labels_digest` of the labels where that is known already, else ""."""
        return ""

    @property
    def samples_file(self) -> Path | None:
        """The file that keeps :func:`plsc.data.identity.samples`; None: it is computed each time."""
        return None

    def __repr__(self) -> str:
        """Return how many images of how many classes these are, and the source."""
        return f"<{type(self).__name__} of {self.source}: {len(self):,} images of {self.num_classes:,} classes>"

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, H, W) RGB: :meth:`picture`, resized when ``image_size`` is set.

        Raises:
            DataError: the image cannot be read; the message names its record.
        """
        picture = self.picture(index)
        return picture if self.image_size is None else resize_image(picture, self.image_size, self.interpolation)

    def picture(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, H, W) in its stored size, or as :meth:`image` if it has none."""
        return self.image(index)

    @abstractmethod
    def key(self, index: int) -> str:
        """Return the readable id of image ``index``: its path, or its record's key."""

    @property
    def faces_found(self) -> int:
        """How many faces the picture shows that the last image was cut out of; 0 where none were looked for."""
        return 0

    def metadata(self, index: int) -> dict[str, str]:
        """Return what the source says of image ``index`` besides its key and labels: texts by their names."""
        return {}

    def record_key(self, index: int) -> str:
        """Return the record's key of an image in a ``.rec`` even if its path is known; elsewhere :meth:`key`."""
        return self.key(index)

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return what tells images [start, stop) from others under the same labels.

        That is :meth:`key` of each, unless that is a mere number; a subclass may do it faster.
        """
        return [self.key(index) for index in range(start, stop)]

    def stamps(self, start: int, stop: int) -> bytes:
        """Return bytes that are others once images [start, stop) have other contents; no image is read for them.

        Here they are those of the file or folder that ``source`` names, or the same forever where it names none.
        :func:`plsc.data.identity.file_stamps` makes them of a file for each image.
        """
        return file_stamps([self.source])

    def save_label_map(self, path: Path) -> None:
        """Write ``{"source", "classes"}`` as JSON; ``classes[c]`` is the source's name of class c."""
        write_json(path, {"source": self.source, "classes": list(self.class_names)})


class EncodedDataset(ImageDataset):
    """A data set whose images are stored as encoded files (JPEG, PNG, …)."""

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """Return the stored bytes of image ``index``.

        Raises:
            DataError: they cannot be read; the message names the record.
        """

    def picture(self, index: int) -> torch.Tensor:
        """Return image ``index`` decoded, in its stored size."""
        content = self.encoded(index)
        try:
            return decode_image(content, "")
        except DataError:  # again with its name: to look it up for each sound image takes a tenth of the time
            return decode_image(content, f"image {self.key(index)} of {self.source}")


class FileDataset(EncodedDataset):
    """Image files; keys are their paths below ``folder``.

    Args:
        folder: whose files they are.
        paths: below it.
        labels: int64 (N,).
        class_names: C names.
        image_size: as :class:`ImageDataset`'s.
        may_leave: they may be links that lead out of the folder.
    """

    def __init__(
        self,
        folder: Path,
        paths: Iterable[str],
        labels: NDArray[np.int64],
        class_names: Sequence[str],
        image_size: ImageSize | None,
        *,
        may_leave: bool = False,
    ) -> None:
        super().__init__(str(folder), labels, class_names, image_size)
        self.folder, self._paths = folder, PackedStringColumn.of(paths)
        self._below = None if may_leave else folder.resolve()

    def key(self, index: int) -> str:
        """Return the image's path below the folder, as a list has it."""
        return self._paths[index]

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the paths of images [start, stop)."""
        return self._paths[start:stop]

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the sizes and times of the files of images [start, stop)."""
        return file_stamps([f"{self.folder}/{path}" for path in self._paths[start:stop]])

    def encoded(self, index: int) -> bytes:
        """Read the image file."""
        return read_bytes(self.folder / self._paths[index], below=self._below)


def encoded_image(dataset: ImageDataset, index: int, encoding: Encoding) -> bytes:
    """Encode image ``index``: the stored bytes if the data set keeps stored sizes, else resized and re-encoded.

    Raises:
        DataError: the image cannot be read or, where it is re-encoded, decoded; the message names it.
    """
    if isinstance(dataset, EncodedDataset) and dataset.image_size is None:
        return dataset.encoded(index)
    return encode_image(dataset.image(index), encoding)


def first_labels(labels: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The first label that each image has, int64 (N,), of labels (N,) or (N, K); -1 where it has none."""
    if labels.ndim > 1:
        labels = np.take_along_axis(labels, np.argmax(labels >= 0, axis=1)[:, None], 1)[:, 0]
    return labels.astype(np.int64, copy=False)


def map_numbers(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Close the gaps between class numbers, keeping their order.

    Returns:
        The labels, int64 (N,) in 0 … C-1, and the original number of each class, int64 (C,).
    """
    if len(numbers) and numbers.min() >= 0 and numbers.max() < 4 * len(numbers) + 1024:
        # Counting takes a twentieth of the time that sorting does for tens of millions of labels.
        present = np.bincount(numbers) > 0
        return (np.cumsum(present) - 1)[numbers], np.flatnonzero(present).astype(np.int64)
    classes, labels = np.unique(numbers, return_inverse=True)
    return labels.reshape(-1).astype(np.int64), classes


def map_names(names: Sequence[str]) -> tuple[NDArray[np.int64], Sequence[str]]:
    """Map label texts to labels: by number if every text is a plain integer, otherwise by name in sorted order.

    A plain integer is one as Python prints it: "007" is a name, and a different one than "7".

    Returns:
        The labels, int64 (N,) in 0 … C-1, and the C class names.
    """
    if not all(_PLAIN_INTEGER(name) for name in names):
        classes = sorted(set(names))
        label_of = {name: label for label, name in enumerate(classes)}
        return np.array([label_of[name] for name in names], dtype=np.int64), PackedStringColumn.of(classes)
    labels, values = map_numbers(np.array([int(name) for name in names], dtype=np.int64))
    return labels, number_names(values)
