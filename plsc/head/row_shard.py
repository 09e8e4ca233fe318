"""A rank's rows of a table, in the form in which torch.distributed.checkpoint saves and loads them at any world size.

DTensor's Shard(0) cuts C rows into pieces of ⌈C/W⌉; the head's shards differ by one row at most. Checkpoints hold
global offsets, so this uses the hooks that DCP gives to sharded types of others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass
class RowShard:
    """``local`` holds rows [first, first + len) of a table of ``total`` rows; loading writes into ``local``."""

    local: Tensor
    first: int
    total: int

    def size(self) -> torch.Size:
        """The whole table's shape."""
        return torch.Size((self.total, *self.local.shape[1:]))

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        if self.local.shape[0] == 0:
            return []
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.local), self.size())
        return [WriteItem(MetadataIndex(fqn, self._chunk().offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.local.shape[0] else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local

    def _chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size((self.first, *[0] * (self.local.dim() - 1)))
        return ChunkStorageMetadata(offsets=offsets, sizes=self.local.shape)
