"""Pixels become the same bits in training, evaluation, embedding, the exported files and the service."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plsc.data import normalize
from plsc.embedding.embedder import EmbeddingModel, TorchEngine, backbone_engine, open_embedder
from plsc.embedding.export import export_onnx
from plsc.models import create
from plsc.models.preprocessing import Preprocessing

# Every pixel value, as images (2, 3, 32, 32).
LEVELS = torch.arange(2 * 3 * 32 * 32).remainder(256).to(torch.uint8).view(2, 3, 32, 32)


class Recorder(torch.nn.Module):
    """Embeds by averaging, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given.append(x.clone())
        return x.mean(dim=(2, 3))


def test_each_value_is_the_float32_nearest_to_the_true_quotient() -> None:
    values = normalize(torch.arange(256, dtype=torch.uint8))
    exact = [np.float32(Fraction(2 * level - 255, 255).__float__()) for level in range(256)]
    assert values.dtype == torch.float32
    assert values.tolist() == [float(value) for value in exact]
    assert (values[0], values[-1]) == (-1.0, 1.0)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_stay_as_they_are_and_keep_their_memory_format(memory_format: torch.memory_format) -> None:
    images = LEVELS.contiguous(memory_format=memory_format)
    for given in (images, images.float()):
        assert torch.equal(normalize(given), normalize(LEVELS))
        assert torch.equal(given, LEVELS.to(given.dtype))
        assert normalize(given).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_sees_the_same_bits_in_training_and_when_it_embeds(precision: str) -> None:
    recorder = Recorder()
    engine = TorchEngine(recorder, Preprocessing(32), 3, "id", torch.device("cpu"), precision)
    EmbeddingModel(engine, "test")(LEVELS)
    assert torch.equal(torch.cat(recorder.given), normalize(LEVELS))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_exported_onnx_model_sees_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph takes normalised values; the engine that feeds it makes them by the same function."""
    import plsc.embedding.onnx_engine as onnx_engine

    model = create("resnet8", embedding_dim=8, image_size=32).eval()
    export_onnx(model, tmp_path / "model.onnx")
    fed: list[np.ndarray] = []
    run_session = onnx_engine.run_session

    def recorded(path: Path, session: Any, outputs: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        fed.extend(inputs.values())
        return run_session(path, session, outputs, inputs)

    embedder = open_embedder(tmp_path / "model.onnx", device=torch.device("cpu"))
    monkeypatch.setattr(onnx_engine, "run_session", recorded)
    answers = embedder(LEVELS)
    assert torch.equal(torch.from_numpy(np.concatenate(fed)), normalize(LEVELS))
    torch.testing.assert_close(answers, backbone_engine(model, torch.device("cpu")).run(LEVELS), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits() -> None:
    assert torch.equal(normalize(LEVELS.cuda()).cpu(), normalize(LEVELS))
