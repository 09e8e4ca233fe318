"""ShardedHead: the class table, one shard per rank, and its exact margin softmax."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.head.chunk_size import default_chunk_size
from plsc.head.global_batch import SMALLEST_NORM, GlobalBatch, gather_batch, gather_labels
from plsc.head.head_loss import HeadLoss
from plsc.head.host_memory import Column, HostMemory, mapped_file
from plsc.head.host_table import HostTable
from plsc.head.norms import renew_norms
from plsc.head.partition import class_range, fill_normal, normal_rows
from plsc.head.pending import Pending, gradient_chunks, visited
from plsc.head.row_shard import RowShard
from plsc.head.sampling import sample_classes
from plsc.head.targets import target_cosines
from plsc.losses.class_rows import Chunk, ClassRows
from plsc.losses.margins import ArcFace, Margin, TargetLogit
from plsc.losses.softmax import Batch, Partial, first_pass, is_bounded
from plsc.parallel.collectives import all_gather_equal, all_reduce_max, all_reduce_sum, reduce_scatter_rows
from plsc.parallel.mesh import Mesh

NORM_ROWS = 65536  # whose norms are taken at a time: never a second copy of the table


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

    Attributes:
        weight: this rank's rows, (C_local·K, D). Writing into it from outside is noticed. Of a table that is not on the
            device, asking for it waits until all updates have landed: ask again after each step.
        class_range: (first, last + 1) of this rank's classes.

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
    ) -> None:
        super().__init__()
        _check_arguments(dim, num_classes, sample_rate, weight_dtype, centers, update, chunk_classes, placement)
        self.dim, self.num_classes, self.centers = dim, num_classes, centers
        self.mesh = mesh if mesh is not None else Mesh(0, 1, 0, torch.device("cpu"))
        self.margin = margin if margin is not None else ArcFace()
        self.sample_rate, self.seed, self.update = sample_rate, seed, update
        self.momentum_dtype, self.chunk_classes = momentum_dtype, chunk_classes
        self.class_range = class_range(num_classes, self.mesh.head.rank, self.mesh.head.world_size)
        self.placement = placement
        self.host = self._host_table(weight_dtype) if is_staged(placement, self.mesh.device) else None
        # .data counts writes by itself: those by way of the parameter are from outside
        weight = self.host.weight.values.data if self.host is not None else self._resident_table(weight_dtype)
        self.weight = nn.Parameter(weight, requires_grad=update == "autograd")
        self.margin_state = {name: value.to(self.mesh.device) for name, value in self.margin.initial_state().items()}
        self.forwards = 0  # training batches seen; keys sampling and random margins
        self.pending: list[Pending] = []
        self._inverse_norm = torch.empty(0)
        self._norm_version = -1
        # backward() must reach the head even where the embeddings need no gradient
        self._anchor = torch.zeros((), device=self.mesh.device, requires_grad=True)

    @property
    def first_row(self) -> int:
        """The global number of this rank's first row."""
        return self.class_range[0] * self.centers

    @property
    def table(self) -> nn.Parameter:
        """``weight``, without waiting for the updates on their way to it."""
        return cast(nn.Parameter, self._parameters["weight"])

    @property
    def version(self) -> int:
        """Another number after every update, and after every write from outside."""
        return self.table._version + (self.host.staging.updates if self.host is not None else 0)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.__dict__.get("host") is not None:
            self.settle()
        return super().__getattr__(name)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        self.settle()
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.settle()
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
        weight = self.table if self.update == "autograd" else None
        loss: Tensor = HeadLoss.apply(embeddings, self._anchor, weight, labels, self, torch.is_grad_enabled())
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
        if self.host is None or self.sample_rate >= 1:
            return
        everyones = gather_labels(labels, num_classes=self.num_classes, mesh=self.mesh)
        self._notice_writes()
        key = self.forwards + self.host.announced
        self.host.announce(key, everyones, self._draw(everyones, key))

    def settle(self) -> None:
        """Wait until all updates have landed in a table that is not on the device."""
        if self.host is not None:
            self.host.settle()

    def inverse_norms(self) -> Tensor:
        """1/‖W‖ of this rank's rows, float32 (float64 for float64 tables); renewed if the weights were written to."""
        self.settle()
        self._notice_writes()
        return self._inverse_norm

    @torch.no_grad()
    def _notice_writes(self) -> None:
        """Renew all norms, and forget what was fetched ahead, if someone else wrote into the weights."""
        table = self.table
        if self._norm_version == table._version:
            return
        if self.host is not None:
            self.host.settle(forget=True)
            self._inverse_norm = self.host.inverse_norm.values
        else:
            wide = torch.promote_types(table.dtype, torch.float32)
            self._inverse_norm = torch.empty(table.shape[0], dtype=wide, device=table.device)
        whole = ClassRows(table.detach(), self._inverse_norm)
        for start in range(0, table.shape[0], NORM_ROWS):
            rows = slice(start, min(start + NORM_ROWS, table.shape[0]))
            if self.host is not None:
                self.host.renew_norms(rows)
            else:
                renew_norms(whole, rows)
        self.norms_are_current()

    def norms_are_current(self) -> None:
        """Say that every row written so far has its norm renewed."""
        self._norm_version = self.table._version

    def mean_norm(self) -> float:
        """The mean ‖W‖ over all classes and sub-centres of all shards; a norm that keeps growing is a bad sign."""
        sums = self.inverse_norms().reciprocal().sum(dtype=torch.float64).reshape(1).to(self.mesh.device)
        return float(all_reduce_sum(sums, self.mesh.head) / (self.num_classes * self.centers))

    def rows(self, selected: Tensor | None, *, learning: bool = False) -> ClassRows:
        """The table, or ``selected`` local classes of it, for a pass; ``learning``, if an update may follow."""
        self._notice_writes()
        if self.host is not None:
            return self.host.visited(selected, learning=learning)
        return ClassRows(self.table.detach(), self._inverse_norm, self.centers, selected)

    def chunk_size(self, batch: int) -> int:
        """Classes per chunk for this many samples."""
        if self.chunk_classes is not None:
            return self.chunk_classes
        return default_chunk_size(batch, self.dim, self.centers, self.mesh.device.type)

    def sharded_state(self) -> dict[str, RowShard]:
        """What torch.distributed.checkpoint saves, and loads at any number of ranks."""
        return {"weight": self.row_shard(self.table.detach(), self.host.weight if self.host is not None else None)}

    def row_shard(self, local: Tensor, column: Column | None = None) -> RowShard:
        """Some per-row tensor of this rank as its part of the global one; ``column``, if it is a host table's."""
        if self.host is not None:
            self.host.settle(forget=True)
        release = column.release if column is not None else None
        return RowShard(local, self.first_row, self.num_classes * self.centers, release)

    def get_extra_state(self) -> dict[str, Any]:
        """Small state, equal on all ranks: the margin's statistics and the number of batches seen."""
        return {"forwards": self.forwards, "margin": {k: float(v) for k, v in self.margin_state.items()}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`get_extra_state` gave."""
        self.forwards = int(state["forwards"])
        for name, value in state["margin"].items():
            self.margin_state[name].fill_(value)

    def extra_repr(self) -> str:
        """For print()."""
        first, stop = self.class_range
        return (
            f"dim={self.dim}, num_classes={self.num_classes}, classes [{first}, {stop}) here, {self.margin}, "
            f"sample_rate={self.sample_rate}, {self.table.dtype}, on {self.placement}"
        )

    # Forward, in the order in which it happens.

    def compute(self, embeddings: Tensor, labels: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None, Pending]:
        """The loss, this rank's embedding gradient (b, D) if ``differentiate``, and what the update needs."""
        gathered = gather_batch(
            embeddings,
            labels,
            dim=self.dim,
            num_classes=self.num_classes,
            dtype=self.table.dtype,
            with_norms=self.margin.uses_norm,
            mesh=self.mesh,
        )
        selected, rows = self._visit(gathered, differentiate and self.training)
        position = rows.positions(gathered.labels - self.class_range[0])
        cos, own = target_cosines(rows, gathered.features, position, self.mesh)
        target = self._margin_target(cos, gathered, differentiate and self.training)
        batch = Batch(gathered.features, position, target.phi, self.margin, self.margin_state)
        partial = first_pass(rows, batch, self.chunk_size(len(position)), with_pull=differentiate)
        losses, log_z, probability, pull = self._normalise(partial, target)
        loss = self._mean(losses, gathered.total).to(partial.maximum.dtype)
        scale = self.margin.s / gathered.total
        target_pull = (probability - 1) * target.slope * scale
        pending = Pending(
            batch,
            gathered.labels,
            selected,
            log_z,
            torch.full_like(log_z, scale),
            target_pull,
            self.version,
            gathered.largest,
            rows,
        )
        if differentiate and self.training:
            self.forwards += 1
        if pull is None:
            return loss, None, pending
        pull.mul_(scale).index_add_(*own.pull(target_pull, pull.dtype))
        mine = reduce_scatter_rows(pull, gathered.sizes, self.mesh.head)
        return loss, self._through_norm(embeddings, mine, target, probability, gathered), pending

    def _visit(self, gathered: GlobalBatch, learning: bool) -> tuple[Tensor | None, ClassRows]:
        """This step's local classes (None: all), the same on all replicas, and their rows."""
        if self.sample_rate >= 1:
            return None, self.rows(None)
        labels = gathered.everyones(gathered.labels, self.mesh)
        if self.host is not None and learning:
            self._notice_writes()
            ahead = self.host.take_announced(self.forwards, labels)
            if ahead is not None:
                return ahead.classes, ahead
        selected = self._draw(labels, self.forwards)
        return selected, self.rows(selected, learning=learning)

    def _draw(self, labels: Tensor, batch: int) -> Tensor:
        """The local classes that training batch number ``batch``, with these labels of all ranks, visits."""
        first, stop = self.class_range
        local = labels - first
        owned = local[(local >= 0) & (local < stop - first)]
        generator = self._generator(self.mesh.device, first + 1, batch)
        return sample_classes(stop - first, owned, self.sample_rate, generator)

    def _generator(self, device: torch.device, salt: int, batch: int) -> torch.Generator:
        key = (self.seed * 1_000_003 + batch) * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03
        return torch.Generator(device).manual_seed(key % 2**63)

    def _margin_target(self, cos: Tensor, gathered: GlobalBatch, learning: bool) -> TargetLogit:
        """The margin at the group's targets. Statistics, and margins drawn at random, are those of the whole batch."""
        cos = gathered.everyones(cos, self.mesh)
        norms = gathered.everyones(gathered.norms, self.mesh) if gathered.norms is not None else None
        if learning:
            self.margin_state = self.margin.updated_state(self.margin_state, cos, norms)
        all_targets = self.margin.target(
            cos, norms, self.margin_state, self._generator(torch.device("cpu"), 0, self.forwards)
        )
        optional = all_targets.norm_slope, all_targets.penalty, all_targets.penalty_slope
        return TargetLogit(
            gathered.ours(all_targets.phi),
            gathered.ours(all_targets.slope),
            *[None if values is None else gathered.ours(values) for values in optional],
        )

    def _normalise(self, partial: Partial, target: TargetLogit) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Bring the shards' sums together: losses, log Z and the target's p, all (b,), and this shard's pull / Z."""
        logit = target.phi * self.margin.s
        here = partial.maximum.double()
        maximum = here if is_bounded(self.margin) else all_reduce_max(torch.maximum(here, logit), self.mesh.head)
        total = all_reduce_sum(partial.total * (here - maximum).exp(), self.mesh.head) + (logit - maximum).exp()
        log_z = maximum + total.log()
        losses = log_z - logit
        if target.penalty is not None:
            losses = losses + target.penalty
        pull = partial.pull
        if pull is not None:
            pull.mul_(((here - maximum).exp() / total).to(pull.dtype)[:, None])
        return losses, log_z, (logit - log_z).exp(), pull

    def _mean(self, losses: Tensor, total: int) -> Tensor:
        """The mean over the whole batch of ``total``. Sums are gathered and added here: the same bits on every rank."""
        return all_gather_equal(losses.sum(), self.mesh.replicas).sum() / total

    def _through_norm(
        self,
        embeddings: Tensor,
        unit_gradient: Tensor,
        target: TargetLogit,
        probability: Tensor,
        gathered: GlobalBatch,
    ) -> Tensor:
        """From the gradient by this rank's unit embeddings to the gradient by the embeddings."""
        x = embeddings.to(unit_gradient.dtype)
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=SMALLEST_NORM)
        unit = x / norm
        gradient = (unit_gradient - unit * (unit_gradient * unit).sum(1, keepdim=True)) / norm
        by_norm = torch.zeros_like(probability)
        if target.norm_slope is not None:
            by_norm += (probability - 1) * target.norm_slope * self.margin.s
        if target.penalty_slope is not None:
            by_norm += target.penalty_slope
        if self.margin.uses_norm:
            mine = torch.split(by_norm, gathered.sizes)[self.mesh.head.rank] / gathered.total
            gradient = gradient + unit * mine.to(gradient.dtype)[:, None]
        return cast(Tensor, gradient)

    def gradient_chunks(
        self, pending: list[Pending], update: Mapping[str, Column] | None = None
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Pass 2: the rows that the pending batches touch, chunk by chunk, with the gradients by their unit rows.

        Gradients are summed over the replicas, chunk by chunk, while they are float32 or float64. Every rank calls.
        Where the caller updates each chunk as it comes, ``update`` holds its columns of a host table's state.
        """
        selected, member = visited(pending)
        size = self.chunk_size(sum(p.largest_group for p in pending))  # chunks are the same on all replicas
        if self.host is None:
            rows = self.rows(selected)
        else:
            rows = self.host.visited_again(selected, [p.rows for p in pending], update)
        for chunk, gradient in gradient_chunks(rows, member, pending, self.class_range[0], size):
            yield chunk, all_reduce_sum(gradient, self.mesh.replicas)

    # Creation.

    def _resident_table(self, dtype: torch.dtype) -> Tensor:
        """Rows with their first values, on the device, or in the host's memory where the device reads that in place."""
        weight = torch.empty(self._local_rows, self.dim, dtype=dtype, device=self.mesh.device)
        if weight.device.type != "meta":
            fill_normal(weight, self.first_row, self.seed)
        return weight

    def _host_table(self, dtype: torch.dtype) -> HostTable:
        """The same rows in host memory. Their values come from the device's generator, as those on it do."""
        device = self.mesh.device
        file = mapped_file(self.placement)
        memory = HostMemory(file, self.mesh.rank, self.mesh.world_size, pinned=device.type == "cuda")
        table = HostTable(memory, self._local_rows, self.dim, dtype, self.centers, device)
        for rows, values in normal_rows((self._local_rows, self.dim), self.first_row, self.seed, device):
            table.weight.write(rows, values.to(dtype).cpu())
        return table

    @property
    def _local_rows(self) -> int:
        return (self.class_range[1] - self.class_range[0]) * self.centers


def is_staged(placement: str, device: torch.device) -> bool:
    """Whether rows are copied to compute with them: a processor reads its own memory in place, but not a file."""
    if placement == "device" or device.type == "meta":
        return False
    return device.type != "cpu" or mapped_file(placement) is not None


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
