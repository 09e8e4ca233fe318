"""Files of landmarks: where the five points of the face lie in each image.

One line per image, in any order, in one of three forms; the first line tells which:

    path,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5        CSV; a path with a comma in it stands in "double quotes"
    path<TAB>x1<TAB>y1 … x5<TAB>y5             TSV
    {"path": "ann/1.jpg", "landmarks": [[x1, y1], … [x5, y5]]}       JSON lines

A first line of names (path,x1,…) is passed over, and so are empty lines. Paths are the images' keys: below the folder,
as the list has them, or the record's number in a .rec. For the points' order and units see :mod:`plsc.data.alignment`.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.dataset import ImageDataset
from plsc.errors import DataError, UsageError
from plsc.files import sha256

NUMBERS = 10
FORM = "path,x1,y1,…,x5,y5 (or with tabs, or JSON lines)"


def read_landmarks(path: Path) -> dict[str, tuple[float, ...]]:
    """The ten numbers of each image, by its key.

    Raises :class:`UsageError` if there is no such file, and :class:`DataError`, naming the line, for one of another
    form or an image named twice. Whether the points are a face's shows when they are used.
    """
    if not path.is_file():
        raise UsageError(f"there is no file of landmarks {path}")
    found: dict[str, tuple[float, ...]] = {}
    for number, name, numbers in _entries(path):
        if name in found:
            raise DataError(f"{path} line {number} names {name[:80]} again; give each image one line")
        found[name] = numbers
    if not found:
        raise DataError(f"{path} holds no landmarks; each line is {FORM}")
    return found


class FileLandmarks:
    """The landmarks of a data set's images, from a file.

    identity: the file's SHA-256. Making it raises as :func:`read_landmarks` does, and :class:`DataError` when the file
    knows none of the images; calling it does for an image without a line.
    """

    def __init__(self, path: Path, dataset: ImageDataset) -> None:
        found = read_landmarks(path)
        self.path = path
        self.identity = f"landmarks {sha256(path)[:16]}"
        keys = (dataset.key(index).removeprefix("./") for index in range(len(dataset)))
        missing = (float("nan"),) * NUMBERS
        rows = np.fromiter((found.get(key, missing) for key in keys), dtype=(np.float64, NUMBERS), count=len(dataset))
        if np.isnan(rows[:, 0]).all():
            raise DataError(
                f"{path} knows none of the {len(dataset):,} images of {dataset.source}: it names "
                f"{next(iter(found))[:80]}, and the first image is {dataset.key(0)}"
            )
        self._points: NDArray[np.float64] = rows.reshape(-1, 5, 2)

    def __call__(self, index: int, image: torch.Tensor, name: str) -> NDArray[np.float64]:
        """The landmarks (5, 2) of image ``index``, which a person calls ``name``."""
        points: NDArray[np.float64] = self._points[index]
        if np.isnan(points).all():
            raise DataError(f"{name}: {self.path} has no landmarks for it")
        return points


def _entries(path: Path) -> Iterator[tuple[int, str, tuple[float, ...]]]:
    """(line, key, ten numbers) of each line that is neither empty nor the names of the columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                parse = _from_json if line.lstrip().startswith("{") else _from_fields
                name, values = parse(line)
                if number == 1 and name == "path" and parse is _from_fields:
                    continue
                yield number, name.removeprefix("./"), _numbers(values)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except (ValueError, TypeError, KeyError, csv.Error, RecursionError):
        raise DataError(f"{path} line {number} is {line.strip()[:80]!r}; each line is {FORM}") from None


def _from_fields(line: str) -> tuple[str, Sequence[object]]:
    line = line.rstrip("\r\n")
    name, *values = line.split("\t") if "\t" in line else next(csv.reader([line], strict=True))
    if not name.strip():
        raise ValueError("no path")
    return name, values


def _from_json(line: str) -> tuple[str, Sequence[object]]:
    entry = json.loads(line)
    points = entry["landmarks"]
    if not isinstance(entry["path"], str) or not isinstance(points, list):
        raise TypeError("other types")
    pairs = all(isinstance(point, list) and len(point) == 2 for point in points)
    return entry["path"], [number for point in points for number in point] if pairs else points


def _numbers(values: Sequence[object]) -> tuple[float, ...]:
    if len(values) != NUMBERS or any(isinstance(value, bool) for value in values):
        raise ValueError("not ten numbers")
    return tuple(float(value) for value in values)  # type: ignore[arg-type]  # what is no number raises
