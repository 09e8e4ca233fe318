"""Avatars are the same everywhere, differ where they should, and cannot be told apart by their raw pixels."""

import hashlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data import open_dataset
from plsc.data.avatars import MAX_IMAGES, AvatarDataset, open_avatars
from plsc.data.avatars.traits import conditions_of, traits_of
from plsc.errors import UsageError

DIGEST = """
import hashlib
from plsc.data.avatars import AvatarDataset
data = AvatarDataset(3, 4, first=70, image_size=64)
digest = hashlib.sha256()
for i in reversed(range(len(data))):
    digest.update(data.image(i).numpy().tobytes())
print(digest.hexdigest())
"""


def raw_pixels(data: AvatarDataset) -> torch.Tensor:
    """All pictures as unit vectors (N, 3·S·S), the mean picture taken away."""
    flat = torch.stack([data.image(i) for i in range(len(data))]).flatten(1).float()
    return torch.nn.functional.normalize(flat - flat.mean(dim=0), dim=1)


@pytest.mark.live
@pytest.mark.slow
def test_another_process_draws_the_same_pixels_in_another_order() -> None:
    data = AvatarDataset(3, 4, first=70, image_size=64)
    pictures = [data.image(i).numpy().tobytes() for i in range(len(data))]
    digest = hashlib.sha256(b"".join(reversed(pictures))).hexdigest()
    other = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**15), st.integers(1, 40), st.integers(1, 9), st.data())
def test_a_picture_depends_on_its_identity_and_number_alone(
    first: int, identities: int, images: int, draw: st.DataObject
) -> None:
    data = AvatarDataset(identities, images, first=first, image_size=32)
    index = draw.draw(st.integers(0, len(data) - 1))
    identity, image = first + index // images, index % images
    alone = AvatarDataset(1, image + 1, first=identity, image_size=32)
    assert torch.equal(data.image(index), alone.image(image))
    assert data.key(index) == alone.key(image) == f"avatar-{identity}/{image}"
    assert data.labels[index] == index // images


@pytest.mark.parametrize("size", [32, 33, 48, 64, 95, 96, 112, 160, 224])
def test_any_size_gives_uint8_rgb(size: int) -> None:
    picture = AvatarDataset(2, 2, first=5, image_size=size).image(3)
    assert picture.shape == (3, size, size)
    assert picture.dtype == torch.uint8
    assert picture.is_contiguous()
    assert picture.float().std() > 5


def test_sizes_show_the_same_picture() -> None:
    large, small = (AvatarDataset(1, 4, first=9, image_size=size) for size in (112, 56))
    for i in range(4):
        halved = torch.nn.functional.avg_pool2d(large.image(i)[None].float(), 2)[0]
        assert (halved - small.image(i)).abs().mean() < 12


def test_no_two_pictures_are_alike() -> None:
    pictures = raw_pixels(AvatarDataset(40, 5, image_size=32))
    similarity = pictures @ pictures.T - 2 * torch.eye(len(pictures))
    assert similarity.max() < 0.995


def test_traits_differ_between_identities_and_conditions_between_images() -> None:
    assert len({traits_of(identity) for identity in range(2000)}) == 2000
    assert len({conditions_of(identity, image) for identity in range(40) for image in range(50)}) == 2000


def test_raw_pixels_hardly_recognise_anyone() -> None:
    data = AvatarDataset(100, 4, first=500_000, image_size=32)
    pictures, labels = raw_pixels(data), torch.from_numpy(data.labels)
    gallery = torch.arange(len(data)) % 4 == 0
    nearest = labels[gallery][(pictures[~gallery] @ pictures[gallery].T).argmax(dim=1)]
    assert (nearest == labels[~gallery]).float().mean() < 0.3


def test_it_is_a_data_set_as_others_are() -> None:
    data = open_dataset("avatars:20x3@1000", image_size=48)
    assert (len(data), data.num_classes, data.image_size, data.source) == (60, 20, 48, "avatars:20x3@1000")
    assert data.labels.dtype == np.int64
    assert list(data.class_names[1:3]) == ["avatar-1001", "avatar-1002"]
    assert data.class_names[19] == "avatar-1019"
    assert len(data.class_names) == 20
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.image(7), data.image(7))
    assert open_avatars("avatars:1x1", image_size=None).image(0).shape == (3, 112, 112)


MALFORMED = [
    "avatars:", "avatars:20", "avatars:20x", "avatars:x3", "avatars:-2x3", "avatars:2x3@", "avatars:2x3@-1",
    "avatars:2.5x3", "avatars:2x3x4", "avatars:２x3", "avatars:2x3 ", "avatars:2x3\n", "avatars:" + "9" * 30 + "x1",
    "faces:2x3",
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "size", "why"),
    [
        *((spec, 48, "avatars:IDSxIMAGES") for spec in MALFORMED),
        *((spec, 48, spec) for spec in ("avatars:0x3", "avatars:3x0", f"avatars:{MAX_IMAGES}x2")),
        *(("avatars:2x3", size, f"image_size {size}") for size in (0, 15, 513)),
    ],
)
def test_a_wrong_spec_or_size_is_refused_by_name(spec: str, size: int, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        open_avatars(spec, image_size=size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="no picture"):
        AvatarDataset(2, 3).image(index)
