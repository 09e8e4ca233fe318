"""The class tables of a run, built from its configuration: their data, heads, optimizers and learning rates."""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from plsc.config import ClassTable, Config, DataConfig, class_tables, make_margin
from plsc.data import ImageDataset, open_dataset
from plsc.data.relabelled import RelabelledDataset
from plsc.data.transforms import RotatedDataset
from plsc.head.options import TableOptions
from plsc.head.sharded_head import AbsentHead, ShardedHead
from plsc.optim.head_optimizers import HeadAdamW, HeadOptimizer, HeadSGD
from plsc.optim.schedules import scaled_lr
from plsc.parallel import Mesh
from plsc.parallel.strategies import Strategy
from plsc.toml_keys import options_of


@dataclass(frozen=True)
class TrainedTable:
    """A class table of a run with its optimizer.

    Attributes:
        of: its name, its configuration and its weight in the loss.
        head: the table.
        optimizer: of its rows.
        first_class: the number of its first class among those of all tables, as the data has them.
    """

    of: ClassTable
    head: ShardedHead
    optimizer: HeadOptimizer
    first_class: int = 0

    @property
    def name(self) -> str:
        """Its name; "" of a run's only table."""
        return self.of.name


def open_training_data(config: Config) -> ImageDataset:
    """Open the images of all class tables; raises as :func:`plsc.data.open_dataset` does.

    With data.labels, they are the images and the order that ``plsc embed`` takes.
    """
    for section in config.features_on:
        if (joined := section.open_data(config, _open_data)) is not None:
            return joined
    return _open_data(config.data)


def classes_of(dataset: ImageDataset) -> list[int]:
    """The number of classes of each class table."""
    return [stop - first for first, stop in pairwise(dataset.first_classes)]


def _open_data(data: DataConfig) -> ImageDataset:
    contract = data.preprocessing
    dataset: ImageDataset
    if data.labels:
        from plsc.embedding.sources import open_images

        images = open_images(data.train, contract.image_size, own_labels=False)
        images.interpolation = contract.interpolation
        dataset = RelabelledDataset(images, Path(data.labels))
    else:
        dataset = open_dataset(
            data.train,
            image_size=contract.image_size,
            interpolation=contract.interpolation,
            max_bad_records=data.max_bad_records,
            label_columns=data.label_columns,
        )
    return RotatedDataset(dataset) if data.rotation_classes else dataset


def make_tables(config: Config, dataset: ImageDataset, strategy: Strategy, *, exact: bool) -> list[TrainedTable]:
    """The class tables, each with another seed: tables of one seed would begin with the same rows."""
    tables = []
    firsts = pairwise(dataset.first_classes)
    for number, (of, (first, stop)) in enumerate(zip(class_tables(config), firsts, strict=True)):
        own = dataclasses.replace(of.config, seed=config.seed + number)
        head = _head_of(own, stop - first, strategy, exact=exact)
        optimizer = make_head_optimizer(own, head, strategy.data_ranks)
        tables.append(TrainedTable(of, head, optimizer, first))
    return tables


def _head_of(config: Config, num_classes: int, strategy: Strategy, *, exact: bool) -> ShardedHead:
    """This rank's side of the class head."""
    if strategy.steps_alone and config.head.placement.startswith("mmap:"):  # ranks share the file's folder
        own = f"{config.head.placement}.of-rank{strategy.mesh.rank}"
        config = dataclasses.replace(config, head=dataclasses.replace(config.head, placement=own))
    if strategy.head_mesh is not None:
        return make_head(config, num_classes, strategy.head_mesh, exact=exact)
    alone = Mesh(0, 1, strategy.mesh.local_rank, strategy.mesh.device)
    momentum = config.head.momentum_dtype
    return AbsentHead(
        config.embedding_dim, num_classes, alone, make_margin(config.head), momentum_dtype=momentum, backend="torch"
    )


def make_head(config: Config, num_classes: int, mesh: Mesh, *, exact: bool = False) -> ShardedHead:
    """The class head that [head] describes; with ``exact``, a float32 table becomes float64, and so do all sums."""
    head = config.head
    kinds = (section.head_kind() for section in config.features)
    kind = next((found for found in kinds if found is not None), ShardedHead)
    of_features = {name: value for section in config.features for name, value in section.head_options().items()}
    return kind(
        config.embedding_dim,
        num_classes,
        mesh,
        make_margin(head),
        sample_rate=head.sample_rate,
        weight_dtype="float64" if exact and head.weight_dtype == "float32" else head.weight_dtype,
        momentum_dtype=head.momentum_dtype,
        options=[options_of(TableOptions, head, seed=config.seed)],
        **of_features,
    )


def global_batch(config: Config, data_ranks: int) -> int:
    """Images of a step that so many ranks with own images take."""
    return config.data.batch_size * data_ranks * config.optim.accumulate


def peak_rates(config: Config, data_ranks: int) -> tuple[float, float]:
    """The peak learning rates of backbone and head at the global batch that so many ranks with own images make.

    Where each of them steps by itself, its step is its share of theirs, as its gradient is of their mean.
    """
    optim = config.optim
    batch = global_batch(config, data_ranks)
    lr = scaled_lr(optim.lr, batch, optim.lr_scaling, optim.base_batch)
    head_lr = lr if optim.head_lr is None else scaled_lr(optim.head_lr, batch, optim.lr_scaling, optim.base_batch)
    steppers = data_ranks if config.steps_alone else 1
    return lr / steppers, head_lr / steppers


def make_head_optimizer(config: Config, head: ShardedHead, data_ranks: int) -> HeadOptimizer:
    """The head's optimizer, as [optim] describes it, for the global batch of so many ranks with own images."""
    optim = config.optim
    lr = peak_rates(config, data_ranks)[1]
    if optim.head_name == "sgd":
        momentum = optim.momentum if head.momentum_dtype is not None else 0.0
        return HeadSGD(head, lr, momentum=momentum, weight_decay=optim.weight_decay)
    betas = (optim.betas[0], optim.betas[1])
    return HeadAdamW(head, lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)
