"""The key of [negative_filter]."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config


@dataclass(frozen=True)
class NegativeFilterConfig(FeatureConfig):
    """[negative_filter]: classes near to a label's that are left out of its softmax.

    Attributes:
        cosine: Cosine of two classes' rows from which on neither is a negative of the other (PyTorch makes the passes
            then, with 3 products for 2, and a picture of K labels costs as K do); unset: all other classes are.
            negative_filter = 0.6 is short for it.
    """

    cosine: float | None = key(
        None, above=0, most=1, in_tables=True, stands_for_section=True, moved_from="head.negative_filter"
    )

    @property
    def filters_negatives(self) -> bool:
        """See :attr:`FeatureConfig.filters_negatives`."""
        return self.cosine is not None

    def head_options(self) -> dict[str, Any]:
        """See :meth:`FeatureConfig.head_options`."""
        return {"negative_filter": self.cosine}

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse a margin that has no label to compare a negative with."""
        from plsc.config import make_margin
        from plsc.features.negative_filter.filter import NegativeFilterOptions

        try:
            NegativeFilterOptions(self.cosine).check(make_margin(run.head))
        except UsageError as error:
            yield str(error)
