"""Built-in data: procedural identities, drawn as faces, as many as one asks for.

`avatars:2000x30@1000` are identities 1000 … 2999 with 30 pictures each. Picture k of identity i is the same
whatever else the data set holds, on every machine and in any order; other indices are other people.
"""

import re

import numpy as np
import torch

from plsc.data.avatar_camera import MAX_SIZE, MIN_SIZE, render_avatar
from plsc.data.dataset import ImageDataset
from plsc.data.lazy_strings import LazyStrings
from plsc.errors import UsageError

DEFAULT_SIZE = 112
MAX_IMAGES = 1_000_000_000
_SPEC = re.compile(r"avatars:(\d{1,15})x(\d{1,15})(?:@(\d{1,15}))?", re.ASCII)


def parse_spec(spec: str) -> tuple[int, int, int]:
    """`avatars:IDSxIMAGES[@FIRST]` as (identities, images per identity, index of the first identity)."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} is not avatars:IDSxIMAGES[@FIRST], as in avatars:2000x30@1000")
    identities, images, first = (int(number or 0) for number in match.groups())
    return identities, images, first


def open_avatars(spec: str, *, image_size: int | None = DEFAULT_SIZE) -> "AvatarDataset":
    """The data set that `spec` describes (see `parse_spec`); `image_size` None is 112."""
    identities, images, first = parse_spec(spec)
    size = DEFAULT_SIZE if image_size is None else image_size
    return AvatarDataset(identities, images, first=first, image_size=size)


class AvatarDataset(ImageDataset):
    """`images_per_identity` pictures of each of the identities first, first + 1, …, in this order.

    Raises UsageError for a count that is not positive, more than 10⁹ pictures, or a size out of range.
    """

    def __init__(
        self, num_identities: int, images_per_identity: int, *, first: int = 0, image_size: int = DEFAULT_SIZE
    ) -> None:
        source = f"avatars:{num_identities}x{images_per_identity}" + (f"@{first}" if first else "")
        if num_identities < 1 or images_per_identity < 1 or first < 0:
            raise UsageError(f"{source}: identities and images must be at least 1, and the first at least 0")
        if num_identities * images_per_identity > MAX_IMAGES:
            raise UsageError(f"{source}: at most {MAX_IMAGES:,} pictures can be asked for at once")
        if not MIN_SIZE <= image_size <= MAX_SIZE:
            raise UsageError(f"{source}: image_size {image_size} is not between {MIN_SIZE} and {MAX_SIZE}")
        labels = np.repeat(np.arange(num_identities, dtype=np.int64), images_per_identity)
        super().__init__(source, labels, _Names(first, num_identities), image_size)
        self.first = first
        self.images_per_identity = images_per_identity
        self._size = image_size

    def image(self, index: int) -> torch.Tensor:
        """Picture `index`, drawn anew on each call: uint8 (3, S, S) RGB."""
        pixels = render_avatar(*self._place(index), self._size)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def key(self, index: int) -> str:
        """`avatar-IDENTITY/IMAGE`, with the identity's index among all avatars."""
        identity, image = self._place(index)
        return f"avatar-{identity}/{image}"

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source} has no picture {index}; there are {len(self)}")
        position, image = divmod(int(index), self.images_per_identity)
        return self.first + position, image


class _Names(LazyStrings):
    """Class names, made when asked for: millions of identities cost nothing."""

    def __init__(self, first: int, count: int) -> None:
        self._identities = range(first, first + count)

    def __len__(self) -> int:
        return len(self._identities)

    def at(self, position: int) -> str:
        """The name of the identity at ``position``."""
        return f"avatar-{self._identities[position]}"
