"""The weights of the package ``mtcnn``, read out of its files without importing it or unpickling them.

The package (MIT) is made for TensorFlow; installed alone it is three files and their readers. Each file is an lz4 frame
around a pickle of a list of float32 arrays, in Keras's order and layout, with the arrays' bytes between its opcodes as
joblib writes them. :func:`pickletools.genops` tells the opcodes apart and executes none. Which array comes next is
known from the network.

A signature is not asked for: the files come with the package, as code does, and their hashes stand here, in the code
that reads them. Other files are refused.
"""

import hashlib
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
# SHA-256 of the networks' files in mtcnn 1.0.
DIGESTS = {
    "pnet": "ea6b0c3e685ebee3165326ad6484acc95f2ef78f1c94fbf40a55704fa989f7b5",
    "rnet": "cb00e6460f3c98b0bfafaba3c0a0ded4bdf6e62cee7174d969e8670d7e757fee",
    "onet": "94f6ea2f4cf985275ee958cdd762d17b6009348a4fb9d8c6be39ba73ffd22ca3",
}


def weights_files() -> list[Path]:
    """The installed files of the three networks.

    Raises:
        UsageError: the extra is not installed.
    """
    try:
        folder = Path(str(metadata.distribution("mtcnn").locate_file("mtcnn/assets/weights")))
    except metadata.PackageNotFoundError:
        raise UsageError(f"the detector mtcnn needs the package mtcnn: {INSTALL}") from None
    return [folder / f"{name}.lz4" for name in DIGESTS]


def load_weights(network: nn.Module, path: Path) -> None:
    """Fill ``network``, whose parameters are in the file's order, with the arrays of ``path``.

    Raises:
        UsageError: the extra is not installed.
        DataError: the file is missing, or another than that of mtcnn 1.0.
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
    for opcode, _, _ in pickletools.genops(stream):
        # An array's description ends with a dictionary that builds it; padding and the numbers follow.
        if (previous, opcode.name) == ("SETITEMS", "BUILD"):
            stream.read(stream.read(1)[0])
            shape = shapes[len(found)]
            numbers = np.frombuffer(stream.read(4 * math.prod(shape)), "<f4")
            found.append(numbers.reshape(shape).copy())
        previous = opcode.name
    return found


def _decompressed(path: Path) -> bytes:
    try:
        import lz4.frame
    except ImportError:
        raise UsageError(f"the detector mtcnn needs the package lz4: {INSTALL}") from None
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); install it again: {INSTALL}") from None
    if hashlib.sha256(packed).hexdigest() != DIGESTS[path.stem]:
        raise DataError(f"{path} does not hold the weights of mtcnn 1.0; install it again: {INSTALL}")
    content: bytes = lz4.frame.decompress(packed)
    return content
