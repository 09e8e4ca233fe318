"""The sections and keys of a configuration, each with its type, default and meaning, once and here.

A new key is a field of its section.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plsc.strict_toml import Table, key, tables

if TYPE_CHECKING:
    from plsc.models.preprocessing import Preprocessing

# torch is imported within functions only: --help and mistyped keys are answered without it.


@functools.cache
def margin_keys() -> dict[str, tuple[str, ...]]:
    """The keys of [head] that each margin takes; one that is unset keeps the margin's own default."""
    from plsc.losses import MARGINS

    return {name: tuple(field.name for field in dataclasses.fields(kind)) for name, kind in MARGINS.items()}


def _backbone_optimizers() -> tuple[str, ...]:
    from plsc.optim.backbone_optimizers import BACKBONE_OPTIMIZERS

    return tuple(BACKBONE_OPTIMIZERS)


def _lr_scalings() -> tuple[str, ...]:
    from plsc.optim.schedules import LR_SCALINGS

    return tuple(LR_SCALINGS)


def _strategies() -> tuple[str, ...]:
    from plsc.parallel.strategies import STRATEGIES

    return (*STRATEGIES, "auto")


def _pipeline_schedules() -> tuple[str, ...]:
    from plsc.parallel.strategies import STAGES_OF_A_RANK

    return tuple(STAGES_OF_A_RANK)


def _schedules() -> tuple[str, ...]:
    from plsc.optim.schedules import SCHEDULES

    return tuple(SCHEDULES)


@dataclass(frozen=True)
class DataConfig:
    """[data]: the images to train on."""

    train: str = key(
        "avatars:2000x30",
        "Training images: a folder per class, a list file (a line path<TAB>label per image), a .rec, or "
        "avatars:IDENTITIESxIMAGES, which plsc draws.",
    )
    image_size: int | tuple[int, ...] | None = key(
        None,
        "Size in pixels that images are resized to: the side of a square, or [height, width]; unset: that of "
        "init_weights, or 112.",
        least=16,
    )
    interpolation: str | None = key(
        None,
        "Interpolation by which images are resized; unset: that of init_weights, or bilinear.",
        choices=("bilinear", "bicubic"),
    )
    mean: float | tuple[float, ...] | None = key(
        None,
        "Mean of the pixel values, from 0 to 255, that is subtracted: one number, or [red, green, blue]; unset: that "
        "of init_weights, or 127.5.",
        least=0,
        most=255,
    )
    std: float | tuple[float, ...] | None = key(
        None,
        "Standard deviation of the pixel values, by which they are divided then: one number, or [red, green, blue]; "
        "unset: that of init_weights, or 127.5.",
        above=0,
    )
    batch_size: int = key(
        128, "Images per rank and micro-batch; the global batch is this × ranks × optim.accumulate.", least=1
    )
    augment: str = key(
        "flip",
        "Augmentation: flip mirrors half of the images; affine rotates, scales, shears and shifts slightly without "
        "mirroring; standard adds crop, colour, greyscale, blur, low resolution, JPEG and erasing to flip and affine.",
        choices=("none", "flip", "affine", "standard"),
        in_stages=True,
    )
    rotation_classes: bool = key(
        False,
        "Add every class rotated by 90, 180 and 270 degrees as a class of its own; epochs take four times as long.",
        renamed_from="turned_classes",
    )
    workers: int = key(2, "Decoding processes per rank; 0 decodes in the training process.", least=0)
    max_bad_records: int = key(
        1000, "Unreadable images, in whose places the next ones are taken, before the run stops with an error.", least=0
    )
    cache: str = key(
        "auto",
        "Keep decoded images in memory between epochs; auto does so where they take a small part of it.",
        choices=("auto", "always", "never"),
    )

    @property
    def preprocessing(self) -> "Preprocessing":
        """The preprocessing contract of the run; where a key is unset, with plsc's own values."""
        from plsc.models.preprocessing import Preprocessing

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Preprocessing)}
        return Preprocessing(**{name: value for name, value in values.items() if value is not None})

    def with_contract(self, contract: "Preprocessing") -> "DataConfig":
        """Return these keys with those of the preprocessing contract set."""
        values = {field.name: getattr(contract, field.name) for field in dataclasses.fields(contract)}
        return dataclasses.replace(self, **values)


