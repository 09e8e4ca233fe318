"""Where a class table lies and how its numbers are stored: the one place that knows all kinds of tables.

A kind of storage is a class of tables (:class:`plsc.head.class_table.ClassTable`) and its line in
:meth:`TableStorage.make`. What does not go together is refused here, for scripts and configurations alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from plsc.errors import UsageError
from plsc.head.class_table import ClassTable, TableShape
from plsc.head.host_memory import HostMemory, mapped_file
from plsc.head.host_table import HostTable
from plsc.head.journaled_table import JournaledFiles, JournaledTable
from plsc.head.low_precision import STATE_DTYPES
from plsc.parallel.mesh import Mesh

_WEIGHT_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_MOMENTUM_DTYPES = {**{str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}, "none": None}


@dataclass(frozen=True)
class JournalOptions:
    """Whether a mapped table's files are a checkpoint of it.

    Attributes:
        journal: keep the values that rows had at the last savepoints (:meth:`plsc.ShardedHead.set_savepoint`), so that
            a head that is made over the files again goes on after :meth:`plsc.ShardedHead.roll_back`, whatever killed
            the process.
    """

    journal: bool = False


@dataclass(frozen=True)
class TableStorage:
    """The storage of a class table and of its optimizer's state; attributes are :class:`plsc.ShardedHead`'s arguments.

    Attributes:
        weight_dtype, momentum_dtype: as dtypes.
        file: of a mapped table.

    Raises:
        UsageError: a value is none of its kind, or they do not go together.
    """

    weight_dtype: torch.dtype
    momentum_dtype: torch.dtype | None
    placement: str = "device"
    journal: bool = False

    @classmethod
    def of(
        cls,
        weight_dtype: torch.dtype | str,
        momentum_dtype: torch.dtype | str | None,
        placement: str = "device",
        journal: bool = False,
    ) -> "TableStorage":
        """The storage with these dtypes, given as such or by name."""
        weight = _named("weight_dtype", weight_dtype, _WEIGHT_DTYPES)
        assert weight is not None
        momentum = _named("momentum_dtype", momentum_dtype, _MOMENTUM_DTYPES)
        return cls(weight, momentum, placement, journal)

    def __post_init__(self) -> None:
        if self.file is None and self.journal:  # the placement is looked at first: it may be none
            raise UsageError(
                f'journal is for tables in a mapped file: give placement="mmap:FILE", not {self.placement!r}'
            )

    @property
    def file(self) -> Path | None:
        """FILE of ``"mmap:FILE"``."""
        return mapped_file(str(self.placement))

    def make(self, shape: TableShape, mesh: Mesh, *, requires_grad: bool = False) -> ClassTable:
        """Make this rank's rows with their first values; a journaled file that holds such a table is taken as it is.

        Raises:
            UsageError, DataError: as :class:`HostMemory` does.
        """
        device, file = mesh.device, self.file
        if not is_staged(self.placement, device):
            return ClassTable.made(shape, self.weight_dtype, device, requires_grad=requires_grad)
        if self.journal and file is not None:
            return JournaledTable(shape, self.weight_dtype, device, JournaledFiles(file, shape, mesh))
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
