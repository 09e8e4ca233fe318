"""Inputs of requests made ready for the model: images decoded within limits, vectors checked."""

import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pybase64
import torch

from plsc.data.alignment import align_face
from plsc.embedding.detector import Detector
from plsc.errors import DataError, UsageError
from plsc.image_files import SUFFIXES, TooLargeError, suffix_of, unread_formats
from plsc.models.preprocessing import Preprocessing, check_square, picture_warnings, resize_image
from plsc.serve.decode_process import FORMATS
from plsc.serve.decoding import DecodeProcess
from plsc.serve.errors import ApiError
from plsc.serve.schemas import Input

Float32 = npt.NDArray[np.float32]
_FORMATS = {SUFFIXES[kind][0]: kind for kind in FORMATS}


class DecodedImage(NamedTuple):
    """An image as the model expects it: uint8 (3, H, W), and warnings about it, a line each."""

    pixels: torch.Tensor
    warnings: Sequence[str]


def image_bytes(item: Input, name: str) -> bytes:
    """The encoded image of an input; :class:`ApiError` 422 if it is no base64."""
    if isinstance(item.image, bytes):
        return item.image
    return _from_base64(item.image or "", f"{name}: the image is not base64; send the bytes of the file in base64")


def decode(
    process: DecodeProcess, data: bytes, name: str, contract: Preprocessing, landmarks: Any, detector: Detector | None
) -> DecodedImage:
    """Decode a JPEG, PNG, WEBP, AVIF or HEIC file as the model expects it.

    Args:
        process: where the file is decoded; its pixels are aligned or resized here.
        contract: the model's, which says what size it takes.
        landmarks: (5, 2) points to align by, in pixels of the file's picture; without them ``detector`` finds the main
            face, and without that the image is taken as an aligned crop and resized, with warnings where it does not
            look like one.

    Raises:
        ApiError: 415 for another format, 413 for too many pixels, 422 where it does not decode or shows no face.
    """
    check_format(data, name)
    size = contract.image_size
    try:
        pixels, divisor = process.decode(data, name)
    except TooLargeError as error:
        raise ApiError(413, f"{error}, send a JPEG, or raise --max-megapixels of the service") from None
    except DataError as error:
        raise ApiError(422, str(error)) from None
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    try:
        if landmarks is not None:
            points = (np.asarray(landmarks) + 0.5) / divisor - 0.5  # a pixel stands for divisor x divisor of the file's
            return DecodedImage(align_face(image, points, check_square(size, "aligning by landmarks"), name), ())
        if detector is not None:
            return DecodedImage(detector.aligned(image, check_square(size, "aligning faces"), name), ())
    except (DataError, UsageError) as error:
        raise ApiError(422, str(error)) from None
    found = picture_warnings(image, size)
    shrunk = f" (decoded at 1/{divisor})" if divisor > 1 else ""
    warnings = [f"{name}: {warning.message}{shrunk}; give an aligned crop" for warning in found]
    return DecodedImage(resize_image(image, size, contract.interpolation), warnings)


def check_format(data: bytes, name: str) -> None:
    """:class:`ApiError` 415 unless the first bytes are those of a format that this service decodes."""
    kind = _FORMATS.get(suffix_of(data) or "")
    if kind is None:
        raise ApiError(415, f"{name} is no JPEG, PNG, WEBP or AVIF image, nor HEIC; convert it first")
    if kind in unread_formats():
        shown = "HEIC" if kind == "HEIF" else kind
        raise ApiError(415, f"{name} is {shown}: on the server, {unread_formats()[kind]}; or send JPEG")


def input_vector(item: Input, name: str, dim: int) -> Float32:
    """The vector of an input as float32 (dim,); :class:`ApiError` 422 unless it is finite and has a direction."""
    if item.vector_b64 is None:
        with np.errstate(over="ignore"):  # becomes infinite, which is refused by name
            vector = np.array(item.vector, dtype=np.float32)
    else:
        wrong = f"{name}: vector_b64 is not float32, little-endian, in base64"
        data = _from_base64(item.vector_b64, wrong)
        if len(data) % 4:
            raise ApiError(422, wrong)
        vector = np.frombuffer(data, dtype="<f4")
    if len(vector) != dim:
        raise ApiError(422, f"{name}: the vector has {len(vector)} numbers; this service's model makes {dim}")
    check_direction(vector, name)
    return vector


def check_direction(vector: Float32, name: str) -> None:
    """:class:`ApiError` 422 if a vector is not finite, or zero."""
    with np.errstate(over="ignore", invalid="ignore"):  # looked into below
        square = np.dot(vector, vector)
    if 0 < square < np.inf:
        return
    if not np.isfinite(vector).all():
        raise ApiError(422, f"{name}: the vector holds NaN or infinity, or numbers beyond float32")
    if not vector.any():
        raise ApiError(422, f"{name}: the vector is zero, which has no direction")


def _from_base64(text: str, wrong: str) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(422, wrong) from None
