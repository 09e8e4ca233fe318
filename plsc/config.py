"""Configuration of a training run: every key with its type, default and meaning, once and here.

:func:`load` reads a TOML file strictly and lays ``--KEY VALUE`` overrides over it: an unknown key, a value of
the wrong type or out of range is a :class:`UsageError` that names the key and the nearest right one.
:func:`to_toml` writes a configuration whole; :func:`load` reads it back equal.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc import strict_toml
from plsc.errors import UsageError
from plsc.strict_toml import Key, key, toml_value

# torch is imported within functions only: --help and mistyped keys are answered without it.


@functools.cache
def margin_keys() -> dict[str, tuple[str, ...]]:
    """The keys of [head] that each margin takes; one that is unset keeps the margin's own default."""
    from plsc.losses import MARGINS

    return {name: tuple(field.name for field in dataclasses.fields(kind)) for name, kind in MARGINS.items()}


def _schedules() -> tuple[str, ...]:
    from plsc.optim.schedules import SCHEDULES

    return tuple(SCHEDULES)


@dataclass(frozen=True)
class DataConfig:
    """[data]: the images to learn from."""

    train: str = key(
        "avatars:2000x30",
        "a folder per class, a list file (path<TAB>label), a .rec, or avatars:IDENTITIESxIMAGES (built in)",
    )
    image_size: int = key(112, "pixels of a side that pictures are resized to", least=16)
    batch_size: int = key(128, "pictures per rank and micro-batch", least=1)
    augment: str = key(
        "flip",
        "flip mirrors half of the pictures; affine bends them a little and mirrors none; standard is the usual "
        "stronger set",
        choices=("none", "flip", "affine", "standard"),
    )
    rotation_classes: bool = key(
        False,
        "every class also rotated by 90, 180 and 270 degrees, as classes of their own: epochs four times as long",
        renamed_from="turned_classes",
    )
    workers: int = key(2, "decoding processes per rank; 0 decodes in the training process", least=0)
    max_bad_records: int = key(1000, "unreadable pictures to skip before the run gives up", least=0)
    cache: str = key(
        "auto",
        "keep decoded pictures in memory; auto: where they take little of it",
        choices=("auto", "always", "never"),
    )


@dataclass(frozen=True)
class HeadConfig:
    """[head]: the class head; the number of classes comes from the data."""

    margin: str = key("arcface", "the margin of the softmax", choices=lambda: tuple(margin_keys()))
    s: float | None = key(None, "scale of the cosines; unset: the margin's own (64)", above=0)
    m: float | None = key(None, "margin; unset: its own default (arcface 0.5, cosface 0.4, …)", least=0)
    m1: float | None = key(None, "combined: factor of the angle, cos(m1·θ + m2) − m3", above=0)
    m2: float | None = key(None, "combined: added to the angle, in radians", least=0)
    m3: float | None = key(None, "combined: taken from the cosine", least=0)
    h: float | None = key(None, "adaface: how strongly the embedding's norm moves the margin", above=0)
    rate: float | None = key(
        None, "adaface, curricularface: weight of a new batch in the running statistics", above=0, most=1
    )
    m_low: float | None = key(None, "magface: margin at norm_low", least=0)
    m_high: float | None = key(None, "magface: margin at norm_high", least=0)
    norm_low: float | None = key(None, "magface: smallest embedding norm", above=0)
    norm_high: float | None = key(None, "magface: largest embedding norm", above=0)
    penalty_weight: float | None = key(None, "magface: weight of the penalty on small norms", least=0)
    std: float | None = key(None, "elasticface: standard deviation of the drawn margins", least=0)
    base: str | None = key(None, "elasticface: margin on the angle or on the cosine", choices=("arc", "cos"))
    plus: bool | None = key(None, "elasticface: largest margins to smallest cosines (ElasticFace+)")
    gradient: str | None = key(
        None,
        "gradient of the margin; straight_through is arcface_torch's; unset: exact",
        choices=("exact", "straight_through"),
    )
    centers: int = key(1, "sub-centres per class", least=1)
    sample_rate: float = key(
        1.0,
        "share of the classes in a step (Partial FC); 1 is exact, 0 takes the batch's own classes alone",
        least=0,
        most=1,
    )
    weight_dtype: str = key("float32", "class weights' storage", choices=("float32", "bfloat16"))
    momentum_dtype: str = key(
        "float32", "momentum's storage; none trains without", choices=("float32", "bfloat16", "int8", "none")
    )
    placement: str = key(
        "device",
        "where class weights and momentum lie: device; host, in its memory; mmap:FILE, in a file per rank",
    )


