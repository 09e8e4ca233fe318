"""Products in 8-bit floating point as a feature of a run."""

import torch
from torch import nn

from plsc.features.fp8.float8 import convert_to_float8
from plsc.train.feature import Feature


class Float8(Feature):
    """Converts the backbone that is trained; what is evaluated and exported multiplies as ever."""

    _note = "fp8 in the blocks"

    def convert(self, backbone: nn.Module, device: torch.device) -> None:
        """See :meth:`Feature.convert`."""
        convert_to_float8(backbone, device, self.config.data.batch_size)
        self._note += " (emulated)" if device.type == "cpu" else ""

    def model_note(self) -> str:
        """See :meth:`Feature.model_note`."""
        return self._note
