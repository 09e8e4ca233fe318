"""Augmentation, a pure function of (seed, epoch, sample index), and the normalisation that models expect."""

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from plsc.errors import UsageError
from plsc.models.backbone import PIXEL_MEAN, PIXEL_STD

AUGMENTATIONS = ("none", "flip", "affine", "standard")


def normalize(images: torch.Tensor, mean: float = PIXEL_MEAN, std: float = PIXEL_STD) -> torch.Tensor:
    """Normalise pixels as models expect them: (x - mean) / std, by default in [-1, 1].

    The only definition of it: training, evaluation, embedding, the exports' checks and the service share its bits.

    Args:
        images: uint8 (B, 3, H, W), or any other shape, of values 0 to 255.
        mean: subtracted from each value.
        std: divides the difference.

    Returns:
        float32 of the same shape and memory format, on the same device; ``images`` stay as they are.
    """
    # Each value is the float32 nearest to the true quotient: the difference is exact, and one division rounds once.
    # The divisor is a tensor because torch multiplies by the reciprocal of a Python number on CUDA, which is a bit off.
    divisor = torch.full((), std, dtype=torch.float32, device=images.device)
    return images.to(torch.float32, copy=True).sub_(mean).div_(divisor)


def check_augmentation(name: str) -> None:
    """Raise UsageError unless ``name`` is one of :data:`AUGMENTATIONS`."""
    if name not in AUGMENTATIONS:
        raise UsageError(f"no augmentation {name!r}; it is one of {', '.join(AUGMENTATIONS)}")


def augment_batch(
    images: torch.Tensor, indices: NDArray[np.int64], name: str, *, seed: int, epoch: int
) -> torch.Tensor:
    """Augment uint8 (B, 3, S, S), whose row i is the data set's image ``indices[i]``; returns the same shape.

    ``"flip"`` mirrors half of them. ``"affine"`` turns, stretches, shears and shifts them a little and mirrors none,
    for what is another thing in the mirror (letters). ``"standard"`` mirrors, bends, crops, recolours, blurs,
    coarsens, compresses and covers parts. What befalls an image depends on (seed, epoch, its index)
    alone, so that it is the same on any rank, in any loader process and in any batch.
    """
    if name == "none" or len(indices) == 0:
        return images
    keys = sample_keys(indices, seed=seed, epoch=epoch)
    if name == "flip":
        return _mirrored(images, keys >> np.uint64(63) == 1)
    if name == "affine":
        return _bent(images, keys)
    transform = _standard(images.shape[-1])
    state = torch.default_generator.get_state()
    try:
        pairs = zip(images, keys, strict=True)
        return torch.stack([_keyed(transform, image, int(key)) for image, key in pairs])
    finally:
        torch.default_generator.set_state(state)


def sample_keys(indices: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """A 64-bit key per sample, well mixed, from (seed, epoch, index): SplitMix64 (Steele et al. 2014)."""
    keys = _mixed(np.full(len(indices), seed % 2**64, dtype=np.uint64))
    keys = _mixed(keys ^ np.uint64(epoch))
    return _mixed(keys ^ indices.astype(np.uint64))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mirrored(images: torch.Tensor, chosen: NDArray[np.bool_]) -> torch.Tensor:
    pixels = images.numpy().copy()  # numpy reverses rows of bytes twice as fast as torch does
    pixels[chosen] = pixels[chosen][..., ::-1]
    return torch.from_numpy(pixels)


def _bent(images: torch.Tensor, keys: NDArray[np.uint64]) -> torch.Tensor:
    """Every image by an affine map of its own; what comes in at the edges repeats the edge."""
    angle, stretch_x, stretch_y, shear_x, shear_y, shift_x, shift_y = (
        torch.from_numpy(_mixed(keys ^ np.uint64(number)) / 2.0**63 - 1).float() for number in range(1, 8)
    )  # each uniform in [-1, 1)
    turn = angle * (10 * torch.pi / 180)
    rotation = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1).view(-1, 2, 2)
    shape = torch.stack([1 + 0.1 * stretch_x, 0.14 * shear_x, 0.14 * shear_y, 1 + 0.1 * stretch_y], 1).view(-1, 2, 2)
    shift = 0.12 * torch.stack([shift_x, shift_y], 1)  # of half the image's side
    grid = functional.affine_grid(torch.cat([rotation @ shape, shift[:, :, None]], 2), list(images.shape), False)
    bent = functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return bent.round_().to(torch.uint8)


def _keyed(transform: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor, key: int) -> torch.Tensor:
    # torchvision draws from torch's CPU generator; torch.manual_seed would reseed the accelerators' as well.
    torch.default_generator.manual_seed(key)
    return transform(image)


def _recompressed(image: torch.Tensor) -> torch.Tensor:
    """The image after JPEG at a random quality (torchvision's own JPEG is deprecated since 0.29)."""
    from PIL import Image

    quality = int(torch.randint(30, 91, ()))
    stored = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(stored, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(stored))).permute(2, 0, 1)


@lru_cache
def _standard(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The usual stronger set: often a little geometry, now and then what AdaFace adds (crop, colour, low resolution).

    Mild enough for aligned faces, and quick to learn from: Kim et al., CVPR 2022, take each of theirs with 0.2, too.
    """
    from torchvision.transforms import InterpolationMode, v2

    bend = v2.RandomAffine(
        10, translate=(0.06, 0.06), scale=(0.9, 1.1), shear=6, interpolation=InterpolationMode.BILINEAR, fill=127
    )

    coarse = max(size // 3, 8)
    steps: list[Any] = [
        v2.RandomHorizontalFlip(0.5),
        v2.RandomApply([bend], 0.7),
        v2.RandomApply([v2.RandomResizedCrop(size, scale=(0.65, 1.0), ratio=(0.85, 1.18))], 0.2),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.3)], 0.2),
        v2.RandomGrayscale(0.1),
        v2.RandomApply([v2.GaussianBlur(5, sigma=(0.1, 1.5))], 0.1),
        v2.RandomApply([v2.RandomResize(coarse, size), v2.Resize([size, size])], 0.1),
        v2.RandomApply([_recompressed], 0.1),
        v2.RandomErasing(0.1, scale=(0.02, 0.2), value=127),
    ]
    transform: Callable[[torch.Tensor], torch.Tensor] = v2.Compose(steps)
    return transform
