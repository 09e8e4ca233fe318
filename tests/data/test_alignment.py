"""Alignment: the transform against plain least squares, the crop against pictures whose every pixel is known."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.posed_faces import move

from plsc.data.alignment import TEMPLATE, align_face, similarity_transform, warp
from plsc.errors import DataError


def test_the_transform_is_the_least_squares_one():
    generator = np.random.default_rng(0)
    for _ in range(20):
        source = move(TEMPLATE, generator.normal(), 2.0, [3, 4]) + generator.normal(scale=6, size=(5, 2))
        # A similarity (a, -b, tx; b, a, ty) is linear in its four parameters.
        rows = [row for x, y in source for row in ([x, -y, 1, 0], [y, x, 0, 1])]
        a, b, tx, ty = np.linalg.lstsq(np.array(rows), TEMPLATE.reshape(-1), rcond=None)[0]
        np.testing.assert_allclose(similarity_transform(source, TEMPLATE), [[a, -b, tx], [b, a, ty]], atol=1e-9)


def test_mirrored_landmarks_give_a_rotation_and_no_reflection():
    mirrored = TEMPLATE * [-1, 1] + [112, 0]
    assert np.linalg.det(similarity_transform(mirrored, TEMPLATE)[:, :2]) > 0


def test_warp_moves_whole_pixels_exactly_and_halves_by_the_mean():
    image = torch.randint(0, 256, (3, 9, 13), dtype=torch.uint8)
    stay = np.array([[1.0, 0, 0], [0, 1.0, 0]])
    assert torch.equal(warp(image, stay, 9), image[:, :, :9])
    right = warp(image, np.array([[1.0, 0, 2], [0, 1.0, 1]]), 9)
    assert torch.equal(right[:, 1:, 2:], image[:, :8, :7])
    assert right[:, 0].sum() == right[:, :, :2].sum() == 0
    half = warp(image, np.array([[1.0, 0, -0.5], [0, 1.0, 0]]), 9)
    mean = (image[:, :, :9].double() + image[:, :, 1:10].double()) / 2
    assert (half.double() - mean).abs().max() <= 0.5


def ramp(height, width):
    """A picture whose colour tells the place: red x, green y (both by thirds), blue 128."""
    y, x = np.mgrid[0:height, 0:width]
    return torch.from_numpy(np.stack([x * 250 / width, y * 250 / height, np.full(x.shape, 128.0)]).round()).byte()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.floats(-np.pi, np.pi),
    st.floats(0.3, 12.0),
    st.floats(-60, 60),
    st.floats(-60, 60),
    st.sampled_from([56, 112, 160]),
)
def test_every_pixel_comes_from_where_the_transform_says_at_any_scale(angle, scale, dx, dy, image_size):
    size = 1500
    centre = np.array([size / 2 + dx, size / 2 + dy])
    landmarks = move(TEMPLATE - TEMPLATE.mean(axis=0), angle, scale, centre)
    crop = align_face(ramp(size, size), landmarks, image_size).double().numpy()
    matrix = similarity_transform(landmarks, TEMPLATE * image_size / 112)
    y, x = np.mgrid[0:image_size, 0:image_size]
    origin = (np.stack([x, y], axis=-1) - matrix[:, 2]) @ np.linalg.inv(matrix[:, :2]).T
    step = scale * 112 / image_size
    inside = np.all((origin > 3 * step) & (origin < size - 1 - 3 * step), axis=-1)
    expected = origin * 250 / size
    assert np.abs(crop[0] - expected[..., 0])[inside].max(initial=0) < 1.2
    assert np.abs(crop[1] - expected[..., 1])[inside].max(initial=0) < 1.2
    assert np.all(crop[2][inside] == 128)


@pytest.mark.parametrize("angle", [0.0, 0.5])
@pytest.mark.parametrize("scale", [4.0, 18.0])
def test_a_large_face_is_averaged_down_and_not_picked_from(angle, scale):
    """White noise averaged over n pixels keeps 1/sqrt(n) of its spread; bilinear samples keep about 2/3 of it."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2, (3, 2200, 2200), generator=generator, dtype=torch.uint8) * 255
    landmarks = move(TEMPLATE - 56, angle, scale, np.array([1100.0, 1100.0]))
    crop = align_face(noise, landmarks, 112)[:, 20:92, 20:92].double()
    assert crop.std() < 1.3 * 127.5 / scale
    assert abs(crop.mean() - 127.5) < 1.5
    stripes = torch.zeros(3, 2200, 2200, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    assert (align_face(stripes, landmarks, 112)[:, 20:92, 20:92].double() - 127.5).abs().max() < 4


@pytest.mark.parametrize("scale", [2.0, 4.0])
def test_a_face_hardly_larger_gives_a_crop_hardly_different(scale):
    noise = torch.randint(0, 256, (3, 500, 500), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    crops = [
        align_face(noise, move(TEMPLATE - 56, 0.3, factor * scale, np.array([250.0, 250.0])), 112).double()
        for factor in (0.999, 1.001)
    ]
    assert (crops[0] - crops[1]).abs().mean() < 0.25 * crops[0].std()


def test_a_small_face_is_the_plain_bilinear_crop():
    picture = torch.randint(0, 256, (3, 300, 260), dtype=torch.uint8)
    landmarks = move(TEMPLATE, 0.2, 1.9, [20, 30])
    expected = warp(picture, similarity_transform(landmarks, TEMPLATE), 112).int()
    assert (align_face(picture, landmarks, 112).int() - expected).abs().max() <= 1


def test_what_lies_outside_the_picture_is_black():
    landmarks = TEMPLATE - [60, 0]  # the crop's left 60 columns lie beyond the edge
    crop = align_face(torch.full((3, 112, 112), 200, dtype=torch.uint8), landmarks, 112)
    assert torch.all(crop[:, :, :59] == 0)
    assert torch.all(crop[:, 1:-1, 61:] == 200)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.full((5, 2), 7.0), "coincide"),
        (TEMPLATE / 112, "not fractions of the image"),
        (np.full((5, 2), np.nan), "not finite"),
        (TEMPLATE * [1, np.inf], "not finite"),
        (TEMPLATE * 1e300, "out of range"),
        (TEMPLATE[:4], "five points"),
        (TEMPLATE.reshape(-1), "five points"),
        ("eyes", "five points"),
        ([[1, 2], [3], [4, 5], [6, 7], [8, 9]], "five points"),
        (None, "five points"),
        (TEMPLATE[[1, 0, 2, 4, 3]], "check their order: left eye"),
        (TEMPLATE - [-5000, 0], "outside the image of 20x20"),
        (TEMPLATE - [0, 5000], "outside the image"),
    ],
)
def test_landmarks_of_no_face_are_one_line_that_names_the_picture(bad, message):
    with pytest.raises(DataError, match=message) as caught:
        align_face(torch.zeros(3, 20, 20, dtype=torch.uint8), bad, 112, "face.jpg")
    assert str(caught.value).startswith("face.jpg: ")
    assert "\n" not in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-3e3, 3e3), min_size=10, max_size=10))
def test_any_five_points_give_a_crop_or_one_line(numbers):
    try:
        crop = align_face(torch.zeros(3, 40, 50, dtype=torch.uint8), np.reshape(numbers, (5, 2)), 112, "x.jpg")
    except DataError:
        return
    assert crop.shape == (3, 112, 112)
