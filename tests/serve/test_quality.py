"""Quality gates: poor pictures are not enrolled, and the answer says what was measured."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from support.live_service import SIZE, Live, image_input, picture, vectors

from plsc.embedding.quality import EmbeddingNorm, QualityGate, Sharpness, parse_quality_gates
from plsc.errors import UsageError
from plsc.tools.entry import main

SETTINGS = {"quality_gates": {"sharpness": Sharpness(50.0), "norm": EmbeddingNorm(1e-3)}}


def grey(value: int) -> bytes:
    """A picture of one grey, without any edge."""
    file = io.BytesIO()
    Image.new("RGB", (SIZE, SIZE), (value,) * 3).save(file, "PNG")
    return file.getvalue()


@pytest.mark.live
def test_poor_pictures_are_refused_wherever_faces_are_enrolled(live: Live) -> None:
    place = live.collection("gates")
    sharp, flat = image_input(picture(0)), image_input(grey(90))
    person = live.ask("POST", f"{place}/persons", {"name": "A", "faces": [sharp]}).json()["id"]
    several = {"persons": [{"faces": [sharp]}, {"faces": [sharp, flat]}]}
    for method, path, body, name in (
        ("POST", f"{place}/persons", {"faces": [flat]}, "faces[0]"),
        ("POST", f"{place}/persons", several, "persons[1].faces[1]"),
        ("POST", f"{place}/persons/{person}/faces", {"faces": [sharp, flat]}, "faces[1]"),
        ("PUT", f"{place}/persons/by-external-id/E-1", {"faces": [flat]}, "faces[0]"),
    ):
        answer = live.ask(method, path, body)
        assert answer.status_code == 422
        text = (
            f"{name} is too poor a picture: its sharpness is 0, and this service enrols from 50 on; send a better one"
        )
        assert answer.json()["error"]["message"] == text
    black = live.ask("POST", f"{place}/persons", {"faces": [{"vector": vectors(1)[0].tolist()}, sharp]})
    assert black.status_code == 201  # a vector is not judged
    assert len(live.ask("GET", f"{place}/persons").json()["persons"]) == 2
    assert live.ask("POST", f"{place}/search", {"queries": [flat]}).status_code == 200


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    pixels = torch.randint(0, 256, (3, 7, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    red, green, blue = pixels.numpy().astype(np.float64)
    values = 0.299 * red + 0.587 * green + 0.114 * blue
    inner = [
        values[y - 1, x] + values[y + 1, x] + values[y, x - 1] + values[y, x + 1] - 4 * values[y, x]
        for y in range(1, 6)
        for x in range(1, 4)
    ]
    nothing = np.zeros(4, np.float32)
    assert Sharpness(0).quality(pixels, nothing) == pytest.approx(np.var(inner), rel=1e-5)
    assert EmbeddingNorm(0).quality(pixels, np.array([3.0, 4.0], np.float32)) == 5.0


@pytest.mark.parametrize("text", ["blur=3", "sharpness", "sharpness=", "norm=high", "norm=nan", "=3"])
def test_what_is_no_gate_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["serve", "--model", "m.onnx", "--store", "s", "--quality-gate", "norm=1", text])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert f"--quality-gate {text}: " in error


@pytest.mark.live
def test_a_measure_that_is_no_number_is_refused(live: Live) -> None:
    class Broken(QualityGate):
        def quality(self, pixels: torch.Tensor, embedding: object) -> float:
            return float("nan")

    live.service.settings.quality_gates["broken"] = Broken(0.0)  # type: ignore[index]
    answer = live.ask("POST", f"{live.collection('broken')}/persons", {"faces": [image_input(picture(1))]})
    del live.service.settings.quality_gates["broken"]  # type: ignore[attr-defined]
    assert answer.status_code == 422
    with pytest.raises(UsageError, match="sharpness, norm"):
        parse_quality_gates(["hue=1"])
