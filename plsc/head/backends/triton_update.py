"""The update of the class table's rows by a Triton kernel, for SGD and AdamW.

A launch reads and writes every number of a chunk once. Offsets are of 64 bits, and nothing waits for the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plsc.head.class_table import SMALLEST_NORM, Chunk
from plsc.head.low_precision import RowState, as_int32, rounding_key
from plsc.head.update_rules import AdamWRule, SgdRule, Update, UpdateRule

STATES: dict[type[UpdateRule], tuple[str, ...]] = {
    SgdRule: ("momentum",),
    AdamWRule: ("first_moment", "second_moment"),
}
_WIDEST = 1024  # columns: a program holds whole rows
_ELEMENTS = 2048  # of the table that a program takes
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def has_kernel(rule: type[UpdateRule], dim: int, state_dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether :func:`update_rows` takes float32 and bfloat16 tables this wide, with such state."""
    return rule in STATES and dim <= _WIDEST and all(dtype in _STATE_DTYPES for dtype in state_dtypes)


def update_rows(chunk: Chunk, unit_gradient: Tensor, state: Mapping[str, RowState], update: Update) -> None:
    """Update a chunk's rows and state by a rule, with g = factor·ρ(u − Ŵ⟨u, Ŵ⟩); then their norms: ρ = 1/‖W‖.

    Norms are those of what was stored. Rounding takes the bits of :func:`plsc.head.low_precision.random_bits`.

    Args:
        chunk: rows of a table, consecutive or a list without repeats, changed in place.
        unit_gradient: u, (n, D) float32, the gradient by the rows divided by their norms.
        state: the rule's tables, changed in place; SGD without momentum has none.
        update: a step of SGD or AdamW.
    """
    weight, index = chunk.table.weight, chunk.index
    n, dim = unit_gradient.shape
    if n == 0:
        return
    kernel, rule_numbers, constants = _kernel(update.rule)
    tables = [state.get(name) for name in STATES[type(update.rule)]]
    width = 1 << (dim - 1).bit_length()
    rows = max(_ELEMENTS // width, 1)
    with torch.cuda.device_of(weight):
        kernel[(-(-n // rows),)](
            unit_gradient.contiguous(),
            weight,
            chunk.table.inverse_norm,
            *[tensor for table in tables for tensor in (_values(table), _scale(table))],
            None if isinstance(index, slice) else index.contiguous(),
            index.indices(weight.shape[0])[0] if isinstance(index, slice) else 0,
            chunk.local_rows.contiguous(),
            update.first_row,
            n,
            update.skip,
            as_int32(rounding_key(update.seed, update.step)),
            update.factor,
            SMALLEST_NORM,
            *rule_numbers,
            dim,
            BLOCK_N=rows,
            BLOCK_D=width,
            STOCHASTIC=update.rounding == "stochastic",
            num_warps=4,
            enable_fp_fusion=True,
            **constants,
        )
    # the kernel writes behind PyTorch's back: versions show writes from outside
    torch.autograd.graph.increment_version([weight, *[table.values for table in tables if table is not None]])


def _kernel(rule: UpdateRule) -> tuple[Any, tuple[float, ...], dict[str, bool]]:
    """The kernel of a rule, the numbers that it takes and its constants."""
    from plsc.head.backends import triton_update_kernels as kernels

    numbers = tuple(rule_numbers(rule).values())
    return (kernels.sgd_rows if isinstance(rule, SgdRule) else kernels.adamw_rows), numbers, rule_constants(rule)


def rule_numbers(rule: UpdateRule) -> dict[str, float]:
    """The numbers of a step that its kernels take, by name and in their order."""
    if isinstance(rule, SgdRule):
        return {"lr": rule.lr, "momentum": rule.momentum, "weight_decay": rule.weight_decay}
    assert isinstance(rule, AdamWRule)
    names = ("rate1", "beta2", "rate2", "step_size", "correction2", "eps", "decay")
    return dict(zip(names, adamw_numbers(rule), strict=True))


def rule_constants(rule: UpdateRule) -> dict[str, bool]:
    """What a step's kernels are compiled for, beside its type."""
    return {"NESTEROV": rule.nesterov} if isinstance(rule, SgdRule) else {}


def adamw_numbers(rule: AdamWRule) -> tuple[float, ...]:
    """(1 − β₁, β₂, 1 − β₂, lr/(1 − β₁ᵗ), 1 − β₂ᵗ, eps, 1 − lr·λ), as the kernel takes them."""
    step_size = rule.lr / (1 - rule.beta1**rule.step)
    correction2 = 1 - rule.beta2**rule.step
    decay = 1 - rule.lr * rule.weight_decay
    return 1 - rule.beta1, rule.beta2, 1 - rule.beta2, step_size, correction2, rule.eps, decay


def _values(table: RowState | None) -> Tensor | None:
    return None if table is None else table.values


def _scale(table: RowState | None) -> Tensor | None:
    return None if table is None else table.scale
