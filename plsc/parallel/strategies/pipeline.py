"""Pipeline parallelism for ViTs: a rank holds consecutive blocks, and micro-batches go through the ranks in turn.

torch.distributed.pipelining sends activations and gradients from stage to stage by one of three schedules: GPipe
(Huang et al., NeurIPS 2019), 1F1B (Narayanan et al., PipeDream, SOSP 2019), and interleaved 1F1B, where each rank holds
two stages that are far apart (Narayanan et al., SC 2021, section 2.2). The loss of a micro-batch is computed by the
ranks of the last stage, among which the class table is sharded; the other ranks hold nothing of it. The ranks that hold
the same stages in several pipelines follow a strategy of their own: they average gradients, shard weights, or share
each block, as all ranks do without a pipeline. torch's schedules know of DistributedDataParallel and fully_shard, and
let them exchange gradients behind the last micro-batch.

Micro-batches are to layers and loss what those of gradient accumulation are. They have one shape, as torch's engine
asks for: smaller ones are filled up with blank images, which the blocks compute, each sample on its own, and which are
taken off before the last layers and their batch normalisation.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from plsc.errors import UsageError
from plsc.parallel.collectives import broadcast
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Groups, Loss, Strategy, Weight, Wrapping
from plsc.parallel.strategies.cuts import balanced, splits_tokens, stage_of, token_counts
from plsc.parallel.strategies.ddp import DataParallel
from plsc.parallel.strategies.layout import Layout
from plsc.parallel.strategies.tensor_parallel import own_tokens, tokens_of_all

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
    """One rank's stages of a pipeline, whose weights lie on the ranks of the stage by another strategy.

    Stages lie far apart in the numbering of ranks, since they send least: with D ranks to a stage, ranks 0 to D − 1
    hold the last one, the next D the one before it.
    """

    is_replicated = False
    has_own_passes = True
    prefetches = False

    def __init__(
        self, layout: Layout, within: Strategy, ranks: int, schedule: str, stages: int, micro_batches: int
    ) -> None:
        """Set up this rank's place.

        Args:
            layout: of all ranks.
            within: the strategy of the ranks of a stage.
            ranks: of a pipeline; at least 2.
            schedule: "gpipe", "1f1b" or "interleaved".
            stages: of each rank.
            micro_batches: into which a rank's batch is cut.
        """
        super().__init__(layout)
        self.mesh = mesh = layout.mesh
        self._layout, self._within = layout, within
        self.data_rank, self.data_ranks = within.data_rank, within.data_ranks
        place = mesh.rank // layout.stage.world_size
        self._rank = ranks - 1 - place  # counted in the direction of the forward pass
        self._ranks, self._count = ranks, ranks * stages
        self._schedule_name, self.micro_batches = schedule, micro_batches
        group = layout.along("pp").get_group()
        self._pipeline = Mesh(place, ranks, mesh.local_rank, mesh.device, group, timeout=mesh.timeout)
        self.head_mesh = layout.stage if place == _LAST_STAGE else None
        self._rows = 0  # of a micro-batch
        self._schedule: Any = None
        self._engine_stages: list[PipelineStage] = []

    def describe(self) -> str:
        """The number of ranks and micro-batches, the schedule, and how the backbone lies on a stage's ranks."""
        pipeline = f"blocks over {self._ranks} ranks ({self._schedule_name}, {self.micro_batches} micro-batches)"
        within = self._within.describe()
        return f"{pipeline}; within a stage: {within}" if within else pipeline

    # Placing the backbone.

    def wrap(self, backbone: nn.Module, template: nn.Module, wrapping: Wrapping) -> nn.Module:
        """Keep this rank's stages of ``backbone``, and place them over the ranks that hold the same."""
        self._within.wrapping = wrapping
        net = super().wrap(backbone, template, wrapping)
        self._within.weights, self.steps_on_device = self.weights, self._within.steps_on_device
        return net

    def split(self, backbone: nn.Module) -> None:
        """Split single layers over the ranks of a stage."""
        self._within.split(backbone)

    def place_backbone(self, backbone: nn.Module) -> nn.Module:
        """Keep this rank's stages of ``backbone``, with the names that their weights have in the whole."""
        model = cast(BlockwiseBackbone, backbone)  # as a configuration that names another is refused
        self._spans = balanced(len(model.blocks), self._count)
        self._check_trained(model)
        stages = ((name, stage_of(name, self._spans, model.embedding)) for name in backbone.state_dict())
        self._holders = {name: self._place_of(stage) for name, stage in stages}
        tp = self._layout.size("tp")
        tokens_over = self._layout.along("tp") if tp > 1 and splits_tokens(token_counts(backbone), tp) else None
        numbers = range(self._rank, self._count, self._ranks)
        self.stages = [Stage(model, self._spans, n, self.wrapping.autocast, tokens_over) for n in numbers]
        self._free_other_stages(model)
        self._nets = [self._within.place_backbone(stage) for stage in self.stages]
        for stage in self.stages:  # fully_shard has put other parameters into the place of those of the stage
            for name, weight in stage.model.named_parameters(recurse=False):
                setattr(model, name, weight)
        return backbone

    def _check_trained(self, model: BlockwiseBackbone) -> None:
        """UsageError where a stage trains no weight: neither optimizers nor DDP take none."""
        weights = cast(nn.Module, model).named_parameters()
        trained = {stage_of(name, self._spans, model.embedding) for name, weight in weights if weight.requires_grad}
        if frozen := sorted(set(range(self._count)) - trained):
            raise UsageError(
                f"frozen leaves stage {frozen[0] + 1} of the pipeline's {self._count} no weight to train; leave one in "
                f"each, or give another parallel.pp than {self._ranks}"
            )

    def _place_of(self, stage: int) -> int:
        """The place in the pipeline's group of the rank that holds a stage."""
        return self._ranks - 1 - stage % self._ranks

    def _free_other_stages(self, model: BlockwiseBackbone) -> None:
        held = {block for stage in self.stages for block in stage.span}
        for index in range(len(model.blocks)):
            if index not in held:
                model.blocks[index] = nn.Identity()
        for names, stage in ((model.embedding, self.stages[0].is_first), (model.projection, self.stages[-1].is_last)):
            if not stage:
                _free(model, names)

    def place_weight(self, name: str, place: int | None, weight: nn.Parameter, shape: torch.Size) -> Weight:
        """Describe a weight, or a part of one, as the strategy within the stage does."""
        return self._within.place_weight(name, place, weight, shape)

    def optimizer(self, make: Callable[[Groups], torch.optim.Optimizer], groups: Groups) -> torch.optim.Optimizer:
        """Make the optimizer of this rank's parts, as the strategy within the stage does."""
        return self._within.optimizer(make, groups)

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that holds this rank's states."""
        return self._within.local_optimizer(optimizer)

    # A step.

    def warm_up(self, images: Callable[[], Tensor]) -> None:
        """Let DDP order its buckets now, as :meth:`plsc.parallel.strategies.ddp.DataParallel.warm_up` does."""
        if self.data_ranks > 2 and isinstance(self._within, DataParallel):
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
        parts = micro_batch_sizes(sizes, self.micro_batches)
        own = [part[self.data_rank] for part in parts]
        rows = [*own[:-1], max(own[-1], self.wrapping.least_images)]  # perhaps another one beside a single image
        x = images() if self.stages[0].is_first else None
        self._prepare(max(2, *map(max, parts)), x)
        for engine, net, stage in zip(self._engine_stages, self._nets, self.stages, strict=True):
            # torch's engine lets DDP exchange gradients in the last backward pass of every batch; what fully_shard has
            # changed in place adds up the sums of the batches
            engine.submod = net if last else stage
            stage.rows = deque(rows)
        by_part = labels.split(own)
        self._loss_of_part = lambda embeddings, part: (
            self._within.loss_of(loss, embeddings, by_part[part], parts[part]) if own[part] else _no_loss(embeddings)
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
        self._schedule = make(stages, self.micro_batches, loss_fn=self._loss, scale_grads=False)
        places = {number: self._place_of(number) for number in range(self._count)}
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

    def collect_gradients(self) -> None:
        """Give :attr:`weights` their gradients, as the strategy within the stage does."""
        self._within.collect_gradients()

    # The state.

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Let each stage's ranks write, as the strategy within says."""
        return self._within.writes(name, tensor)

    def whole_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the backbone's whole state_dict on every rank; all ranks call.

        The ranks of a stage make its weights whole, then every pipeline hands them on.
        """
        whole, of_stage = {}, self._within.whole_tensors(parts)
        for name, like in self.template.state_dict().items():
            own = of_stage.get(name)
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
        tokens_over: the ranks that split the tokens between the layers; None: each has all.

    Attributes:
        model: the backbone without blocks, with what this stage has of the rest.
        rows: of the coming micro-batches' images those that are no filling.
    """

    def __init__(
        self,
        model: BlockwiseBackbone,
        spans: Sequence[range],
        number: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        tokens_over: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.number, self.span = number, spans[number]
        self.is_first, self.is_last = number == 0, number == len(spans) - 1
        self.rows: deque[int] = deque()
        self.blocks = nn.ModuleList(model.blocks[index] for index in self.span)
        self.model = _ends(model, first=self.is_first, last=self.is_last)
        self._autocast, self._tokens_over = autocast, tokens_over

    @property
    def _model(self) -> BlockwiseBackbone:
        return cast(BlockwiseBackbone, self.model)

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
            if self.is_first and self._tokens_over is not None:
                kept = own_tokens(kept, self._tokens_over)
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
        if kept is not None and self._tokens_over is not None:
            kept = tokens_of_all(kept, self._tokens_over)
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
        ranks = 1 if self._tokens_over is None else self._tokens_over.size()
        shape = rows, model.tokens_seen // ranks, model.dim + int(model.drops_patches)
        return torch.empty(shape, device="meta", requires_grad=True)


def _ends(model: BlockwiseBackbone, *, first: bool, last: bool) -> nn.Module:
    """Return a copy of ``model`` that has no blocks, and shares with it the weights of its embedding or projection."""
    ends = copy.copy(cast(nn.Module, model))
    ends._modules, ends._parameters = ends._modules.copy(), ends._parameters.copy()
    ends.blocks = nn.ModuleList()
    _free(ends, (() if first else model.embedding) + (() if last else model.projection))
    return ends


def _free(model: Any, names: Sequence[str]) -> None:
    """Drop weights and layers of these names."""
    for name in names:
        setattr(model, name, None if isinstance(getattr(model, name), nn.Parameter) else nn.Identity())


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


def _example(rows: int, x: Tensor) -> Tensor:
    return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta")


def _no_loss(embeddings: Tensor, *_: Any) -> Tensor:
    return embeddings.sum() * 0
