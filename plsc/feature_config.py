"""The seam of rare features: a section of keys by name, and what the section makes of a run.

The core reads keys, asks whether a feature is on, and calls it; it names none. A feature is a folder of
:mod:`plsc.features`, or a package's object under the entry point group ``plsc.features``.
"""

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from plsc.extensions import Registry, is_subclass

if TYPE_CHECKING:
    from plsc.config import Config  # which imports this module, as the others do
    from plsc.plan.plan_config import PlanConfig
    from plsc.train.feature import Feature  # imports torch


@dataclass(frozen=True)
class FeatureConfig:
    """The section of a rare feature: its keys, what they do not go with, and what they make of a run.

    A frozen dataclass is derived from it, whose fields are made by :func:`plsc.toml_keys.key`. The section's name is
    that in :data:`FEATURES`.

    Attributes:
        alone: dotted keys and sections that it does not go with unless they have their defaults, with the reason.
        steps_alone: each rank steps by its own samples, with its share of the learning rate.
        goes_with_own_steps: it goes with a feature that lets ranks do so.
        precision: the only one that it goes with; "": any.
        moves_weights: weights of the backbone change without a gradient.
        keeps: tensors of its exchange that nothing takes over in a run without it, by the last part of their names, in
            words.
        needs_trained_backbone: nothing comes of it where the backbone does not train.
    """

    alone: ClassVar[Mapping[str, str]] = {}
    steps_alone: ClassVar[bool] = False
    goes_with_own_steps: ClassVar[bool] = False
    precision: ClassVar[str] = ""
    moves_weights: ClassVar[bool] = False
    keeps: ClassVar[Mapping[str, str]] = {}
    needs_trained_backbone: ClassVar[bool] = False

    def is_on(self, run: "Config") -> bool:
        """Whether ``run``, whose section this is, has the feature; else it is not made, as what heads alone have."""
        return False

    @property
    def cause(self) -> str:
        """The key that turns it on, with its value: how refusals begin."""
        raise NotImplementedError

    def refusals(self, run: "Config") -> Iterator[str]:
        """Say, one after another, what of ``run`` does not go with these keys."""
        return iter(())

    def head_options(self) -> dict[str, Any]:
        """Keyword arguments of :class:`plsc.ShardedHead` that the section gives to each class table."""
        return {}

    @property
    def filters_negatives(self) -> bool:
        """Whether passes compare the rows of labels with every row, to leave some out of the softmax."""
        return False

    @property
    def keeps_rows(self) -> str:
        """Which rows of the class table no step updates: "", "some" or "all"."""
        return ""

    def check_world(self, ranks: int) -> None:
        """Raise UsageError unless so many ranks go with these keys."""

    def make(self, run: "Config") -> "Feature":
        """Return what takes part in the training of ``run``."""
        raise NotImplementedError

    # Of the planner.

    def planned_tables(self, run: "PlanConfig") -> list["PlanConfig"]:
        """Tables that it adds to those of a planned ``run``; every sample meets them."""
        return []

    def plan_notes(self) -> list[str]:
        """What a plan leaves out, a line each."""
        return []

    # Of checkpoints.

    @classmethod
    def former_state(cls, state: Mapping[str, Any]) -> Any:
        """What a checkpoint without entries of features says of this one; None: nothing."""
        return None

    @classmethod
    def left_out(cls, state: Any) -> str:
        """What of a checkpoint's ``state`` of it nothing takes over in a run without it; "" where that is nothing.

        Raises:
            UsageError: a run cannot go on without it.
        """
        return ""


_Section = TypeVar("_Section", bound=FeatureConfig)

# Each by its section's name, with the section's class, imported when the keys are read.
FEATURES: Registry[str | type[FeatureConfig]] = Registry(
    "plsc.features",
    {
        "averaging": "averaging.config:AveragingConfig",
        "asynchronous": "asynchronous.config:AsynchronousConfig",
        "frozen": "frozen.config:FrozenConfig",
        "compatible": "compatible.config:CompatibleConfig",
        "fp8": "fp8.config:Float8Config",
        "labels": "labels.config:LabelsConfig",
        "negative_filter": "negative_filter.config:NegativeFilterConfig",
    },
    is_subclass(FeatureConfig),
    "a subclass of plsc.config.FeatureConfig",
)


def section_class(name: str) -> type[FeatureConfig]:
    """The class of a feature's section; KeyError where nothing has that name."""
    found = FEATURES[name]
    return cast(
        type[FeatureConfig], pkgutil.resolve_name(f"plsc.features.{found}") if isinstance(found, str) else found
    )


def section_name(kind: type[FeatureConfig]) -> str:
    """The name of a section of this class."""
    return next(name for name in FEATURES if section_class(name) is kind)


def section_of(sections: Sequence[FeatureConfig], kind: type[_Section]) -> _Section:
    """The section of a class among those that a configuration gives; its defaults where it gives none."""
    return next((section for section in sections if isinstance(section, kind)), None) or kind()