@dataclass(frozen=True)
class HeadConfig:
    """[head]: the class head; the number of classes comes from the data."""

    margin: str = key("arcface", "Margin of the softmax.", choices=lambda: tuple(margin_keys()))
    s: float | None = key(None, "Scale of the cosines; unset: 64.", above=0, in_stages=True)
    m: float | None = key(
        None,
        "Margin; unset: 0.5 (arcface, curricularface, elasticface), 0.4 (cosface, adaface), 1.7 (sphereface).",
        least=0,
        in_stages=True,
    )
    m1: float | None = key(None, "combined: m1 of cos(m1·θ + m2) − m3; unset: 1.", above=0, in_stages=True)
    m2: float | None = key(
        None, "combined: m2 of cos(m1·θ + m2) − m3, in radians; unset: 0.5.", least=0, in_stages=True
    )
    m3: float | None = key(None, "combined: m3 of cos(m1·θ + m2) − m3; unset: 0.", least=0, in_stages=True)
    h: float | None = key(
        None,
        "adaface: factor of the embedding's standardised norm in the margin; unset: 0.333.",
        above=0,
        in_stages=True,
    )
    rate: float | None = key(
        None,
        "adaface, curricularface: weight of the newest batch in the running statistics; unset: 0.01.",
        above=0,
        most=1,
        in_stages=True,
    )
    m_low: float | None = key(None, "magface: margin at norm_low, in radians; unset: 0.45.", least=0, in_stages=True)
    m_high: float | None = key(None, "magface: margin at norm_high, in radians; unset: 0.8.", least=0, in_stages=True)
    norm_low: float | None = key(None, "magface: smallest embedding norm; unset: 10.", above=0, in_stages=True)
    norm_high: float | None = key(None, "magface: largest embedding norm; unset: 110.", above=0, in_stages=True)
    penalty_weight: float | None = key(
        None, "magface: weight of the penalty on small norms; unset: 35.", least=0, in_stages=True
    )
    std: float | None = key(
        None, "elasticface: standard deviation of the margins drawn per sample; unset: 0.0125.", least=0, in_stages=True
    )
    base: str | None = key(
        None,
        "elasticface: margin on the angle (arc) or on the cosine (cos); unset: arc.",
        choices=("arc", "cos"),
        in_stages=True,
    )
    plus: bool | None = key(
        None,
        "elasticface: give the largest margins to the smallest cosines (ElasticFace+); unset: false.",
        in_stages=True,
    )
    gradient: str | None = key(
        None,
        "Gradient through the margin: exact, or straight_through, which applies the margin without gradient as "
        "arcface_torch does; unset: exact.",
        choices=("exact", "straight_through"),
        in_stages=True,
    )
    centers: int = key(1, "Sub-centres per class.", least=1)
    sample_rate: float = key(
        1.0,
        "Share of the classes that take part in a step (Partial FC); 1 is the exact softmax, 0 takes the classes of "
        "the batch alone.",
        least=0,
        most=1,
        in_stages=True,
    )
    weight_dtype: str = key(
        "float32",
        "Storage type of the class weights; bfloat16 is rounded stochastically.",
        choices=("float32", "bfloat16"),
    )
    momentum_dtype: str = key(
        "float32",
        "Storage type of the class weights' momentum (adamw: of both moments); none trains without momentum.",
        choices=("float32", "bfloat16", "int8", "none"),
    )
    fp32_precision: str = key(
        "ieee",
        "How a GPU multiplies a float32 table: ieee, tf32 (factors of 11 bits, on the matrix units), or bf16x3 (16 "
        "bits, three bfloat16 products); bfloat16 tables are not concerned, and a CPU takes ieee alone.",
        choices=("ieee", "tf32", "bf16x3"),
    )
    placement: str = key(
        "device",
        "Memory that holds class weights and momentum: device (the GPU), host (main memory), or mmap:FILE (a mapped "
        "file per rank).",
    )
    staleness: int = key(
        0,
        "Steps after which an average of head groups (parallel.head_averaging_period) comes in, while they keep going; "
        "for tables on host or mmap; 0: they wait for it.",
        least=0,
    )


