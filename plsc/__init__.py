"""plsc: train recognition models over tens of millions of classes, and put them to work.

Training: :func:`init`, :func:`data_parallel`, :class:`ShardedHead` with its margins, :class:`ShardedHeads` for several,
and the optimizers :class:`HeadSGD` and :class:`HeadAdamW`. A trained model: :func:`load_model`, :func:`embed`,
:func:`evaluate`, :class:`Index`; :func:`open_images` and :func:`align` for its pictures, :class:`Client` for a service.
:class:`Embedder` embeds in Ray Data, Spark and datasets.

The names below are imported at their first use (PEP 562): ``import plsc``, and with it ``plsc --help``, takes
milliseconds and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from plsc.api import align as align
    from plsc.api import embed as embed
    from plsc.api import evaluate as evaluate
    from plsc.api import load_model as load_model
    from plsc.client import Client as Client
    from plsc.embedding.row_batches import Embedder as Embedder
    from plsc.embedding.sources import open_images as open_images
    from plsc.errors import PlscError as PlscError
    from plsc.features.dynamic.dynamic_head import DynamicHead as DynamicHead
    from plsc.features.labels.options import LabelOptions as LabelOptions
    from plsc.features.tables.sharded_heads import ShardedHeads as ShardedHeads
    from plsc.head import ShardedHead as ShardedHead
    from plsc.head import TableOptions as TableOptions
    from plsc.index import Index as Index
    from plsc.losses.margins import *  # noqa: F403  (every margin, by its __all__)
    from plsc.optim import HeadAdamW as HeadAdamW
    from plsc.optim import HeadSGD as HeadSGD
    from plsc.parallel import data_parallel as data_parallel
    from plsc.parallel import init as init

# Public names by the module that defines them; a test compares them with the imports above.
_EXPORTS = {
    "plsc.api": ("align", "embed", "evaluate", "load_model"),
    "plsc.client": ("Client",),
    "plsc.embedding.row_batches": ("Embedder",),
    "plsc.embedding.sources": ("open_images",),
    "plsc.errors": ("PlscError",),
    "plsc.features.dynamic.dynamic_head": ("DynamicHead",),
    "plsc.features.labels.options": ("LabelOptions",),
    "plsc.features.tables.sharded_heads": ("ShardedHeads",),
    "plsc.head": ("ShardedHead", "TableOptions"),
    "plsc.index": ("Index",),
    "plsc.losses.margins": (
        "AdaFace",
        "ArcFace",
        "Combined",
        "CosFace",
        "CurricularFace",
        "ElasticFace",
        "MLCD",
        "MagFace",
        "Softmax",
        "SphereFace",
    ),
    "plsc.optim": ("HeadAdamW", "HeadSGD"),
    "plsc.parallel": ("data_parallel", "init"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
_PACKAGES = (
    "collectives",
    "errors",
    "head",
    "losses",
    "optim",
    "parallel",
)  # reachable as attributes after `import plsc` alone

__all__ = [*_MODULES]

if not TYPE_CHECKING:  # type checkers would take every name for one that exists

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"plsc.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'plsc' has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
