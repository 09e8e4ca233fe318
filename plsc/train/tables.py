"""The class tables of a run, built from its configuration: their data, heads, optimizers and learning rates."""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from plsc.config import Config, DataConfig, TableConfig, make_margin, table_configs
from plsc.data import ImageDataset, open_dataset
from plsc.data.joined import JoinedDataset
from plsc.data.relabelled import RelabelledDataset
from plsc.data.transforms import RotatedDataset
from plsc.errors import UsageError
from plsc.head.sharded_head import AbsentHead, ShardedHead
from plsc.optim.head_optimizers import HeadAdamW, HeadOptimizer, HeadSGD
from plsc.optim.schedules import scaled_lr
from plsc.parallel import Mesh
from plsc.parallel.strategies import Strategy
from plsc.progress import counted


@dataclass(frozen=True)
class TrainedTable:
    """A class table of a run with its optimizer.

    Attributes:
        of: its name, its configuration and its weight in the loss.
        head: the table.
        optimizer: of its rows.
        first_class: the number of its first class among those of all tables, as the data has them.
    """

    of: TableConfig
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

    Raises:
        UsageError: besides, a table has fewer rows than its data has classes.
    """
    tables = table_configs(config)
    if not config.table:
        return _open_data(config.data)
    parts = {table.name: _open_data(table.config.data) for table in tables}
    for table in tables:
        if table.classes is not None and table.classes < (needed := parts[table.name].num_classes):
            raise UsageError(
                f"table {table.name} has classes = {table.classes:,}, and {table.config.data.train} "
                f"{counted(needed, 'class')}; leave classes out"
            )
    classes = [table.classes or parts[table.name].num_classes for table in tables]
    return JoinedDataset(parts, [table.batch_share for table in tables], classes)


def classes_of(dataset: ImageDataset) -> list[int]:
    """The number of classes of each class table."""
    if not isinstance(dataset, JoinedDataset):
        return [dataset.num_classes]
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
            label_columns=True,
        )
    return RotatedDataset(dataset) if data.rotation_classes else dataset


def make_tables(config: Config, dataset: ImageDataset, strategy: Strategy, *, exact: bool) -> list[TrainedTable]:
    """The class tables, each with another seed: tables of one seed would begin with the same rows."""
    firsts = dataset.first_classes if isinstance(dataset, JoinedDataset) else [0, dataset.num_classes]
    tables = []
    for number, (of, (first, stop)) in enumerate(zip(table_configs(config), pairwise(firsts), strict=True)):
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
    names = ["sample_rate", "momentum_dtype", "centers", "placement", "fp32_precision"]
    of_features = {name: value for section in config.features for name, value in section.head_options().items()}
    return kind(
        config.embedding_dim,
        num_classes,
        mesh,
        make_margin(head),
        weight_dtype="float64" if exact and head.weight_dtype == "float32" else head.weight_dtype,
        seed=config.seed,
        **{name: getattr(head, name) for name in names},
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
