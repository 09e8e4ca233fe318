"""The influence loss of backward-compatible training: new embeddings among the class centres of an old model.

Shen et al., "Towards Backward-Compatible Representation Learning" (CVPR 2020): beside its own loss, a new backbone is
trained to be right by the old model's classifier, which does not change. Where the new data has classes that the old
model was not trained on, the means of their old embeddings stand in for rows ("synthesised classifier weights").
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from plsc.config import Config
from plsc.data import ImageDataset
from plsc.errors import DataError, UsageError
from plsc.features.compatible.class_centres import ClassCentres, open_centres
from plsc.features.compatible.config import CompatibleConfig
from plsc.head.class_table import SMALLEST_NORM
from plsc.head.sharded_head import AbsentHead, ShardedHead
from plsc.losses import CosFace
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.strategies import Strategy
from plsc.progress import counted

_ROWS = 65536  # of a source that are read at a time
_SCALE = 64.0


class InfluenceLoss:
    """The mean loss over the old centres of those samples of a global batch whose class has one.

    The centres are sharded over the ranks as the class table is, and no step moves them: the head stays in eval mode,
    in which no batch waits for an update.

    Args:
        head: holds the centres.
        centre_of: (C,) int64, the centre's class of each class of the data; −1: it has none.
        weight: of the loss in that of the run.
        origin: where the centres are from, in words.
        digest: tells other centres of the same origin from these.
        by_number: they have no names, and are those of the data's classes in their order.

    Attributes:
        head, centre_of, weight, origin: as given.
        identity: of the centres, which a run that goes on compares with what it began with.
        matched: how many classes of the data have a centre.
    """

    def __init__(
        self,
        head: ShardedHead,
        centre_of: Tensor,
        weight: float,
        origin: str,
        digest: str = "",
        *,
        by_number: bool = False,
    ) -> None:
        self.head, self.centre_of, self.weight, self.origin = head.eval(), centre_of, weight, origin
        self.identity: dict[str, str | int] = {"classes": head.num_classes, "origin": origin, "digest": digest}
        self._by_number = by_number
        self.matched = int((centre_of >= 0).sum())
        self._by_label = torch.cat([centre_of, centre_of.new_tensor([-1])])  # the last one is label −1's
        self._on_device = self._by_label.to(head.mesh.device)
        self._of_step = torch.ones((), dtype=torch.float64, device=head.mesh.device)

    def __call__(self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int]) -> Tensor:
        """The mean loss, the same on every rank; 0 where no sample has a centre.

        Args:
            embeddings: this rank's (b, D).
            labels: (b,) or (b, K) of the data's classes, −1 for none.
            sizes: b of every rank.
        """
        table = self._on_device if labels.device.type == self._on_device.device.type else self._by_label
        old = table[labels]
        if labels.is_pinned():
            old = old.pin_memory()
        # one label a sample that may be missing is one of several: the mean is over samples that have one
        old = old[:, None] if old.dim() == 1 and self.matched < len(self.centre_of) else old
        loss: Tensor = self.head(embeddings, old, sizes)
        return loss

    def begin(self, labels: Sequence[Tensor], mesh: Mesh, data_ranks: int) -> None:
        """Count a step's samples that have a centre, of which :meth:`share` gives parts; nothing waits.

        Args:
            labels: of each of this rank's micro-batches, on the CPU, as in a call.
            mesh: all ranks of the run; all call.
            data_ranks: how many of them have batches of their own; the others have the same ones as one of these.
        """
        self._of_step = all_reduce_sum(self._samples(torch.cat(list(labels))), mesh) * (data_ranks / mesh.world_size)

    def share(self, labels: Tensor) -> Tensor:
        """The part of the step's samples with a centre that are in a micro-batch: its weight in the step's mean.

        Args:
            labels: this rank's of the micro-batch, as in a call, on the CPU; all ranks of the head call.
        """
        return all_reduce_sum(self._samples(labels), self.head.mesh) / self._of_step.clamp(min=1)

    def _samples(self, labels: Tensor) -> Tensor:
        """How many samples have a centre; made on the device, since a copy to it would wait."""
        known = self._by_label[labels] >= 0
        count = int((known.any(1) if known.dim() > 1 else known).sum())
        return torch.full((), count, dtype=torch.float64, device=self.head.mesh.device)

    def describe(self) -> str:
        """The centres, in words for a run's first lines."""
        margin = self.head.margin
        assert isinstance(margin, CosFace)
        how = ", by number" if self._by_number else ""
        return (
            f"{counted(self.head.num_classes, 'old centre')} ({self.origin}), which {counted(self.matched, 'class')} "
            f"of {len(self.centre_of):,} here have{how}; weight {self.weight:g}, s {margin.s:g}, m {margin.m:g}"
        )


