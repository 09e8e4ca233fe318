"""Detectors with SCRFD's outputs: known boxes in known places, whatever the model's form; other models are refused."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from support.scrfd import BOX, POINTS, stand_in, write_model
from support.yunet import write_yunet

from plsc.data.alignment import TEMPLATE
from plsc.embedding.detector import open_detector
from plsc.errors import DataError, UsageError

COLOURS = {8: 0, 16: 1, 32: 2}


def painted(height, width, *cells, scale=1.0):
    """A black picture in which the cells (stride, row, column[, brightness]) of the model's input are coloured."""
    picture = torch.zeros(3, height, width, dtype=torch.uint8)
    for stride, row, column, *brightness in cells:
        top, left, side = (round(stride * value / scale) for value in (row, column, 1))
        picture[COLOURS[stride], top : top + side, left : left + side] = (brightness or [255])[0]
    return picture


def expected(stride, row, column, scale=1.0, box=BOX, points=POINTS):
    """The box (4,) and the landmarks (5, 2) that the stand-in answers for a cell, in pixels of the picture."""
    x, y = column * stride, row * stride
    corners = np.array([x - box[0] * stride, y - box[1] * stride, x + box[2] * stride, y + box[3] * stride])
    return corners / scale, (points * stride + [x, y]) / scale


def opened(path, **options):
    return open_detector(f"onnx:{path}", **options)


@pytest.mark.parametrize("shape", [(1, 3, 480, 640), (1, 3, "H", "W"), ("N", 3, None, None), (None,) * 4])
@pytest.mark.parametrize("batch_axis", [False, True])
@pytest.mark.parametrize("order", [range(9), [0, 3, 6, 1, 4, 7, 2, 5, 8], [8, 0, 5, 1, 7, 2, 6, 3, 4]])
def test_known_cells_give_known_boxes_and_landmarks(shape, batch_axis, order, tmp_path):
    detector = opened(stand_in(tmp_path / "d.onnx", shape=shape, batch_axis=batch_axis, order=order))
    faces = detector.faces(painted(480, 640, (16, 4, 10, 230), (8, 0, 50), (32, 14, 8, 245)))
    assert [round(face.score, 3) for face in faces] == [0.996, 0.918, 0.801]
    for face, cell in zip(faces, [(8, 0, 50), (32, 14, 8), (16, 4, 10)], strict=True):
        box, points = expected(*cell)
        np.testing.assert_allclose(face.box, np.clip(box, 0, [640, 480] * 2), atol=1e-3)
        np.testing.assert_allclose(face.landmarks, points, atol=1e-3)
        assert (face.box.dtype, face.box.shape, face.landmarks.shape) == (np.float32, (4,), (5, 2))


@pytest.mark.parametrize(("height", "width"), [(1280, 960), (700, 1280), (320, 100), (240, 320)])
def test_pictures_of_any_size_are_letterboxed_and_told_in_their_own_pixels(height, width, tmp_path):
    scale = min(640 / height, 640 / width)
    row, column = int(height * scale / 32) - 2, 1
    faces = opened(stand_in(tmp_path / "d.onnx")).faces(painted(height, width, (32, row, column), scale=scale))
    assert len(faces) == 1
    box, points = expected(32, row, column, scale)
    # Rounding the scaled picture to whole pixels moves things by a pixel of the model's input at most.
    np.testing.assert_allclose(faces[0].box, np.clip(box, 0, [width, height] * 2), atol=1 / scale)
    np.testing.assert_allclose(faces[0].landmarks, points, atol=1 / scale)


