"""The sections of a configuration: those of a run's operation, and the whole of them.

The larger sections stand in files of their own names beside this one. Each key is a field of its section, with its
type, default and meaning, once and there; a new key is a new field.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from plsc.config.data import DataConfig
from plsc.config.head import HeadConfig
from plsc.config.optim import OptimConfig
from plsc.config.parallel import ParallelConfig
from plsc.strict_toml import Table, tables
from plsc.toml_keys import key

AUTO = "auto"  # the precision that suits the device


@dataclass(frozen=True)
class EvalConfig:
    """[eval]: evaluation during training, on classes that are not trained on."""

    sets: tuple[str, ...] = key(
        (), "Evaluation sets: .bin verification sets, folders of unseen classes, or avatars:NxM@FIRST."
    )
    every_steps: int = key(2000, "Steps between evaluations; 0: at the end only.", least=0)
    batch_size: int = key(64, "Images per rank and forward pass.", least=1)


@dataclass(frozen=True)
class KeepConfig:
    """[checkpoint.keep]: which checkpoints stay; each is removed that no key keeps, and never the newest."""

    last: int = key(
        3,
        "Number of newest checkpoints to keep; checkpoint.keep = N is short for it.",
        least=1,
        stands_for_section=True,
    )
    every_hours: float = key(
        0.0, "Keep the last checkpoint of each period of so many hours, counted by the clock (UTC); 0: none.", least=0
    )
    best: int = key(
        0,
        "Number of checkpoints of the best mean accuracy over eval.sets to keep; where it is not 0, a checkpoint "
        "follows each evaluation that has one.",
        least=0,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: when to save."""

    every_steps: int = key(1000, "Steps between checkpoints; 0: by the clock alone, and at the end.", least=0)
    every_minutes: float = key(
        0.0, "Minutes after which a checkpoint is due, whatever the steps; 0: by steps alone.", least=0
    )
    async_save: bool = key(
        True, "Write checkpoints while training goes on, from a copy in host memory; false: training waits for them."
    )
    keep: KeepConfig = dataclasses.field(default_factory=KeepConfig)


@dataclass(frozen=True)
class LogConfig:
    """[log]: metrics.jsonl and TensorBoard."""

    every_steps: int = key(10, "Steps between lines of metrics.jsonl and points of TensorBoard.", least=1)
    tensorboard: bool = key(True, "Write RUN/tensorboard as well.")
    profile: int = key(
        0,
        "Steps to profile after the first ten, on the first rank, into RUN/profile: a trace for Perfetto, and a "
        "picture of the step's parts. 0: none.",
        least=0,
    )


@dataclass(frozen=True)
class StageKeys:
    """[[stage]]: when it begins; beside these it takes every key of the run that may change."""

    from_step: int | None = key(None, "Number of steps after which the stage begins; unset: from_epoch.", least=1)
    from_epoch: float | None = key(
        None, "Number of epochs after which the stage begins, to the nearest step; unset: from_step.", above=0
    )


@dataclass(frozen=True)
class Config:
    """A training run. ``epochs`` and ``steps`` exclude each other."""

    backbone: str = key(
        "iresnet50",
        "Backbone: iresnet18 to iresnet200, mobilefacenet, vit_small, vit_base, …, or timm:NAME.",
        also_called=("model", "arch"),
    )
    embedding_dim: int = key(512, "Length of an embedding.", least=2)
    precision: str = key(
        AUTO,
        "Arithmetic of the backbone; bf16 and fp16 are autocast, fp16 with loss scaling. auto is bf16 on devices with "
        "units for it (GPUs from Ampere on; CPUs with AMX-BF16, AVX512-BF16 or ARM's BF16), fp16 on Volta and Turing, "
        "else fp32; a run that goes on keeps what it began with.",
        choices=(AUTO, "fp32", "bf16", "fp16"),
        also_called=("amp", "dtype"),
    )
    epochs: int | None = key(
        None,
        "Passes over the data; unset: 20, unless steps is given.",
        least=1,
        also_called=("num_epochs", "max_epochs"),
    )
    steps: int | None = key(
        None, "Steps to train, in place of epochs.", least=1, also_called=("max_steps", "iterations")
    )
    seed: int = key(
        0,
        "Seed of weights, order of the data, augmentation and sampling.",
        least=0,
        below=2**31,
        also_called=("random_seed",),
    )
    init_weights: str = key(
        "",
        "Backbone weights to start from: a .safetensors of a run, arcface_torch's .pt, or, for timm:NAME, timm's own: "
        "a file, a folder with config.json, timm/NAME or hf-hub:ORG/NAME; the head starts from scratch; empty: none.",
        also_called=("pretrained",),
    )
    head_ranks: int = key(
        0,
        "Ranks that share one class table, a divisor of all ranks; the other groups hold replicas of it; 0: all ranks.",
        least=0,
    )
    sync_batchnorm: bool = key(
        False, "Batch normalisation over all ranks; in fp32 on CPUs, sums over samples then run in float64."
    )
    channels_last: bool = key(False, "Memory format NHWC, which speeds up convolutions on GPUs.")
    compile: bool = key(False, "Compile the backbone with torch.compile.")
    fp8: bool = key(
        False,
        "Products of a ViT's linear layers in 8-bit floating point, by torchao, on GPUs from Ada and Hopper on; with "
        "precision bf16. CPUs emulate them; weights, checkpoints and exports stay as without.",
    )
    recompute: str = key(
        "none",
        "Activations that the backward pass computes again, in place of keeping them: every_k, those of every "
        "recompute_every-th block; budget, those of the blocks that free most memory for the least work, until "
        "recompute_budget is met. Losses stay the same.",
        choices=("none", "every_k", "budget"),
    )
    recompute_every: int = key(1, "every_k: 1 recomputes every block, 2 every second one, and so on.", least=1)
    recompute_budget: float = key(
        0.6,
        "budget: largest memory of the activations in a step, as a share of what they take without recomputation.",
        above=0,
        most=1,
    )
    ema_decay: float = key(
        0.0,
        "Decay of the moving average of the backbone's weights, which is then evaluated and exported; 0: off.",
        least=0,
        below=1,
        renamed_from="ema",
    )
    rotation_tta: bool = key(
        False,
        "Evaluate and export the backbone on each image in four rotations, the embeddings concatenated (four times the "
        "time and length); goes with data.rotation_classes.",
        renamed_from="turned_views",
    )
    frozen: tuple[str, ...] = key(
        (),
        "Patterns of names of the backbone's weights that are not trained, as layer1.* or *: they keep their values "
        "bit for bit, and batch normalisation all of whose weights are frozen keeps its statistics, and applies them.",
        in_stages=True,
    )
    non_finite: str = key(
        "skip",
        "What a step with a non-finite loss or gradient does: skip leaves everything as it was and goes on, stop ends "
        "the run. fp16's search for a loss scale, which begins with gradients out of range, counts as neither.",
        choices=("skip", "stop"),
    )
    non_finite_kept: int = key(
        3, "Steps with a non-finite loss or gradient whose batches are kept in RUN/non_finite, the first ones.", least=0
    )
    max_skipped_steps: int = key(
        20, "Consecutive steps with a non-finite loss or gradient after which the run stops with an error.", least=1
    )
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    stage: tuple[Table, ...] = tables(
        "Changes of the run from a step or epoch on, in the order of the file. A key that a stage does not give keeps "
        "its value.",
        StageKeys,
    )


def get(config: Config, name: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
