"""Class tables as .safetensors files, written and read in pieces: none of them is in memory whole.

``weight`` is (classes x sub-centres, D), rows of a class together; beside it lie the optimizer's tables. The metadata
hold ``classes``, ``centers`` and what else the writer knows, as texts.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plsc.errors import DataError, UsageError, first_line
from plsc.files import atomic_write, pinned, read_json
from plsc.regular_files import open_regular
from plsc.train.checkpoint_writer import write_errors

FORMAT = "plsc-table-1"
WEIGHT = "weight"
_LARGEST_HEADER = 4 << 20
_DTYPES = {  # of the format, by torch's
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
}
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_table(
    out: Path, tensors: Shapes, pieces: Callable[[str], Iterator[Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write a .safetensors file, atomically.

    Args:
        out: the file.
        tensors: the type and the shape of each, by name.
        pieces: gives the consecutive rows of a tensor, of its type.
        metadata: more texts of the file's own.

    Raises:
        DataError: it cannot be written, or a type has no place in it.
    """
    if unknown := [str(dtype) for dtype, _ in tensors.values() if dtype not in _DTYPES]:
        raise DataError(f"{out} cannot hold {unknown[0]}; a table is of floating point numbers or int8")
    ordered = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, **metadata}}
    place = 0
    for name in ordered:
        dtype, shape = tensors[name]
        end = place + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with write_errors(str(out)), atomic_write(out) as tmp_path, tmp_path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            for piece in pieces(name):
                write_rows(file, piece)


def write_rows(file: BinaryIO, rows: Tensor) -> None:
    """Write the values of ``rows`` as they lie in memory."""
    file.write(rows.contiguous().view(torch.uint8).numpy().data.cast("B"))


class TableFile:
    """The ``weight`` of a file of :func:`write_table`, mapped.

    Attributes:
        classes, centers, dim: its rows are classes x centers.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path``.

        Raises:
            DataError: it is no .safetensors file, or holds no class table.
            OSError: it is missing, or may not be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with open_regular(path) as file:
                if int.from_bytes(file.read(8), "little") > _LARGEST_HEADER:
                    raise DataError(f"{path} is truncated or corrupt: it announces a header that is too long")
                tensors: Any = safe_open(pinned(file), framework="pt")  # maps the file, which may be closed then
            metadata = tensors.metadata() or {}
            self._tensors, self._weight = tensors, tensors.get_slice(WEIGHT)
            shape, dtype = self._weight.get_shape(), self._weight.get_dtype()
        except (SafetensorError, ValueError) as error:
            raise DataError(
                f"{path} holds no class table ({first_line(error)}); plsc table writes such files"
            ) from None
        centers = metadata.get("centers", "1")
        self.centers = int(centers) if centers.isdecimal() and len(centers) < 4 else 0
        if len(shape) != 2 or dtype not in _DTYPES.values() or dtype == "I8" or not self.centers:
            raise DataError(f"{path} holds no class table: weight has to be (rows, D) of floating point numbers")
        rows, self.dim = shape
        self.classes, rest = divmod(rows, self.centers)
        if rest:
            raise DataError(f"{path} holds {rows:,} rows, which are no {self.centers} for each class; use another copy")

    @classmethod
    def named_by(cls, key: str, value: str) -> "TableFile":
        """Open the file that is the value of a configuration key; DataError, which names both, if it cannot be read."""
        try:
            return cls(Path(value))
        except (OSError, DataError) as error:
            raise DataError(f"{key} = {value} cannot be read: {first_line(error)}") from None

    def read(self, first: int, stop: int) -> Tensor:
        """The rows of classes [first, stop), (n, centers, D), in float32."""
        rows: Tensor = self._weight[first * self.centers : stop * self.centers]
        return rows.float().view(stop - first, self.centers, self.dim)

    def columns(self) -> dict[str, Tensor]:
        """All that the file holds, as it is stored: the weight and the optimizer's tables by their names."""
        return {name: self._tensors.get_tensor(name) for name in self._tensors.keys()}  # noqa: SIM118 (no dict)


def class_names_beside(path: Path, classes: int) -> list[list[str]]:
    """The names of each of the ``classes`` of an exported table, which lie beside it as NAME.json.

    Raises:
        UsageError: there is no such file.
        DataError: it holds no names, or those of another table.
    """
    names = path.with_suffix(".json")
    if not names.exists():
        raise UsageError(f"{path} has no names of its classes beside it ({names}); export a table whose classes have")
    content = read_json(names)
    listed = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not all(
        isinstance(each, list) and all(isinstance(name, str) for name in each) for each in listed
    ):
        raise DataError(f"{names} holds no names of classes; use another copy")
    if len(listed) != classes:
        raise DataError(f"{path} holds {classes:,} classes, and names of {len(listed):,} lie beside it")
    return listed
