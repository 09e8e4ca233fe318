"""Checks of what concerns several keys of a configuration together, before a process starts, and precision "auto"."""

import dataclasses
import re
from typing import TYPE_CHECKING

from plsc import arcface_torch
from plsc.config.head import HeadConfig, margin_keys
from plsc.config.optim import OptimConfig
from plsc.config.sections import AUTO, Config, get
from plsc.config.stages import check_stages, stage_configs
from plsc.devices import Units
from plsc.errors import UsageError
from plsc.nearest import did_you_mean
from plsc.toml_keys import toml_value

if TYPE_CHECKING:
    from plsc.losses.margins import Margin  # imports torch

# Of each pair one may be given; on the command line it takes the place of the file's other one.
EXCLUSIVE = (("epochs", "steps"), ("optim.warmup_epochs", "optim.warmup_steps"))

# What the head's own refusals say of its arguments, in the words of keys.
_WORDS_OF_THE_HEAD = {
    "averaging_period": "parallel.head_averaging_period",
    "clip the backbone's alone": "leave optim.clip_head out",
}

# Their step depends on norms or products of a whole layer.
_WHOLE_LAYER_OPTIMIZERS = ("lars", "lamb", "adafactor", "muon")


def check_together(config: Config) -> None:
    """Check what concerns several keys, of the run and of each of its stages."""
    _check(config)
    check_stages(config)
    _check_frozen(config)
    for number, stage in enumerate(stage_configs(config)[1:], start=1):
        try:
            _check(stage)
        except UsageError as error:
            raise UsageError(f"stage {number}: {error}") from None


def with_precision(config: Config, units: Units) -> Config:
    """Put a precision in the place of "auto": the best that ``units`` have and the other keys go with, else fp32.

    Raises:
        UsageError: the other keys go with no precision that is fast here: fp8 asks for bf16.
    """
    if config.precision != AUTO:
        return config
    for precision in (*units.precisions, "fp32"):
        resolved = dataclasses.replace(config, precision=precision)
        try:
            check_together(resolved)
        except UsageError as error:
            problem = error
        else:
            return resolved
    raise UsageError(f'precision = "auto" is {units.best} here ({units.reason}): {problem}')


def _check(config: Config) -> None:
    for first, second in EXCLUSIVE:
        if all(get(config, name) is not None for name in (first, second)):
            raise UsageError(f"{first} and {second} are both given; keep one")
    if len(config.optim.betas) != 2:
        raise UsageError(f"optim.betas has {len(config.optim.betas)} numbers; it takes two")
    if list(config.optim.milestones) != sorted(set(config.optim.milestones)):
        raise UsageError("optim.milestones must rise: each epoch later than the one before it")
    if config.data.batch_size == 1 and not config.sync_batchnorm:
        raise UsageError("data.batch_size = 1 leaves batch normalisation nothing to average; give 2 or more")
    if config.optim.head_name == "adamw" and config.head.momentum_dtype == "none":
        raise UsageError(
            'head.momentum_dtype = "none" leaves adamw no moments; give bfloat16 or int8, or optim.head = "sgd"'
        )
    _check_images(config)
    _check_hyperparameters(config.optim)
    _check_state_dtype(config)
    _check_comm_hook(config)
    _check_averaging(config)
    _check_head_averaging(config)
    _check_strategy(config)
    _check_pipeline(config)
    _check_head(config)
    _check_backbone(config.backbone)
    _check_tensor_parallel(config)
    _check_fp8(config)


def _check_fp8(config: Config) -> None:
    """Refuse products in float8 where there are none, or nobody has tried."""
    from plsc.models.vit import SHAPES

    if not config.fp8:
        return
    if config.backbone not in SHAPES:
        raise UsageError(f'fp8 is for {", ".join(SHAPES)}, and backbone is "{config.backbone}"; leave fp8 out')
    if config.precision not in ("bf16", AUTO):
        raise UsageError(f'fp8 goes with precision = "bf16", and precision is "{config.precision}"; give "bf16"')
    for name in ("tp", "pp"):
        if getattr(config.parallel, name) > 1:
            raise UsageError(
                f"fp8 is not made for parallel.{name} = {getattr(config.parallel, name)}; leave one of them out"
            )


