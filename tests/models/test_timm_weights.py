"""timm's own weights in `timm:NAME`: files, folders and hub ids; what they say of images; what does not fit."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from plsc.errors import DataError, UsageError
from plsc.models import create, load_model, load_weights, save_model
from plsc.models.preprocessing import Preprocessing
from plsc.models.timm_weights import timm_preprocessing, weights_file
from plsc.models.weights import create_for, weights_preprocessing


def timms_own(name: str, seed: int = 7, **options: Any) -> Any:
    """timm's model with random weights and running statistics, in evaluation mode."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def trunk_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model.trunk.state_dict().items()}  # type: ignore[union-attr, operator]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def resnet() -> Any:
    return timms_own("test_resnet")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["state_dict", "state_dict key", "model key", "ema", "module.", "safetensors", "bare"])
def test_timms_own_file_is_taken_in_every_form_that_timm_takes(form: str, resnet: Any, tmp_path: Path) -> None:
    state, path = resnet.state_dict(), tmp_path / "resnet.pth"
    if form == "safetensors":
        path = tmp_path / "resnet.safetensors"
        save_file(state, path)
    elif form == "bare":  # without a classifier, as num_classes=0 leaves it
        torch.save({key: tensor for key, tensor in state.items() if not key.startswith("fc.")}, path)
    else:
        wrapped: dict[str, Any] = {
            "state_dict": state,
            "state_dict key": {"epoch": 3, "args": argparse.Namespace(lr=1), "state_dict": state},
            "model key": {"model": state, "epoch": 3},
            "ema": {"state_dict": {k: torch.zeros_like(v) for k, v in state.items()}, "state_dict_ema": state},
            "module.": {"module." + key: tensor for key, tensor in state.items()},
        }
        torch.save(wrapped[form], path)
    model = create("timm:test_resnet", embedding_dim=8, image_size=64)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    load_weights(model, path)
    own = {key: tensor for key, tensor in state.items() if not key.startswith("fc.")}
    assert same(trunk_of(model), own)
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in ("fc.weight", "features.running_mean"))


@pytest.mark.slow
def test_position_embeddings_are_resampled_as_timm_resamples_them(tmp_path: Path) -> None:
    published = timms_own("test_vit")
    path = tmp_path / "vit.pth"
    torch.save(published.state_dict(), path)
    model = create("timm:test_vit", embedding_dim=8, image_size=(64, 32))
    load_weights(model, path)
    oracle = timm.create_model(
        "test_vit",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(path)},
        num_classes=0,
        img_size=(64, 32),
    )
    assert model.trunk.pos_embed.shape[1] == 1 + 4 * 2  # type: ignore[union-attr]
    assert same(trunk_of(model), oracle.state_dict())


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT with a mean, a size and a token pooling of its own, as timm.models.save_for_hf writes it."""
    folder = tmp_path_factory.mktemp("hub") / "snapshot"
    model = timms_own("test_vit", img_size=(64, 32), global_pool="avg")
    # Given in full: which arguments of a model timm notes by itself differs between its versions.
    expected = {
        "input_size": (3, 64, 32),
        "mean": (0.4, 0.5, 0.6),
        "std": (0.2, 0.3, 0.25),
        "interpolation": "bilinear",
    }
    arguments = {"img_size": [64, 32], "global_pool": "avg"}
    timm.models.save_for_hf(model, str(folder), model_config={"pretrained_cfg": expected, "model_args": arguments})
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"] |= expected
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_of_the_hubs_layout_says_what_its_weights_expect(snapshot: Path) -> None:
    contract = timm_preprocessing("timm:test_vit", weights_file(snapshot))
    assert contract == Preprocessing((64, 32), (102.0, 127.5, 153.0), (51.0, 76.5, 63.75), "bilinear")


@pytest.mark.slow
def test_a_model_takes_its_weights_mean_and_std_and_keeps_them_in_its_file(snapshot: Path, tmp_path: Path) -> None:
    model = create("timm:test_vit", embedding_dim=8, image_size=(64, 32), global_pool="avg")
    load_weights(model, snapshot)
    assert model.preprocessing.mean == (102.0, 127.5, 153.0)
    save_model(model, tmp_path / "m.safetensors")
    read = load_model(tmp_path / "m.safetensors")
    assert (read.preprocessing, read.options) == (model.preprocessing, {"global_pool": "avg"})
    assert same(trunk_of(read), trunk_of(model))


@pytest.mark.parametrize("name", ["test_byobnet", "test_vit", "resnet18.a1_in1k", "vit_base_patch16_clip_224.openai"])
def test_a_file_alone_is_expected_to_take_what_timms_registry_says(name: str, tmp_path: Path) -> None:
    contract = timm_preprocessing(f"timm:{name}", tmp_path / "weights.pth")
    expected = timm.data.resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (torch.tensor(expected[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(contract(pixels), (pixels / 255 - mean) / std, rtol=0, atol=1e-6)
    assert (contract.shape, contract.interpolation) == (expected["input_size"], expected["interpolation"])


def test_equal_channels_are_plscs_own_numbers_bit_for_bit(tmp_path: Path) -> None:
    assert timm_preprocessing("timm:test_resnet", tmp_path / "w.pth") == Preprocessing(160)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file_of", "backbone", "problem"),
    [
        ("test_resnet", "test_byobnet", "lacks .*stem.*and .* more"),
        ("test_vit2", "test_vit", "lacks cls_token"),
        ("test_resnet", "test_vit", "does not fit the model"),
        ("iresnet18", "test_resnet", "does not fit the model: it lacks"),
    ],
)
def test_another_architecture_is_named_in_a_line(file_of: str, backbone: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    other = create(file_of, embedding_dim=8, image_size=32) if file_of == "iresnet18" else timms_own(file_of)
    torch.save(other.state_dict(), path)
    model = create(f"timm:{backbone}", embedding_dim=8, image_size=32)
    before = trunk_of(model)
    with pytest.raises(DataError, match=problem) as caught:
        load_weights(model, path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert same(trunk_of(model), before)


def test_a_folder_of_another_architecture_says_which_backbone_to_give(snapshot: Path) -> None:
    model = create("timm:test_resnet", embedding_dim=8, image_size=32)
    with pytest.raises(
        DataError, match=r'holds test_vit, and the backbone is timm:test_resnet; give .*"timm:test_vit"'
    ):
        load_weights(model, snapshot)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", "config.json is not readable as JSON"),
        ("[" * 100_000, "config.json is not readable as JSON: it is nested too deeply"),
        (" " * (9 << 20), "config.json: it has 9,437,184 bytes"),
        ('{"architecture": "\\u001b[2J"}', "names a model .* which is none"),
        ('{"architecture": "test_resnet", "pretrained_cfg": []}', "pretrained_cfg and model_args are tables"),
        ('{"architecture": "test_resnet", "pretrained_cfg": {"input_size": [1, 28, 28]}}', "images of 1 channels"),
        ('{"architecture": "test_resnet", "pretrained_cfg": {"mean": ["x", 0, 0]}}', "cannot be used"),
        ('{"architecture": "test_resnet", "pretrained_cfg": {"std": [0, 0, 0]}}', "std is 0.0"),
        ('{"architecture": "test_resnet", "pretrained_cfg": {"interpolation": "lanczos"}}', "bilinear or bicubic"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_name(config: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(DataError, match=problem):
        timm_preprocessing("timm:test_resnet", tmp_path / "model.safetensors")


def configured(snapshot: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the folder whose config.json has other tables."""
    shutil.copytree(snapshot, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, **{name: {**config[name], **table} for name, table in changes.items()}})
    )
    return folder


