"""The choice of Triton kernels for the head's passes and updates, on the devices that they run on."""

import os
from collections.abc import Iterator
from copy import copy
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from plsc.head.backends import triton_passes, triton_stored
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.torch_backend import Batch, PartialSoftmax, PassInputs, StateOf, TorchBackend, Updater
from plsc.head.backends.triton_shape import NEVER, Threshold
from plsc.head.backends.triton_update import has_kernel, update_rows
from plsc.head.class_table import Chunk, ClassRows
from plsc.head.update_rules import Update, UpdateKind

_SMALLEST_CAPABILITY = (8, 0)  # bfloat16 matrix units


def is_interpreted() -> bool:
    """Return whether TRITON_INTERPRET=1 has kernels run on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Return whether kernels run on ``device``: an NVIDIA GPU from Ampere on, or the CPU in Triton's interpreter."""
    if device.type == "cpu":
        return is_interpreted() and _is_installed()
    return device.type == "cuda" and torch.version.cuda is not None and _is_installed() and _is_capable(device)


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _SMALLEST_CAPABILITY


class TritonBackend(TorchBackend):
    """Triton kernels for float32 and bfloat16 tables on NVIDIA GPUs from Ampere on, or in Triton's interpreter.

    Args:
        reason: why this backend was chosen, for logs.
        dim: D of the table.
        with_passes: take the passes too: logits that are s·cos, and rows that the kernels take.
        fp32_precision: of the passes' products over a float32 table.
        stored_from: from how many samples on the passes store their logits; None: never.

    Attributes:
        stored_from: as given. It may be set between steps.
    """

    name = "triton"
    updates_by_rows = True

    def __init__(
        self,
        reason: str,
        *,
        dim: int,
        with_passes: bool,
        fp32_precision: Fp32Precision = "ieee",
        stored_from: Threshold | None = None,
    ) -> None:
        super().__init__(reason, fp32_precision)
        self._dim, self.takes_passes, self._precision = dim, with_passes, fp32_precision
        self.stored_from = stored_from

    def describe(self) -> str:
        """See :meth:`TorchBackend.describe`."""
        return super().describe() + (f"; {self.stored_from}" if self.stored_from is not None else "")

    @property
    def keeps_exponentials(self) -> bool:
        """See :attr:`TorchBackend.keeps_exponentials`."""
        return not self.takes_passes or (self.stored_from is not None and self.stored_from.samples < NEVER)

    def in_shape(self, *, stored: bool, is_wide: bool = False) -> "TritonBackend":
        """Return a backend that stores logits of every batch, or of none; its name says so.

        ``is_wide``: it makes them in wide blocks of samples (:func:`.triton_stored.row_options`).
        """
        backend = copy(self)
        backend.stored_from = Threshold(0 if stored else NEVER, "asked for", is_wide)
        shape = ", weights stored" + ", in wide blocks" * is_wide
        backend.name = f"{self.name}{shape}" if stored else self.name
        return backend

    def first_pass(
        self, rows: ClassRows, batch: Batch, chunk_size: int, *, with_grad: bool, keeps: bool = False
    ) -> PartialSoftmax:
        """See :meth:`TorchBackend.first_pass`."""
        if not self._takes(batch):
            return super().first_pass(rows, batch, chunk_size, with_grad=with_grad, keeps=keeps)
        kept = None
        if self._stores(batch):
            kept = self._room(rows, batch, chunk_size) if keeps and with_grad else None
            total, grad = triton_stored.first_pass(
                rows, batch, chunk_size, self._precision, with_grad=with_grad, kept=kept, is_wide=self._is_wide
            )
        else:
            total, grad = triton_passes.first_pass(rows, batch, chunk_size, self._precision, with_grad=with_grad)
        return PartialSoftmax(torch.zeros_like(total, dtype=torch.float32), total, grad, kept)

    def second_pass(self, inputs: PassInputs) -> Iterator[tuple[Chunk, Tensor]]:
        """See :meth:`TorchBackend.second_pass`."""
        if not self._takes(inputs.batch):
            return super().second_pass(inputs)
        if self._stores(inputs.batch):
            return triton_stored.second_pass(inputs, self._precision, is_wide=self._is_wide)
        return triton_passes.second_pass(inputs, self._precision)

    def update_pass(self, inputs: PassInputs, updater: Updater, state: StateOf, update: Update) -> None:
        """See :meth:`TorchBackend.update_pass`. The kernel takes gradients by rows as they are."""
        if not inputs.exponentials or updater is not update_rows or not self._takes(inputs.batch):
            super().update_pass(inputs, updater, state, update)
            return
        for chunk, gradient, is_by_rows in triton_stored.gradients(inputs, self._precision, is_wide=self._is_wide):
            update_rows(chunk, gradient, state(chunk), update, is_by_rows=is_by_rows)

    def updater(self, kind: UpdateKind) -> Updater:
        """See :meth:`TorchBackend.updater`."""
        return update_rows if has_kernel(kind, self._dim) else super().updater(kind)

    def _takes(self, batch: Batch) -> bool:
        if not self.takes_passes or len(batch.features) == 0:  # a group without a sample has no block to launch
            return False
        if batch.position.dim() == 1:
            return True
        is_fused = self.stored_from is None or self.stored_from.samples > 0
        return is_fused and batch.position.shape[1] <= triton_passes.MOST_LABELS

    def _stores(self, batch: Batch) -> bool:
        """Whether weights are stored, whose kernels take one label a sample."""
        is_large = self.stored_from is not None and len(batch.features) >= self.stored_from.samples
        return is_large and batch.position.dim() == 1

    @property
    def _is_wide(self) -> bool:
        """Whether weights are made in wide blocks."""
        return self.stored_from is not None and self.stored_from.is_wide
