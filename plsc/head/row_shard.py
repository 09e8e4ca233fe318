"""A rank's rows of a table, in the form in which torch.distributed.checkpoint saves and loads them at any world size.

DTensor's Shard(0) cuts C rows into pieces of ⌈C/W⌉; the head's shards differ by one row at most. Checkpoints hold
global offsets, so this uses the hooks that DCP gives to sharded types of others.

A shard is written in pieces, each an item of its own, since DCP copies an item before it writes it. Loading reads the
stored items one after another, whatever their sizes, and copies each into its rows: never a second copy of the table.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing torch.distributed.checkpoint takes as long as importing torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


_PIECE_BYTES = 64 << 20


class RowShard(Tensor):
    """A handle for checkpoints on rows [first, first + len(local)) of a table of ``total`` rows.

    It has the whole table's shape, no data beyond ``local``, which loading writes into, and no arithmetic.
    ``release`` is called before each piece is handed out: memory that maps a file then gives back the last one's pages.
    """

    local: Tensor
    first: int
    _release: Callable[[], None] | None
    _saving: bool

    @staticmethod
    def __new__(cls, local: Tensor, first: int, total: int, release: Callable[[], None] | None = None) -> "RowShard":
        """Wrap ``local`` (n, …) without copying it."""
        shape = (total, *local.shape[1:])
        shard: RowShard = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        shard.local, shard.first, shard._release = local, first, release
        shard._saving = False
        return shard

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse arithmetic."""
        raise NotImplementedError(f"a RowShard is a checkpoint's handle; {function} takes its .local")

    def __repr__(self) -> str:  # type: ignore[override]
        """For error messages."""
        return f"RowShard(rows [{self.first}, {self.first + len(self.local)}) of {tuple(self.shape)})"

    def __create_write_items__(self, fqn: str, object: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._saving = True
        properties = TensorProperties.create_from_tensor(self.local)
        items = []
        for piece in map(self._chunk, self._pieces()):
            data = TensorWriteData(piece, properties, self.shape)
            items.append(WriteItem(MetadataIndex(fqn, piece.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        self._saving = False
        return [self._chunk(slice(0, len(self.local)))] if self.local.shape[0] else []

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        """Return the tensor that DCP writes or reads next: a piece if it planned to save, all of ``local`` if to load.

        It then narrows the latter to the stored item's rows.
        """
        if self._release is not None:
            self._release()
        if not self._saving:
            return self.local
        assert index.offset is not None
        first = index.offset[0] - self.first
        return next(self.local[piece] for piece in self._pieces() if piece.start == first)

    def _pieces(self) -> Iterator[slice]:
        """Cut ``local`` into parts whose bounds, but for its own, are the same at every number of ranks."""
        size = max(_PIECE_BYTES // max(self.local[:1].nbytes, 1), 1)
        start, stop = self.first, self.first + len(self.local)
        while start < stop:
            end = min((start // size + 1) * size, stop)
            yield slice(start - self.first, end - self.first)
            start = end

    def _chunk(self, rows: slice) -> "ChunkStorageMetadata":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = torch.Size((self.first + rows.start, *[0] * (self.local.dim() - 1)))
        return ChunkStorageMetadata(offsets=offsets, sizes=self.local[rows].shape)
