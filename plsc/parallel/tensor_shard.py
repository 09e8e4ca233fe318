"""A rank's part of a tensor, in the form in which torch.distributed.checkpoint saves and loads it at any world size.

DTensor's Shard(0) cuts C rows into pieces of ⌈C/W⌉; the head's shards differ by one row at most, and a rank of tensor
parallelism holds rows of three parts of a fused weight. Checkpoints hold global offsets, so this uses the hooks that
DCP gives to sharded types of others.

A shard is written in pieces, each an item of its own, since DCP copies an item before it writes it. Loading reads the
stored items one after another, whatever their sizes, and copies each into its place: never a second copy of the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing torch.distributed.checkpoint takes as long as importing torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


_PIECE_BYTES = 64 << 20


class Block(NamedTuple):
    """``local``, which begins at ``offsets`` of the whole tensor: one offset for each of its dimensions."""

    local: Tensor
    offsets: tuple[int, ...]


class TensorShard(Tensor):
    """A handle for checkpoints on blocks of a tensor that is spread over ranks.

    It has the whole tensor's shape, no data beyond the blocks', which loading writes into, and no arithmetic.
    ``release`` is called before each piece is handed out: memory that maps a file then gives back the last one's pages.
    """

    blocks: list[Block]
    _release: Callable[[], None] | None
    _saving: bool

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], blocks: Sequence[Block], release: Callable[[], None] | None = None
    ) -> "TensorShard":
        """Wrap ``blocks``, one at least (it may be empty), without copying them."""
        first = blocks[0].local
        shard: TensorShard = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=first.dtype, device=first.device)
        shard.blocks = list(blocks)
        shard._release, shard._saving = release, False
        return shard

    @classmethod
    def of_rows(cls, local: Tensor, first: int, total: int, release: Callable[[], None] | None = None) -> "TensorShard":
        """Wrap ``local`` (n, …), which are rows [first, first + n) of ``total``."""
        block = Block(local, (first, *[0] * (local.dim() - 1)))
        return cls((total, *local.shape[1:]), [block], release)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse arithmetic."""
        raise NotImplementedError(f"a TensorShard is a checkpoint's handle; {function} takes its blocks")

    def release(self) -> None:
        """Let memory that maps a file give back the pages that were read or written last."""
        if self._release is not None:
            self._release()

    def __repr__(self) -> str:  # type: ignore[override]
        """For error messages."""
        parts = ", ".join(f"{tuple(block.local.shape)} at {block.offsets}" for block in self.blocks)
        return f"TensorShard({parts} of {tuple(self.shape)})"

    def __create_write_items__(self, fqn: str, object: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._saving = True
        properties = TensorProperties.create_from_tensor(self.blocks[0].local)
        items = []
        for piece in self._pieces():
            data = TensorWriteData(_chunk(piece), properties, self.shape)
            items.append(WriteItem(MetadataIndex(fqn, _chunk(piece).offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        self._saving = False
        return [_chunk(block) for block in self.blocks if block.local.numel()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        """Return the tensor that DCP writes or reads next: a piece if it planned to save, a whole block if to load.

        It then narrows the latter to the stored item's part.
        """
        self.release()
        assert index.offset is not None
        wanted = tuple(index.offset)
        candidates = self._pieces() if self._saving else iter(self.blocks)
        return next(block.local for block in candidates if block.offsets == wanted and block.local.numel())

    def _pieces(self) -> Iterator[Block]:
        """Cut the blocks into rows whose bounds, but for the blocks' own, are the same at every number of ranks."""
        for local, (first, *rest) in self.blocks:
            size = max(_PIECE_BYTES // max(local[:1].nbytes, 1), 1)
            start, stop = first, first + len(local)
            while start < stop and local.numel():
                end = min((start // size + 1) * size, stop)
                yield Block(local[start - first : end - first], (start, *rest))
                start = end


def _chunk(block: Block) -> "ChunkStorageMetadata":
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=block.local.shape)
