"""The class tables of a run: the one that [head] describes, unless a feature has several."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plsc.config.sections import Config


@dataclass(frozen=True)
class ClassTable:
    """A class table of a run.

    Attributes:
        name: "" of the only table, which [head] describes.
        config: that of the run, with the values that the table gives.
        classes: rows of the table; None: as many as the data has classes.
        share: its share of each batch, in relation to the other tables' shares.
        loss_weight: the factor of its mean loss in the run's loss.
    """

    name: str
    config: "Config"
    classes: int | None = None
    share: float = 1.0
    loss_weight: float = 1.0

    @property
    def prefix(self) -> str:
        """What stands before its name where several are told of: "" or "NAME."."""
        return f"{self.name}." if self.name else ""


def class_tables(config: "Config") -> list[ClassTable]:
    """The class tables of a run, or of one of its stages."""
    of_features = (section.class_tables(config) for section in config.features_on)
    return next((found for found in of_features if found), [ClassTable("", config)])
