"""Classes turned by quarter rotations: which picture is which, and training on them."""

import numpy as np
import pytest

from plsc.data import open_dataset
from plsc.data.transforms import RotatedDataset


@pytest.fixture(scope="module")
def plain():
    return open_dataset("avatars:3x2", image_size=32)


def test_four_classes_of_each(plain):
    rotated = RotatedDataset(plain)
    assert (len(rotated), rotated.num_classes) == (24, 12)
    assert sorted(np.unique(rotated.labels, return_counts=True)[1].tolist()) == [2] * 12
    for index in range(len(rotated)):
        place, turns = index // 4, index % 4
        pixels = plain.image(place).numpy()
        for _ in range(turns):  # a quarter turn against the clock: what was on the right is on top
            pixels = pixels.transpose(0, 2, 1)[:, ::-1]
        assert np.array_equal(rotated.image(index).numpy(), pixels)
        assert rotated.labels[index] == 4 * plain.labels[place] + turns
        name = plain.class_names[int(plain.labels[place])]
        assert rotated.class_names[int(rotated.labels[index])] == (f"{name} turned by {90 * turns}" if turns else name)
        assert rotated.key(index).startswith(plain.key(place))