def test_yunet_gives_known_boxes_and_landmarks(tmp_path):
    """Its input is BGR of 0 to 255, its score the geometric mean of two, its boxes are centres and logarithms."""
    write_yunet(tmp_path / "y.onnx", box=(0.5, 0.25, np.log(4), np.log(2)), points=POINTS)
    face, other = opened(tmp_path / "y.onnx").faces(painted(128, 128, (8, 4, 10), (32, 2, 1, 204)))
    assert [face.score, other.score] == pytest.approx([0.9, np.sqrt(0.8 * 0.81)], abs=1e-4)
    np.testing.assert_allclose(face.box, [80 + 4 - 16, 32 + 2 - 8, 80 + 4 + 16, 32 + 2 + 8], atol=1e-3)
    np.testing.assert_allclose(other.box, [0, 72 - 32, 48 + 64, 72 + 32], atol=1e-3)
    np.testing.assert_allclose(face.landmarks, POINTS * 8 + [80, 32], atol=1e-3)


@pytest.mark.parametrize(("reach", "kept"), [(1.0, 2), (3.0, 1)])
def test_of_boxes_that_overlap_by_more_than_two_fifths_the_better_stays(reach, kept, tmp_path):
    """Neighbouring cells' squares of 16 pixels overlap by 8/24, those of 48 pixels by 40/56."""
    path = stand_in(tmp_path / "d.onnx", shape=(1, 3, 128, 128), box=(reach,) * 4)
    faces = opened(path).faces(painted(128, 128, (8, 7, 7, 240), (8, 7, 8, 250)))
    assert len(faces) == kept
    np.testing.assert_allclose(faces[0].box, expected(8, 7, 8, box=(reach,) * 4)[0], atol=1e-3)


def test_the_threshold_is_inclusive_and_a_blank_picture_has_no_face(tmp_path):
    path = stand_in(tmp_path / "d.onnx", shape=(1, 3, 64, 64))
    picture = painted(64, 64, (8, 3, 3, 191))  # (191 - 127.5) / 128 = 0.49609375
    assert opened(path).faces(picture) == []
    assert len(opened(path, threshold=0.49609375).faces(picture)) == 1
    assert opened(path).faces(torch.zeros(3, 50, 50, dtype=torch.uint8)) == []


def test_a_picture_without_a_face_at_640_is_looked_at_small(tmp_path):
    path = stand_in(tmp_path / "d.onnx", only_small=True)
    faces = opened(path).faces(painted(256, 256, (32, 1, 2), scale=0.5))
    assert len(faces) == 1
    np.testing.assert_allclose(faces[0].landmarks, expected(32, 1, 2, 0.5)[1], atol=1e-3)


def test_the_main_face_is_the_largest_and_is_aligned(tmp_path):
    points = (TEMPLATE - 56) / 32
    detector = opened(stand_in(tmp_path / "d.onnx", shape=(1, 3, 640, 640), points=points, box=(1, 1, 1, 1)))
    picture = painted(640, 640, (8, 10, 10), (32, 10, 10, 235))
    picture[:, 264:376, 264:376] = torch.randint(0, 60, (3, 112, 112), dtype=torch.uint8)
    picture[2, 320:352, 320:352] = 235
    assert [face.area for face in detector.faces(picture)] == [256.0, 4096.0]
    assert detector.main_face(picture).area == 4096.0
    # The landmarks are the template's, 264 pixels further: the crop is a cut-out.
    assert torch.equal(detector.aligned(picture, 112), picture[:, 264:376, 264:376])
    with pytest.raises(DataError, match=r"empty\.jpg: no face was found"):
        detector.aligned(torch.zeros(3, 80, 80, dtype=torch.uint8), 112, "empty.jpg")


def test_threads_may_share_a_detector(tmp_path):
    detector = opened(stand_in(tmp_path / "d.onnx", shape=(1, 3, 128, 128)))
    places = [*range(4, 12)] * 5
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda place: detector.faces(painted(128, 128, (8, 6, place))), places))
    for place, faces in zip(places, found, strict=True):
        np.testing.assert_allclose(faces[0].landmarks, expected(8, 6, place)[1], atol=1e-3)


