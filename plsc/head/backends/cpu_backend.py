"""The head's passes and SGD by compiled kernels on a CPU (see :mod:`plsc.native.head_kernels`)."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from plsc.head.backends.torch_backend import Batch, PartialSoftmax, PassInputs, TorchBackend, Updater
from plsc.head.class_table import Chunk, ClassRows
from plsc.head.low_precision import RowState, rounding_key
from plsc.head.update_rules import SgdRule, Update, UpdateKind
from plsc.native import head_kernels as kernels

_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


class CpuBackend(TorchBackend):
    """Compiled kernels for the passes and SGD on float32 and bfloat16 tables.

    Args:
        reason: why this backend was chosen, for logs.
        with_passes: take the passes too: D a multiple of 32, and logits that are s·cos.
    """

    name = "cpu"

    def __init__(self, reason: str, *, with_passes: bool) -> None:
        super().__init__(reason)
        self.takes_passes = with_passes

    def first_pass(
        self, rows: ClassRows, batch: Batch, chunk_size: int, *, with_grad: bool, keeps: bool = False
    ) -> PartialSoftmax:
        """See :meth:`TorchBackend.first_pass`. Chunks are whole blocks of the kernels, which keep no exponentials."""
        if not self._takes(batch):
            return super().first_pass(rows, batch, chunk_size, with_grad=with_grad, keeps=keeps)
        sums = kernels.FirstPass(kernels.PackedBatch(batch.features, batch.position), batch.margin.s, with_grad)
        for chunk in rows.chunks(kernels.whole_blocks(chunk_size)):
            sums.add(_kernel_rows(chunk), chunk.start)
        maximum = batch.features.new_zeros(len(batch.position), dtype=torch.float32)
        return PartialSoftmax(maximum, *sums.result())

    def second_pass(self, inputs: PassInputs) -> Iterator[tuple[Chunk, Tensor]]:
        """See :meth:`TorchBackend.second_pass`. The kernels have no notion of ``member``."""
        batch = inputs.batch
        if not self._takes(batch) or inputs.member is not None or inputs.exponentials:
            yield from super().second_pass(inputs)
            return
        packed = kernels.PackedBatch(batch.features, batch.position)
        log_z, scale, target_grad = (packed.pad(x.float()) for x in (inputs.log_z, inputs.scale, inputs.target_grad))
        size = self.second_pass_classes(inputs)
        scratch = batch.features.new_empty((size, packed.dim), dtype=torch.float32)
        for chunk in inputs.rows.chunks(size):
            table, s = _kernel_rows(chunk), batch.margin.s
            yield chunk, kernels.gradient(table, packed, s, chunk.start, (log_z, scale, target_grad), scratch)

    def second_pass_classes(self, inputs: PassInputs) -> int:
        """See :meth:`TorchBackend.second_pass_classes`: what caches keep until the update, for few samples too."""
        if not self.takes_passes:
            return super().second_pass_classes(inputs)
        return kernels.whole_blocks(min(inputs.chunk_size, kernels.IN_CACHE * torch.get_num_threads()))

    @property
    def chunking(self) -> str:
        """See :attr:`TorchBackend.chunking`."""
        return f"{self.name}'s passes, threads: {torch.get_num_threads()}" if self.takes_passes else self.name

    @property
    def keeps_exponentials(self) -> bool:
        """See :attr:`TorchBackend.keeps_exponentials`."""
        return not self.takes_passes

    def _takes(self, batch: Batch) -> bool:
        return self.takes_passes and len(batch.features) >= kernels.least_batch(batch.features.dtype)

    def updater(self, kind: UpdateKind) -> Updater:
        """See :meth:`TorchBackend.updater`."""
        # nearest rounding is there to show what it breaks, and has no kernel
        is_sgd = isinstance(kind.rule, SgdRule) and kind.rounding == "stochastic"
        return _sgd if is_sgd and kind.has_state_in(_STATE_DTYPES) else super().updater(kind)


def _sgd(chunk: Chunk, unit_gradient: Tensor, state: Mapping[str, RowState], update: Update) -> None:
    rule, buffer = update.rule, state.get("momentum")
    assert isinstance(rule, SgdRule)
    if update.skip is not None and update.skip.item():  # at hand on a CPU
        return
    momentum, scale = (None, None) if buffer is None else (buffer.values, buffer.scale)
    key = rounding_key(update.seed, update.step)
    sgd = kernels.Sgd(update.factor, rule.lr, rule.momentum, rule.weight_decay, rule.nesterov, key)
    sgd.update(_kernel_rows(chunk), unit_gradient, momentum, scale, chunk.local_rows, update.first_row)


def _kernel_rows(chunk: Chunk) -> kernels.Table:
    return kernels.Table.visiting(chunk.table.weight, chunk.table.inverse_norm, chunk.index)
