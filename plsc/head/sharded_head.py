"""ShardedHead: the class table, one shard per rank, and its exact margin softmax."""

import logging
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.head.backends import HeadBackend, HeadShape, choose_backend
from plsc.head.class_table import Chunk, ClassTable, OptimizerState, class_range
from plsc.head.host_memory import mapped_file
from plsc.head.host_table import create_table
from plsc.head.row_shard import RowShard
from plsc.head.sampling import ClassSampler
from plsc.head.sharded_softmax import HeadLoss, PendingBackward, ShardedSoftmax
from plsc.losses.margins import ArcFace, Margin, State
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh

_LOG = logging.getLogger("plsc")


class ShardedHead(nn.Module):
    """A margin-based softmax over ``num_classes`` classes whose table is sharded over the ranks of ``mesh``.

    The loss is the exact mean over the global batch, the same number on every rank. Gradients by the embeddings come
    multiplied by the number of ranks, so that data parallelism's average gives those of one process. The table itself
    is updated by :class:`plsc.HeadSGD` or :class:`plsc.HeadAdamW`, which run the second pass.

    Where the mesh has head groups (``plsc.init(head_ranks=K)``), the table is sharded over the K ranks of a group and
    replicated over the G groups; all of the above holds as without groups, and replicas stay equal bit for bit.

    Communication, in bytes received per rank and step, with b samples of this rank's group among B of all (b = B
    without groups): b·D weights' numbers for the features and 4·b·D for their gradient, 40 bytes per sample of the
    group. With groups also 8·B for target cosines (4·B more for margins that use norms, 8·B more where classes are
    sampled), and 8·D·(G − 1)/G for each row of this rank's that took part: the replicas' sum of its gradient. Groups
    pay where b·D is large beside the rows that a step touches: many ranks, a sampled or small table.

    Args:
        dim: width D of embeddings and class weights.
        num_classes: C. Rank r of a head group of K owns a contiguous range; the first C mod K own one class more.
        mesh: from :func:`plsc.init`; a single process where left out.
        margin: one of :mod:`plsc.losses`; ArcFace(s=64, m=0.5) by default.
        sample_rate: 1 computes the exact softmax; below 1, all positives and this share of the shard's classes take
            part in a step (Partial FC); 0 takes positives only. Rows that take no part are neither read nor moved.
        weight_dtype: float64, float32 or bfloat16 (rounded stochastically by the update).
        momentum_dtype: of the optimizer's state: float64, float32, bfloat16, int8, or None for no momentum.
        centers: sub-centres K per class; a class's cosine is that of its nearest (Deng et al., ECCV 2020).
        seed: of first weights, sampling and rounding.
        update: "fused" lets the head's optimizers do pass 2 and the step, chunk by chunk; "autograd" leaves
            ``weight.grad`` for any optimizer instead.
        chunk_classes: classes per chunk; by default chosen from the batch and the device. Results do not depend on it.
        placement: where the table and the optimizer's state lie. "device": in the memory of the device that computes.
            "host": in ordinary memory, pinned for a GPU. "mmap:FILE": in files FILE.rankR-of-W.NAME, mapped; they are
            working memory of this run, not a checkpoint, and are overwritten by the next. From host and file, rows
            come to the device while it computes (see :meth:`prefetch`) and go back behind it: results are those of
            "device", bit for bit. Only 1/norms and int8 scales of a mapped table stay in ordinary memory.
        backend: "torch", "cpu" or "triton" computes; None chooses the fastest that can, or ``PLSC_HEAD_BACKEND``.

    Attributes:
        weight: this rank's rows, (C_local·K, D). Writing into it from outside is noticed. Of a table that is not on the
            device, asking for it waits until all updates have landed: ask again after each step.
        class_range: (first, last + 1) of this rank's classes.
        backend: what computes, chosen when the head is made; ``backend.name`` and ``backend.reason`` say which and why.

    Raises:
        UsageError: an argument is out of its range; the mapped file's folder is missing or cannot be written.
        DataError: the disk has no room for the mapped file.

    Source: Deng et al., CVPR 2019 (ArcFace); An et al., CVPR 2022 (Partial FC); Milakov & Gimelshein, 2018 (online
    maximum).
    """

    weight: nn.Parameter

    def __init__(
        self,
        dim: int,
        num_classes: int,
        mesh: Mesh | None = None,
        margin: Margin | None = None,
        sample_rate: float = 1.0,
        weight_dtype: torch.dtype = torch.float32,
        momentum_dtype: torch.dtype | None = torch.float32,
        centers: int = 1,
        seed: int = 0,
        update: Literal["fused", "autograd"] = "fused",
        chunk_classes: int | None = None,
        placement: str = "device",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(dim, num_classes, sample_rate, weight_dtype, centers, update, chunk_classes, placement)
        self.dim, self.num_classes, self.centers = dim, num_classes, centers
        self.mesh = mesh if mesh is not None else Mesh(0, 1, 0, torch.device("cpu"))
        self.margin = margin if margin is not None else ArcFace()
        self.sample_rate, self.seed, self.update = sample_rate, seed, update
        self.momentum_dtype, self.placement = momentum_dtype, placement
        self.class_range = class_range(num_classes, self.mesh.head.rank, self.mesh.head.world_size)
        device = self.mesh.device
        self.backend: HeadBackend = choose_backend(
            HeadShape(device, weight_dtype, dim, centers, self.margin), requested=backend
        )
        if self.mesh.rank == 0:
            _LOG.info("class head: %s", self.backend.describe())
        self.table: ClassTable = create_table(
            placement,
            self.mesh,
            num_classes=num_classes,
            dim=dim,
            dtype=weight_dtype,
            centers=centers,
            seed=seed,
            requires_grad=update == "autograd",
        )
        self.weight = self.table.parameter
        sampler = ClassSampler(*self.class_range, sample_rate, seed, device)
        self._softmax = ShardedSoftmax(
            self.mesh, self.margin, self.table, self.backend, sampler, num_classes, chunk_classes
        )
        # backward() must reach the head even where the embeddings need no gradient
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def __getattr__(self, name: str) -> Any:
        # only what nn.Module holds comes here, and of that only the weight may have updates on their way to it
        if name == "weight" and "table" in self.__dict__:
            self.table.settle()
        return super().__getattr__(name)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        self.table.settle()
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.table.settle()
        super()._load_from_state_dict(*arguments)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over the global batch.

        Args:
            embeddings: this rank's (b, D), floating point, of any norm; b may differ between ranks and may be 0.
            labels: (b,) integers in [0, num_classes). Never changed.

        Returns:
            A float32 scalar (float64 for float64 tables), equal on every rank.

        Raises:
            LabelError: a label is out of range, on whatever rank: every rank raises it, and it names the label.
            UsageError: shapes or dtypes do not fit (likewise on every rank).
        """
        weight = self.table.parameter if self.update == "autograd" else None
        loss: Tensor = HeadLoss.apply(
            embeddings, self._anchor, weight, labels, self._softmax, torch.is_grad_enabled(), self.training
        )
        return loss

    @torch.no_grad()
    def prefetch(self, labels: Tensor) -> None:
        """Begin to fetch the rows of a coming training batch, while this one computes.

        Announce each batch once, in order, at any time before its loss. Results do not depend on it: the classes drawn
        are those that the step would draw, and rows that are being updated meanwhile are taken from their updates.
        Without effect where the table lies on the device, and where nothing is sampled. Every rank calls.

        Args:
            labels: this rank's (b,) of that batch. Moves 8 bytes per sample of all ranks.

        Raises:
            LabelError, UsageError: as :meth:`forward` does.
        """
        self._softmax.prefetch(labels)

    def inverse_norms(self) -> Tensor:
        """1/‖W‖ of this rank's rows, float32 (float64 for float64 tables); renewed if the weights were written to."""
        return self.table.inverse_norms()

    def mean_norm(self) -> float:
        """The mean ‖W‖ over all classes and sub-centres of all shards; a norm that keeps growing is a bad sign."""
        sums = self.inverse_norms().reciprocal().sum(dtype=torch.float64).reshape(1).to(self.mesh.device)
        return float(all_reduce_sum(sums, self.mesh.head) / (self.num_classes * self.centers))

    # For the optimizers.

    @property
    def pending(self) -> list[PendingBackward]:
        """The batches that went through backward() and wait for the update."""
        return self._softmax.pending

    def gradient_chunks(
        self, pending: list[PendingBackward], update: OptimizerState | None = None
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Run pass 2 over ``pending``: see :meth:`ShardedSoftmax.gradient_chunks`."""
        return self._softmax.gradient_chunks(pending, update)

    # State.

    @property
    def margin_state(self) -> State:
        """The margin's running statistics, equal on all ranks. May be set, to take a step back."""
        return self._softmax.margin_state

    @margin_state.setter
    def margin_state(self, state: State) -> None:
        self._softmax.margin_state = state

    def sharded_state(self) -> dict[str, RowShard]:
        """The table for torch.distributed.checkpoint, which loads it at any number of ranks."""
        return {"weight": self.table.weight_shard()}

    def get_extra_state(self) -> dict[str, Any]:
        """Small state, equal on all ranks: the margin's statistics and the number of batches seen."""
        return {"forwards": self._softmax.forwards, "margin": {k: float(v) for k, v in self.margin_state.items()}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self._softmax.forwards = int(state["forwards"])
        for name, value in state["margin"].items():
            self.margin_state[name].fill_(value)

    def extra_repr(self) -> str:
        """For print()."""
        first, stop = self.class_range
        return (
            f"dim={self.dim}, num_classes={self.num_classes}, classes [{first}, {stop}) here, {self.margin}, "
            f"sample_rate={self.sample_rate}, {self.table.parameter.dtype}, on {self.placement}, {self.backend.name}"
        )


def _check_arguments(
    dim: int,
    num_classes: int,
    sample_rate: float,
    weight_dtype: torch.dtype,
    centers: int,
    update: str,
    chunk_classes: int | None,
    placement: str,
) -> None:
    mapped_file(placement)
    if placement != "device" and update != "fused":
        raise UsageError(f'placement {placement!r} leaves no gradient of the whole table: give update="fused"')
    for name, value in (
        ("dim", dim),
        ("num_classes", num_classes),
        ("centers", centers),
        ("chunk_classes", 1 if chunk_classes is None else chunk_classes),
    ):
        if value < 1:
            raise UsageError(f"the head's {name} must be at least 1, not {value}")
    if not (0 <= sample_rate <= 1 and math.isfinite(sample_rate)):
        raise UsageError(f"sample_rate is a share from 0 to 1, not {sample_rate}")
    if weight_dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise UsageError(f"weights are float64, float32 or bfloat16, not {weight_dtype}")
    if update not in ("fused", "autograd"):
        raise UsageError(f"update is 'fused' or 'autograd', not {update!r}")
