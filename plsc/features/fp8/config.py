"""The keys of [fp8]."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.fp8.feature import Float8


@dataclass(frozen=True)
class Float8Config(FeatureConfig):
    """[fp8]: products of a vision transformer's linear layers in 8-bit floating point.

    Attributes:
        enabled: Products of a ViT's linear layers in 8-bit floating point, by torchao, on GPUs from Ada and Hopper on;
            with precision bf16. CPUs emulate them; weights, checkpoints and exports stay as without. fp8 = true is
            short for it.
    """

    enabled: bool = key(False, stands_for_section=True)

    precision = "bf16"
    goes_with_own_steps = True
    alone: ClassVar[Mapping[str, str]] = {
        "parallel.tp": "nobody has tried",
        "parallel.pp": "nobody has tried",
    }

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        return self.enabled

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return "fp8 = true"

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse backbones and precisions without such products."""
        from plsc.models.vit import SHAPES

        if not self.enabled:
            return
        if run.backbone not in SHAPES:
            yield f'fp8 is for {", ".join(SHAPES)}, and backbone is "{run.backbone}"; leave fp8 out'
        if run.precision not in ("bf16", "auto"):
            yield f'fp8 goes with precision = "bf16", and precision is "{run.precision}"; give "bf16"'

    def make(self, run: "Config") -> "Float8":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.fp8.feature import Float8

        return Float8(run)
