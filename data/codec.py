"""Image codec: encoded images to RGB pixels and back; :mod:`plsc.image_files` bounds hostile files."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from plsc import image_files
from plsc.data.decoders import jpeg_decoder
from plsc.errors import DataError, UsageError
from plsc.regular_files import read_bytes

if TYPE_CHECKING:
    from PIL import Image

    ImageLike = str | Path | bytes | np.ndarray[Any, Any] | torch.Tensor | Image.Image

Encoding = Literal["jpeg", "png"]

MAX_PIXELS = 64 * 2**20


def decode_image(data: bytes, name: str, *, max_pixels: int = MAX_PIXELS) -> torch.Tensor:
    """Decode an image of one of :data:`plsc.image_files.FORMATS`, of several frames the first.

    Grey becomes RGB, 16 bits become 8, and transparent pixels are composited on white. JPEG is left to the library that
    :mod:`plsc.data.decoders` chooses, the rest to Pillow: a PNG with a wrong checksum makes torchvision 0.29 crash the
    whole process.

    Args:
        data: the encoded file.
        name: the image's name in error messages.
        max_pixels: limit on width x height, checked in the header before memory is allocated.

    Returns:
        uint8 (3, H, W) RGB, rotated upright by its EXIF orientation.

    Raises:
        DataError: it does not decode, has more than ``max_pixels`` pixels, or is a JPEG of too many scans.
    """
    size, decoder = image_files.jpeg_size(data), jpeg_decoder()
    if size is None or decoder is None:
        return _planar(image_files.decode_rgb(data, name, max_pixels))
    image_files.check_pixels(*size, name, max_pixels)
    image_files.check_scans(data, name)
    try:
        pixels = decoder.decode(data)
    except RuntimeError:
        raise DataError(f"{name} is a broken JPEG image; replace or remove it") from None
    if pixels.shape != (3, *size[::-1]):
        raise DataError(f"{name} decodes to another size than its header's; replace or remove it")
    return _turned(pixels, image_files.exif_orientation(image_files.jpeg_exif(data)))


def read_image(path: Path, *, below: Path | None = None, max_pixels: int = MAX_PIXELS) -> torch.Tensor:
    """Read and decode the image file ``path``, which has to lie in ``below`` if that is given.

    Returns and raises as :func:`decode_image`, and as :func:`plsc.regular_files.read_bytes`.
    """
    return decode_image(read_bytes(path, below=below), str(path), max_pixels=max_pixels)


def to_rgb_tensor(image: "ImageLike", name: str = "image") -> torch.Tensor:
    """The pixels of ``image`` as uint8 (3, H, W) RGB.

    Args:
        image: a file's path or bytes; a Pillow image; an array (H, W, 3) or grey (H, W); or a tensor (3, H, W).
        name: the image's name in error messages; a path names itself.

    Raises:
        UsageError: it is nothing of these, or an array of another shape or type than uint8.
        DataError: it does not decode.
    """
    if isinstance(image, str | Path):
        return read_image(Path(image))
    if isinstance(image, bytes):
        return decode_image(image, name)
    if isinstance(image, torch.Tensor):
        if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3 or not image.numel():
            raise UsageError(f"{name} is a {image.dtype} tensor {tuple(image.shape)}: give uint8 RGB (3, H, W)")
        return image
    if isinstance(image, np.ndarray):
        return _from_array(image, name)
    if not hasattr(image, "getbands"):  # what Pillow's images have, and nothing else here: Pillow stays unimported
        raise UsageError(f"{name} is of type {type(image).__name__}: give a path, bytes, an array or a Pillow image")
    try:
        return _planar(image_files.to_rgb(image))
    except Exception as error:  # Pillow reads a file's pixels late, and its decoders raise nearly every kind
        raise DataError(f"{name} does not decode ({str(error)[:120]}); replace or remove it") from None


def _turned(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Turn (3, H, W) upright that has this EXIF orientation, 1 to 8."""
    if orientation == 1:
        return image
    if orientation >= 5:
        image = image.mT
    return image.flip([-2] * (orientation in (3, 4, 7, 8)) + [-1] * (orientation in (2, 3, 6, 7)))


def _planar(pixels: "np.ndarray[Any, Any]") -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _from_array(image: "np.ndarray[Any, Any]", name: str) -> torch.Tensor:
    if image.ndim == 2:
        image = np.repeat(image[:, :, None], 3, axis=2)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise UsageError(f"{name} is a {image.dtype} array {image.shape}: give uint8 RGB (H, W, 3)")
    return torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C"))


def encode_image(image: torch.Tensor, encoding: Encoding = "jpeg") -> bytes:
    """Encode uint8 (3, H, W) RGB as JPEG of quality 95 without chroma subsampling, or as PNG without loss."""
    from PIL import Image

    buffer = io.BytesIO()
    pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy())
    if encoding == "jpeg":
        pixels.save(buffer, "JPEG", quality=95, subsampling=0)
    else:
        pixels.save(buffer, "PNG")
    return buffer.getvalue()


def image_pixels(data: bytes) -> tuple[int, int]:
    """Return (height, width) of an encoded image from its header alone; :class:`DataError` if it has none."""
    try:
        with image_files.open_header(data) as image:
            return image.height, image.width
    except Exception as error:  # as in decoding
        raise DataError(f"an image has no readable header ({str(error)[:120]})") from None
