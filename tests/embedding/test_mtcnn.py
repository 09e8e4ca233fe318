"""The detector mtcnn with the weights of its package, on drawn faces whose places are known."""

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import lz4.frame
import numpy as np
import pytest
import torch
from support.drawn_face import landmarks, photo

from plsc.embedding.detector import open_detector
from plsc.errors import DataError, UsageError


@pytest.fixture(scope="module")
def detector():
    return open_detector("mtcnn")


@pytest.mark.parametrize(
    ("width", "height", "face"),
    [
        (300, 240, (150, 120, 15)),
        (300, 240, (100, 90, 50)),
        (112, 112, (55, 60, 50)),  # an aligned crop
        (3000, 2000, (2300, 700, 300)),  # searched at a third of its size
        (500, 1400, (120, 1200, 100)),
    ],
)
def test_a_face_and_its_landmarks_are_found_where_they_are(width, height, face, detector):
    (found,) = detector.faces(photo(width, height, face))
    x, y, radius = face
    assert np.abs(found.landmarks - landmarks(*face)).max() < 0.12 * radius + 0.5
    assert np.abs((found.landmarks - landmarks(*face)).mean(axis=0)).max() < 0.04 * radius + 0.3
    left, top, right, bottom = found.box
    assert 0 <= left < x - 0.6 * radius < x + 0.6 * radius < right <= width
    assert 0 <= top < y - 0.6 * radius < y + 0.8 * radius < bottom <= height
    assert (found.box.dtype, found.landmarks.dtype, type(found.score)) == (np.float32, np.float32, float)


def test_all_faces_are_found_best_first_and_the_largest_is_the_main_one(detector):
    picture = photo(640, 360, (100, 100, 30), (300, 180, 45), (520, 200, 90))
    faces = detector.faces(picture)
    assert [face.score for face in faces] == sorted((face.score for face in faces), reverse=True)
    assert sorted(round(face.landmarks[2, 0] / 20) * 20 for face in faces) == [100, 300, 520]
    assert abs(detector.main_face(picture).landmarks[2, 0] - 520) < 10


def test_faces_below_a_thirty_second_of_a_large_picture_are_passed_over(detector):
    """This bounds the time: no picture is searched in more than 1,024 pixels for faces below 32."""
    (found,) = detector.faces(photo(4000, 1000, (600, 500, 20), (2500, 500, 120)))
    assert abs(found.landmarks[2, 0] - 2500) < 20


@pytest.mark.parametrize("shape", [(1, 1), (15, 15), (3, 900), (200, 200), (2000, 1)])
def test_pictures_without_a_face_have_none(shape, detector):
    assert detector.faces(torch.full((3, *shape), 90, dtype=torch.uint8)) == []


def test_threads_that_share_a_detector_find_the_same_bits(detector):
    picture = photo(300, 240, (100, 100, 30), (220, 120, 40))
    expected = detector.faces(picture)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: detector.faces(picture), range(4)))
    for faces in found:
        for face, other in zip(faces, expected, strict=True):
            np.testing.assert_array_equal(face.landmarks, other.landmarks)
            np.testing.assert_array_equal(face.box, other.box)


def test_a_threshold_above_the_score_leaves_the_face_out(detector):
    picture = photo(300, 240, (150, 120, 30))
    score = detector.main_face(picture).score
    assert open_detector("mtcnn", threshold=score - 1e-4).faces(picture)
    assert open_detector("mtcnn", threshold=min(score + 1e-4, 1)).faces(picture) == []


def test_without_the_extra_the_line_that_installs_it_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(UsageError, match=r"mtcnn needs the package mtcnn: pip install plsc-torch\[detector\]"):
        open_detector("mtcnn")


class Installed:
    """A distribution whose files lie in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, path: str) -> Path:
        return self.folder / Path(path).name


class Harmful:
    """What creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    """A copy of the package's files, which is taken for them."""
    folder = tmp_path / "weights"
    shutil.copytree(str(metadata.distribution("mtcnn").locate_file("mtcnn/assets/weights")), folder)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(tmp_path))
    return folder


def test_other_weights_are_refused_and_nothing_is_unpickled(weights, tmp_path):
    open_detector("mtcnn")
    whole = (weights / "rnet.lz4").read_bytes()
    content = lz4.frame.decompress(whole)
    hostile = lz4.frame.compress(pickle.dumps(Harmful(tmp_path / "harmed")))
    other = lz4.frame.compress(lz4.frame.decompress((weights / "pnet.lz4").read_bytes()))
    longer = lz4.frame.compress(content + b"x")
    for bad in (b"", b"hello", whole[:3000], lz4.frame.compress(content[:-9]), longer, other, hostile):
        (weights / "rnet.lz4").write_bytes(bad)
        with pytest.raises(
            DataError, match=r"rnet\.lz4 .*install it again: pip install plsc-torch\[detector\]"
        ) as caught:
            open_detector("mtcnn")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "harmed").exists()
    (weights / "rnet.lz4").unlink()
    with pytest.raises(DataError, match=r"rnet\.lz4 cannot be read"):
        open_detector("mtcnn")