@dataclass(frozen=True)
class OptimConfig:
    """[optim]: the optimizers of backbone and head, and their schedule."""

    name: str = key("sgd", "optimizer of backbone and head", choices=("sgd", "adamw"))
    lr: float = key(0.1, "peak learning rate", above=0)
    head_lr: float | None = key(None, "the head's peak learning rate; unset: lr", above=0)
    momentum: float = key(0.9, "sgd: momentum", least=0, below=1)
    weight_decay: float = key(5e-4, "weight decay of every weight, the head's too", least=0)
    betas: tuple[float, ...] = key((0.9, 0.999), "adamw: decay of the two moments", least=0, below=1)
    eps: float = key(1e-8, "adamw: added to the root of the second moment", above=0)
    schedule: str = key(
        "polynomial",
        "how the rate falls after the warm-up",
        choices=_schedules,
    )
    warmup_epochs: float | None = key(None, "linear warm-up in epochs; unset: none", least=0)
    warmup_steps: int | None = key(None, "linear warm-up in steps (instead of warmup_epochs)", least=0)
    power: float = key(1.0, "polynomial: (1 − progress)^power", above=0)
    min_lr_ratio: float = key(
        0.0, "polynomial, cosine: the last rate as a share of the peak", least=0, most=1, renamed_from="final"
    )
    milestones: tuple[float, ...] = key((), "step: epochs at which the rate is multiplied by gamma", above=0)
    gamma: float = key(0.1, "step: factor at each milestone", above=0, most=1)
    clip_norm: float = key(0.0, "clip the gradient's norm to this; 0 does not clip", least=0)
    clip_head: bool = key(False, "count and clip the head's gradient too (unset: the backbone's alone)")
    accumulate: int = key(1, "micro-batches per step; a step is that of one large batch", least=1)


