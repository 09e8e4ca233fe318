"""Writing ``X.rec`` with ``X.idx``, ``property`` and the class names, as insightface lays them out."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from plsc.data.record_dataset import label_map_path
from plsc.data.record_io import ImageRecord, pack_image, write_record
from plsc.errors import UsageError
from plsc.files import atomic_write, write_json

LARGEST_FLOAT = 2**24  # up to here float32, which labels are stored in, holds every integer


class RecordWriter:
    """Appends images to a ``.rec`` and its ``.idx``; made by :func:`record_writer`.

    Record 0 is the header: flag 2, labels (N+1, N+1+C). Images have the keys 1 … N; after them comes a record
    per class, with flag 2 and labels (first key, last key + 1). Where ``expected`` images are too many for
    float32 to number, there is no header, and every record is an image: the other convention.
    """

    def __init__(self, records: BinaryIO, index: BinaryIO, expected: int) -> None:
        self._records, self._index = records, index
        self.count = 0
        self.height = self.width = 112  # for the property file
        self._first_keys: list[int] = []
        self._has_header = 2 * expected < LARGEST_FLOAT
        if self._has_header:
            self._append_labels(0, 0.0, 0.0)  # its place; finish() fills it in

    def add(self, image: bytes, label: int) -> None:
        """Append one encoded image. Labels come in ascending order from 0 without gaps, else ValueError."""
        if label > LARGEST_FLOAT:
            raise UsageError(f"a .rec numbers no class past {LARGEST_FLOAT:,}, its labels being float32")
        key = self.count + self._has_header
        if label == len(self._first_keys):
            self._first_keys.append(key)
        elif label != len(self._first_keys) - 1:
            raise ValueError(f"label {label} after label {len(self._first_keys) - 1}: group images by class")
        self._append(key, pack_image(ImageRecord(0, (float(label),), (key, 0), image)))
        self.count += 1

    @property
    def num_classes(self) -> int:
        """Classes so far."""
        return len(self._first_keys)

    def finish(self) -> None:
        """Append the classes' records and fill in the header, if there is one."""
        if not self._has_header:
            return
        stop = self.count + 1
        bounds = [*self._first_keys, stop]
        for number, first in enumerate(self._first_keys):
            self._append_labels(stop + number, float(first), float(bounds[number + 1]))
        self._records.seek(0)
        write_record(self._records, _labels_alone(0, float(stop), float(stop + self.num_classes)))

    def _append_labels(self, key: int, first: float, second: float) -> None:
        self._append(key, _labels_alone(key, first, second))

    def _append(self, key: int, content: bytes) -> None:
        self._index.write(f"{key}\t{self._records.tell()}\n".encode("ascii"))
        write_record(self._records, content)


def _labels_alone(key: int, first: float, second: float) -> bytes:
    return pack_image(ImageRecord(2, (first, second), (key, 0), b""))


@contextmanager
def record_writer(path: Path, class_names: Sequence[str], *, expected: int) -> Iterator[RecordWriter]:
    """Write ``path`` (``X.rec``) and its companions aside; they appear when the block ends well.

    class_names: names of the classes in order of label; every one gets images.
    expected: how many images there will be at most.
    """
    if path.suffix != ".rec":
        raise UsageError(f"{path} does not end in .rec")
    with ExitStack() as stack:
        tmp_paths = [stack.enter_context(atomic_write(name)) for name in (path.with_suffix(".idx"), path)]
        index, records = (stack.enter_context(tmp_path.open("wb")) for tmp_path in tmp_paths)
        writer = RecordWriter(records, index, expected)
        yield writer
        writer.finish()
    with atomic_write(path.with_name("property")) as tmp_path:
        tmp_path.write_text(f"{writer.num_classes},{writer.height},{writer.width}\n", encoding="ascii")
    write_json(label_map_path(path), {"source": str(path), "classes": list(class_names)})
