"""The seam of rare features: a section of keys by name, and what the section makes of a run.

The core reads keys, asks whether a feature is on, and calls it; it names none. A feature is a folder of
:mod:`plsc.features`, or a package's object under the entry point group ``plsc.features``.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from plsc.extensions import Registry, is_subclass

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from plsc.config import Config, DataConfig  # which imports this module, as the others do
    from plsc.config.class_tables import ClassTable
    from plsc.data import ImageDataset
    from plsc.head import ShardedHead
    from plsc.plan.plan_config import PlanConfig
    from plsc.train.checkpoint_reader import StoredCheckpoint
    from plsc.train.feature import Feature  # imports torch


@dataclass(frozen=True)
class DiskTerm:
    """Bytes that a feature takes on a rank's disk, about: their name in JSON, and in words."""

    name: str
    words: str
    nbytes: int


@dataclass(frozen=True)
class RowsOutside:
    """The weights of a class table (rows, dim) that a checkpoint goes with and does not hold, in ``files``.

    ``copy_into`` writes them, as they were at the checkpoint, into a float32 array of this shape.
    """

    rows: int
    dim: int
    dtype: "torch.dtype"
    files: tuple[str, ...]
    copy_into: "Callable[[NDArray[np.float32]], None]"


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
        keeps_tables: it keeps the class tables' rows itself, and checkpoints hold none; its feature is a
            :class:`plsc.train.feature.TableKeeper`.
    """

    alone: ClassVar[Mapping[str, str]] = {}
    steps_alone: ClassVar[bool] = False
    goes_with_own_steps: ClassVar[bool] = False
    precision: ClassVar[str] = ""
    moves_weights: ClassVar[bool] = False
    keeps: ClassVar[Mapping[str, str]] = {}
    needs_trained_backbone: ClassVar[bool] = False
    keeps_tables: ClassVar[bool] = False

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

    def head_kind(self) -> "Callable[..., ShardedHead] | None":
        """What makes each class table, with the arguments of :class:`plsc.ShardedHead`; None: that does."""
        return None

    @property
    def filters_negatives(self) -> bool:
        """Whether passes compare the rows of labels with every row, to leave some out of the softmax."""
        return False

    @property
    def keeps_rows(self) -> str:
        """Which rows of the class table no step updates: "", "some" or "all"."""
        return ""

    def class_tables(self, run: "Config") -> "list[ClassTable]":
        """The class tables of ``run``, or of one of its stages, where it has others than that of [head]."""
        return []

    def open_data(self, run: "Config", open_one: "Callable[[DataConfig], ImageDataset]") -> "ImageDataset | None":
        """Open the images of a run whose :meth:`class_tables` these are, by ``open_one`` those of one [data].

        Returns:
            Images whose ``parts`` are those of the tables; None: those of the run's own [data].
        """
        return None

    def check_world(self, ranks: int) -> None:
        """Raise UsageError unless so many ranks go with these keys."""

    def make(self, run: "Config") -> "Feature":
        """Return what takes part in the training of ``run``."""
        raise NotImplementedError

    # Of the planner.

    def planned_tables(self, run: "PlanConfig") -> list["PlanConfig"]:
        """Tables that it adds to those of a planned ``run``; every sample meets them."""
        return []

    def planned_classes(self, classes: int) -> int:
        """How many classes a table has room for whose data has ``classes``."""
        return classes

    def plan_notes(self) -> list[str]:
        """What a plan leaves out, a line each."""
        return []

    def planned_disk(self, table: "PlanConfig", row_bytes: int) -> list[DiskTerm]:
        """What it takes on the disk of each rank of a run with this ``table``, whose rows take so many bytes there."""
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

    @classmethod
    def class_names(cls, path: Path, table: str) -> list[list[str]] | None:
        """The names of each class of a ``table`` of the checkpoint ``path``; None: classes are numbers of the data."""
        return None

    @classmethod
    def open_rows(cls, stored: "StoredCheckpoint", state: Any, used: Sequence[int] | None) -> RowsOutside:
        """The rows that it keeps (``keeps_tables``) and that the checkpoint ``stored`` goes with.

        Args:
            stored: the checkpoint, from wherever.
            state: what it holds of the feature.
            used: rows of each shard that were in use; None: all.

        Raises:
            DataError: they are not there.
            IntegrityError: ``state`` is none of this feature.
        """
        raise NotImplementedError


_Section = TypeVar("_Section", bound=FeatureConfig)


def _folders() -> dict[str, str | type[FeatureConfig]]:
    """The folders of :mod:`plsc.features`, each by its name, which is its section's."""
    found = sorted(each.name for each in pkgutil.iter_modules([str(Path(__file__).parent / "features")]))
    return {name: f"plsc.features.{name}.config" for name in found}


# Each by its section's name, with the module or the class of the section, imported when the keys are read.
FEATURES: Registry[str | type[FeatureConfig]] = Registry(
    "plsc.features", _folders(), is_subclass(FeatureConfig), "a subclass of plsc.config.FeatureConfig"
)


def section_class(name: str) -> type[FeatureConfig]:
    """The class of a feature's section, the one that its module ``config`` defines; KeyError where there is none."""
    found = FEATURES[name]
    if isinstance(found, str):
        defined = [each for each in vars(import_module(found)).values() if is_subclass(FeatureConfig)(each)]
        FEATURES[name] = found = next(each for each in defined if each.__module__ == found)
    return found


def section_name(kind: type[FeatureConfig]) -> str:
    """The name of a section of this class."""
    return next(name for name in FEATURES if section_class(name) is kind)


def section_of(sections: Sequence[FeatureConfig], kind: type[_Section]) -> _Section:
    """The section of a class among those that a configuration gives; its defaults where it gives none."""
    return next((section for section in sections if isinstance(section, kind)), None) or kind()


def feature_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's small state holds of rare features, by name; earlier versions kept it elsewhere."""
    former = {name: section_class(name).former_state(state) for name in FEATURES}
    given = state.get("features")  # from wherever: it may be anything
    own = given if isinstance(given, dict) else {}
    return {name: found for name, found in former.items() if found is not None} | own


def keeper_of_tables(state: Mapping[str, Any]) -> tuple[type[FeatureConfig], Any] | None:
    """The section of the feature that keeps the rows of the class tables of a checkpoint, and the feature's state.

    Args:
        state: the checkpoint's small state.

    Returns:
        None where the checkpoint holds them.
    """
    for name, of_feature in feature_states(state).items():
        if of_feature is not None and FEATURES.find(name) is not None and section_class(name).keeps_tables:
            return section_class(name), of_feature
    return None
