"""Where Triton kernels can run."""

import os
from functools import cache
from importlib.util import find_spec

import torch

_SMALLEST_CAPABILITY = (8, 0)  # bfloat16 matrix units


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 asks for kernels to run on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Whether kernels can run on ``device``: an NVIDIA GPU from Ampere on, or the CPU in Triton's interpreter."""
    if device.type == "cpu":
        return is_interpreted() and _is_installed()
    return device.type == "cuda" and torch.version.cuda is not None and _is_installed() and _is_capable(device)


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _SMALLEST_CAPABILITY
