"""Tensor parallelism of vision transformers: the ranks of a group share each block's heads and hidden units.

The layout is Megatron-LM's (Shoeybi et al., 2019), as DTensor plans: ``qkv`` and ``fc1`` are split by columns, ``proj``
and ``fc2`` by rows. Between them tokens are split too (sequence parallelism: Korthikanti et al., 2022), so that a rank
normalises and keeps a part of the tokens, and the all-reduces of a block become all-gathers and reduce-scatters of the
same bytes. Patch and position embedding, which are small, are computed by all.

All ranks of a group see the same images, and their replicated layers draw the same random numbers.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from plsc.errors import UsageError
from plsc.parallel.strategies.base import Loss, Slice, Strategy, Weight
from plsc.parallel.strategies.cuts import COLUMNS, ENDING, ROWS, splits_tokens, token_counts
from plsc.parallel.strategies.fsdp import FullySharded
from plsc.parallel.strategies.layout import Layout

# Other attentions and MLPs of timm have weights, or shapes that are fixed in forward(), which the plan does not know.
_ATTENTIONS = ("plsc.models.vit.Attention", "timm.layers.attention.Attention")
_MLPS = ("plsc.models.vit.Mlp", "timm.layers.mlp.Mlp")
_QKV = ".attn.qkv."


def check_tensor_parallel(backbone: nn.Module, name: str, tp: int) -> None:
    """Raise :class:`UsageError` unless ``tp`` ranks can share the blocks of ``backbone``, called ``name``."""
    blocks = transformer_blocks(backbone)
    if not blocks:
        raise UsageError(
            f"parallel.tp = {tp} splits the blocks of vision transformers, and backbone = {name!r} has none that it "
            "knows: set tp = 1, or take vit_* or timm:vit_*"
        )
    for block in blocks:
        heads, hidden = int(block.attn.num_heads), block.mlp.fc1.out_features
        if heads % tp or hidden % tp:
            divisors = ", ".join(str(k) for k in range(1, heads + 1) if heads % k == 0 and hidden % k == 0)
            raise UsageError(
                f"parallel.tp = {tp} does not divide the {heads} heads and {hidden} hidden units of a block of "
                f"backbone = {name!r}: set tp to one of {divisors}"
            )


def transformer_blocks(backbone: nn.Module) -> list[Any]:
    """Return the blocks that tensor parallelism can split; none where there are others besides."""
    trunk = getattr(backbone, "trunk", backbone)
    blocks = list(getattr(trunk, "blocks", []))
    return blocks if all(_can_be_split(block) for block in blocks) else []


def _can_be_split(block: Any) -> bool:
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    return (
        isinstance(attention, nn.Module)
        and isinstance(mlp, nn.Module)
        and _class_name(attention) in _ATTENTIONS
        and _class_name(mlp) in _MLPS
        and {name for name, _ in attention.named_parameters()} <= _weights_of("qkv", "proj")
        and {name for name, _ in mlp.named_parameters()} <= _weights_of("fc1", "fc2")
    )


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _weights_of(*layers: str) -> set[str]:
    return {f"{layer}.{weight}" for layer in layers for weight in ("weight", "bias")}


def split_blocks(backbone: nn.Module, mesh: DeviceMesh) -> None:
    """Split the blocks of ``backbone`` over the ranks of ``mesh``, in place; its split weights become DTensors.

    Tokens are split where the number of ranks divides them (in training: those that ``mask_ratio`` keeps) and the
    backbone is one of plsc's; timm's, most of which have a class token, are replicated between the layers.

    Args:
        backbone: whole, with the same weights on every rank.
        mesh: the ranks of the group, one dimension.
    """
    tp = mesh.size()
    by_tokens = splits_tokens(token_counts(backbone), tp)
    blocks = transformer_blocks(backbone)
    for block in blocks:
        _keep_whole_heads_together(block.attn, tp)
        parallelize_module(block, mesh, _block_plan(by_tokens), src_data_rank=None)
    if by_tokens:
        split_tokens = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
        parallelize_module(blocks[0], mesh, split_tokens)
    for layer, styles in _ending_plan(backbone, by_tokens).items():
        for style in styles:
            parallelize_module(backbone.get_submodule(layer), mesh, style, src_data_rank=None)
        if isinstance(backbone.get_submodule(layer), nn.Linear):
            # FSDP2, which gathers a large layer on its own, hooks what it returns: no view, as to_local() makes
            backbone.get_submodule(layer).register_forward_hook(_copied)


def _copied(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.clone()


def _block_plan(by_tokens: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if by_tokens else Replicate()
    norms: dict[str, ParallelStyle] = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if by_tokens else {}
    # gathered once before the branch: its gradient, a sum over the ranks, is then reduced and split in one step
    return {
        **norms,
        **{
            part: PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            for part in ("attn", "mlp")
        },
        **{layer: ColwiseParallel() for layer in COLUMNS},
        **{layer: RowwiseParallel(output_layouts=between) for layer in ROWS},
    }


def _ending_plan(backbone: nn.Module, by_tokens: bool) -> dict[str, list[ParallelStyle]]:
    """Styles of the layers behind the blocks: all tokens in one linear layer, whose columns the ranks share.

    A rank's tokens are neighbouring columns of that layer's input, so that nothing is gathered but the sums behind it,
    unless dropped tokens have to be put back first.
    """
    tokens = token_counts(backbone)
    if not tokens:
        return {}
    if not by_tokens:
        return {ENDING: [RowwiseParallel(input_layouts=Replicate())]}
    whole = tokens[0] != tokens[1]
    gather = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate() if whole else Shard(1))
    columns = RowwiseParallel(input_layouts=Replicate() if whole else Shard(-1))
    return {"norm": [SequenceParallel(), gather], ENDING: [columns]}


def _keep_whole_heads_together(attention: Any, tp: int) -> None:
    """Reorder the rows of ``qkv``, [q; k; v] of all heads, to [q; k; v] of each rank's heads, one rank after another.

    Cut into equal parts, the layer then computes all of a head on one rank, in the order that its forward() expects.
    """
    for weight in attention.qkv.parameters(recurse=False):
        weight.data = weight.data.unflatten(0, (3, tp, -1)).transpose(0, 1).flatten(0, 2).contiguous()
    attention.num_heads //= tp
    if hasattr(attention, "attn_dim"):  # timm
        attention.attn_dim //= tp


def in_stored_order(name: str, weight: Tensor, tp: int) -> Tensor:
    """Return a whole weight, or a tensor of its shape, as it is without tensor parallelism: ``qkv`` as [q; k; v]."""
    if _QKV not in name:
        return weight
    stored: Tensor = weight.unflatten(0, (tp, 3, -1)).transpose(0, 1).flatten(0, 2)
    return stored


def slices_of(name: str, weight: Tensor, tp: int) -> list[Slice]:
    """Return where a rank's part of a weight lies in the whole weight, as it is without tensor parallelism.

    Args:
        name: the weight's.
        weight: a DTensor over dimensions of which "tp" is cut first, as FSDP2 does; it may lack that one.
        tp: ranks of the group.

    Returns:
        Slices along the first dimension, one behind the other in the local part. None are empty, unless the part is.
    """
    offsets = [0] * weight.dim()
    sizes = list(weight.shape)
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    placements = dict(zip(mesh.mesh_dim_names, weight.placements, strict=True))  # type: ignore[attr-defined]
    for axis in ("tp", "shard"):
        dim = _cut_dim(placements.get(axis))
        if dim is not None:
            chunk = -(-sizes[dim] // mesh[axis].size())
            first = min(chunk * mesh.get_local_rank(axis), sizes[dim])
            offsets[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
    if _QKV not in name:
        return [Slice(sizes[0], tuple(offsets))]
    runs = _qkv_runs(offsets[0], offsets[0] + sizes[0], weight.shape[0], tp)
    return [Slice(rows, (first, *offsets[1:])) for rows, first in runs]


def _cut_dim(placement: Placement | None) -> int | None:
    """Return the dimension that a placement cuts; FSDP2's of weights that are cut already is no Shard."""
    return getattr(placement, "dim", None)


