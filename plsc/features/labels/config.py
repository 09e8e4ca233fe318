"""The keys of [labels]: several labels a picture."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config

# What the head's own refusals say of its options, in the words of keys.
_KEYS = {"label_reduction": "labels.reduction", "positives": "labels.positives"}


@dataclass(frozen=True)
class LabelsConfig(FeatureConfig):
    """[labels]: what becomes of several labels of a picture, classes of one joint space.

    Attributes:
        positives: Of pictures with several labels: whether the others of a picture are left out of the softmax of each
            (excluded), or are in it as negatives (kept).
        reduction: What the losses of a picture's labels become: their mean, or their sum.
        per_step: Labels of a picture that are drawn to have a loss in a step; unset: all.
    """

    positives: str = key("excluded", choices=("excluded", "kept"), in_tables=True, moved_from="head.positives")
    reduction: str = key("mean", choices=("mean", "sum"), in_tables=True, moved_from="head.label_reduction")
    per_step: int | None = key(None, least=1, in_tables=True, moved_from="head.labels_per_step")

    def head_options(self) -> dict[str, Any]:
        """See :meth:`FeatureConfig.head_options`."""
        return {"positives": self.positives, "label_reduction": self.reduction, "labels_per_step": self.per_step}

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse a margin that has no loss of each label, where keys say how such losses are formed."""
        from plsc.config import make_margin
        from plsc.features.labels.options import LabelOptions

        try:
            LabelOptions(**self.head_options()).check(make_margin(run.head))
        except UsageError as error:
            yield re.sub(r"(label_reduction|positives)(?= = )", lambda found: _KEYS[found[1]], str(error))
