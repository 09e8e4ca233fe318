"""Models of timm give through every way of embedding what timm computes: oblong images, their own mean and std.

The oracle is timm's whole model, classifier included, on pixels that are normalised as timm's transforms do it. The
embedder gets the classifier in its last two layers, so that its embeddings are timm's logits.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from support.live_service import live_service
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

import plsc
from plsc.embedding.embedder import open_embedder
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.export import export_insightface
from plsc.errors import UsageError
from plsc.models import Backbone, create, load_weights, save_model
from plsc.parallel import Mesh
from plsc.tools.entry import main

SIZE = (64, 32)
MEAN, STD = (0.485, 0.456, 0.406), (0.2, 0.3, 0.25)
CLASSES, CPU = 12, torch.device("cpu")


@dataclass
class Published:
    """A model of timm with random weights, our backbone that took them, and its file."""

    oracle: Any
    backbone: Backbone
    file: Path

    def logits(self, images: Tensor) -> Tensor:
        """timm's logits of uint8 (B, 3, H, W)."""
        normalised = functional.normalize(images / 255, list(MEAN), list(STD))
        with torch.no_grad():
            return self.oracle(normalised)  # type: ignore[no-any-return]


def published(name: str, folder: Path) -> Published:
    torch.manual_seed(3)
    # A convolutional network takes any size; a vision transformer is made for one.
    sized = {"img_size": SIZE} if "vit" in name else {}
    oracle = timm.create_model(name, num_classes=CLASSES, **sized)
    oracle.train()(torch.rand(16, 3, *SIZE))  # running statistics of its own
    oracle.eval()
    timm.models.save_for_hf(oracle, str(folder))
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"] |= {"input_size": (3, *SIZE), "mean": MEAN, "std": STD, "interpolation": "bicubic"}
    (folder / "config.json").write_text(json.dumps(config))
    backbone = create(f"timm:{name}", embedding_dim=CLASSES, image_size=SIZE)
    load_weights(backbone, folder)
    classifier = oracle.get_classifier()
    fc: Any = backbone.fc
    features: Any = backbone.features
    with torch.no_grad():
        fc.weight.copy_(classifier.weight)
        features.bias.copy_(classifier.bias)
        features.running_var.fill_(1 - features.eps)
    save_model(backbone, folder / "ours.safetensors")
    return Published(oracle, backbone.eval(), folder / "ours.safetensors")


