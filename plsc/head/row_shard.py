"""A rank's rows of a table, in the form in which torch.distributed.checkpoint saves and loads them at any world size.

DTensor's Shard(0) cuts C rows into pieces of ⌈C/W⌉; the head's shards differ by one row at most. Checkpoints hold
global offsets, so this uses the hooks that DCP gives to sharded types of others.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing torch.distributed.checkpoint takes as long as importing torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class RowShard(Tensor):
    """``local`` holds rows [first, first + len) of a table of ``total`` rows; loading writes into ``local``.

    It has the whole table's shape and no data beyond ``local``. It is a handle for checkpoints, not for arithmetic.
    """

    local: Tensor
    first: int

    @staticmethod
    def __new__(cls, local: Tensor, first: int, total: int) -> "RowShard":
        """Wrap ``local`` (n, …) without copying it."""
        shape = (total, *local.shape[1:])
        shard: RowShard = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        shard.local, shard.first = local, first
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

        if self.local.shape[0] == 0:
            return []
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.local), self.shape)
        return [WriteItem(MetadataIndex(fqn, self._chunk().offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        return [self._chunk()] if self.local.shape[0] else []

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        return self.local

    def _chunk(self) -> "ChunkStorageMetadata":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = torch.Size((self.first, *[0] * (self.local.dim() - 1)))
        return ChunkStorageMetadata(offsets=offsets, sizes=self.local.shape)
