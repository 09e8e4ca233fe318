"""Augmentation as a pure function of (seed, epoch, sample index), and rotation classes."""

import io
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from plsc.data.dataset import ComputedStrings, ImageDataset
from plsc.data.permutation import mixed
from plsc.errors import UsageError
from plsc.models.preprocessing import BILINEAR, check_square

ROTATIONS = 4
AUGMENTATIONS = ("none", "flip", "affine", "elastic", "standard")


def check_augmentation(name: str) -> None:
    """Raise UsageError unless ``name`` is one of :data:`AUGMENTATIONS`."""
    if name not in AUGMENTATIONS:
        raise UsageError(f"no augmentation {name!r}; it is one of {', '.join(AUGMENTATIONS)}")


def augment_batch(
    images: torch.Tensor,
    indices: NDArray[np.int64],
    name: str,
    *,
    seed: int,
    epoch: int,
    interpolation: str = BILINEAR,
) -> torch.Tensor:
    """Augment a batch, each image by a key of (seed, epoch, its index) alone.

    So an image is augmented alike on any rank, in any loader process and in any batch. ``"flip"`` mirrors half of the
    images. ``"affine"`` rotates, stretches, shears and shifts them a little and mirrors none, for classes that differ
    from their mirror image (letters). ``"elastic"`` does so half as much again, and bends them smoothly, as hands do
    (Simard et al., ICDAR 2003). ``"standard"`` combines flip, affine, crop, colour, greyscale, blur, low resolution,
    JPEG compression and erasing.

    Args:
        images: uint8 (B, 3, H, W); row i is image ``indices[i]`` of the data set.
        indices: int64 (B,).
        name: one of :data:`AUGMENTATIONS`.
        seed: the run's seed.
        epoch: the epoch, from 0.
        interpolation: by which "standard" resizes its crops to (H, W), as pictures are resized.

    Returns:
        uint8 (B, 3, H, W); ``images`` themselves for ``"none"``.
    """
    if name == "none" or len(indices) == 0:
        return images
    keys = sample_keys(indices, seed=seed, epoch=epoch)
    if name == "flip":
        return _flip(images, keys >> np.uint64(63) == 1)
    if name == "affine":
        return _warped(images, _affine(keys, images.shape))
    if name == "elastic":
        return _warped(images, _affine(keys, images.shape, strength=1.5) + _bending(keys, images.shape))
    transform = _standard(images.shape[-2], images.shape[-1], interpolation)
    state = torch.default_generator.get_state()  # torchvision draws from it; callers do not see that
    try:
        pairs = zip(images, keys, strict=True)
        return torch.stack([_apply_keyed(transform, image, int(key)) for image, key in pairs])
    finally:
        torch.default_generator.set_state(state)


def sample_keys(indices: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Hash (seed, epoch, index) to a 64-bit key per sample by SplitMix64 (Steele et al., OOPSLA 2014)."""
    keys = mixed(np.full(len(indices), seed % 2**64, dtype=np.uint64))
    keys = mixed(keys ^ np.uint64(epoch))
    return mixed(keys ^ indices.astype(np.uint64))


def _flip(images: torch.Tensor, mask: NDArray[np.bool_]) -> torch.Tensor:
    pixels = images.numpy().copy()  # numpy reverses rows of bytes twice as fast as torch does
    pixels[mask] = pixels[mask][..., ::-1]
    return torch.from_numpy(pixels)


def _warped(images: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Take each pixel from its place (B, H, W, 2) in ``grid``; pixels from outside repeat the edge."""
    warped = functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return warped.round_().to(torch.uint8)


def _uniform(keys: NDArray[np.uint64], first: int, count: int) -> torch.Tensor:
    """Numbers ``first`` to ``first + count`` of each key's, uniform in [-1, 1): (count, B) float32."""
    numbers = [mixed(keys ^ np.uint64(number)) / 2.0**63 - 1 for number in range(first, first + count)]
    return torch.from_numpy(np.stack(numbers)).float()


def _affine(keys: NDArray[np.uint64], shape: torch.Size, *, strength: float = 1.0) -> torch.Tensor:
    """Make the grid of an affine map of each image's own."""
    angle, stretch_x, stretch_y, shear_x, shear_y, shift_x, shift_y = strength * _uniform(keys, 1, 7)
    radians = angle * (10 * torch.pi / 180)
    rotation = torch.stack([radians.cos(), -radians.sin(), radians.sin(), radians.cos()], 1).view(-1, 2, 2)
    form = torch.stack([1 + 0.1 * stretch_x, 0.14 * shear_x, 0.14 * shear_y, 1 + 0.1 * stretch_y], 1).view(-1, 2, 2)
    shift = 0.12 * torch.stack([shift_x, shift_y], 1)  # of half the image's side
    matrix = _in_grid_units(rotation @ form, *shape[-2:])
    return functional.affine_grid(torch.cat([matrix, shift[:, :, None]], 2), list(shape), False)


def _bending(keys: NDArray[np.uint64], shape: torch.Size) -> torch.Tensor:
    """Displace 4 x 4 points of each image by up to 7% of half its side, and all between them smoothly."""
    points = 0.07 * _uniform(keys, 8, 32).T.reshape(-1, 2, 4, 4)
    field = functional.interpolate(points, size=shape[-2:], mode="bicubic", align_corners=True)
    return field.permute(0, 2, 3, 1)


def _in_grid_units(matrix: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Convert maps (B, 2, 2) of pixels to affine_grid's coordinates, in which both sides of an image have length 2."""
    if height == width:
        return matrix
    return matrix * torch.tensor([[1.0, height / width], [width / height, 1.0]])


def _apply_keyed(transform: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor, key: int) -> torch.Tensor:
    # torch.manual_seed would reseed the accelerators' generators as well.
    torch.default_generator.manual_seed(key)
    return transform(image)


def _recompress(image: torch.Tensor) -> torch.Tensor:
    """Compress and decompress by JPEG at a random quality (torchvision's own JPEG is deprecated since 0.29)."""
    from PIL import Image

    quality = int(torch.randint(30, 91, ()))
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(buffer))).permute(2, 0, 1)


