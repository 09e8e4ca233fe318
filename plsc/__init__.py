"""plsc: train recognition models over tens of millions of classes, and put them to work.

The names below are imported at their first use (PEP 562): ``import plsc``, and with it ``plsc --help``, takes
milliseconds and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from plsc.client import Client as Client
    from plsc.errors import PlscError as PlscError
    from plsc.head import ShardedHead as ShardedHead
    from plsc.losses.margins import *  # noqa: F403  (every margin, by its __all__)
    from plsc.optim import HeadAdamW as HeadAdamW
    from plsc.optim import HeadSGD as HeadSGD
    from plsc.parallel import data_parallel as data_parallel
    from plsc.parallel import init as init

# Public names by the module that defines them; a test compares them with the imports above.
_EXPORTS = {
    "plsc.client": ("Client",),
    "plsc.errors": ("PlscError",),
    "plsc.head": ("ShardedHead",),
    "plsc.losses.margins": (
        "AdaFace",
        "ArcFace",
        "Combined",
        "CosFace",
        "CurricularFace",
        "ElasticFace",
        "MagFace",
        "Softmax",
        "SphereFace",
    ),
    "plsc.optim": ("HeadAdamW", "HeadSGD"),
    "plsc.parallel": ("data_parallel", "init"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
_PACKAGES = ("head", "losses", "optim", "parallel")  # reachable as attributes after `import plsc` alone

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
        return sorted([*globals(), *__all__])
