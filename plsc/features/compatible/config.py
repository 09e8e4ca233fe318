"""The keys of [compatible]: a new backbone whose queries search the gallery of an old one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key, toml_value

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.compatible.feature import Compatible
    from plsc.plan.plan_config import PlanConfig


@dataclass(frozen=True)
class CompatibleConfig(FeatureConfig):
    """[compatible]: embeddings that can be compared with those of an old model (backward-compatible training).

    Attributes:
        with_: The old model's class centres, which stay as they are: its run or checkpoint (the rows of its class
            table), a .safetensors of plsc table export, or the embedding set that the old model made of data.train
            (plsc embed), whose mean of each class is its centre; empty: none. Classes are known by their names.
        weight: Weight in the loss of the run of the influence loss: the softmax of the new embeddings over the old
            centres, of the pictures whose class has one.
        s: Scale of the cosines with the old centres; unset: head.s, or 64.
        m: Margin of the cosine with a picture's own centre, cos θ − m as in cosface; 0: none.
    """

    with_: str = key("")
    weight: float = key(1.0, above=0)
    s: float | None = key(None, above=0)
    m: float = key(0.2, least=0, below=1)

    needs_trained_backbone = True
    alone: ClassVar[Mapping[str, str]] = {"table": "old centres are those of a single class table"}

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        return bool(self.with_)

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return f"compatible.with = {toml_value(self.with_)}"

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse keys without centres, which nothing reads."""
        if not self.with_:
            yield "[compatible] has no old class centres: give compatible.with, or leave the section out"

    def planned_tables(self, run: "PlanConfig") -> list["PlanConfig"]:
        """The old centres: as many as the run has classes where they are not at hand."""
        from plsc.config import HeadConfig, OptimConfig
        from plsc.features.compatible.class_centres import centres_count

        head = run.config.head
        classes, centers = centres_count(self.with_) or (run.classes, 1)
        own = HeadConfig(
            margin="cosface",
            s=self.s or head.s,
            m=self.m,
            centers=centers,
            weight_dtype=head.weight_dtype,
            momentum_dtype="none",
            fp32_precision=head.fp32_precision,
        )
        optim = OptimConfig(accumulate=run.config.optim.accumulate)
        config = replace(run.config, head=own, optim=optim)
        of_table = {"name": "compatible.with", "fixed": "old class centres", "placement": "device", "share": 1.0}
        return [replace(run, config=config, classes=classes, **of_table)]  # type: ignore[arg-type]

    def make(self, run: "Config") -> "Compatible":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.compatible.feature import Compatible

        return Compatible(run)

    @classmethod
    def former_state(cls, state: Mapping[str, Any]) -> Any:
        """See :meth:`FeatureConfig.former_state`."""
        return state.get("compatible")
