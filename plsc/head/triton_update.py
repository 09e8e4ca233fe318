"""SGD's update of rows of the class table as one Triton kernel: every number is read once and written once."""

import torch
from torch import Tensor

from plsc.head.global_batch import SMALLEST_NORM
from plsc.head.low_precision import Rounding, RowState
from plsc.head.random_bits import as_int32
from plsc.losses.triton_support import runs_on

_WIDEST = 1024  # a program holds whole rows
_ELEMENTS = 2048  # that a program takes
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def supports(weight: Tensor, state: RowState | None) -> bool:
    """Whether :func:`update_rows` is for this table (rows, D): float32 or bfloat16, D ≤ 1024, where Triton runs."""
    return (
        weight.dtype in (torch.float32, torch.bfloat16)
        and weight.shape[1] <= _WIDEST
        and (state is None or state.values.dtype in _STATE_DTYPES)
        and runs_on(weight.device)
    )


def update_rows(
    weight: Tensor,
    inverse_norm: Tensor,
    index: slice | Tensor,
    unit_gradient: Tensor,
    state: RowState | None,
    *,
    factor: float,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    rounding: Rounding,
    key: int,
    numbers: Tensor,
    first_number: int,
) -> None:
    """m = μm + g + λW;  W −= lr·m, with g = factor·ρ(u − Ŵ⟨u, Ŵ⟩); then ρ = 1/‖W‖ of what was stored.

    Rounding takes the bits of :func:`plsc.head.random_bits.random_bits`. Offsets are of 64 bits. Nothing waits for
    the device.

    Args:
        weight: the table (rows, D), changed in place.
        inverse_norm: ρ (rows,) float32, changed in place.
        index: which rows, consecutive or a list (n,) int64 without repeats.
        unit_gradient: u, (n, D) float32, the gradient by the rows divided by their norms.
        state: momentum's table, changed in place, or None.
        factor: what the gradient is multiplied by.
        lr, momentum, weight_decay, nesterov: SGD's.
        rounding: how bfloat16 and int8 are stored.
        key: of seed and step, :func:`plsc.head.random_bits.key_of`.
        numbers: (n,) int64, with ``first_number`` added the rows' numbers in the global table.
        first_number: the shard's first row.
    """
    from plsc.head.update_kernels import sgd_rows

    n, dim = unit_gradient.shape
    if n == 0:
        return
    listed = None if isinstance(index, slice) else index.contiguous()
    first = index.indices(weight.shape[0])[0] if isinstance(index, slice) else 0
    width = 1 << (dim - 1).bit_length()
    block = max(_ELEMENTS // width, 1)
    with torch.cuda.device_of(weight):
        sgd_rows[(-(-n // block),)](
            unit_gradient.contiguous(),
            weight,
            inverse_norm,
            None if state is None else state.values,
            None if state is None else state.scale,
            listed,
            first,
            numbers.contiguous(),
            first_number,
            n,
            as_int32(key),
            lr,
            momentum,
            weight_decay,
            factor,
            SMALLEST_NORM,
            dim,
            BLOCK_N=block,
            BLOCK_D=width,
            NESTEROV=nesterov,
            STOCHASTIC=rounding == "stochastic",
            num_warps=4,
            enable_fp_fusion=True,
        )
    changed = [tensor for tensor in (weight, None if state is None else state.values) if tensor is not None]
    torch.autograd.graph.increment_version(changed)