def _qkv_runs(start: int, stop: int, rows: int, tp: int) -> list[tuple[int, int]]:
    """(length, first stored row) of the runs of neighbouring stored rows in rows [start, stop) of the reordered qkv."""
    height = rows // (3 * tp)  # of a rank's q, k or v
    runs = []
    while start < stop:
        rank, part, row = start // (3 * height), start // height % 3, start % height
        length = min(height - row, stop - start)
        runs.append((length, (part * tp + rank) * height + row))
        start += length
    return runs or [(0, 0)]


class TensorParallel(FullySharded):
    """Groups of ``tp`` consecutive ranks split the blocks, and data parallelism goes over the groups.

    Each rank gives the class head, which is sharded over all ranks, its share of the group's embeddings.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._tp, self._group = layout.size("tp"), layout.along("tp")
        self.data_rank, self.data_ranks = self.mesh.rank // self._tp, self.mesh.world_size // self._tp

    @classmethod
    def gathering_passes(cls, data_ranks: int, pp: int) -> int:
        """See :meth:`Strategy.gathering_passes`: a single group has nothing to gather from others."""
        return super().gathering_passes(data_ranks, pp) if data_ranks > 1 else 0

    def describe(self) -> str:
        """How the backbone lies on the ranks, in words for a run's first lines."""
        cut = f", other weights in {self._shards} parts" if self._shards > 1 else ""
        return f"blocks over groups of {self._tp} ranks{cut}"

    def split(self, backbone: nn.Module) -> None:
        """Split the blocks over the group."""
        split_blocks(backbone, self._group)

    def place_backbone(self, backbone: nn.Module) -> nn.Module:
        """Shard or replicate all layers over the groups, in place."""
        return super().place_backbone(backbone) if self.data_ranks > 1 else backbone

    def place_weight(self, name: str, place: int | None, weight: nn.Parameter, shape: torch.Size) -> Weight:
        """Take the rank's part of a weight as a parameter of its own, as :class:`FullySharded` does."""
        part = weight.data
        if not isinstance(part, DTensor):
            return Strategy.place_weight(self, name, place, weight, shape)
        self._sharded[name] = weight
        local = nn.Parameter(part.to_local(), requires_grad=weight.requires_grad)
        cuts = [
            size for size, cut in zip(part.device_mesh.shape, part.placements, strict=True) if _cut_dim(cut) is not None
        ]
        slices = None if local.shape == shape else slices_of(name, part, self._tp)
        return Weight(name, place, local, shape, slices, self.mesh.world_size // math.prod(cuts))

    def loss_of(self, loss: Loss, embeddings: Tensor, labels: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the loss of this rank's share of the group's embeddings."""
        return loss(share_of_embeddings(embeddings[: len(labels)], self._group), *self.head_share(labels, sizes))

    def head_share(self, labels: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Return this rank's share of the group's labels, and the shares of all ranks."""
        of_ranks = [share for size in sizes for share in shares(size, self._tp)]
        place = self.data_rank * self._tp
        mine = labels.split(of_ranks[place : place + self._tp])[self._group.get_local_rank()]
        return mine, of_ranks

    def exchanges_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Keep gradients on the group until the last micro-batch."""
        return super().exchanges_gradients(last) if self.data_ranks > 1 else nullcontext()

    def collect_gradients(self) -> None:
        """Give the parts of gradients to the parameters that the optimizer steps.

        Each rank has summed the gradient of a norm over its own tokens: without FSDP, which adds them up, this does.
        """
        for weight in self.weights:
            sharded = self._sharded.get(weight.name)
            if sharded is not None and weight.parameter.requires_grad:
                gradient: Any = sharded.grad
                if gradient is not None:
                    gradient = gradient.redistribute(placements=cast(DTensor, sharded.data).placements).to_local()
                weight.parameter.grad = gradient

    def gather(self, weight: Weight, part: Tensor) -> Tensor:
        """Return the whole of a weight on the mesh's device."""
        if weight.name not in self._sharded:
            return part
        whole = self.as_dtensor(weight, part)
        placements = list(whole.placements)
        for index in range(len(placements)):  # the last cut first: torch warns where it has to take such steps itself
            placements[index] = Replicate()
            whole = whole.redistribute(placements=placements)
        return in_stored_order(weight.name, whole.to_local(), self._tp)


def shares(count: int, tp: int) -> list[int]:
    """Return how many of a batch's ``count`` samples each rank of a group gives to the head: as ``Shard(0)`` cuts."""
    most = -(-count // tp)
    return [max(min(most, count - rank * most), 0) for rank in range(tp)]


def own_tokens(of_tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part (B, n / ranks) of numbers (B, n), of which there is one for each token."""
    return of_tokens.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


def tokens_of_all(of_tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather what :func:`own_tokens` returns on the ranks of ``mesh``; without gradients."""
    whole: Tensor = DTensor.from_local(of_tokens.contiguous(), mesh, [Shard(1)], run_check=False).full_tensor()
    return whole


def share_of_embeddings(embeddings: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of embeddings (b, D), which are equal on all ranks of ``mesh``.

    The backward pass gathers the ranks' gradients. It divides them by the number of ranks: the head multiplies them by
    all ranks of the world, where data parallelism averages over one of each group.
    """
    whole = DTensor.from_local(embeddings, mesh, [Replicate()], run_check=False)
    rows: Any = whole.redistribute(placements=[Shard(0)]).to_local()
    if rows.requires_grad:
        rows.register_hook(lambda gradient: gradient / mesh.size())
    return rows  # type: ignore[no-any-return]
