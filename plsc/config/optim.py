"""The keys of [optim] and of its tables by weight: optimizers, learning rates, and their schedule."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plsc.strict_toml import Table, tables
from plsc.toml_keys import key, toml_value

if TYPE_CHECKING:
    from plsc.config.sections import Config  # which imports this module


@dataclass(frozen=True)
class GroupKeys:
    """[optim.groups]: a table under each pattern.

    Attributes:
        lr_scale: Factor of optim.lr; unset: 1.
        weight_decay: Weight decay; 0 as by no_decay; unset: optim.weight_decay, or 0 by no_decay.
        frozen: Keep the weights as they are during the whole run; unset: false, as frozen says.
    """

    lr_scale: float | None = key(None, above=0)
    weight_decay: float | None = key(None, least=0)
    frozen: bool | None = key(None)


def _group_hint(name: str) -> str | None:
    """The names that other programs give to the keys of parameter groups."""
    if name in ("lr", "lr_mult", "lr_factor", "lr_multiplier"):
        return "it is lr_scale here, a factor of optim.lr"
    return "it is weight_decay here, the value itself" if name in ("wd", "decay_mult", "wd_mult") else None


@dataclass(frozen=True)
class OptimConfig:
    """[optim]: the optimizers of backbone and head, and their learning-rate schedule.

    Attributes:
        name: Optimizer of the backbone; muon trains what is no matrix by adamw.
        head: Optimizer of the head; unset: sgd with sgd and lars, adamw with the others.
        lr: Peak learning rate, of a global batch of base_batch images where lr_scaling is set.
        lr_scaling: Growth of lr and head_lr with the global batch (data.batch_size × ranks × accumulate): linear, by
            its ratio to base_batch, which suits sgd and lars, or sqrt, by the ratio's square root, which suits the
            others.
        base_batch: Global batch that lr and head_lr are given for; arcface_torch's 0.1 are for 512.
        head_lr: Peak learning rate of the head; unset: lr.
        momentum: sgd, lars, muon: momentum; muon is published with 0.95.
        trust_coefficient: lars: length of a layer's step as a share of its weights' norm, before lr.
        weight_decay: Weight decay of all weights, the head's included.
        no_decay: Patterns of names of the backbone's weights without weight decay, as *.bias or *norm*; lars and lamb
            do not adapt their rate to these either.
        groups: Values of the backbone's weights whose names a pattern fits. Where several fit, the last that gives a
            key counts for it; all count before no_decay, and lr_scale as well as layer_decay.
        layer_decay: Factor of the backbone's learning rate from each transformer block to the one before it (vit_*,
            ViTs of timm); 1: one rate for all.
        betas: adamw, lamb, lion, muon: decay rates of the two moments; lion is published with 0.9, 0.99.
        eps: adamw, lamb, muon: added to the square root of the second moment.
        state_dtype: adamw: type of the backbone's two moments; int8 takes 2.0 to 2.1 bytes a weight in place of 8
            (torchao).
        schedule: Course of the learning rate after the warm-up.
        warmup_epochs: Epochs of linear warm-up; unset: none.
        warmup_steps: Steps of linear warm-up, in place of warmup_epochs; unset: none.
        power: polynomial: exponent of (1 − progress)^power; 1 is a straight line.
        min_lr_ratio: polynomial, cosine: learning rate at the end, as a share of the peak.
        milestones: step: epochs at which the learning rate is multiplied by gamma.
        gamma: step: factor of the learning rate at each milestone.
        clip_norm: Largest norm of the gradient, to which it is clipped; 0: no clipping.
        clip_head: Include the head's gradient in the norm and clip it too; false: the backbone's gradient alone.
        accumulate: Micro-batches per step (gradient accumulation); the step equals that of one large batch, but for
            what sees a micro-batch at a time: batch normalisation, running statistics (head.rate), drawn classes and
            labels, and classes that come into the table.
    """

    name: str = key("sgd", choices="plsc.optim.backbone_optimizers:BACKBONE_OPTIMIZERS", is_fixed=True)
    head: str | None = key(None, choices=("sgd", "adamw"), is_fixed=True)
    lr: float = key(0.1, above=0, also_called=("learning_rate", "base_lr"), in_stages=True)
    lr_scaling: str = key("none", choices="plsc.optim.schedules:LR_SCALINGS")
    base_batch: int = key(512, least=1)
    head_lr: float | None = key(None, above=0, in_stages=True)
    momentum: float = key(0.9, least=0, below=1)
    trust_coefficient: float = key(0.001, above=0)
    weight_decay: float = key(0.0005, least=0, also_called=("wd",))
    no_decay: tuple[str, ...] = key(())
    groups: tuple[Table, ...] = tables(GroupKeys, are_named=True, hint=_group_hint)
    layer_decay: float = key(1.0, above=0, most=1)
    betas: tuple[float, ...] = key((0.9, 0.999), least=0, below=1)
    eps: float = key(1e-08, above=0)
    state_dtype: str = key("float32", choices=("float32", "int8"), is_fixed=True)
    schedule: str = key(
        "polynomial", choices="plsc.optim.schedules:SCHEDULES", also_called=("scheduler",), in_stages=True
    )
    warmup_epochs: float | None = key(None, least=0, in_stages=True)
    warmup_steps: int | None = key(None, least=0, in_stages=True)
    power: float = key(1.0, above=0, in_stages=True)
    min_lr_ratio: float = key(0.0, least=0, most=1, renamed_from="final", in_stages=True)
    milestones: tuple[float, ...] = key((), above=0, in_stages=True)
    gamma: float = key(0.1, above=0, most=1, in_stages=True)
    clip_norm: float = key(0.0, least=0)
    clip_head: bool = key(False)
    accumulate: int = key(1, least=1, also_called=("grad_accum", "gradient_accumulation_steps"))

    @property
    def head_name(self) -> str:
        """The head's optimizer, "sgd" or "adamw"."""
        return self.head or ("sgd" if self.name in ("sgd", "lars") else "adamw")

    def refusals(self, run: "Config") -> Iterator[str]:
        """Say, one after another, what of ``run`` does not go with these keys."""
        if len(self.betas) != 2:
            yield f"optim.betas has {len(self.betas)} numbers; it takes two"
        if list(self.milestones) != sorted(set(self.milestones)):
            yield "optim.milestones must rise: each epoch later than the one before it"
        yield from self._without_effect()
        if self.state_dtype != "float32":
            yield from self._of_state_dtype(run)

    def _without_effect(self) -> Iterator[str]:
        """What neither optimizer reads. A value that equals the default was as good as not given."""
        from plsc.optim.backbone_optimizers import HYPERPARAMETERS

        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        read = {*HYPERPARAMETERS[self.name], *HYPERPARAMETERS[self.head_name]}
        for name in dict.fromkeys(name for names in HYPERPARAMETERS.values() for name in names):
            value = getattr(self, name)
            if name not in read and value != defaults[name]:
                readers = [reader for reader, names in HYPERPARAMETERS.items() if name in names]
                yield (
                    f"optim.{name} = {toml_value(value)} has no effect: neither {self.name} nor the head's "
                    f"{self.head_name} reads it; leave it out, or take {' or '.join(readers)}"
                )

    def _of_state_dtype(self, run: "Config") -> Iterator[str]:
        """Of moments in 8 bits: no rank holds whole rows, or ranks' own moments would be averaged."""
        parallel, cause = run.parallel, f'optim.state_dtype = "{self.state_dtype}"'
        if self.name != "adamw":
            yield f'{cause} is for adamw, and optim.name is "{self.name}"; give optim.name = "adamw"'
        if parallel.tp > 1:
            yield (
                f"{cause} has scales for parts of rows, which parallel.tp = {parallel.tp} cuts elsewhere; give "
                'strategy = "fsdp", which leaves rows whole, or state_dtype = "float32"'
            )
