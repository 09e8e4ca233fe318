"""ShardedHead: the class table, one shard per rank, and its exact margin softmax."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from plsc.arguments import as_integer
from plsc.errors import UsageError
from plsc.head.backends import HeadShape, agree_on_shape, choose_backend, fall_back
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.torch_backend import TorchBackend, is_bounded
from plsc.head.class_table import TableShape, class_range
from plsc.head.kept_rows import KeptClasses
from plsc.head.options import ATTRIBUTES, KEYWORDS, Options, TableOptions, check_sample_rate, group_of
from plsc.head.replica_exchange import ReplicaExchange
from plsc.head.sampling import ClassSampler
from plsc.head.sharded_softmax import HeadLoss, ShardedSoftmax
from plsc.head.storage import TableStorage
from plsc.losses.margins import Margin, State, to_margin
from plsc.parallel.collectives import all_gather_object, all_reduce_sum
from plsc.parallel.mesh import Mesh, require_mesh
from plsc.parallel.tensor_shard import TensorShard

_LOG = logging.getLogger("plsc")


class ShardedHead(nn.Module):
    """A margin-based softmax over ``num_classes`` classes whose table is sharded over the ranks of ``mesh``.

    The loss is the exact mean over the global batch, the same number on every rank. Gradients by the embeddings come
    multiplied by the number of ranks, so that data parallelism's average gives those of one process. The table itself
    is updated by :class:`plsc.HeadSGD` or :class:`plsc.HeadAdamW`, which run the second pass.

    Where the mesh has head groups (``plsc.init(head_ranks=K)``), the table is sharded over the K ranks of a group and
    replicated over the G groups; all of the above holds as without groups, and replicas stay equal bit for bit, unless
    an option lets them part.

    Communication, in bytes received per rank and step, with b samples of this rank's group among B of all (b = B
    without groups): b·D weights' numbers for the features and 4·b·D for their gradient, 40 bytes per sample of the
    group. With groups also 8·B for target cosines (4·B more for margins that use norms, 8·B more where classes are
    sampled), and 8·D·(G − 1)/G for each row of this rank's that took part: the replicas' sum of its gradient. Groups
    pay where b·D is large beside the rows that a step touches: many ranks, a sampled or small table.

    Args:
        dim: width D of embeddings and class weights.
        num_classes: C. Rank r of a head group of K owns a contiguous range; the first C mod K own one class more.
        mesh: from :func:`plsc.init`; a single process where left out.
        margin: such as ``plsc.CosFace(s=64, m=0.35)``, or a name with its paper's values: "softmax", "sphereface",
            "cosface", "arcface", "combined", "adaface", "magface", "curricularface", "elasticface". None is
            ArcFace(s=64, m=0.5).
        sample_rate: 1 computes the exact softmax; below 1, all positives and this share of the shard's classes take
            part in a step (Partial FC); 0 takes positives only. Rows that take no part are neither read nor moved.
        weight_dtype: float64, float32 or bfloat16 (rounded stochastically by the update), as a dtype or its name.
        momentum_dtype: of the optimizer's state: float64, float32, bfloat16, int8, or None for no momentum.
        options: groups of rarer options: :class:`plsc.TableOptions`, :class:`plsc.LabelOptions`, and those of rare
            features (docs/features).
        **keywords: fields of such groups by their names: ``centers=3`` is short for
            ``options=[plsc.TableOptions(centers=3)]``.

    Arguments but ``weight_dtype`` and ``options``, and the fields of groups but ``chunk_classes`` and ``backend``, are
    attributes, as given. The others:

    Attributes:
        weight: this rank's rows, (C_local·K, D). Writing into it from outside is noticed. Of a table that is not on the
            device, asking for it waits until all updates have landed: ask again after each step.
        class_range: (first, last + 1) of this rank's classes.
        backend: what computes, chosen when the head is made; ``backend.name`` and ``backend.reason`` say which and why.
        softmax: its step: table, waiting batches and passes. For its optimizers; a training script has no use for it.

    Raises:
        UsageError: an argument is out of its range; nothing here multiplies in ``fp32_precision``; the mapped file's
            folder is missing or cannot be written.
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
        margin: Margin | str | None = None,
        sample_rate: float = 1.0,
        weight_dtype: torch.dtype | str = torch.float32,
        momentum_dtype: torch.dtype | str | None = torch.float32,
        options: Sequence[object] = (),
        **keywords: Any,
    ) -> None:
        super().__init__()
        self.dim = as_integer(dim, "the head's dim", 1)
        self.num_classes = as_integer(num_classes, "the head's num_classes", 1)
        check_sample_rate(sample_rate)
        groups = Options(options, keywords)
        of_table = groups.get(TableOptions)
        mapped = groups.mapped_tables(of_table.placement)
        storage = TableStorage.of(weight_dtype, momentum_dtype, of_table.placement, mapped)
        self.mesh = Mesh(0, 1, 0, torch.device("cpu")) if mesh is None else require_mesh(mesh)
        self.margin = to_margin("arcface" if margin is None else margin)
        self.sample_rate, self.momentum_dtype = sample_rate, storage.momentum_dtype
        for feature in groups.features:
            feature.check(self.margin)
        self._groups = groups
        self.centers, self.seed, self.update = of_table.centers, of_table.seed, of_table.update
        self.placement, self.fp32_precision = of_table.placement, _to_fp32_precision(of_table.fp32_precision)
        self.exponentials_memory = int(of_table.exponentials_memory or 0)  # bytes
        self._weight_dtype, self._requested_backend = storage.weight_dtype, of_table.backend
        self.backend = self._chosen_backend()
        self.class_range = first, stop = self._own_classes()
        centers, seed = self.centers, self.seed
        shape = TableShape((stop - first) * centers, self.dim, first * centers, num_classes * centers, centers, seed)
        shape = self._table_shape(shape)
        table = storage.make(shape, self.mesh, requires_grad=self.update == "autograd")
        self.weight = table.parameter
        self.softmax = ShardedSoftmax(
            self.mesh,
            self.margin,
            table,
            self.backend,
            ClassSampler(first, stop, sample_rate, seed, self.mesh.device),
            of_table.chunk_classes,
            ReplicaExchange(table, self.mesh.replicas),
        )
        # an input that requires grad, so that backward() reaches the head with a frozen backbone too
        self._anchor = torch.zeros((), device=self.mesh.device, requires_grad=True)
        for feature in groups.features:
            feature.attach(self)

    def _own_classes(self) -> tuple[int, int]:
        return class_range(self.num_classes, self.mesh.head.rank, self.mesh.head.world_size)

    def keep(self, classes: KeptClasses) -> None:
        """Let no update change the rows of ``classes`` from now on."""
        found = classes.by_number(self.num_classes, self.class_range, self.centers, self.mesh.device)
        self.softmax.table.kept = found

    @property
    def _most_classes(self) -> int:
        """The classes that there ever are, which bound the logits."""
        return self.num_classes

    def _table_shape(self, shape: TableShape) -> TableShape:
        return shape

    def __getattr__(self, name: str) -> Any:
        # parameters are looked up here, and updates of a host table's weight may not be stored yet
        if name == "weight" and "softmax" in self.__dict__:
            self.softmax.table.wait_written()
        elif name in ATTRIBUTES and "softmax" in self.__dict__:  # of options that were not given
            group_of(ATTRIBUTES[name])().attach(self)
            return self.__dict__[name]
        elif name in KEYWORDS and "_groups" in self.__dict__:
            return self._groups.value(name)
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        """The attributes, with those of options."""
        options = {name for name in (*KEYWORDS, *ATTRIBUTES) if name != "chunk_classes"}
        return sorted({*super().__dir__(), *options})  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, *arguments: Any) -> None:
        self.softmax.table.wait_written()
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.softmax.table.wait_written()
        super()._load_from_state_dict(*arguments)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int] | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the global batch.

        Args:
            embeddings: this rank's (b, D), floating point, of any norm; b may differ between ranks and may be 0.
            labels: (b,) integers in [0, num_classes), on the CPU or the device. Never changed. Or (b, K), up to 100 a
                sample and the same K on all ranks, with −1 where there is none: a sample of −1 alone adds no loss, and
                a label that is given twice counts once.
            sizes: b of every rank. Without it, ranks tell each other their b and whether their labels are in range,
                and wait for labels that lie on a GPU. With it, nothing waits, and each rank speaks for itself: of a
                label out of range, a rank that has it on the CPU raises the error alone; on a GPU it makes the loss NaN
                on every rank, by which no optimizer of the head updates anything.
            weights: (b, K) of the labels' losses, floating point and not negative, in place of those that the
                head's options give them.

        Returns:
            A float32 scalar (float64 for float64 tables), equal on every rank.

        Raises:
            LabelError: a label is out of range, on whatever rank: every rank raises it, and it names the label.
            UsageError: shapes or dtypes do not fit (likewise on every rank); or batches before this one went through
                backward(), and the head has no optimizer, or the backbone's has stepped since and the head's has not.
                Several backward() before the step of both accumulate. Under no_grad() and in eval mode nothing waits.
        """
        if not isinstance(embeddings, Tensor) or not isinstance(labels, Tensor):
            kinds = f"{type(embeddings).__name__} and {type(labels).__name__}"
            raise UsageError(f"the head takes tensors of embeddings (b, {self.dim}) and labels (b,), not {kinds}")
        if self.margin.separates_positives:
            if weights is not None:
                name = type(self.margin).__name__
                raise UsageError(
                    f"{name} joins all labels of a sample in one term, which takes no weights: leave them out"
                )
            labels = labels[:, None] if labels.dim() == 1 else labels
        elif labels.dim() > 1 and self.margin.changes_negatives:
            name = type(self.margin).__name__
            shape = tuple(labels.shape)
            raise UsageError(
                f"{name} compares negatives with a sample's label, which has to be one: labels (b,), not {shape}"
            )
        weight = self.softmax.table.parameter if self.update == "autograd" else None
        differentiate = torch.is_grad_enabled()
        # norms and statistics outlive this call: made in inference mode, no later training step could change them
        with torch.inference_mode(False), torch.set_grad_enabled(differentiate):
            loss: Tensor = HeadLoss.apply(
                embeddings, self._anchor, weight, labels, weights, self.softmax, sizes, differentiate, self.training
            )
        return loss

    @torch.no_grad()
    def prefetch(self, labels: Tensor, sizes: Sequence[int] | None = None) -> None:
        """Begin to fetch the rows of a coming training batch, while this one computes.

        Announce each batch once, in order, at any time before its loss. Results do not depend on it: the classes drawn
        are those that the step would draw, and rows that are being updated meanwhile are taken from their updates.
        Without effect where the table lies on the device, and where nothing is sampled. Every rank calls.

        Args:
            labels: this rank's (b,) or (b, K) of that batch. Moves 8 bytes per sample and label of all ranks.
            sizes: as :meth:`forward` takes them.

        Raises:
            LabelError, UsageError: as :meth:`forward` does.
        """
        self.softmax.prefetch(labels, sizes)

    def end_step(self) -> None:
        """Called by an optimizer of the head when its step has taken the batches that waited; every rank calls."""

    def set_margin(self, margin: Margin) -> None:
        """Take other values of the margin from the next batch on; its running statistics stay. Every rank calls.

        Raises:
            UsageError: it is another kind of margin; batches wait for the optimizer.
        """
        if type(margin) is not type(self.margin):
            kinds = f"{type(margin).__name__}, not {type(self.margin).__name__}"
            raise UsageError(f"a head keeps its kind of margin, and this one is {kinds}: make another head")
        self._refuse_while_batches_wait("margin")
        was_bounded = is_bounded(self.margin, self._most_classes)
        self.margin = self.softmax.margin = margin
        if is_bounded(margin, self._most_classes) != was_bounded:  # kernels take bounded logits alone
            self.backend = self.softmax.backend = self._chosen_backend()

    def set_sample_rate(self, sample_rate: float) -> None:
        """Sample another share of the classes from the next batch on. Every rank calls.

        Raises:
            UsageError: it is no share; batches wait for the optimizer.
        """
        check_sample_rate(sample_rate)
        self._refuse_while_batches_wait("sample_rate")
        self.sample_rate = sample_rate
        self.softmax.sampler = replace(self.softmax.sampler, rate=sample_rate)
        self.softmax.table.forget_prefetched()  # their classes were drawn at the rate before

    def _refuse_while_batches_wait(self, name: str) -> None:
        if self.softmax.pending.batches:
            raise UsageError(f"the head's {name} cannot change between a loss and its step(): step() first")

    def _chosen_backend(self) -> TorchBackend:
        """The backend for the present margin, the same on replicas. Every rank calls."""
        shape = HeadShape(
            self.mesh.device,
            self._weight_dtype,
            self.dim,
            self.centers,
            self.margin,
            self.fp32_precision,
            self._most_classes,
            any(feature.filters_negatives for feature in self._groups.features),
            self.exponentials_memory,
        )
        backend = choose_backend(shape, requested=self._requested_backend)
        self._agree_on(backend, shape)
        if self.mesh.replicas.world_size == 1:
            return backend
        shards = self.mesh.head
        everyone = all_gather_object((backend.chunking, _processor(self.mesh.device)), self.mesh)
        for shard in range(shards.world_size):
            processors = sorted({processor for _, processor in everyone[shard :: shards.world_size]})
            if len(processors) > 1:  # whose generators give other rows and other sampled classes
                raise UsageError(
                    f"replicas of a shard lie on {' and '.join(processors)}, which draw other random numbers: order "
                    "ranks so that replicas have GPUs of one kind, or shard the table over all ranks (head_ranks = 0)"
                )
        replicas = {chunking for chunking, _ in everyone[shards.rank :: shards.world_size]}
        if len(replicas) == 1 or backend.name == "torch":
            return backend
        return fall_back(shape, f"replicas of this shard cannot all run {backend.chunking}")

    def _agree_on(self, backend: TorchBackend, shape: HeadShape) -> None:
        """Make sure that all ranks compute the same head; every rank that holds classes calls."""
        agree_on_shape(backend, shape, self.mesh)
        if self.mesh.rank == 0 and not hasattr(self, "softmax"):
            _LOG.info("class head: %s", backend.describe())

    def inverse_norms(self) -> Tensor:
        """1/‖W‖ of this rank's rows, float32 (float64 for float64 tables); renewed if the weights were written to."""
        return self.softmax.table.inverse_norms()

    def mean_norm(self) -> float:
        """The mean ‖W‖ over all classes and sub-centres of all shards; a norm that keeps growing is a bad sign."""
        sums = self.inverse_norms().reciprocal().sum(dtype=torch.float64).reshape(1).to(self.mesh.device)
        return float(all_reduce_sum(sums, self.mesh.head) / (self.num_classes * self.centers))

    @property
    def margin_state(self) -> State:
        """The margin's running statistics, equal on all ranks. May be set, to take a step back."""
        return self.softmax.margin_state

    @margin_state.setter
    def margin_state(self, state: State) -> None:
        self.softmax.margin_state = state

    def sharded_state(self) -> dict[str, TensorShard]:
        """The table for torch.distributed.checkpoint, which loads it at any number of ranks."""
        table = self.softmax.table
        return {"weight": table.row_shard(table.parameter.detach())}

    def get_extra_state(self) -> dict[str, Any]:
        """Small state, equal on all ranks: the margin's statistics and the number of batches seen."""
        return {"forwards": self.softmax.forwards, "margin": {k: float(v) for k, v in self.margin_state.items()}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self.softmax.forwards = int(state["forwards"])
        for name, value in state["margin"].items():
            self.margin_state[name].fill_(value)

    def extra_repr(self) -> str:
        """For print()."""
        first, stop = self.class_range
        return (
            f"dim={self.dim}, num_classes={self.num_classes}, classes [{first}, {stop}) here, {self.margin}, "
            f"sample_rate={self.sample_rate}, {self.weight.dtype}, on {self.placement}, {self.backend.name}"
        )


class AbsentHead(ShardedHead):
    """A head on a rank that holds none of its classes, such as a pipeline's first stages: no rows, and no loss.

    A training step calls it, and an optimizer of it, as on the other ranks: no rank branches on its place. Its mesh is
    this rank alone.
    """

    def _own_classes(self) -> tuple[int, int]:
        return 0, 0

    def _agree_on(self, backend: TorchBackend, shape: HeadShape) -> None:
        """Nothing: the head is computed elsewhere."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int] | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Raise RuntimeError: losses are for the ranks that hold classes."""
        raise RuntimeError("this rank holds none of the head's classes")

    def mean_norm(self) -> float:
        """NaN: the rows are elsewhere."""
        return float("nan")


def _to_fp32_precision(value: str) -> Fp32Precision:
    """The precision of float32 products that ``value`` names; UsageError if there is none."""
    for precision in get_args(Fp32Precision):
        if value == precision:
            return precision  # type: ignore[no-any-return]
    raise UsageError(f"fp32_precision must be one of {', '.join(get_args(Fp32Precision))}, not {value!r}")


def _processor(device: torch.device) -> str:
    """What random numbers of torch's generators depend on, beside the seed: a GPU's kind; equal for all CPUs."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.multi_processor_count} processors)"
