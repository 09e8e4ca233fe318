"""Backbones by name: plain functions, each registered under its own name."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from plsc.errors import UsageError
from plsc.models.backbone import Backbone, check_geometry

TIMM_PREFIX, TURNED_PREFIX = "timm:", "turned:"

Builder = Callable[..., Backbone]
_builders: dict[str, Builder] = {}

# What arcface_torch calls them: used to answer a wrong name with the right one.
_ARCFACE_TORCH_NAMES = {
    "r18": "iresnet18",
    "r34": "iresnet34",
    "r50": "iresnet50",
    "r100": "iresnet100",
    "r200": "iresnet200",
    "mbf": "mobilefacenet",
    "mbf_large": "mobilefacenet_large",
    "vit_t": "vit_tiny",
    "vit_s": "vit_small",
    "vit_b": "vit_base",
    "vit_l": "vit_large",
}


def register(builder: Builder) -> Builder:
    """Make ``builder(embedding_dim, image_size, **options)`` known to :func:`create` by its own name."""
    _builders[builder.__name__] = builder
    return builder


def names() -> tuple[str, ...]:
    """The names that :func:`create` takes, besides ``timm:NAME``."""
    return tuple(_builders)


def create(name: str, *, embedding_dim: int = 512, image_size: int = 112, **options: Any) -> Backbone:
    """A new backbone with fresh weights, (B, 3, S, S) float32 -> (B, D) float32.

    Args:
        name: one of :func:`names`, or ``timm:NAME`` for any model of timm; or ``turned:`` and such a name, for
            :class:`plsc.models.turned.TurnedViews` of it.
        embedding_dim: D.
        image_size: S in pixels, a multiple of 16 from 32 up.
        options: what the family takes further: ``dropout`` (iresnet); ``drop_path``, ``mask_ratio`` and
            ``patch_size`` (vit); ``gradient_checkpointing`` (iresnet, vit, timm); timm's own keywords (timm).

    Raises:
        UsageError: the name is unknown (the nearest right one is given), or a number or option does not fit.
    """
    check_geometry(embedding_dim, image_size)
    builder = _builder(name)
    _check_options(name, builder, options)
    model = builder(embedding_dim, image_size, **options)
    model.options = dict(options)
    return model


def nearest(wrong: str, right: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the likeliest of ``right``, or an empty string."""
    found = difflib.get_close_matches(wrong.lower(), list(right), n=1, cutoff=0.4)
    return f"; did you mean {found[0]!r}?" if found else ""


def _builder(name: str) -> Builder:
    if name in _builders:
        return _builders[name]
    if name.startswith(TIMM_PREFIX):
        from plsc.models.timm_backbone import timm_builder

        return timm_builder(name.removeprefix(TIMM_PREFIX))
    if name.startswith(TURNED_PREFIX):
        from plsc.models.turned import turned_builder

        return turned_builder(name.removeprefix(TURNED_PREFIX))
    meant = _ARCFACE_TORCH_NAMES.get(name)
    hint = f"; did you mean {meant!r}?" if meant else nearest(name, _builders)
    raise UsageError(f"no backbone is called {name!r}{hint} (known: {', '.join(_builders)}, timm:NAME)")


def _check_options(name: str, builder: Builder, options: dict[str, Any]) -> None:
    parameters = inspect.signature(builder).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise UsageError(f"{name} has no option {option!r}{nearest(option, known)} (it takes: {takes})")
