"""The contract id of a model, and checks of the pictures that it is given.

Two embeddings may be compared only if the same weights saw pixels that were prepared in the same way. The contract id
stands for both, and every embedding set, index and gallery carries it.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError
from plsc.models.preprocessing import BILINEAR, ImageSize, Preprocessing, height_and_width
from plsc.progress import counted

CONTRACT_DIGITS = 16
MAX_SIDE_RATIO = 1.1  # longer side / shorter side of a square picture; crops by hand miss square by a few pixels
MAX_STRETCH = 1.5  # of a picture towards a model's oblong shape; detectors' boxes of bodies differ as much
MAX_SCALE = 2.0  # side / model's side, and its inverse, within which resizing keeps the face's share of the picture
MIN_DEVIATION = 4.0  # standard deviation of a channel, of 255 levels; crops of faces in poor light have 15 and more
_SAMPLES = 32  # rows and columns that the deviation is taken of, so that a large picture costs no more than a crop


class PictureWarning(NamedTuple):
    """A reason to doubt that a picture is a crop like those that the model was trained on.

    Attributes:
        code: "not_square", "wrong_shape", "wrong_size" or "uniform".
        message: for people, without the picture's name: "3000x2000 pixels are not square".
    """

    code: Literal["not_square", "wrong_shape", "wrong_size", "uniform"]
    message: str


def picture_warnings(picture: Tensor, image_size: ImageSize) -> list[PictureWarning]:
    """Look for signs that a picture is no aligned crop: an embedding of it has no meaning, but looks like any other.

    - ``not_square``: the longer side exceeds 1.1 times the shorter; resizing distorts the face.
    - ``wrong_shape``, of oblong models in its place: resizing stretches the picture by more than 1.5.
    - ``wrong_size``: of a picture in the model's shape, a side of more than twice or less than half of the model's.
      Aligned crops are stored at about the model's size; a larger picture mostly shows more than the face.
    - ``uniform``: no channel deviates by more than 4 of 255 levels (standard deviation over 32x32 pixels).

    A crop of the model's size, or up to twice or half of it, gives no warning unless it is uniform.

    Args:
        picture: uint8 (3, H, W) on the CPU, as decoded, before it is resized.
        image_size: of the model's images: the side of squares in pixels, or (height, width).

    Returns:
        The warnings; empty for a picture without a sign.
    """
    height, width = picture.shape[-2:]
    model_height, model_width = height_and_width(image_size)
    stretch = max(height * model_width / (width * model_height), width * model_height / (height * model_width))
    ours, models = f"{width}x{height} pixels", f"the model's {model_width}x{model_height}"
    warnings = []
    if model_height == model_width and stretch > MAX_SIDE_RATIO:
        warnings.append(PictureWarning("not_square", f"{ours} are not square"))
    elif stretch > MAX_STRETCH:
        warnings.append(PictureWarning("wrong_shape", f"{ours} (width x height) are of another shape than {models}"))
    elif not 1 / MAX_SCALE <= max(height, width) / max(model_height, model_width) <= MAX_SCALE:
        warnings.append(PictureWarning("wrong_size", f"{ours} are far from {models}"))
    sample = picture[:, :: max(height // _SAMPLES, 1), :: max(width // _SAMPLES, 1)].flatten(1).numpy()
    if sample.std(axis=1, dtype=np.float32).max() <= MIN_DEVIATION:
        warnings.append(PictureWarning("uniform", "it is nearly uniform"))
    return warnings


def warning_summary(count: int, total: int, name: str, message: str) -> str:
    """Format warnings of ``count`` pictures among ``total`` as one line, which names the first and its message."""
    return (
        f"warning: {count:,} of {counted(total, 'picture')} may not be cropped as the model expects, so that scores "
        f"mean little; the first, {name}: {message} (docs/faces.md)"
    )


def contract_id(preprocessing: Preprocessing, weights_digest: str) -> str:
    """Id of a model's embeddings: 16 hexadecimal digits over preprocessing and weights."""
    size, interpolation = preprocessing.image_size, preprocessing.interpolation
    resizing = "" if interpolation == BILINEAR else f" {interpolation}"  # so that earlier models keep their ids
    text = f"RGB {size} {preprocessing.mean} {preprocessing.std}{resizing} {weights_digest}"
    return hashlib.sha256(text.encode()).hexdigest()[:CONTRACT_DIGITS]


def stated_contract(
    path: Path, stated: Mapping[str, Any], format_name: str, fingerprint: str, preprocessing: Preprocessing
) -> str:
    """The id that the export wrote into the file, if its graph is still the one that it was written for; else its own.

    Args:
        path: the file.
        stated: its metadata.
        format_name: of our exports.
        fingerprint: of its graph and weights.
        preprocessing: of its images.

    Raises:
        DataError: the export wrote none.
    """
    if stated.get("format") == format_name and stated.get("fingerprint") == fingerprint:
        if "contract_id" not in stated:
            raise DataError(f"{path} has incomplete metadata: it has no contract_id; export it again")
        return str(stated["contract_id"])
    return contract_id(preprocessing, fingerprint)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over keys, types, shapes and bytes of a state_dict, independent of its order and its file."""
    digest = hashlib.sha256()
    for key in sorted(state):
        tensor = state[key].detach().cpu().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
