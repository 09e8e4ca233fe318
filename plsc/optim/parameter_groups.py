"""Parameter groups of a backbone: values of weights by patterns of their names, and rates that fall layer by layer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from plsc.errors import UsageError
from plsc.nearest import edit_distance

# What a ViT computes before its first block, by the first part of the name (plsc's and timm's ViTs).
_BEFORE_BLOCKS = ("patch_embed", "pos_embed", "cls_token", "reg_token", "dist_token", "norm_pre")


Patterns = Sequence[tuple[str, Mapping[str, Any]]]


def parameter_groups(
    backbone: nn.Module, lr: float, *, no_decay: Sequence[str] = (), layer_decay: float = 1.0, patterns: Patterns = ()
) -> list[dict[str, Any]]:
    """Return the trained weights in groups for torch's optimizers, those of the highest learning rate first.

    Layer-wise decay is that of BEiT (Bao et al., ICLR 2022, appendix; timm's ``param_groups_layer_decay``): block k of
    K, from 0, has ``lr`` · decay^(K − k), what comes before the blocks decay^(K + 1), what comes after them ``lr``.

    Args:
        backbone: with the names of its own, not wrapped by data parallelism.
        lr: of what comes after the blocks.
        no_decay: patterns of weights' names (``fnmatch``) that get a ``weight_decay`` of 0.
        layer_decay: 1 gives every layer ``lr``.
        patterns: values of the weights whose names each pattern fits: ``lr_scale``, a factor of the rate that the layer
            has, and ``weight_decay``. The last pattern that gives a value counts for it, and before ``no_decay``.

    Returns:
        Groups with ``params`` and ``lr``, and ``weight_decay`` where it is not the optimizer's own. Weights keep the
        backbone's order in each; without patterns and decay there is one group.

    Raises:
        UsageError: a pattern fits no weight, or layers decay in a backbone without a sequence of transformer blocks.
    """
    weights = {name: weight for name, weight in backbone.named_parameters() if weight.requires_grad}
    names = [name for name, _ in backbone.named_parameters()]
    undecayed = fitting(no_decay, names, "optim.no_decay")
    fitting([pattern for pattern, _ in patterns], names, "optim.groups")
    scales = _layer_scales(backbone, layer_decay)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, weight in weights.items():
        scale = 1.0 if layer_decay == 1.0 else _scale_of(name, scales)
        scale *= last_given("lr_scale", name, patterns, 1.0)
        decay = last_given("weight_decay", name, patterns, 0.0 if name in undecayed else None)
        group = {"params": [], "lr": lr * scale} | ({} if decay is None else {"weight_decay": decay})
        groups.setdefault((-scale, -1.0 if decay is None else decay), group)["params"].append(weight)
    return [groups[key] for key in sorted(groups)]


def fitting(patterns: Iterable[str], names: Sequence[str], key: str) -> set[str]:
    """Return those of ``names`` that one of the patterns fits (``fnmatch``, by letters' case).

    Raises:
        UsageError: a pattern of ``key`` fits none of the names; it shows those that are nearest.
    """
    found: set[str] = set()
    for pattern in patterns:
        fits = {name for name in names if fnmatchcase(name, pattern)}
        if not fits:
            near = sorted(names, key=partial(edit_distance, pattern))[:2]
            raise UsageError(f'{key}: "{pattern}" fits no weight of the backbone; the nearest are {", ".join(near)}')
        found |= fits
    return found


def last_given(key: str, name: str, patterns: Patterns, default: Any) -> Any:
    """Return the value of ``key`` by the last pattern that fits ``name`` and gives one, else ``default``."""
    fits = (values[key] for pattern, values in reversed(patterns) if key in values and fnmatchcase(name, pattern))
    return next(fits, default)


def _layer_scales(backbone: nn.Module, decay: float) -> dict[str, float]:
    """The factors of the learning rate by the beginnings of names."""
    if decay == 1.0:
        return {}
    prefix, blocks = _blocks_of(backbone)
    scales = {f"{prefix}{name}": decay ** (len(blocks) + 1) for name in _BEFORE_BLOCKS}
    return scales | {f"{prefix}blocks.{k}": decay ** (len(blocks) - k) for k in range(len(blocks))}


def _scale_of(name: str, scales: dict[str, float]) -> float:
    return next((scale for start, scale in scales.items() if name == start or name.startswith(f"{start}.")), 1.0)


def _blocks_of(backbone: nn.Module) -> tuple[str, nn.Sequential | nn.ModuleList]:
    """The blocks, and what stands before their name: those of a ViT itself, or of timm's within a wrapper."""
    for prefix, module in _candidates(backbone):
        blocks = getattr(module, "blocks", None)
        if hasattr(module, "patch_embed") and isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks):
            return prefix, blocks
    raise UsageError(
        "optim.layer_decay needs a backbone with a sequence of transformer blocks, and this one has none: take "
        "vit_small or another vit_*, or a ViT of timm, or leave optim.layer_decay at 1"
    )


def _candidates(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "", backbone
    for name, module in backbone.named_children():
        yield f"{name}.", module
