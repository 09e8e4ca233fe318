"""The sections of a configuration: those of a run's operation, and the whole of them.

The larger sections stand in files of their own names beside this one. Each key is a field of its section, with its
type, default and limits, and its meaning is in the section's docstring; both are once and there.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from plsc import arcface_torch
from plsc.config.data import DataConfig
from plsc.config.head import HeadConfig
from plsc.config.optim import OptimConfig
from plsc.config.parallel import ParallelConfig
from plsc.feature_config import FEATURES, FeatureConfig, section_class, section_name, section_of
from plsc.nearest import did_you_mean
from plsc.strict_toml import Table, tables
from plsc.toml_keys import attribute, key, toml_value

_Section = TypeVar("_Section", bound=FeatureConfig)
AUTO = "auto"  # the precision that suits the device
# Of each pair one may be given; on the command line it takes the place of the file's other one.
EXCLUSIVE = (("epochs", "steps"), ("optim.warmup_epochs", "optim.warmup_steps"))


@dataclass(frozen=True)
class EvalConfig:
    """[eval]: evaluation during training, on classes that are not trained on.

    Attributes:
        sets: Evaluation sets: .bin verification sets, folders of unseen classes, or drawn sets, as avatars:NxM@FIRST.
        every_steps: Steps between evaluations; 0: at the end only.
        batch_size: Images per rank and forward pass.
    """

    sets: tuple[str, ...] = key(())
    every_steps: int = key(2000, least=0)
    batch_size: int = key(64, least=1)


@dataclass(frozen=True)
class KeepConfig:
    """[checkpoint.keep]: which checkpoints stay; each is removed that no key keeps, and never the newest.

    Attributes:
        last: Number of newest checkpoints to keep; checkpoint.keep = N is short for it.
        every_hours: Keep the last checkpoint of each period of so many hours, counted by the clock (UTC); 0: none.
        best: Number of checkpoints of the best mean accuracy over eval.sets to keep; where it is not 0, a checkpoint
            follows each evaluation that has one.
    """

    last: int = key(3, least=1, stands_for_section=True)
    every_hours: float = key(0.0, least=0)
    best: int = key(0, least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: when to save.

    Attributes:
        every_steps: Steps between checkpoints; 0: by the clock alone, and at the end.
        every_minutes: Minutes after which a checkpoint is due, whatever the steps; 0: by steps alone.
        async_save: Write checkpoints while training goes on, from a copy in host memory; false: training waits for
            them.
    """

    every_steps: int = key(1000, least=0)
    every_minutes: float = key(0.0, least=0)
    async_save: bool = key(True)
    keep: KeepConfig = dataclasses.field(default_factory=KeepConfig)


@dataclass(frozen=True)
class LogConfig:
    """[log]: metrics.jsonl, and the loggers beside it.

    Attributes:
        every_steps: Steps between lines of metrics.jsonl and points of the loggers.
        to: Loggers that get the numbers of metrics.jsonl, and pictures of evaluations: tensorboard (RUN/tensorboard),
            csv (RUN/metrics.csv, no pictures), wandb (offline in RUN/wandb unless WANDB_MODE is set), mlflow
            (RUN/mlflow.db unless MLFLOW_TRACKING_URI is set). true and false of the former name are the first, and
            none.
        profile: Steps to profile after the first ten, on the first rank, into RUN/profile: a trace for Perfetto, and a
            picture of the step's parts. 0: none.
    """

    every_steps: int = key(10, least=1)
    to: tuple[str, ...] = key(
        ("tensorboard",),
        choices="plsc.loggers:LOGGERS",
        renamed_from="tensorboard",
        former_values={"true": ("tensorboard",), "false": ()},
    )
    profile: int = key(0, least=0)


@dataclass(frozen=True)
class StageKeys:
    """[[stage]]: when it begins; beside these it takes every key of the run that may change.

    Attributes:
        from_step: Number of steps after which the stage begins; unset: from_epoch.
        from_epoch: Number of epochs after which the stage begins, to the nearest step; unset: from_step.
    """

    from_step: int | None = key(None, least=1)
    from_epoch: float | None = key(None, above=0)


@dataclass(frozen=True)
class TableKeys:
    """[[table]]: a class table of its own data; beside these it takes the keys of [head], and its data and rate.

    Attributes:
        name: Name of the table: in the log, in metrics and in checkpoints.
        classes: Rows of the table; unset: the number of classes of its data.
        batch_share: Share of each batch that the table's data has, in relation to the other tables' shares; an epoch
            is one pass over the first table's data.
        loss_weight: Factor of the table's mean loss in the loss of the run.
    """

    name: str | None = key(None)
    classes: int | None = key(None, least=1)
    batch_share: float = key(1.0, above=0)
    loss_weight: float = key(1.0, above=0)