def test_a_model_is_created_with_the_arguments_of_its_weights(snapshot: Path, tmp_path: Path) -> None:
    folder = configured(snapshot, tmp_path / "hub", model_args={"depth": 3})
    model = create_for(folder, "timm:test_vit", embedding_dim=8, image_size=(64, 32))
    assert model.options == {"global_pool": "avg", "depth": 3}
    assert len(model.trunk.blocks) == 3  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"depth": 10_000}, "has more than the 160 parameters"),
        ({"embed_dim": 30_000}, "takes more memory"),
        ({"mlp_ratio": 1e6}, "takes more memory"),
        ({"num_heads": 0}, "cannot be built: "),
    ],
)
def test_arguments_of_another_model_than_the_weights_are_refused_before_it_is_built(
    arguments: dict[str, Any], problem: str, snapshot: Path, tmp_path: Path
) -> None:
    folder = configured(snapshot, tmp_path / "hub", model_args=arguments)
    built: list[nn.Module] = []
    hook = register_module_module_registration_hook(lambda module, name, child: built.append(module))
    try:
        with pytest.raises(DataError, match=problem) as caught:
            create_for(folder, "timm:test_vit", embedding_dim=8, image_size=(64, 32))
    finally:
        hook.remove()
    assert str(folder / "config.json") in str(caught.value)
    assert len(built) < 1000


def test_a_config_has_no_say_in_large_images(snapshot: Path, tmp_path: Path) -> None:
    folder = configured(snapshot, tmp_path / "hub", pretrained_cfg={"input_size": [3, 100_000, 32]})
    with pytest.raises(DataError, match="takes images of 100000 pixels a side"):
        weights_preprocessing("timm:test_vit", folder)


@pytest.mark.parametrize("hub_id", ["timm/resnet18.a1_in1k", "hf-hub:org/name", "hf-hub:org/name@main", "hf-hub:"])
def test_without_the_hub_its_ids_are_answered_in_a_line(hub_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="cannot be had from the Hugging Face hub") as caught:
        weights_file(hub_id)
    assert "\n" not in str(caught.value)
    assert hub_id in str(caught.value)


@pytest.mark.live
def test_a_hub_that_is_not_there_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match=r"cannot be had from the Hugging Face hub \(http://127\.0\.0\.1:1: .*refused"):
        weights_file("hf-hub:org/name")
    assert caplog.text == ""  # no line of the hub's own about trying again


def test_a_hub_id_stands_for_the_snapshot_that_the_hub_gives(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def download(repository: str, name: str, revision: str | None = None, local_files_only: bool = False) -> str:
        asked.append((repository, name, revision))
        return str(snapshot / name)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # a download that is replaced needs no hub
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert weights_file("hf-hub:org/name@v2") == snapshot / "model.safetensors"
    assert asked == [("org/name", "config.json", "v2"), ("org/name", "model.safetensors", "v2")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "local").touch()
    assert weights_file("timm/local") == Path("timm/local")  # what lies here goes before the hub


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds neither model.safetensors nor pytorch_model.bin"):
        weights_file(tmp_path)
