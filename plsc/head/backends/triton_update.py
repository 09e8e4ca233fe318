"""The update of the class table's rows by a Triton kernel, for SGD and AdamW.

A launch reads and writes every number of a chunk once. Offsets are of 64 bits, and nothing waits for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plsc.head.class_table import SMALLEST_NORM, Chunk
from plsc.head.low_precision import RowState, as_int32, rounding_key
from plsc.head.update_rules import AdamWRule, SgdRule, Update, UpdateKind, UpdateRule

_RULES = (SgdRule, AdamWRule)
_WIDEST = 1024  # columns: a program holds whole rows
_ELEMENTS = 2048  # of the table that a program takes
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def has_kernel(kind: UpdateKind, dim: int) -> bool:
    """Return whether :func:`update_rows` updates float32 and bfloat16 tables this wide so."""
    return isinstance(kind.rule, _RULES) and dim <= _WIDEST and kind.has_state_in(_STATE_DTYPES)


def update_rows(
    chunk: Chunk, unit_gradient: Tensor, state: Mapping[str, RowState], update: Update, *, is_by_rows: bool = False
) -> None:
    """Update a chunk's rows and state by a rule, with g = factor·ρ(u − Ŵ⟨u, Ŵ⟩); then their norms: ρ = 1/‖W‖.

    Norms are those of what was stored. Rounding takes the bits of :func:`plsc.head.low_precision.random_bits`.

    Args:
        chunk: rows of a table, consecutive or a list without repeats, changed in place.
        unit_gradient: u, (n, D) float32, the gradient by the rows divided by their norms.
        state: the rule's tables, changed in place; SGD without momentum has none.
        update: a step of SGD or AdamW.
        is_by_rows: what is given is ρ·u.
    """
    weight, index = chunk.table.weight, chunk.index
    n, dim = unit_gradient.shape
    if n == 0:
        return
    from plsc.head.backends import triton_update_kernels as kernels

    width = 1 << (dim - 1).bit_length()
    rows = max(_ELEMENTS // width, 1)
    with torch.cuda.device_of(weight):
        kernels.update_rows[(-(-n // rows),)](
            unit_gradient.contiguous(),
            weight,
            chunk.table.inverse_norm,
            index=None if isinstance(index, slice) else index.contiguous(),
            first=index.indices(weight.shape[0])[0] if isinstance(index, slice) else 0,
            numbers=chunk.local_rows.contiguous(),
            n=n,
            dim=dim,
            BLOCK_N=rows,
            BLOCK_D=width,
            BY_ROWS=is_by_rows,
            num_warps=4,
            enable_fp_fusion=True,
            **rule_arguments(update, state),
        )
    mark_written(chunk, state)


def mark_written(chunk: Chunk, state: Mapping[str, RowState]) -> None:
    """Raise the versions of what a kernel has written behind PyTorch's back: they show writes from outside."""
    torch.autograd.graph.increment_version([chunk.table.weight, *[table.values for table in state.values()]])


def rule_arguments(update: Update, state: Mapping[str, RowState]) -> dict[str, Any]:
    """The arguments of :mod:`plsc.head.backends.triton_update_kernels` for a step, but for the rows and their places.

    Args:
        update: a step of SGD or AdamW.
        state: the rule's tables.
    """
    first, second = state.get("momentum") or state.get("first_moment"), state.get("second_moment")
    return {
        "first_moment": None if first is None else first.values,
        "first_scale": None if first is None else first.scale,
        "second_moment": None if second is None else second.values,
        "second_scale": None if second is None else second.scale,
        **_numbers(update.rule),
        "first_number": update.first_row,
        "skip": update.skip,
        "key": as_int32(rounding_key(update.seed, update.step)),
        "factor": update.factor,
        "smallest_norm": SMALLEST_NORM,
        "STOCHASTIC": update.rounding == "stochastic",
    }


def _numbers(rule: UpdateRule) -> dict[str, Any]:
    """A rule's name for the kernels, and its numbers: see :mod:`plsc.head.backends.triton_update_kernels`."""
    if isinstance(rule, SgdRule):
        given = {"step_size": rule.lr, "rate1": rule.momentum, "decay": rule.weight_decay}
        name = "nesterov" if rule.nesterov else "sgd"
        return {"RULE": name, **given, **dict.fromkeys(("beta2", "rate2", "correction2", "eps"))}
    assert isinstance(rule, AdamWRule)
    return {
        "RULE": "adamw",
        "step_size": rule.lr / (1 - rule.beta1**rule.step),
        "rate1": 1 - rule.beta1,
        "decay": 1 - rule.lr * rule.weight_decay,
        "beta2": rule.beta2,
        "rate2": 1 - rule.beta2,
        "correction2": 1 - rule.beta2**rule.step,
        "eps": rule.eps,
    }
