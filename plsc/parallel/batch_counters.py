"""The batch normalisations' counters of batches, which one launch adds to instead of one each."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchCounters:
    """Counts a training pass in all batch normalisations of a backbone together.

    torch's layers each add 1 to a number on the device: IResNet-50 has 79 such launches in a pass. The sums are the
    same where every layer runs once in a pass, as backbones say by ``norms_run_once``. Of others, and of layers whose
    momentum is None, which read the counter, nothing is changed.
    """

    def __init__(self, backbone: nn.Module) -> None:
        modules = backbone.modules() if getattr(backbone, "norms_run_once", False) else ()
        self._norms = [layer for layer in modules if isinstance(layer, _BatchNorm) and layer.momentum is not None]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Count the pass within; one that raises does not count."""
        counting = [norm for norm in self._norms if norm.training and norm.num_batches_tracked is not None]
        counters = [cast(Tensor, norm.num_batches_tracked) for norm in counting]
        for norm in counting:
            norm.num_batches_tracked = None
        try:
            yield
        finally:
            for norm, counter in zip(counting, counters, strict=True):
                norm.num_batches_tracked = counter
        if counters:
            torch._foreach_add_(counters, 1)