@dataclass(frozen=True)
class Config:
    """A training run. ``epochs`` and ``steps`` exclude each other.

    Attributes:
        backbone: Backbone: iresnet18 to iresnet200, mobilefacenet, vit_small, vit_base, …, or timm:NAME.
        embedding_dim: Length of an embedding.
        precision: Arithmetic of the backbone; bf16 and fp16 are autocast, fp16 with loss scaling. auto is bf16 on
            devices with units for it (GPUs from Ampere on; CPUs with AMX-BF16, AVX512-BF16 or ARM's BF16), fp16 on
            Volta and Turing, else fp32; a run that goes on keeps what it began with.
        epochs: Passes over the data; unset: 20, unless steps is given.
        steps: Steps to train, in place of epochs.
        seed: Seed of weights, order of the data, augmentation and sampling.
        init_weights: Backbone weights to start from: a .safetensors of a run, arcface_torch's .pt, or, for timm:NAME,
            timm's own: a file, a folder with config.json, timm/NAME or hf-hub:ORG/NAME; the head starts from scratch;
            empty: none.
        head_ranks: Ranks that share one class table, a divisor of all ranks; the other groups hold replicas of it; 0:
            all ranks.
        sync_batchnorm: Batch normalisation over all ranks; in fp32 on CPUs, sums over samples then run in float64.
        channels_last: Memory format NHWC, which speeds up convolutions on GPUs.
        compile: Compile the backbone with torch.compile.
        compile_mode: With compile: reduce-overhead replays the backbone's passes as CUDA graphs, which spares the host
            their launches; on one GPU, without accumulation. It has not run on a GPU.
        recompute: Activations that the backward pass computes again, in place of keeping them: every_k, those of every
            recompute_every-th block; budget, those of the blocks that free most memory for the least work, until
            recompute_budget is met. Losses stay the same.
        recompute_every: every_k: 1 recomputes every block, 2 every second one, and so on.
        recompute_budget: budget: largest memory of the activations in a step, as a share of what they take without
            recomputation.
        ema_decay: Decay of the moving average of the backbone's weights, which is then evaluated and exported; 0: off.
        rotation_tta: Evaluate and export the backbone on each image in four rotations, the embeddings concatenated
            (four times the time and length); goes with data.rotation_classes.
        non_finite: What a step with a non-finite loss or gradient does: skip leaves everything as it was and goes on,
            stop ends the run. fp16's search for a loss scale, which begins with gradients out of range, counts as
            neither.
        non_finite_kept: Steps with a non-finite loss or gradient whose batches are kept in RUN/non_finite, the first
            ones.
        max_skipped_steps: Consecutive steps with a non-finite loss or gradient after which the run stops with an error.
        stage: Changes of the run from a step or epoch on, in the order of the file. A key that a stage does not give
            keeps its value.
        table: Class tables over the one backbone, in place of the single one that [head] describes, each with its own
            data. A key that a table does not give has the run's value.
        features: The sections of rare features that are not at their defaults, in the order of FEATURES; see
            :meth:`section`.
    """

    backbone: str = key("iresnet50", also_called=("model", "arch"), is_fixed=True)
    embedding_dim: int = key(512, least=2, is_fixed=True)
    precision: str = key(AUTO, choices=(AUTO, "fp32", "bf16", "fp16"), also_called=("amp", "dtype"))
    epochs: int | None = key(None, least=1, also_called=("num_epochs", "max_epochs"))
    steps: int | None = key(None, least=1, also_called=("max_steps", "iterations"))
    seed: int = key(0, least=0, below=2**31, also_called=("random_seed",), is_fixed=True)
    init_weights: str = key("", also_called=("pretrained",))
    head_ranks: int = key(0, least=0)
    sync_batchnorm: bool = key(False)
    channels_last: bool = key(False)
    compile: bool = key(False)
    compile_mode: str = key("default", choices=("default", "reduce-overhead"))
    recompute: str = key("none", choices=("none", "every_k", "budget"))
    recompute_every: int = key(1, least=1)
    recompute_budget: float = key(0.6, above=0, most=1)
    ema_decay: float = key(0.0, least=0, below=1, renamed_from="ema")
    rotation_tta: bool = key(False, renamed_from="turned_views")
    non_finite: str = key("skip", choices=("skip", "stop"))
    non_finite_kept: int = key(3, least=0)
    max_skipped_steps: int = key(20, least=1)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    stage: tuple[Table, ...] = tables(StageKeys)
    table: tuple[Table, ...] = tables(TableKeys)
    features: tuple[FeatureConfig, ...] = ()

    def __getattr__(self, name: str) -> FeatureConfig:
        """The section of a rare feature by its name, as the other sections are attributes."""
        if name.startswith("_") or name == "features" or FEATURES.find(name) is None:
            raise AttributeError(f"a configuration has no section {name!r}")
        return section_of(self.features, section_class(name))

    def section(self, kind: type[_Section]) -> _Section:
        """The section of a rare feature; its defaults where nothing of it was given."""
        return section_of(self.features, kind)

    def with_section(self, section: FeatureConfig) -> "Config":
        """This configuration with another section of a rare feature."""
        found = {section_name(type(each)): each for each in (*self.features, section)}
        given = [found[name] for name in FEATURES if name in found]
        return dataclasses.replace(self, features=tuple(each for each in given if each != type(each)()))

    @property
    def features_on(self) -> list[FeatureConfig]:
        """The sections of the rare features that the run has."""
        sections = [section_of(self.features, section_class(name)) for name in FEATURES]
        return [section for section in sections if section.is_on(self)]

    def is_given_in_tables(self, name: str) -> bool:
        """Whether one of several class tables gives a key for itself."""
        return any(name in table.values for table in self.table)

    @property
    def steps_alone(self) -> bool:
        """Whether ranks, where there are several, step by themselves."""
        return any(section.steps_alone for section in self.features_on)

    @property
    def keeps_tables(self) -> bool:
        """Whether a feature keeps the class tables' rows itself: checkpoints hold none then."""
        return any(section.keeps_tables for section in self.features_on)

    @property
    def keeps_rows(self) -> str:
        """Which rows of the class table no step updates: "", "some" or "all"."""
        return next((found for section in self.features if (found := section.keeps_rows)), "")

    def refusals(self) -> Iterator[str]:
        """Say, one after another, what of this run, without its stages, does not go together."""
        for first, second in EXCLUSIVE:
            if all(get(self, name) is not None for name in (first, second)):
                yield f"{first} and {second} are both given; keep one"
        yield from self._of_the_backbone()
        yield from self._of_graphs()
        for section in (self.data, self.optim, self.parallel, self.head):
            yield from section.refusals(self)
        given = {*self.features, *self.features_on}
        for feature in (section_of(self.features, section_class(name)) for name in FEATURES):
            yield from feature.refusals(self) if feature in given else ()
        for feature in self.features_on:
            yield from _refusals_beside(feature, self)

    def _of_the_backbone(self) -> Iterator[str]:
        from plsc.models import exists, names  # imported here: --help needs no backbones

        if not self.backbone.startswith("timm:") and not exists(self.backbone):
            hint = arcface_torch.backbone_hint(self.backbone)
            nearest = did_you_mean(self.backbone, names()) or f"; it is one of {', '.join(names())}, timm:NAME"
            yield f"backbone = {toml_value(self.backbone)} does not exist{f'; {hint}' if hint else nearest}"

    def _of_graphs(self) -> Iterator[str]:
        if self.compile_mode == "default":
            return
        cause = f"compile_mode = {toml_value(self.compile_mode)}"
        if not self.compile:
            yield f"{cause} has no effect without compile = true; give that, or leave it out"
        if self.optim.accumulate > 1:
            yield f"{cause} overwrites a micro-batch's gradients by the next one's; leave it or optim.accumulate out"
        if self.parallel.strategy != "ddp":
            yield f'{cause} is for one GPU, and parallel.strategy = "{self.parallel.strategy}"; leave one of them out'


def get(config: Config, name: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, attribute(part))
    return value


def _refusals_beside(section: FeatureConfig, run: Config) -> Iterator[str]:
    """What a feature that is on declares not to go with."""
    for name, reason in section.alone.items():
        value = get(run, name)
        if isinstance(value, FeatureConfig):
            other = value.cause if value.is_on(run) else ""
        else:
            given = f"{name} = {toml_value(value)}" if isinstance(value, bool | int | float | str) else f"[[{name}]]"
            other = "" if value == get(Config(), name) else given
        if other:
            yield f"{section.cause} does not go with {other}: {reason}; leave one of them out"