@pytest.fixture(scope="module", params=["test_byobnet", "test_vit"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of three classes with four pictures each, of the model's size, without loss."""
    root = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(5)
    for person in range(3):
        base = generator.integers(40, 215, (*SIZE, 3))
        (root / str(person)).mkdir()
        for shot in range(4):
            pixels = (base + generator.integers(-40, 41, base.shape)).astype(np.uint8)
            Image.fromarray(pixels).save(root / str(person) / f"{shot}.png")
    return root


def read(root: Path) -> Tensor:
    paths = sorted(root.rglob("*.png"))
    return torch.stack([torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in paths])


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(np.asarray(found, np.float32)), expected, rtol=0, atol=1e-5)


def exported(model: Published, kind: str, folder: Path) -> Path:
    path = folder / {"onnx": "m.onnx", "torch": "m.pt2"}[kind]
    assert main(["export", str(model.file), "--format", kind, "--out", str(path)]) == 0
    return path


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "onnx", "torch"])
def test_every_engine_gives_timms_logits(kind: str, model: Published, tmp_path: Path) -> None:
    path = model.file if kind == "file" else exported(model, kind, tmp_path)
    embedder = open_embedder(path, device=CPU)
    assert (embedder.image_size, embedder.preprocessing) == (SIZE, model.backbone.preprocessing)
    assert embedder.contract_id == open_embedder(model.file, device=CPU).contract_id
    images = torch.randint(0, 256, (5, 3, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    close(embedder(images), model.logits(images))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_commands_that_embed_and_evaluate_give_timms_logits(model, pictures, tmp_path):
    out = tmp_path / "set"
    assert main(["embed", str(model.file), "--data", str(pictures), "--out", str(out)]) == 0
    close(np.concatenate([shard.embeddings for shard in EmbeddingSet(out)]), model.logits(read(pictures)))
    result = tmp_path / "result.json"
    assert main(["eval", str(model.file), "--data", str(pictures), "--json", str(result)]) == 0
    found = json.loads(result.read_text())["sets"][pictures.name]
    mesh = Mesh(0, 1, 0, CPU)
    expected = plsc.evaluation.evaluate(model.logits, [str(pictures)], image_size=SIZE, mesh=mesh, quiet=True)
    for name, value in expected[pictures.name].items():
        assert found[name] == pytest.approx(value, abs=1e-6) if isinstance(value, float) else found[name] == value


@pytest.mark.live
@pytest.mark.slow
def test_the_service_gives_timms_logits(model: Published, pictures: Path, tmp_path: Path) -> None:
    paths = sorted(pictures.rglob("*.png"))[:2]
    inputs = [{"image": base64.b64encode(path.read_bytes()).decode()} for path in paths]
    images = read(pictures)[:2]
    with live_service(tmp_path, embedder=open_embedder(model.file, device=CPU)) as live:
        answer = live.ask("POST", "/v1/embeddings", {"inputs": inputs}).json()
        assert live.ask("GET", "/v1/info").json()["model"]["image_size"] == list(SIZE)
        tensor = {"name": "images", "datatype": "UINT8", "shape": [2, 3, *SIZE], "data": images.flatten().tolist()}
        address = f"/v2/models/{live.service.model_name}"
        served = live.ask("GET", address).json()
        inferred = live.ask("POST", f"{address}/infer", {"inputs": [tensor]}).json()
    assert "warnings" not in answer  # they have the model's shape
    close(answer["embeddings"], model.logits(images))
    assert served["inputs"][0]["shape"] == [-1, 3, *SIZE]
    close(np.reshape(inferred["outputs"][0]["data"], (2, CLASSES)), model.logits(images))


@pytest.mark.slow
def test_pictures_of_another_size_are_resized_by_the_models_interpolation(model: Published, tmp_path: Path) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (150, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png")
    picture = torch.from_numpy(pixels).permute(2, 0, 1)
    resized = functional.resize(picture, list(SIZE), functional.InterpolationMode.BICUBIC, antialias=True)
    close(plsc.embed(str(model.file), tmp_path / "large.png"), model.logits(resized[None]))
    close(plsc.embed(str(model.file), [pixels]), model.logits(resized[None]))


def test_what_squares_alone_allow_is_refused_by_name(model: Published, tmp_path: Path) -> None:
    embedder = open_embedder(model.file, device=CPU)
    with pytest.raises(UsageError, match=r"aligning faces needs square images, and image_size is \[64, 32\]"):
        plsc.embed(embedder, [np.zeros((64, 32, 3), np.uint8)], landmarks=_landmarks(tmp_path))
    with pytest.raises(UsageError, match="rotation TTA needs square images"):
        create("turned:resnet8", embedding_dim=8, image_size=SIZE)
    oblong = create("mobilefacenet", embedding_dim=8, image_size=SIZE)
    with pytest.raises(UsageError, match=r"takes 64x32 \(height x width\), .*which a bare state_dict cannot say"):
        export_insightface(oblong, tmp_path / "model.pt")


def _landmarks(folder: Path) -> Path:
    path = folder / "landmarks.csv"
    path.write_text("image 0,10,20,20,20,15,30,11,40,19,40\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "resnet8", "vit_tiny"])
def test_our_own_backbones_take_oblong_images(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone: nn.Module = create(name, embedding_dim=8, image_size=[64, 32]).eval()  # type: ignore[arg-type]
    images = torch.randint(0, 256, (2, 3, 64, 32), dtype=torch.uint8)
    with torch.no_grad():
        expected = backbone((images.float() - 127.5) / 127.5)
    save_model(backbone, tmp_path / "m.safetensors")
    embedder = open_embedder(tmp_path / "m.safetensors", device=CPU)
    assert embedder.image_size == (64, 32)
    torch.testing.assert_close(embedder(images), expected, rtol=1e-4, atol=1e-5)