def test_boxes_that_are_no_numbers_are_passed_over(tmp_path):
    path = stand_in(tmp_path / "d.onnx", shape=(1, 3, 64, 64), box=(1, np.nan, 1, 1))
    assert opened(path).faces(painted(64, 64, (8, 3, 3))) == []


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(3, 10, 10),
        torch.zeros(10, 10, 3, dtype=torch.uint8),
        torch.zeros(1, 3, 10, 10, dtype=torch.uint8),
        torch.zeros(3, 0, 10, dtype=torch.uint8),
    ],
)
def test_what_is_no_picture_is_refused(image, tmp_path):
    with pytest.raises(UsageError, match="uint8"):
        opened(stand_in(tmp_path / "d.onnx", shape=(1, 3, 64, 64))).faces(image)


@pytest.mark.parametrize("spec", ["scrfd.onnx", "onnx:", "http://x/d.onnx", "", "onnx:/nowhere/d.onnx", "onnx:/tmp"])
def test_a_detector_that_is_not_there_is_one_line(spec):
    with pytest.raises(UsageError, match="detector") as caught:
        open_detector(spec)
    assert "\n" not in str(caught.value)


NINE = [f"y{i}" for i in range(9)]
SAME = [helper.make_node("Identity", ["x"], [name]) for name in NINE]
CAST = [helper.make_node("Cast", ["x"], [name], to=TensorProto.FLOAT) for name in NINE]
POOLED = [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["y"])]
THREE = helper.make_tensor("v", TensorProto.FLOAT, [1], [3.0])
THREES = [helper.make_node("ConstantOfShape", [f"s{i}"], [name], value=THREE) for i, name in enumerate(NINE)]
ROWS = [np.array([2 * (64 // stride) ** 2, width]) for width in (1, 4, 10) for stride in (8, 16, 32)]
SIZES = {f"s{i}": rows for i, rows in enumerate(ROWS)}
CUSTOM = [helper.make_node("Detect", ["x"], NINE, domain="my.ops")]
SQUARE = (1, 3, 64, 64)


def model(nodes, shape=SQUARE, outputs=NINE, constants=None, **more):
    return lambda path: write_model(path, nodes, shape, outputs, constants, **more)


HOSTILE = {
    "two outputs": (lambda path: stand_in(path, order=[0, 1]), "has 2 outputs; SCRFD with landmarks has nine"),
    "without landmarks": (lambda path: stand_in(path, order=range(6)), "has 6 outputs"),
    "one output nine times": (model(SAME), "answers .* for a"),
    "landmarks of three points": (lambda path: stand_in(path, points=POINTS[:3]), "rows of 1, 4 and 10"),
    "one anchor": (lambda path: stand_in(path, shape=SQUARE, order=[0, 1, 2, 3, 4, 5, 6, 7, 7]), "answers"),
    "logits": (model(THREES, constants=SIZES), "scores outside 0 to 1"),
    "a custom operator": (model(CUSTOM, domain="my.ops"), "of which nobody knows the sizes"),
    "grey pictures": (model(SAME, (1, 1, 64, 64)), "takes one picture"),
    "a batch of four": (model(SAME, (4, 3, 64, 64)), "takes one picture"),
    "bytes": (model(CAST, dtype=TensorProto.UINT8), "takes one picture of floats"),
    "text": (model(CAST, (1,), dtype=TensorProto.STRING), "takes one picture of floats"),
    "odd sides": (lambda path: stand_in(path, shape=(1, 3, 100, 64)), "multiples of 32"),
    "an embedding model": (
        model(POOLED, (1, 3, 112, 112), ["y"]),
        r"is an embedding model \(112x112, one output\), no detector",
    ),
    "no model": (lambda path: path.write_text("hello"), "no ONNX file"),
    "an empty file": (lambda path: path.write_bytes(b""), "no ONNX file"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_another_model_is_refused_in_one_line_when_it_is_opened(kind, tmp_path):
    write, message = HOSTILE[kind]
    write(tmp_path / "d.onnx")
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path / "d.onnx")
    assert "d.onnx" in str(caught.value)
    assert "\n" not in str(caught.value)