def _check_images(config: Config) -> None:
    data = config.data
    if all(value is None for value in (data.image_size, data.mean, data.std)):
        return
    try:
        contract = data.preprocessing
    except UsageError as error:
        raise UsageError(f"data.{error}") from None
    for name, value, least in (("mean", data.mean, 0.0), ("std", data.std, 0.0)):
        numbers = value if isinstance(value, tuple) else (value or 0.0,)
        if least < max(numbers) < 1:
            scaled = toml_value([round(255 * number, 3) for number in numbers])
            raise UsageError(
                f"data.{name} = {toml_value(value)} is of values 0 to 1; of pixels 0 to 255 it is {scaled}"
            )
    if isinstance(contract.image_size, int):
        return
    for name in ("data.rotation_classes", "rotation_tta"):
        if get(config, name):
            raise UsageError(
                f"{name} rotates images by 90 degrees, and data.image_size = {toml_value(data.image_size)} is no "
                "square; leave one of them out"
            )


def _check_hyperparameters(optim: OptimConfig) -> None:
    """Refuse what neither optimizer reads. A value that equals the default was as good as not given."""
    from plsc.optim.backbone_optimizers import HYPERPARAMETERS

    defaults = {field.name: field.default for field in dataclasses.fields(OptimConfig)}
    read = {*HYPERPARAMETERS[optim.name], *HYPERPARAMETERS[optim.head_name]}
    for name in dict.fromkeys(name for names in HYPERPARAMETERS.values() for name in names):
        value = getattr(optim, name)
        if name not in read and value != defaults[name]:
            readers = [reader for reader, names in HYPERPARAMETERS.items() if name in names]
            raise UsageError(
                f"optim.{name} = {toml_value(value)} has no effect: neither {optim.name} nor the head's "
                f"{optim.head_name} reads it; leave it out, or take {' or '.join(readers)}"
            )


def _check_state_dtype(config: Config) -> None:
    """Refuse moments in 8 bits where no rank holds whole rows, or ranks' own moments would be averaged."""
    optim, parallel = config.optim, config.parallel
    if optim.state_dtype == "float32":
        return
    cause = f'optim.state_dtype = "{optim.state_dtype}"'
    if optim.name != "adamw":
        raise UsageError(f'{cause} is for adamw, and optim.name is "{optim.name}"; give optim.name = "adamw"')
    if parallel.tp > 1:
        raise UsageError(
            f"{cause} has scales for parts of rows, which parallel.tp = {parallel.tp} cuts elsewhere; give "
            'strategy = "fsdp", which leaves rows whole, or state_dtype = "float32"'
        )
    if parallel.averaging != "none":
        raise UsageError(
            f'{cause} leaves ranks with codes of their own, which parallel.averaging = "{parallel.averaging}" cannot '
            'merge; give state_dtype = "float32"'
        )


def _check_comm_hook(config: Config) -> None:
    hook, optim = config.parallel.comm_hook, config.optim
    if hook in ("powersgd", "dgc") and config.precision == "fp16":
        raise UsageError(
            f'parallel.comm_hook = "{hook}" adds gradients of several steps, whose loss scales differ under precision '
            '= "fp16"; give precision = "bf16"'
        )
    if hook == "dgc" and optim.name != "sgd":
        raise UsageError(
            f'parallel.comm_hook = "dgc" takes the place of sgd\'s momentum, and optim.name is "{optim.name}"; give '
            'optim.name = "sgd", or comm_hook = "powersgd"'
        )
    if hook == "dgc" and optim.clip_head:
        raise UsageError(
            'parallel.comm_hook = "dgc" clips each tensor before the exchange, so optim.clip_head has no common norm '
            "to clip; leave it out"
        )


def _check_averaging(config: Config) -> None:
    parallel = config.parallel
    name, together = parallel.averaging, f'parallel.averaging = "{parallel.averaging}"'
    if name == "none":
        return
    if parallel.comm_hook != "none":
        raise UsageError(
            f'{together} sends weights and no gradients, which parallel.comm_hook = "{parallel.comm_hook}" would '
            "compress; give one of them"
        )
    if parallel.strategy != "ddp":
        raise UsageError(
            f"{together} averages whole weights and leaves their states to the ranks, and parallel.strategy is "
            f'"{parallel.strategy}"; give strategy = "ddp"'
        )
    if config.sync_batchnorm:
        raise UsageError(
            f"{together} lets ranks have different weights, of which sync_batchnorm would mix the statistics, and "
            "communicates in every layer; leave it out"
        )
    if config.optim.clip_head:
        raise UsageError(
            f"{together} clips each rank's gradient by its own norm, so optim.clip_head has no common norm for the "
            "class table; leave it out"
        )
    if name == "hierarchical" and parallel.averaging_group_ranks == 1:
        raise UsageError(f"{together} needs groups; give parallel.averaging_group_ranks, the ranks of a machine")
    if name == "hierarchical" and parallel.averaging_period % parallel.averaging_group_period:
        raise UsageError(
            f"parallel.averaging_period = {parallel.averaging_period} is no multiple of averaging_group_period = "
            f"{parallel.averaging_group_period}; give one"
        )


