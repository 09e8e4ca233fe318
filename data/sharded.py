"""A data set of shards: rows that an index finds in files of one format."""

import contextlib
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.dataset import EncodedDataset, PackedStringColumn
from plsc.data.shard_index import open_index, shard_stamps
from plsc.data.shards import NO_LABEL, ShardFormat
from plsc.errors import DataError, UsageError
from plsc.models.preprocessing import ImageSize
from plsc.progress import warn

_LOGGED = 10
_CHECKED = 1024  # images


class ShardedDataset(EncodedDataset):
    """The images of ``shards`` in their order, found by :func:`plsc.data.shard_index.open_index`.

    ``labels`` are (N,), or (N, K) where images have several; all -1 where the shards have none. ``skipped`` holds the
    fault of each row left out, by key.

    Args:
        source: as the user wrote it.
        shards: the files.
        shard_format: reads them.
        image_size: as :class:`plsc.data.ImageDataset`'s.
        max_bad_records: damaged rows that are left out; None: any number.
        label_columns: labels of an image that are taken, the first ones; None: all.

    Raises:
        UsageError: a shard does not exist.
        DataError: one cannot be read; or more than ``max_bad_records`` rows are damaged, or all.
    """

    def __init__(
        self,
        source: str,
        shards: Sequence[Path],
        shard_format: ShardFormat,
        image_size: ImageSize | None,
        *,
        max_bad_records: int | None,
        label_columns: int | None = None,
    ) -> None:
        shard_format.check(shards)
        self.label_columns = label_columns
        self.shards, self.format = list(shards), shard_format
        self.index = open_index(source, self.shards, shard_format)
        self._starts: list[int] = self.index.starts.tolist()  # in which bisect takes a tenth of numpy's time
        super().__init__(source, *self._labels(), image_size)
        damaged = [(self._of_shard(shard, key), why) for shard, key, why in self.index.damaged]
        self._check_damage(damaged, max_bad_records)
        self.skipped = dict(damaged)
        for key, why in damaged[:_LOGGED]:
            warn("plsc.data", f"left out: {shard_format.noun} {key} of {source}: {why}")
        if len(damaged) > _LOGGED:
            warn("plsc.data", f"left out: {len(damaged) - _LOGGED} {shard_format.noun}s more of {source}")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is mapped from a file, which another process maps for itself."""
        state = self.__dict__.copy()
        if self.index.folder is not None:
            del state["index"], state["labels"], state["class_names"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "index" not in state:
            self.index = open_index(self.source, self.shards, self.format)
            self.labels, self.class_names = self._labels()

    @property
    def labels_sha256(self) -> str:
        """See :attr:`ImageDataset.labels_sha256`."""
        return self.index.labels_sha256 if self.labels is self.index.labels else ""

    @property
    def samples_file(self) -> Path | None:
        """See :attr:`ImageDataset.samples_file`."""
        folder = self.index.folder
        return None if folder is None else folder / f"samples-{self.label_columns or 'all'}.json"

    def key(self, index: int) -> str:
        """Return the image's name where the format has one, else :meth:`record_key`."""
        if self.index.names is not None:
            return self.record_key(index)
        shard = self._shard(index)
        found = self.format.names(self.shards[shard], self.index.numbers_of(shard, index, index + 1))
        return self.record_key(index) if found is None else found[0]

    def record_key(self, index: int) -> str:
        """Return the key in the index; of several shards after its shard's name, if it is a number or was before."""
        shard = self._shard(index)
        if self.index.names is not None:
            is_repeated = self.index.repeated is not None and self.index.repeated[index]
            return self._of_shard(shard, self.index.names[index]) if is_repeated else self.index.names[index]
        return self._of_shard(shard, str(self.index.numbers_of(shard, index, index + 1)[0]))

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the images' names; where they have none, their keys and their places in their files.

        Another file has its records elsewhere, for they are as long as their images. Where these have one length, the
        checksums of 1,024 of the file's images tell it.
        """
        found: list[str] = []
        while start < stop:
            shard = self._shard(start)
            end = min(stop, int(self.index.starts[shard + 1]))
            found += [self._of_shard(shard, text) for text in self._ids_in(shard, start, end)]
            start = end
        return found

    def _ids_in(self, shard: int, start: int, stop: int) -> Sequence[str]:
        if self.index.names is not None:
            return self.index.names[start:stop]
        numbers = self.index.numbers_of(shard, start, stop)
        if (names := self.format.names(self.shards[shard], numbers)) is not None:
            return names
        places = self.index.places[start:stop]
        at = places[:, 0] if places.shape[1] else numbers
        found = [f"{key} at {place}" for key, place in zip(numbers.tolist(), at.tolist(), strict=True)]
        step = -(-len(self) // _CHECKED)
        for index in range(start + -start % step, stop, step):
            with contextlib.suppress(DataError):
                found[index - start] += f" of {zlib.crc32(self.encoded(index)):08x}"
        return found

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the sizes and times of the shards that hold images [start, stop)."""
        own = self.shards[self._shard(start) : self._shard(stop - 1) + 1]
        return shard_stamps([path for shard in own for path in self.format.stamped(shard)])

    def encoded(self, index: int) -> bytes:
        """Read the row's image."""
        shard = self._shard(index)
        row, place = index - self._starts[shard], self.index.places[index]
        try:
            return self.format.read(self.shards[shard], row, place)
        except ValueError as error:
            where = f"{self.format.noun} {self.record_key(index)} of {self.shards[shard]}"
            raise DataError(f"{where} is damaged: {error}") from None

    def metadata(self, index: int) -> dict[str, str]:
        """Return the further columns of image ``index``."""
        return {name: texts[index] for name, texts in self.index.columns.items()}

    @property
    def has_labels(self) -> bool:
        """Whether the shards say of any image what it is of."""
        return self.index.labels is not None

    def check_labels(self) -> None:
        """Raise where images have no labels, or the format holds some labels only rounded.

        Raises:
            UsageError: there are none, or a shard has none.
            DataError: a label is past what the format holds exactly.
        """
        if not self.has_labels:
            options = ", ".join(f"?{name}= ({text})" for name, text in self.format.options.items() if name != "image")
            raise UsageError(
                f"{self.source} has no labels; {f'name them by {options}, or ' if options else ''}give data.labels"
            )
        if self.index.unlabelled:
            first = self.shards[self.index.unlabelled[0]]
            raise UsageError(f"{first} has no labels, and other files of {self.source} have: leave it out, or label it")
        self.format.check_classes(self)

    def _labels(self) -> tuple[Any, Sequence[str]]:
        stored, names, columns = self.index.labels, self.index.class_names, self.label_columns
        if stored is None:
            return np.broadcast_to(np.int64(-1), (int(self.index.starts[-1]),)), []
        labels = stored if self.index.folder is not None else stored.astype(np.int64)
        if labels.ndim == 1 or columns is None or columns >= labels.shape[1]:
            return labels, names
        order = np.argsort(labels < 0, axis=1, kind="stable")[:, :columns]  # the first ones that are there
        taken = np.take_along_axis(labels, order, 1)
        taken = taken[:, 0] if columns == 1 else taken
        present, inverse = np.unique(taken[taken >= 0], return_inverse=True)
        mapped = np.full(taken.shape, -1, np.int64)
        mapped[taken >= 0] = inverse
        return mapped, PackedStringColumn.of(names[number] for number in present.tolist())

    def _shard(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1

    def _of_shard(self, shard: int, key: str) -> str:
        return key if len(self.shards) == 1 else f"{self.shards[shard].name}/{key}"

    def _check_damage(self, damaged: list[tuple[str, str]], most: int | None) -> None:
        total, noun = len(self) + len(damaged), self.format.noun
        if total == 0:
            raise DataError(f"{self.source} holds no image {noun}; use another copy")
        if len(damaged) == total or (most is not None and len(damaged) > most):
            key, why = damaged[0]
            label = self.format.given.get("label")
            if label and len(damaged) == total and all(each.startswith(NO_LABEL) for _, each in damaged):
                raise UsageError(f"no {noun} of {self.source} has a label by ?label={label}; the first, {key}: {why}")
            raise DataError(
                f"{len(damaged):,} of the {total:,} {noun}s of {self.source} are damaged, the first with key "
                f"{key} ({why}); use another copy{', or another ?label=' if 'label' in self.format.given else ''}"
            )
