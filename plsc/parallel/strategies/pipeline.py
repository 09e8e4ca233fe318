"""Pipeline parallelism for ViTs: a rank holds consecutive blocks, and micro-batches go through the ranks in turn.

torch.distributed.pipelining sends activations and gradients from stage to stage by one of three schedules: GPipe
(Huang et al., NeurIPS 2019), 1F1B (Narayanan et al., PipeDream, SOSP 2019), and interleaved 1F1B, where each rank holds
two stages that are far apart (Narayanan et al., SC 2021, section 2.2). The loss of a micro-batch is computed by the
ranks of the last stage, among which the class table is sharded; the other ranks hold nothing of it. The ranks that hold
the same stages in several pipelines average their gradients (DistributedDataParallel).

Micro-batches are to layers and loss what those of gradient accumulation are. They have one shape, as torch's engine
asks for: smaller ones are filled up with blank images, which the blocks compute, each sample on its own, and which are
taken off before the last layers and their batch normalisation.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from plsc.errors import UsageError
from plsc.parallel.collectives import broadcast
from plsc.parallel.mesh import Mesh, device_mesh
from plsc.parallel.strategies.base import Loss, Strategy, Weight
from plsc.parallel.strategies.ddp import data_parallel

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
_LAST_STAGE = 0  # the place in the pipeline's group of the rank that holds it: the main rank is to have the loss


class BlockwiseBackbone(Protocol):
    """A backbone whose forward pass is ``project`` after ``blocks`` after ``embed``, as ViTs have.

    Attributes:
        blocks: map tokens (B, n, dim) to tokens, each sample on its own.
        embedding, projection: names of the weights and layers that ``embed`` and ``project`` use.
        dim, embedding_dim: widths of a token and of an embedding.
        tokens_seen: n.
        drops_patches: ``embed`` drops patches in training.
    """

    blocks: nn.ModuleList
    embedding: tuple[str, ...]
    projection: tuple[str, ...]
    dim: int
    embedding_dim: int
    tokens_seen: int
    drops_patches: bool

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens of images (B, 3, S, S), and the positions (B, n) of those kept, None for all."""

    def project(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """Return embeddings (B, D) of the last block's tokens."""


class Pipeline(Strategy):
    """One rank's stages of a pipeline of ``ranks`` ranks, and what its data-parallel peers share with it.

    Stages lie far apart in the numbering of ranks, since they send least: with D pipelines, ranks 0 to D − 1 hold the
    last stage, the next D the one before it.
    """

    is_replicated = False
    prefetches = False

    def __init__(self, mesh: Mesh, ranks: int, schedule: str, stages: int, micro_batches: int) -> None:
        """Make the process groups; every rank calls.

        Args:
            mesh: all ranks.
            ranks: of a pipeline, a divisor of all; at least 2.
            schedule: "gpipe", "1f1b" or "interleaved".
            stages: of each rank.
            micro_batches: into which a rank's batch is cut.
        """
        super().__init__(mesh)
        self.data_ranks = mesh.world_size // ranks
        place, self.data_rank = divmod(mesh.rank, self.data_ranks)
        self._rank = ranks - 1 - place  # counted in the direction of the forward pass
        self._ranks, self._count = ranks, ranks * stages
        self._schedule_name, self._micro_batches = schedule, micro_batches
        groups = device_mesh(mesh, {"pp": ranks, "replicate": self.data_ranks})
        self._pipeline = Mesh(place, ranks, mesh.local_rank, mesh.device, groups.get_group("pp"), timeout=mesh.timeout)
        self.peers = Mesh(0, 1, mesh.local_rank, mesh.device)
        if self.data_ranks > 1:
            where = self.data_rank, self.data_ranks, mesh.local_rank, mesh.device
            self.peers = Mesh(*where, groups.get_group("replicate"), timeout=mesh.timeout)
        self.head_mesh = self.peers if place == _LAST_STAGE else None
        self._rows = 0  # of a micro-batch
        self._schedule: Any = None
        self._engine_stages: list[PipelineStage] = []

    def describe(self) -> str:
        """The number of ranks and micro-batches, and the schedule."""
        return f"blocks over {self._ranks} ranks ({self._schedule_name}, {self._micro_batches} micro-batches)"

    # Placing the backbone.

    def place_backbone(self, backbone: nn.Module) -> nn.Module:
        """Keep this rank's stages of ``backbone``, with the names that their weights have in the whole."""
        model = _blockwise(backbone)
        self._spans = balanced(len(model.blocks), self._count)
        self._holders = {name: self._place_of(name, model) for name in backbone.state_dict()}
        self.stages = [
            Stage(model, self._spans, n, self.wrapping.autocast) for n in range(self._rank, self._count, self._ranks)
        ]
        self._free_other_stages(model)
        if self.wrapping.compile is not None:
            for block in (block for stage in self.stages for block in stage.blocks):
                block.compile()
        self._nets = [
            data_parallel(stage, self.peers, None, self.wrapping.exchange, self.wrapping.bucket_mb)
            for stage in self.stages
        ]
        return backbone

    def _place_of(self, name: str, model: BlockwiseBackbone) -> int:
        """The place in the pipeline's group of the rank that holds a weight or buffer."""
        first, _, rest = name.partition(".")
        stage = 0 if first in model.embedding else len(self._spans) - 1
        if first == "blocks":
            block = int(rest.partition(".")[0])
            stage = next(number for number, span in enumerate(self._spans) if block in span)
        return self._ranks - 1 - stage % self._ranks

    def _free_other_stages(self, model: BlockwiseBackbone) -> None:
        held = {block for stage in self.stages for block in stage.span}
        for index in range(len(model.blocks)):
            if index not in held:
                model.blocks[index] = nn.Identity()
        for names, stage in ((model.embedding, self.stages[0].is_first), (model.projection, self.stages[-1].is_last)):
            for name in () if stage else names:
                is_weight = isinstance(getattr(model, name), nn.Parameter)
                setattr(model, name, None if is_weight else nn.Identity())

    def place_weight(self, name: str, place: int | None, weight: nn.Parameter, shape: torch.Size) -> Weight:
        """Describe a weight, of which each pipeline has one."""
        return Weight(name, place, weight, shape, copies=self.data_ranks)

    # A step.

    def warm_up(self, images: Callable[[], Tensor]) -> None:
        """Let DDP order its buckets now, as :meth:`plsc.parallel.strategies.ddp.DataParallel.warm_up` does."""
        if self.data_ranks > 2:
            rows = len(images())
            labels = torch.zeros(rows, dtype=torch.int64)
            self.forward_backward(images, labels, [rows] * self.data_ranks, _no_loss, last=True)
            self.zero_grad()

    def forward_backward(
        self, images: Callable[[], Tensor], labels: Tensor, sizes: Sequence[int], loss: Loss, *, last: bool
    ) -> None:
        """Take a batch through the pipeline in micro-batches, as many as for every other batch."""
        if self._rank:  # also where the ranks of a pipeline share a seed, each drops other branches
            torch.manual_seed(int(torch.randint(1 << 62, ())) + self._rank)
        parts = micro_batch_sizes(sizes, self._micro_batches)
        own = [part[self.data_rank] for part in parts]
        rows = [*own[:-1], max(own[-1], 2)]  # beside a single image stands another one, for batch normalisation
        x = images() if self.stages[0].is_first else None
        self._prepare(max(2, *map(max, parts)), x)
        for engine, net, stage in zip(self._engine_stages, self._nets, self.stages, strict=True):
            # torch's engine lets DDP exchange gradients in the last backward pass of every batch
            engine.submod = net if last else stage
            stage.rows = deque(rows)
        by_part = labels.split(own)
        self._loss_of_part = lambda embeddings, part: (
            loss(embeddings, by_part[part], parts[part]) if own[part] else _no_loss(embeddings)
        )
        inputs = [] if x is None else [self._filled_up(x, rows)]
        target = torch.arange(len(parts)) if self.stages[-1].is_last else None
        self._schedule.step(*inputs, target=target, return_outputs=False)

    def _prepare(self, rows: int, x: Tensor | None) -> None:
        """Make the schedule for micro-batches of ``rows`` images like ``x``, unless there is one for as many."""
        if rows <= self._rows:
            return
        self._rows = rows
        self._engine_stages = [self._engine_stage(stage, rows, x) for stage in self.stages]
        make: Callable[..., Any] = _SCHEDULES[self._schedule_name]
        stages = self._engine_stages if make is ScheduleInterleaved1F1B else self._engine_stages[0]
        self._schedule = make(stages, self._micro_batches, loss_fn=self._loss, scale_grads=False)
        places = {number: self._ranks - 1 - number % self._ranks for number in range(self._count)}
        for stage in self._engine_stages:
            stage.stage_index_to_group_rank = places  # by which it finds the ranks that it sends to

    def _engine_stage(self, stage: "Stage", rows: int, x: Tensor | None) -> PipelineStage:
        """Make torch's object of a stage. All shapes are given: it would find them out by passes with a loss."""
        made = PipelineStage(
            stage,
            stage.number,
            self._count,
            self.mesh.device,
            input_args=stage.example_tokens(rows) if x is None or not stage.is_first else _example(rows, x),
            output_args=stage.example_output(rows),
            group=self._pipeline.group,
        )
        made.group_rank = self._rank  # by which schedules tell what comes when
        return made

    def _loss(self, embeddings: Tensor, part: Tensor) -> Tensor:
        loss: Callable[[Tensor, int], Tensor] = self._loss_of_part
        return loss(embeddings, int(part))

    def _filled_up(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Images (parts · r, 3, S, S): each part's, and blank ones up to the schedule's number of rows r."""
        if all(count == self._rows for count in rows):
            return x.contiguous()
        filled = x.new_zeros((len(rows), self._rows, *x.shape[1:]))
        for part, images in zip(filled, x.split(list(rows)), strict=True):
            part[: len(images)] = images
        return filled.flatten(0, 1)

    def from_head(self, value: Tensor) -> Tensor:
        """Return the last stage's ``value`` on every rank of the pipeline."""
        return broadcast(value, self._pipeline, _LAST_STAGE)

    # The state.

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Let the first pipeline write, each rank its stages."""
        return self.data_rank == 0

    def whole_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the backbone's whole state_dict on every rank; all ranks call."""
        whole = {}
        for name, like in self._template.state_dict().items():
            own = parts.get(name)
            tensor = torch.empty_like(like, device=self.mesh.device) if own is None else own.contiguous()
            whole[name] = broadcast(tensor, self._pipeline, self._holders[name])
        return whole


class Stage(nn.Module):
    """Consecutive blocks of a backbone; of the first stage also its embedding, of the last its projection.

    Between stages travel tokens in float32 (rows, n, dim). Where patches are dropped, each token has its position as
    one more number: torch's engine sends a gradient back for every tensor that it sends.

    Args:
        model: whole.
        spans: the blocks of every stage.
        number: of this one.
        autocast: makes the context of a forward pass.

    Attributes:
        rows: of the coming micro-batches' images those that are no filling.
    """

    def __init__(
        self,
        model: BlockwiseBackbone,
        spans: Sequence[range],
        number: int,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.number, self.span = number, spans[number]
        self.is_first, self.is_last = number == 0, number == len(spans) - 1
        self.rows: deque[int] = deque()
        self.blocks = nn.ModuleList(model.blocks[index] for index in self.span)
        names = (model.embedding if self.is_first else ()) + (model.projection if self.is_last else ())
        for name in names:
            setattr(self, name, getattr(model, name))
        self._unregistered = [model]  # in a list: its weights are registered above, as far as they are this stage's
        self._autocast = autocast

    @property
    def _model(self) -> BlockwiseBackbone:
        return self._unregistered[0]

    def forward(self, x: Tensor) -> Tensor:
        """Images or packed tokens in, packed tokens or embeddings out; rows that are filling have embeddings of 0."""
        with self._autocast():
            tokens, kept = self._model.embed(x) if self.is_first else self._unpacked(x)
            for block in self.blocks:
                tokens = block(tokens)
            return self._embeddings(tokens, kept) if self.is_last else self._packed(tokens, kept)

    def _packed(self, tokens: Tensor, kept: Tensor | None) -> Tensor:
        tokens = tokens.float()
        if kept is not None:
            tokens = torch.cat([tokens, kept.unsqueeze(-1).float()], dim=-1)
        return tokens.contiguous()

    def _unpacked(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self._model.drops_patches:
            return x, None
        return x[..., :-1], x[..., -1].detach().long()

    def _embeddings(self, tokens: Tensor, kept: Tensor | None) -> Tensor:
        filled, rows = len(tokens), self.rows.popleft()
        if not rows:
            return tokens[:, 0, :1].float().mul(0).expand(-1, self._model.embedding_dim).contiguous()
        embeddings = self._model.project(tokens[:rows], None if kept is None else kept[:rows])
        return F.pad(embeddings, (0, 0, 0, filled - rows)) if rows < filled else embeddings

    def example_output(self, rows: int) -> Tensor:
        """A tensor of no data, such as comes out of this stage."""
        if not self.is_last:
            return self.example_tokens(rows)
        return torch.empty((rows, self._model.embedding_dim), device="meta", requires_grad=True)

    def example_tokens(self, rows: int) -> Tensor:
        """A tensor of no data, such as travels between stages."""
        model = self._model
        shape = rows, model.tokens_seen, model.dim + int(model.drops_patches)
        return torch.empty(shape, device="meta", requires_grad=True)


def balanced(blocks: int, stages: int) -> list[range]:
    """Cut so many blocks into consecutive stages; the first ones hold one more where they cannot be equal."""
    size, larger = divmod(blocks, stages)
    starts = [number * size + min(number, larger) for number in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def micro_batch_sizes(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Cut every data rank's batch into ``count`` micro-batches, as equal as can be.

    Batch normalisation needs two samples, on every rank alike: where there are too few, the first micro-batches are
    empty on all ranks, so that the last, with which gradients are exchanged, never is.

    Args:
        sizes: of the ranks' batches, each at least 1.
        count: of micro-batches.

    Returns:
        For each micro-batch the ranks' numbers of samples.
    """
    filled = max(1, min(count, min(sizes) // 2))
    parts = [[size * (part + 1) // filled - size * part // filled for size in sizes] for part in range(filled)]
    return [[0] * len(sizes)] * (count - filled) + parts


def _blockwise(backbone: nn.Module) -> BlockwiseBackbone:
    """UsageError unless ``backbone`` can be cut into stages."""
    if not all(hasattr(backbone, name) for name in ("blocks", "embed", "project", "embedding", "projection")):
        name = getattr(backbone, "name", type(backbone).__name__)
        raise UsageError(
            f"parallel.pp cuts the blocks of plsc's ViTs, and {name} is none; give pp = 1, or strategy fsdp"
        )
    return cast(BlockwiseBackbone, backbone)


def _example(rows: int, x: Tensor) -> Tensor:
    return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta")


def _no_loss(embeddings: Tensor, *_: Any) -> Tensor:
    return embeddings.sum() * 0