def _check_head_averaging(config: Config) -> None:
    if config.parallel.head_averaging_period == 1 and config.head.staleness == 0:
        return
    if config.head_ranks == 0:
        raise UsageError(
            "parallel.head_averaging_period and head.staleness are for the tables of several head groups; give "
            "head_ranks, the ranks of a group"
        )


def _check_strategy(config: Config) -> None:
    parallel = config.parallel
    name = parallel.strategy
    if name != "hsdp" and parallel.shard_ranks:
        raise UsageError(f'parallel.shard_ranks is a number of hsdp, and parallel.strategy is "{name}"; leave it out')
    if name == "zero1" and parallel.comm_hook == "dgc":
        raise UsageError(
            'parallel.comm_hook = "dgc" keeps momenta on every rank, which zero1 spreads; give comm_hook = "powersgd", '
            'or strategy = "ddp"'
        )
    if name not in ("fsdp", "hsdp") and parallel.offload:
        raise UsageError(f'parallel.offload goes with fsdp and hsdp, and parallel.strategy is "{name}"')
    if name in ("fsdp", "hsdp"):
        _check_parts(config, f'parallel.strategy = "{name}"')


def _check_parts(config: Config, cause: str) -> None:
    """Refuse what needs whole weights or gradients, which ``cause`` cuts in parts."""
    parallel, optim = config.parallel, config.optim
    if optim.name in _WHOLE_LAYER_OPTIMIZERS:
        raise UsageError(
            f'optim.name = "{optim.name}" looks at whole layers, which {cause} cuts in parts; '
            'give strategy = "zero1", whose weights are whole, or sgd, adamw or lion, which go element by element'
        )
    if parallel.comm_hook in ("powersgd", "dgc"):
        raise UsageError(
            f'parallel.comm_hook = "{parallel.comm_hook}" compresses whole gradients, and {cause} '
            'sums parts; give comm_hook = "bf16", or strategy = "zero1" or "ddp"'
        )
    if parallel.bucket_mb is not None:
        raise UsageError(f"parallel.bucket_mb is of ddp and zero1; {cause} sums block by block")


def _check_pipeline(config: Config) -> None:
    from plsc.models.vit import SHAPES
    from plsc.parallel.strategies import STAGES_OF_A_RANK

    parallel = config.parallel
    pp, count = parallel.pp, parallel.pp_micro_batches or 2 * parallel.pp
    if pp == 1:
        if parallel.pp_micro_batches:
            raise UsageError("parallel.pp_micro_batches is a number of pipelines, and parallel.pp is 1; leave it out")
        return
    cause = f"parallel.pp = {pp}"
    if config.backbone not in SHAPES:
        raise UsageError(
            f'{cause} cuts the blocks of {", ".join(SHAPES)}, and backbone is "{config.backbone}"; give one of them, '
            'or strategy = "fsdp"'
        )
    stages = pp * STAGES_OF_A_RANK[parallel.pp_schedule]
    if stages > SHAPES[config.backbone].depth:
        raise UsageError(
            f'{cause} with pp_schedule = "{parallel.pp_schedule}" makes {stages} stages, and {config.backbone} has '
            f"{SHAPES[config.backbone].depth} blocks; give a smaller pp"
        )
    _check_micro_batches(config, count)
    if parallel.averaging != "none" or parallel.comm_hook in ("powersgd", "dgc"):
        raise UsageError(
            f"{cause} exchanges gradients stage by stage, which averaging, powersgd and dgc do not know; give "
            'averaging = "none" and comm_hook = "none", "bf16" or "fp16"'
        )
    if config.compile:
        raise UsageError(
            f"{cause} does not go with compile yet: compiled blocks failed in a stage's forward pass when they were "
            "tried; leave compile out"
        )
    if config.head_ranks:
        raise UsageError(f"{cause} shards the class table over the ranks of the last stage; leave head_ranks out")


def _check_micro_batches(config: Config, count: int) -> None:
    parallel = config.parallel
    if count < parallel.pp:
        raise UsageError(
            f"parallel.pp_micro_batches = {count} leaves some of the pipeline's {parallel.pp} ranks without work at "
            f"any time; give {parallel.pp} or more"
        )
    if parallel.pp_schedule == "interleaved" and count % parallel.pp:
        raise UsageError(
            f"parallel.pp_micro_batches = {count} is no multiple of pp = {parallel.pp}, as the interleaved schedule "
            "needs; give one"
        )
    if config.data.batch_size < 2 * count:
        raise UsageError(
            f"data.batch_size = {config.data.batch_size} has less than two samples for each of the pipeline's {count} "
            f"micro-batches, and batch normalisation needs two; give {2 * count} or more, or fewer pp_micro_batches"
        )


