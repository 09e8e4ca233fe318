"""RGB pixels to JPEG or PNG bytes."""

import io
from typing import Literal

import torch

from plsc.data.dataset import EncodedDataset, ImageDataset

Encoding = Literal["jpeg", "png"]


def encode_image(image: torch.Tensor, encoding: Encoding = "jpeg") -> bytes:
    """Encode uint8 (3, H, W) RGB as JPEG of quality 95 without chroma subsampling, or as PNG without loss."""
    from PIL import Image

    stored = io.BytesIO()
    pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy())
    if encoding == "jpeg":
        pixels.save(stored, "JPEG", quality=95, subsampling=0)
    else:
        pixels.save(stored, "PNG")
    return stored.getvalue()


def encoded_image(dataset: ImageDataset, index: int, encoding: Encoding) -> bytes:
    """Image ``index`` encoded: as stored if the data set keeps stored sizes, else resized and encoded anew.

    Raises DataError, naming the image, if it cannot be read or, where it is encoded anew, decoded.
    """
    if isinstance(dataset, EncodedDataset) and dataset.image_size is None:
        return dataset.encoded(index)
    return encode_image(dataset.image(index), encoding)
