"""Preprocessing of pixels before a model sees them, and the contract id of a model together with it.

Two embeddings may be compared only if the same weights saw pixels that were prepared in the same way. The contract id
stands for both, and every embedding set, index and gallery carries it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.data.transforms import normalize
from plsc.models.backbone import PIXEL_MEAN, PIXEL_STD

CONTRACT_DIGITS = 16


@dataclass(frozen=True)
class Preprocessing:
    """RGB images of ``image_size`` pixels a side, (x - mean)/std of values 0 to 255."""

    image_size: int
    mean: float = PIXEL_MEAN
    std: float = PIXEL_STD

    def __call__(self, images_u8: Tensor) -> Tensor:
        """(B, 3, S, S) uint8 -> float32 of the same shape, on the same device."""
        return normalize(images_u8, self.mean, self.std)


def contract_id(preprocessing: Preprocessing, weights_digest: str) -> str:
    """Id of a model's embeddings: 16 hexadecimal digits over preprocessing and weights."""
    text = f"RGB {preprocessing.image_size} {preprocessing.mean} {preprocessing.std} {weights_digest}"
    return hashlib.sha256(text.encode()).hexdigest()[:CONTRACT_DIGITS]


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over keys, types, shapes and bytes of a state_dict, independent of its order and its file."""
    digest = hashlib.sha256()
    for key in sorted(state):
        tensor = state[key].detach().cpu().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