def _check_frozen(config: Config) -> None:
    """Refuse weights that freeze or thaw where ranks keep parts of gradients, or weights of their own."""
    frozen = {stage.frozen for stage in stage_configs(config)}
    if len(frozen) == 1 and "*" not in config.frozen:
        return
    hook, averaging = config.parallel.comm_hook, config.parallel.averaging
    if len(frozen) > 1 and hook in ("powersgd", "dgc"):
        raise UsageError(
            f'parallel.comm_hook = "{hook}" keeps back parts of gradients for later steps, so no stage can change '
            'frozen; give comm_hook = "bf16", or the same frozen to the whole run'
        )
    if averaging != "none":
        raise UsageError(
            f'parallel.averaging = "{averaging}" moves weights without gradients, so no stage can change frozen, and '
            "not all can be frozen; leave it out, or give the same frozen to the whole run"
        )


def _check_head(config: Config) -> None:
    from plsc.head.replicas import ExchangeOptions
    from plsc.head.storage import TableStorage

    head = config.head
    try:
        storage = TableStorage.of(head.weight_dtype, head.momentum_dtype, head.placement, head.journal)
        exchange = ExchangeOptions(config.parallel.head_averaging_period, head.staleness)
        exchange.check(storage, clips=config.optim.clip_head)
    except UsageError as error:
        text = re.sub(r"\b(placement|journal|staleness)\b", r"head.\1", str(error))
        for of_the_head, key in _WORDS_OF_THE_HEAD.items():
            text = text.replace(of_the_head, key)
        raise UsageError(text) from None
    if config.head.journal and (config.checkpoint.keep.every_hours or config.checkpoint.keep.best):
        raise UsageError(
            "head.journal goes back to the last checkpoints alone: leave checkpoint.keep.every_hours and "
            "checkpoint.keep.best out, or give head.journal = false"
        )
    takes = margin_keys()[config.head.margin]
    for name in dict.fromkeys(name for names in margin_keys().values() for name in names):
        if getattr(config.head, name) is not None and name not in takes:
            raise UsageError(
                f"head.{name} is no key of the margin {config.head.margin}, which takes {', '.join(takes)}"
            )
    make_margin(config.head)


def make_margin(head: HeadConfig) -> "Margin":
    """The margin that [head] describes; UsageError for values that it does not take."""
    from plsc.losses.margins import MARGINS

    parameters = {name: getattr(head, name) for name in margin_keys()[head.margin]}
    try:
        return MARGINS[head.margin](**{name: value for name, value in parameters.items() if value is not None})
    except UsageError as error:
        raise UsageError(f"[head] margin {head.margin}: {error}") from None


def _check_backbone(name: str) -> None:
    from plsc.models import names  # imported here: --help needs no backbones

    if name not in names() and not name.startswith("timm:"):
        hint = arcface_torch.backbone_hint(name)
        nearest = did_you_mean(name, names()) or f"; it is one of {', '.join(names())}, timm:NAME"
        raise UsageError(f"backbone = {toml_value(name)} does not exist{f'; {hint}' if hint else nearest}")


def _check_tensor_parallel(config: Config) -> None:
    tp = config.parallel.tp
    if tp == 1:
        return
    if config.parallel.strategy == "zero1":
        raise UsageError(
            f'parallel.tp = {tp} goes with ddp, fsdp and hsdp, and parallel.strategy is "zero1"; give "fsdp", '
            "which spreads the optimizer's state too"
        )
    _check_parts(config, f"parallel.tp = {tp}")
    if config.parallel.averaging != "none":
        raise UsageError(
            f'parallel.averaging = "{config.parallel.averaging}" averages whole weights; parallel.tp = {tp} cuts them; '
            "leave one out"
        )
    if config.compile:
        raise UsageError(
            f"parallel.tp = {tp} splits layers by hooks that torch.compile does not take: leave compile out"
        )
    import torch

    from plsc.models import create
    from plsc.parallel.strategies.tensor_parallel import check_tensor_parallel

    with torch.device("meta"):
        size = config.data.preprocessing.image_size
        backbone = create(config.backbone, embedding_dim=config.embedding_dim, image_size=size)
    check_tensor_parallel(backbone, config.backbone, tp)