@lru_cache
def _standard(height: int, width: int, interpolation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build the stronger set: often mild geometry, sometimes AdaFace's crop, colour and low resolution.

    Mild enough for aligned faces; the probability 0.2 of AdaFace's three is theirs (Kim et al., CVPR 2022).
    """
    from torchvision.transforms import InterpolationMode, v2

    affine = v2.RandomAffine(
        10, translate=(0.06, 0.06), scale=(0.9, 1.1), shear=6, interpolation=InterpolationMode.BILINEAR, fill=127
    )

    size, resizing = [height, width], InterpolationMode(interpolation)
    aspect, shorter = width / height, min(height, width)
    low_resolution = max(shorter // 3, 8)
    ratio = (0.85 * aspect, 1.18 * aspect)
    steps: list[Any] = [
        v2.RandomHorizontalFlip(0.5),
        v2.RandomApply([affine], 0.7),
        v2.RandomApply([v2.RandomResizedCrop(size, scale=(0.65, 1.0), ratio=ratio, interpolation=resizing)], 0.2),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.3)], 0.2),
        v2.RandomGrayscale(0.1),
        v2.RandomApply([v2.GaussianBlur(5, sigma=(0.1, 1.5))], 0.1),
        v2.RandomApply([v2.RandomResize(low_resolution, shorter), v2.Resize(size, resizing)], 0.1),
        v2.RandomApply([_recompress], 0.1),
        v2.RandomErasing(0.1, scale=(0.02, 0.2), value=127),
    ]
    transform: Callable[[torch.Tensor], torch.Tensor] = v2.Compose(steps)
    return transform


class RotatedDataset(ImageDataset):
    """Every image of ``dataset`` in four rotations; classes 4c … 4c + 3 are its class c, rotated by 0 … 270 degrees.

    For images that mean something else when they are rotated, as letters do, and where classes are few: the features
    then have to separate four times as many (Santoro et al., "Meta-learning with memory-augmented neural networks",
    2016, section 4.1). ``dataset`` gives square images with one label each; :class:`UsageError` if it does not.
    """

    def __init__(self, dataset: ImageDataset) -> None:
        if dataset.image_size is not None:
            check_square(dataset.image_size, "data.rotation_classes")
        if dataset.labels.ndim > 1:
            raise UsageError(f"data.rotation_classes takes one label a picture, and {dataset.source} has several")
        labels = (dataset.labels[:, None].astype(np.int64) * ROTATIONS + np.arange(ROTATIONS)).reshape(-1)
        names = ComputedStrings(ROTATIONS * dataset.num_classes, partial(_rotated_class, dataset.class_names))
        super().__init__(dataset.source, labels, names, dataset.image_size)
        self.dataset = dataset
        self.skipped, self.empty_classes, self.alignment = dataset.skipped, dataset.empty_classes, dataset.alignment
        self.left_out = dataset.left_out

    def image(self, index: int) -> torch.Tensor:
        """Return image ``index // 4`` of the data set after ``index % 4`` counter-clockwise quarter turns."""
        source_index, quarters = divmod(index, ROTATIONS)
        return torch.rot90(self.dataset.image(source_index), quarters, (1, 2))

    def key(self, index: int) -> str:
        """Return the image's own key, with the angle."""
        return _rotated_name(self.dataset.key(index // ROTATIONS), index % ROTATIONS)

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the images' own, with the angle."""
        first = start // ROTATIONS
        found = self.dataset.sample_ids(first, -(-stop // ROTATIONS))
        return [_rotated_name(found[index // ROTATIONS - first], index % ROTATIONS) for index in range(start, stop)]

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the images' own."""
        return self.dataset.stamps(start // ROTATIONS, -(-stop // ROTATIONS))


def _rotated_class(names: Sequence[str], label: int) -> str:
    return _rotated_name(names[label // ROTATIONS], label % ROTATIONS)


def _rotated_name(name: str, quarters: int) -> str:
    # The text is in label maps that earlier versions wrote.
    return f"{name} turned by {90 * quarters}" if quarters else name