@dataclass(frozen=True)
class GroupKeys:
    """[optim.groups]: a table under each pattern."""

    lr_scale: float | None = key(None, "Factor of optim.lr; unset: 1.", above=0)
    weight_decay: float | None = key(
        None, "Weight decay; 0 as by no_decay; unset: optim.weight_decay, or 0 by no_decay.", least=0
    )
    frozen: bool | None = key(
        None,
        "Keep the weights as they are during the whole run; unset: false, as frozen says.",
    )


def _group_hint(name: str) -> str | None:
    """The names that other programs give to the keys of parameter groups."""
    if name in ("lr", "lr_mult", "lr_factor", "lr_multiplier"):
        return "it is lr_scale here, a factor of optim.lr"
    return "it is weight_decay here, the value itself" if name in ("wd", "decay_mult", "wd_mult") else None


@dataclass(frozen=True)
class OptimConfig:
    """[optim]: the optimizers of backbone and head, and their learning-rate schedule."""

    name: str = key(
        "sgd",
        "Optimizer of the backbone; muon trains what is no matrix by adamw.",
        choices=_backbone_optimizers,
    )
    head: str | None = key(
        None,
        "Optimizer of the head; unset: sgd beside sgd and lars, adamw beside the others.",
        choices=("sgd", "adamw"),
    )
    lr: float = key(
        0.1,
        "Peak learning rate, of a global batch of base_batch images where lr_scaling is set.",
        above=0,
        in_stages=True,
    )
    lr_scaling: str = key(
        "none",
        "Growth of lr and head_lr with the global batch (data.batch_size × ranks × accumulate): linear, by its ratio "
        "to base_batch, which suits sgd and lars, or sqrt, by the ratio's square root, which suits the others.",
        choices=_lr_scalings,
    )
    base_batch: int = key(
        512, "Global batch that lr and head_lr are given for; arcface_torch's 0.1 are for 512.", least=1
    )
    head_lr: float | None = key(None, "Peak learning rate of the head; unset: lr.", above=0, in_stages=True)
    momentum: float = key(0.9, "sgd, lars, muon: momentum; muon is published with 0.95.", least=0, below=1)
    trust_coefficient: float = key(
        1e-3, "lars: length of a layer's step as a share of its weights' norm, before lr.", above=0
    )
    weight_decay: float = key(5e-4, "Weight decay of all weights, the head's included.", least=0)
    no_decay: tuple[str, ...] = key(
        (),
        "Patterns of names of the backbone's weights without weight decay, as *.bias or *norm*; lars and lamb do not "
        "adapt their rate to these either.",
    )
    groups: tuple[Table, ...] = tables(
        "Values of the backbone's weights whose names a pattern fits. Where several fit, the last that gives a key "
        "counts for it; all count before no_decay, and lr_scale beside layer_decay.",
        GroupKeys,
        are_named=True,
        hint=_group_hint,
    )
    layer_decay: float = key(
        1.0,
        "Factor of the backbone's learning rate from each transformer block to the one before it (vit_*, ViTs of "
        "timm); 1: one rate for all.",
        above=0,
        most=1,
    )
    betas: tuple[float, ...] = key(
        (0.9, 0.999),
        "adamw, lamb, lion, muon: decay rates of the two moments; lion is published with 0.9, 0.99.",
        least=0,
        below=1,
    )
    eps: float = key(1e-8, "adamw, lamb, muon: added to the square root of the second moment.", above=0)
    state_dtype: str = key(
        "float32",
        "adamw: type of the backbone's two moments; int8 takes 2.0 to 2.1 bytes a weight in place of 8 (torchao).",
        choices=("float32", "int8"),
    )
    schedule: str = key(
        "polynomial", "Course of the learning rate after the warm-up.", choices=_schedules, in_stages=True
    )
    warmup_epochs: float | None = key(None, "Epochs of linear warm-up; unset: none.", least=0, in_stages=True)
    warmup_steps: int | None = key(
        None, "Steps of linear warm-up, in place of warmup_epochs; unset: none.", least=0, in_stages=True
    )
    power: float = key(
        1.0, "polynomial: exponent of (1 − progress)^power; 1 is a straight line.", above=0, in_stages=True
    )
    min_lr_ratio: float = key(
        0.0,
        "polynomial, cosine: learning rate at the end, as a share of the peak.",
        least=0,
        most=1,
        renamed_from="final",
        in_stages=True,
    )
    milestones: tuple[float, ...] = key(
        (), "step: epochs at which the learning rate is multiplied by gamma.", above=0, in_stages=True
    )
    gamma: float = key(0.1, "step: factor of the learning rate at each milestone.", above=0, most=1, in_stages=True)
    clip_norm: float = key(0.0, "Largest norm of the gradient, to which it is clipped; 0: no clipping.", least=0)
    clip_head: bool = key(
        False, "Include the head's gradient in the norm and clip it too; false: the backbone's gradient alone."
    )
    accumulate: int = key(
        1, "Micro-batches per step (gradient accumulation); the step equals that of one large batch.", least=1
    )

    @property
    def head_name(self) -> str:
        """The head's optimizer, "sgd" or "adamw"."""
        return self.head or ("sgd" if self.name in ("sgd", "lars") else "adamw")


