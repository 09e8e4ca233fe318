"""The arguments of a class head, checked: names stand for their values, and a wrong one is one line with its fix."""

import numbers

import torch

from plsc.errors import UsageError
from plsc.head.host_memory import mapped_file
from plsc.head.low_precision import STATE_DTYPES

WEIGHT_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
MOMENTUM_DTYPES = {**{str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}, "none": None}


def to_weight_dtype(value: torch.dtype | str) -> torch.dtype:
    """The dtype of class weights that ``value`` is or names; UsageError if weights are not stored in it."""
    dtype = WEIGHT_DTYPES.get(value) if isinstance(value, str) else value
    if dtype is None or dtype not in WEIGHT_DTYPES.values():
        raise UsageError(f"weight_dtype must be one of {', '.join(WEIGHT_DTYPES)}, not {value!r}")
    return dtype


def to_momentum_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of optimizer state that ``value`` is or names, None for none; UsageError if state is not stored so."""
    dtype = MOMENTUM_DTYPES.get(value, value) if isinstance(value, str) else value
    if isinstance(dtype, str) or dtype not in MOMENTUM_DTYPES.values():
        raise UsageError(f"momentum_dtype must be one of {', '.join(MOMENTUM_DTYPES)}, not {value!r}")
    return dtype


def check_integers(**values: object) -> None:
    """UsageError unless all of ``values`` are integers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise UsageError(f"the head's {name} must be an integer, not {value!r}")


def check_sizes(**sizes: int) -> None:
    """UsageError unless all of ``sizes`` are integers of at least 1."""
    check_integers(**sizes)
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"the head's {name} must be at least 1, not {value}")


def check_sample_rate(sample_rate: object) -> None:
    """UsageError unless ``sample_rate`` is a number from 0 to 1."""
    if not isinstance(sample_rate, numbers.Real) or not 0 <= float(sample_rate) <= 1:  # NaN is in no range
        raise UsageError(f"sample_rate is a share of the classes from 0 to 1, not {sample_rate!r}")


def check_storage(placement: object, update: object) -> None:
    """UsageError for an unknown ``placement`` or ``update``, or for two that do not go together."""
    mapped_file(str(placement))
    if update not in ("fused", "autograd"):
        raise UsageError(f'update must be "fused" or "autograd", not {update!r}')
    if placement != "device" and update != "fused":
        raise UsageError(f'placement {placement!r} leaves no gradient of the whole table: give update="fused"')
