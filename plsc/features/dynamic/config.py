"""The keys of [dynamic]."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.dynamic.feature import DynamicClasses
    from plsc.head import ShardedHead  # which imports torch, as the others do
    from plsc.losses.margins import Margin
    from plsc.parallel import Mesh


@dataclass(frozen=True)
class DynamicConfig(FeatureConfig):
    """[dynamic]: classes that come and go, and are known by their names.

    Attributes:
        max_classes: The most classes that there may come to be: classes are known by their names then, come into the
            table when they are first seen, and data.train may have others when the run goes on; unset: those of the
            data, from the first step to the last.
        first_rows: What a class that comes in begins with: the mean of its embeddings in the batch (mean), or random
            numbers; with max_classes.
        admit_after: Pictures of a class that are seen before it comes into the table; until then they have no label;
            with max_classes.
        expire_after: Steps without a picture of a class after which it is removed from the table; unset: it stays; with
            max_classes.
    """

    max_classes: int | None = key(None, least=1, in_tables=True, moved_from="head.max_classes")
    first_rows: str = key("mean", choices=("mean", "random"), in_tables=True, moved_from="head.first_rows")
    admit_after: int = key(1, least=1, in_tables=True, moved_from="head.admit_after")
    expire_after: int | None = key(None, least=1, in_tables=True, moved_from="head.expire_after")

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`; a table may have it alone."""
        return self.max_classes is not None or run.is_given_in_tables("dynamic.max_classes")

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return "dynamic.max_classes" + ("" if self.max_classes is None else f" = {self.max_classes}")

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse keys that mean nothing without the first, and ranks that share a head otherwise."""
        if self.max_classes is None and (self.admit_after > 1 or self.expire_after is not None):
            yield (
                "dynamic.admit_after and dynamic.expire_after go with dynamic.max_classes: give it, or leave them out"
            )
        for axis in ("tp", "pp") if self.max_classes is not None else ():
            if (ranks := getattr(run.parallel, axis)) > 1:
                yield f"dynamic.max_classes is not made for parallel.{axis} = {ranks}; leave one of them out"

    def head_kind(self) -> "Callable[..., ShardedHead] | None":
        """See :meth:`FeatureConfig.head_kind`."""
        return None if self.max_classes is None else partial(_make_head, self)

    def planned_classes(self, classes: int) -> int:
        """See :meth:`FeatureConfig.planned_classes`."""
        return max(classes, self.max_classes or 0)

    def make(self, run: "Config") -> "DynamicClasses":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.dynamic.feature import DynamicClasses

        return DynamicClasses(run)

    @classmethod
    def former_state(cls, state: Mapping[str, Any]) -> Any:
        """See :meth:`FeatureConfig.former_state`: whether a configuration of before has the key."""
        config = state.get("config")
        tables = config.get("table") if isinstance(config, dict) else None
        trees = [config, *(tables if isinstance(tables, list) else ())]
        heads = [tree.get("head") for tree in trees if isinstance(tree, dict)]
        return any(isinstance(head, dict) and head.get("max_classes") is not None for head in heads) or None

    @classmethod
    def left_out(cls, state: Any) -> str:
        """Refuse to go on: rows are those of names, and not of the data's numbers."""
        raise UsageError(other_classes("set", "unset"))

    @classmethod
    def class_names(cls, path: Path, table: str) -> list[list[str]] | None:
        """See :meth:`FeatureConfig.class_names`."""
        from plsc.features.dynamic.named_table import class_names

        return class_names(path, table)


def other_classes(was: str, now: str) -> str:
    """Why a run cannot go on whose classes came and went and do not any more, or the other way round."""
    return (
        f"dynamic.max_classes was {was} when the run began and is {now} now; set it back to go on, or begin another "
        "run (another --out), with --init_weights RUN/model.safetensors to build on this one"
    )


def _make_head(
    section: DynamicConfig, dim: int, num_classes: int, mesh: "Mesh", margin: "Margin", **options: Any
) -> "ShardedHead":
    """The head of ``section``, whose data has so many classes; UsageError where these are too many."""
    from plsc.features.dynamic.dynamic_head import DynamicHead
    from plsc.progress import counted

    assert section.max_classes is not None
    if num_classes > section.max_classes:
        raise UsageError(
            f"dynamic.max_classes = {section.max_classes:,}, and data.train has {counted(num_classes, 'class')}; make "
            "it as large as the table may come to be"
        )
    own = (section.first_rows, section.admit_after, section.expire_after)
    return DynamicHead(dim, section.max_classes, mesh, margin, *own, **options)