@dataclass(frozen=True)
class EvalConfig:
    """[eval]: evaluation during training, on classes that are not trained on."""

    sets: tuple[str, ...] = key((), ".bin pair sets, folders of unseen classes, or avatars:NxM@FIRST")
    every_steps: int = key(2000, "steps between evaluations; 0: only at the end", least=0)
    batch_size: int = key(64, "pictures per rank and forward pass", least=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: when to save, and how many to keep."""

    every_steps: int = key(1000, "steps between checkpoints; 0: only at the end", least=0)
    keep: int = key(3, "how many of the newest stay", least=1)


@dataclass(frozen=True)
class LogConfig:
    """[log]: metrics.jsonl and TensorBoard."""

    every_steps: int = key(10, "steps between lines of metrics.jsonl", least=1)
    tensorboard: bool = key(True, "write RUN/tensorboard too")


@dataclass(frozen=True)
class Config:
    """A training run. ``epochs`` and ``steps`` exclude each other."""

    backbone: str = key("iresnet50", "a name in models/ (iresnet100, mobilefacenet, vit_base…) or timm:NAME")
    embedding_dim: int = key(512, "length of an embedding", least=2)
    precision: str = key("bf16", "arithmetic of the backbone; fp16 scales the loss", choices=("fp32", "bf16", "fp16"))
    epochs: int | None = key(None, "passes over the data; 20 where steps are not given either", least=1)
    steps: int | None = key(None, "steps to train (instead of epochs)", least=1)
    seed: int = key(0, "everything random follows from it", least=0, below=2**31)
    init_weights: str = key("", "weights to fine-tune from: .safetensors, arcface_torch's .pt; empty: none")
    head_ranks: int = key(
        0,
        "ranks over which the class table is sharded, a divisor of all; the others hold replicas of it; 0: all",
        least=0,
    )
    sync_batchnorm: bool = key(
        False, "batch normalisation over the batch of all ranks; in fp32 on CPUs, all sums over samples in float64"
    )
    channels_last: bool = key(False, "memory format NHWC (faster convolutions on GPUs)")
    compile: bool = key(False, "torch.compile the backbone")
    ema_decay: float = key(
        0.0,
        "decay of the moving average of the weights, which is evaluated and exported; 0: off",
        least=0,
        below=1,
        renamed_from="ema",
    )
    rotation_tta: bool = key(
        False,
        "evaluate and export the backbone on four positions of each picture, its embeddings side by side (four "
        "times as long); goes with data.rotation_classes",
        renamed_from="turned_views",
    )
    max_skipped_steps: int = key(20, "steps in a row that a non-finite loss may cost before the run gives up", least=1)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)


SHIPPED = Path(__file__).with_name("configs")
KEYS: dict[str, Key] = {entry.name: entry for entry in strict_toml.keys_of(Config)}
# Of each pair one may be given; on the command line it takes the place of the file's other one.
_EXCLUSIVE = (("epochs", "steps"), ("optim.warmup_epochs", "optim.warmup_steps"))


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML file (None: defaults alone), lay ``overrides`` over it, and check the whole.

    ``path`` may also be the name of a shipped configuration, see :func:`shipped`.

    ``overrides`` maps dotted keys ("optim.lr") to values, or to text as typed on a command line; None takes a key
    of the file out.
    Raises :class:`UsageError` for a missing or malformed file and for every wrong key or value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = strict_toml.flatten(strict_toml.read_toml(_resolve(Path(path))), KEYS, str(path))
    overridden = dict(overrides or {})
    for pair in _EXCLUSIVE:
        if any(name in overridden for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    for name, value in overridden.items():
        entry = strict_toml.known(name, KEYS, "the command line")
        values[entry.name] = entry.parsed(value) if isinstance(value, str) else value
    return _build({name: value for name, value in values.items() if value is not None})


def shipped() -> list[str]:
    """Names of the configurations that are installed with plsc; :func:`load` takes them in place of a path."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _resolve(path: Path) -> Path:
    """Return ``path`` where such a file exists, else the shipped configuration of that name."""
    if path.exists() or path.parent != Path() or path.suffix not in ("", ".toml"):
        return path
    if path.stem in shipped():
        return SHIPPED / f"{path.stem}.toml"
    names = ", ".join(shipped())
    raise UsageError(f"{path} does not exist: name a TOML file, or a shipped configuration: {names}")


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Build a configuration from nested mappings, as a TOML file holds them, with the same strictness."""
    return _build(strict_toml.flatten(tree, KEYS, "the configuration"))


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested mappings without the unset keys; :func:`from_dict` makes an equal configuration of them."""
    tree: dict[str, Any] = {}
    for name in KEYS:
        value = get(config, name)
        section, _, last = name.rpartition(".")
        if value is not None:
            (tree.setdefault(section, {}) if section else tree)[last] = value
    return tree


def to_toml(config: Config) -> str:
    """Format the whole configuration as TOML, defaults included; an unset key becomes a comment."""
    lines: list[str] = []
    current = ""
    for entry in KEYS.values():
        section, _, last = entry.name.rpartition(".")
        if section != current:
            current = section
            lines += ["", f"[{section}]"]
        value = get(config, entry.name)
        lines.append(f"# {last}: {entry.doc}" if value is None else f"{last} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def get(config: Config, name: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def describe() -> str:
    """List every key with its default, type and meaning, as text."""
    lines: list[str] = []
    for entry in KEYS.values():
        default = "(unset)" if entry.default is None else f"= {toml_value(entry.default)}"
        lines += [f"{entry.name} {default}", f"    {entry.doc}  [{entry.expected}]"]
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Parse ``["--optim.lr", "0.2"]`` to overrides for :func:`load`; see :func:`strict_toml.parse_arguments`."""
    return strict_toml.parse_arguments(arguments, KEYS)


def _build(values: Mapping[str, Any]) -> Config:
    hints = typing.get_type_hints(Config)
    hints = {name: hints[name] for name in hints if dataclasses.is_dataclass(hints[name])}
    sections: dict[str, dict[str, Any]] = {name: {} for name in hints}
    top: dict[str, Any] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        (sections[section] if section else top)[last] = KEYS[name].checked(value)
    config = Config(**top, **{name: hints[name](**inner) for name, inner in sections.items()})
    _check_together(config)
    if config.epochs is None and config.steps is None:
        return dataclasses.replace(config, epochs=20)
    return config


def _check_together(config: Config) -> None:
    """Check what concerns several keys."""
    for first, second in _EXCLUSIVE:
        if get(config, first) is not None and get(config, second) is not None:
            raise UsageError(f"{first} and {second} are both given; keep one")
    if len(config.optim.betas) != 2:
        raise UsageError(f"optim.betas has {len(config.optim.betas)} numbers; it takes two")
    if list(config.optim.milestones) != sorted(set(config.optim.milestones)):
        raise UsageError("optim.milestones must rise: each epoch later than the one before it")
    if config.data.batch_size == 1 and not config.sync_batchnorm:
        raise UsageError("data.batch_size = 1 leaves batch normalisation nothing to average; give 2 or more")
    if config.optim.name == "adamw" and config.head.momentum_dtype == "none":
        raise UsageError('head.momentum_dtype = "none" leaves adamw no moments; give bfloat16 or int8')
    _check_head(config)
    _check_backbone(config.backbone)


def _check_head(config: Config) -> None:
    from plsc.head.host_memory import mapped_file

    try:
        mapped_file(config.head.placement)
    except UsageError as error:
        raise UsageError(f"head.{error}") from None
    takes = margin_keys()[config.head.margin]
    for name in dict.fromkeys(name for names in margin_keys().values() for name in names):
        if getattr(config.head, name) is not None and name not in takes:
            raise UsageError(
                f"head.{name} is no key of the margin {config.head.margin}, which takes {', '.join(takes)}"
            )


def _check_backbone(name: str) -> None:
    from plsc.models import names  # imported here: --help needs no backbones

    if name not in names() and not name.startswith("timm:"):
        hint = strict_toml.did_you_mean(name, names()) or f"; it is one of {', '.join(names())}, timm:NAME"
        raise UsageError(f"backbone = {toml_value(name)} does not exist{hint}")