def make_influence_loss(config: Config, dataset: ImageDataset, strategy: Strategy, *, exact: bool) -> InfluenceLoss:
    """The influence loss that [compatible] describes; every rank calls.

    Raises:
        UsageError: the centres do not exist, are of another width, or no class of the data has one.
        DataError: they cannot be read, or one is not finite or zero.
    """
    compatible = config.section(CompatibleConfig)
    with open_centres(compatible.with_) as centres:
        if centres.dim != config.embedding_dim:
            raise UsageError(
                f"compatible.with = {centres.source} has centres of {centres.dim} numbers, and embedding_dim is "
                f"{config.embedding_dim}; give embedding_dim = {centres.dim}, as the old gallery has it"
            )
        centre_of = _matched(centres, dataset)
        head = _head(config, centres, strategy, exact=exact)
        _fill(head, centres)
        by_number = centres.names is None
        return InfluenceLoss(head, centre_of, compatible.weight, centres.origin, centres.digest(), by_number=by_number)


def _head(config: Config, centres: ClassCentres, strategy: Strategy, *, exact: bool) -> ShardedHead:
    """A table for the centres, sharded as the class table is."""
    compatible, dtype = config.section(CompatibleConfig), config.head.weight_dtype
    kind: Callable[..., ShardedHead] = ShardedHead if strategy.head_mesh is not None else AbsentHead
    if strategy.head_mesh is None:
        kind = partial(kind, backend="torch")
    return kind(
        centres.dim,
        centres.classes,
        strategy.head_mesh or Mesh(0, 1, strategy.mesh.local_rank, strategy.mesh.device),
        CosFace(s=compatible.s or config.head.s or _SCALE, m=compatible.m),
        weight_dtype="float64" if exact and dtype == "float32" else dtype,
        momentum_dtype=None,
        centers=centres.centers,
        fp32_precision=config.head.fp32_precision,
    )


def _fill(head: ShardedHead, centres: ClassCentres) -> None:
    """Read this rank's rows."""
    first, stop = head.class_range
    rows = head.weight.detach().view(stop - first, centres.centers, centres.dim)
    for start in range(first, stop, _ROWS):
        part = centres.read(start, min(start + _ROWS, stop))
        length = torch.linalg.vector_norm(part, dim=2)
        if bad := int((~(torch.isfinite(length) & (length > SMALLEST_NORM))).sum()):
            raise DataError(
                f"compatible.with = {centres.source} has {counted(bad, 'centre')} that are zero or not finite; use "
                "another checkpoint of the old model"
            )
        rows[start - first : start - first + len(part)] = part.to(rows)


def _matched(centres: ClassCentres, dataset: ImageDataset) -> Tensor:
    """The centre's class of each class of the data, by name; −1: it has none."""
    if centres.names is None:
        if centres.classes != dataset.num_classes:
            raise UsageError(
                f"compatible.with = {centres.source} has {counted(centres.classes, 'centre')} without names, and "
                f"data.train {counted(dataset.num_classes, 'class')}; put their names beside it, as plsc table "
                "export does, or give the old model's run"
            )
        return torch.arange(centres.classes)
    places = {name: number for number, names in enumerate(centres.names) for name in names if name}
    found = torch.tensor([places.get(name, -1) for name in dataset.class_names])
    if not bool((found >= 0).any()):
        mine, theirs = dataset.class_names[0], next(iter(places), "")
        raise UsageError(
            f"compatible.with = {centres.source} has no class of data.train, whose names are such as {mine!r}, and "
            f"there {theirs!r}; embed data.train by the old model (plsc embed), and give the embedding set"
        )
    return found
