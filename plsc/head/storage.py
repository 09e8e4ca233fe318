"""Where a class table lies and how its numbers are stored: the one place that knows all kinds of tables.

A kind of storage is a class of tables (:class:`plsc.head.class_table.ClassTable`) and its line in
:meth:`TableStorage.make`. What does not go together is refused here, for scripts and configurations alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from plsc.errors import UsageError
from plsc.head.class_table import ClassTable, TableShape
from plsc.head.host_memory import HostMemory, mapped_file
from plsc.head.host_table import HostTable
from plsc.head.low_precision import STATE_DTYPES
from plsc.parallel.mesh import Mesh

_WEIGHT_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_MOMENTUM_DTYPES = {**{str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}, "none": None}
# Makes a table in the mapped files of FILE, in the place of a HostTable.
MappedTables = Callable[[TableShape, torch.dtype, torch.device, Path, Mesh], HostTable]


@dataclass(frozen=True)
class TableStorage:
    """The storage of a class table and of its optimizer's state; attributes are :class:`plsc.ShardedHead`'s arguments.

    Attributes:
        weight_dtype, momentum_dtype: as dtypes.
        mapped_tables: of a rare feature, what makes a mapped table; None: a :class:`HostTable`.
        file: of a mapped table.

    Raises:
        UsageError: a value is none of its kind.
    """

    weight_dtype: torch.dtype
    momentum_dtype: torch.dtype | None
    placement: str = "device"
    mapped_tables: MappedTables | None = None

    @classmethod
    def of(
        cls,
        weight_dtype: torch.dtype | str,
        momentum_dtype: torch.dtype | str | None,
        placement: str = "device",
        mapped_tables: MappedTables | None = None,
    ) -> "TableStorage":
        """The storage with these dtypes, given as such or by name."""
        weight = _named("weight_dtype", weight_dtype, _WEIGHT_DTYPES)
        assert weight is not None
        momentum = _named("momentum_dtype", momentum_dtype, _MOMENTUM_DTYPES)
        mapped_file(str(placement))
        return cls(weight, momentum, placement, mapped_tables)

    @property
    def file(self) -> Path | None:
        """FILE of ``"mmap:FILE"``."""
        return mapped_file(str(self.placement))

    def make(self, shape: TableShape, mesh: Mesh, *, requires_grad: bool = False) -> ClassTable:
        """Make this rank's rows with their first values.

        Raises:
            UsageError, DataError: as :class:`HostMemory` does.
        """
        device, file = mesh.device, self.file
        if not is_staged(self.placement, device):
            return ClassTable.made(shape, self.weight_dtype, device, requires_grad=requires_grad)
        if self.mapped_tables is not None and file is not None:
            return self.mapped_tables(shape, self.weight_dtype, device, file, mesh)
        memory = HostMemory(file, mesh.rank, mesh.world_size, pinned=device.type == "cuda")
        return HostTable(shape, self.weight_dtype, device, memory)


def _named(name: str, value: torch.dtype | str | None, dtypes: Mapping[str, torch.dtype | None]) -> torch.dtype | None:
    """The one of ``dtypes`` that ``value`` is or names."""
    if isinstance(value, str) and value in dtypes:
        return dtypes[value]
    if not isinstance(value, str) and value in dtypes.values():
        return value
    raise UsageError(f"{name} must be one of {', '.join(dtypes)}, not {value!r}")


def is_staged(placement: str, device: torch.device) -> bool:
    """Return whether rows are copied to compute with them: a CPU reads its own memory in place, but not a file."""
    if placement == "device" or device.type == "meta":
        return False
    return device.type != "cpu" or mapped_file(placement) is not None