@dataclass(frozen=True)
class ParallelConfig:
    """[parallel]: how the backbone lies on the ranks, and how these exchange its gradients."""

    strategy: str = key(
        "ddp",
        "Placement of the backbone: ddp (whole on every rank), zero1 (whole, but for the optimizer's state, which is "
        "spread over the ranks), fsdp (weights, gradients and optimizer state spread over all ranks; weights are "
        "gathered block by block), hsdp (spread over shard_ranks, replicated across). None changes the results. auto "
        "takes the fastest that fits by plsc plan, and says why.",
        choices=_strategies,
    )
    shard_ranks: int = key(
        0,
        "hsdp: consecutive ranks that share one set of weights, a divisor of all; 0: the ranks of a machine. "
        "With tp, it counts groups of tp ranks.",
        least=0,
    )
    tp: int = key(
        1,
        "Tensor parallelism of vision transformers (vit_*, ViTs of timm): consecutive ranks that share the heads and "
        "hidden units of each block, and see the same images; a divisor of the ranks and of the heads. 1: off.",
        least=1,
    )
    offload: bool = key(
        False, "fsdp, hsdp: keep weights, gradients and optimizer state in main memory; the update runs there."
    )
    pp: int = key(
        1,
        "Pipeline parallelism of ViTs: the ranks are cut into so many stages, a divisor of all ranks, which hold "
        "consecutive blocks of the backbone; strategy and tp are those of a stage's ranks, and the class table lies on "
        "those of the last one. 1: none.",
        least=1,
    )
    pp_schedule: str = key(
        "1f1b",
        "Schedule of a pipeline: gpipe (all forward passes, then all backward passes), 1f1b (alternating, so that "
        "fewer activations are kept), interleaved (1f1b with two stages per rank: shorter waits, more messages).",
        choices=_pipeline_schedules,
    )
    pp_micro_batches: int = key(
        0,
        "Micro-batches into which a pipeline cuts a batch, at least pp; 0: twice pp. Batch normalisation sees "
        "one at a time, as under optim.accumulate.",
        least=0,
    )
    comm_hook: str = key(
        "none",
        "Compression of the backbone's gradients on their way between ranks: bf16 and fp16 send 16 bits each; powersgd "
        "(rank-r approximation) and dgc (Deep Gradient Compression: the largest elements) send a small part, and keep "
        "the rest on the rank for later steps. None of them goes with sync_batchnorm's exact sums, which it switches "
        "off.",
        choices=("none", "bf16", "fp16", "powersgd", "dgc"),
    )
    bucket_mb: float | None = key(
        None,
        "MiB of gradients that are exchanged together, while the backward pass goes on; unset: DDP's own 25, the first "
        "bucket 1.",
        above=0,
    )
    powersgd_rank: int = key(1, "powersgd: rank of the approximation of a gradient as a matrix.", least=1)
    powersgd_start_step: int = key(
        1000, "powersgd: steps of the run that are exchanged whole before it compresses.", least=2
    )
    dgc_sparsity: float = key(
        0.999, "dgc: share of a tensor's elements that a step does not send; 0 sends all.", least=0, below=1
    )
    dgc_warmup_epochs: float = key(
        4.0, "dgc: epochs over which the sparsity rises from 0.75 in four stages; 0: none.", least=0
    )
    dgc_dense_below: int = key(16384, "dgc: tensors with fewer elements than this are sent whole.", least=1)
    averaging: str = key(
        "none",
        "Averages of the backbone's weights in the place of its gradients: with local_sgd each rank steps by its own "
        "gradients, and all average their weights every averaging_period steps; post_local_sgd begins with that at "
        "averaging_start_step; hierarchical averages more often within groups of ranks; diloco takes an outer step by "
        "what the ranks have changed. The class head stays exact at every step.",
        choices=("none", "local_sgd", "post_local_sgd", "hierarchical", "diloco"),
    )
    averaging_period: int = key(
        8, "Steps from one average over all ranks to the next; diloco is published with 500.", least=2
    )
    averaging_start_step: int = key(
        1000, "post_local_sgd: steps of the run before it, in which gradients are averaged.", least=1
    )
    averaging_group_ranks: int = key(
        1,
        "Consecutive ranks (those of a machine, say) that average their gradients with each other at every step, "
        "whatever averaging; a divisor of all ranks; 1: none do.",
        least=1,
    )
    averaging_group_period: int = key(
        1,
        "hierarchical: steps from one average of weights within such a group to the next, a divisor of "
        "averaging_period; 1: their gradients are averaged at every step.",
        least=1,
    )
    outer_lr: float = key(0.7, "diloco: learning rate of the outer optimizer, SGD with Nesterov's momentum.", above=0)
    head_averaging_period: int = key(
        1,
        "Steps after which the class tables of head groups (head_ranks), each updated by its own group's samples, are "
        "averaged; 1: gradients are summed over the groups at every step, and the tables stay equal.",
        least=1,
    )
    outer_momentum: float = key(0.9, "diloco: momentum of the outer optimizer.", least=0, below=1)
    timeout_seconds: float = key(
        600.0,
        "Seconds in which no rank makes progress, after which the run ends and names the ranks that the others wait "
        "for, with what they are at; after 30 s, or half of it, train.log names them already. Evaluations and "
        "checkpoints have no limit.",
        above=0,
    )


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
        "iresnet50", "Backbone: iresnet18 to iresnet200, mobilefacenet, vit_small, vit_base, …, or timm:NAME."
    )
    embedding_dim: int = key(512, "Length of an embedding.", least=2)
    precision: str = key(
        "bf16",
        "Arithmetic of the backbone; bf16 and fp16 are autocast, fp16 with loss scaling.",
        choices=("fp32", "bf16", "fp16"),
    )
    epochs: int | None = key(None, "Passes over the data; unset: 20, unless steps is given.", least=1)
    steps: int | None = key(None, "Steps to train, in place of epochs.", least=1)
    seed: int = key(0, "Seed of weights, order of the data, augmentation and sampling.", least=0, below=2**31)
    init_weights: str = key(
        "",
        "Backbone weights to start from: a .safetensors of a run, arcface_torch's .pt, or, for timm:NAME, timm's own: "
        "a file, a folder with config.json, timm/NAME or hf-hub:ORG/NAME; the head begins anew; empty: none.",
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
