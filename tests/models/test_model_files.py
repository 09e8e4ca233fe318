"""Saving and loading backbones: what comes back, what is inferred, what is refused and how."""

import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import plsc.models
from plsc.errors import DataError, PlscError, UsageError
from plsc.models.preprocessing import ImageSize

SMALL = ["iresnet18", "mobilefacenet", "vit_tiny", "timm:test_vit", "turned:mobilefacenet", "turned:timm:test_vit"]


def small(name: str = "mobilefacenet", size: ImageSize = 48, dim: int = 16, **options: Any) -> plsc.models.Backbone:
    torch.manual_seed(0)
    return plsc.models.create(name, embedding_dim=dim, image_size=size, **options).eval()


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", SMALL)
def test_a_saved_model_comes_back_whole(name: str, tmp_path: Path) -> None:
    model = small(name)
    plsc.models.save_model(model, tmp_path / "m.safetensors")
    back = plsc.models.load_model(tmp_path / "m.safetensors")
    assert same(model, back)
    assert (back.name, back.embedding_dim, back.image_size, back.training) == (name, 16, 48, False)
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        assert torch.equal(back(torch.ones(2, 3, 48, 48)), model(torch.ones(2, 3, 48, 48)))


def test_options_and_layout_in_memory_survive(tmp_path: Path) -> None:
    model = small("vit_tiny", patch_size=16, drop_path=0.2).to(memory_format=torch.channels_last)
    plsc.models.save_model(model, tmp_path / "m.safetensors")
    back = plsc.models.load_model(tmp_path / "m.safetensors")
    assert back.options == {"patch_size": 16, "drop_path": 0.2}
    assert same(model, back)


def test_a_wrapped_model_is_saved_without_its_wrapper(tmp_path: Path) -> None:
    model = small()
    wrapped = torch.nn.Module()
    wrapped.module = model
    plsc.models.save_model(wrapped, tmp_path / "m.safetensors")
    assert same(model, plsc.models.load_model(tmp_path / "m.safetensors"))
    with pytest.raises(UsageError, match="Linear is no backbone"):
        plsc.models.save_model(torch.nn.Linear(2, 2), tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", plsc.models.names())
@pytest.mark.parametrize(("dim", "size"), [(512, 112), (128, 64)])
def test_the_architecture_of_a_bare_state_dict_is_inferred(name: str, dim: int, size: int) -> None:
    with torch.device("meta"):
        state = plsc.models.create(name, embedding_dim=dim, image_size=size).state_dict()
    from plsc.models.backbone import infer

    assert infer(state, "x.pt")[:3] == (name, dim, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "vit_tiny"])
@pytest.mark.parametrize("form", ["bare", "module.", "_orig_mod.", "module._orig_mod.", "nested", "legacy", "half"])
def test_state_dicts_load_in_every_usual_form(name: str, form: str, tmp_path: Path) -> None:
    model = small(name)
    state: Any = OrderedDict(model.state_dict())
    if form.endswith("."):
        state = {form + key: tensor for key, tensor in state.items()}
    if form == "nested":
        state = {"epoch": 3, "state_dict_backbone": state, "optimizer": {"lr": 0.1}}
    if form == "half":
        state = {key: t.half() if t.is_floating_point() else t for key, t in state.items()}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=form != "legacy")
    back = plsc.models.load_model(tmp_path / "model.pt")
    assert (back.name, back.image_size) == (name, 48)
    if form == "half":
        assert {p.dtype for p in back.parameters()} == {torch.float32}
    else:
        assert same(model, back)


def test_a_foreign_safetensors_file_is_inferred_too(tmp_path: Path) -> None:
    model = small("iresnet18")
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    assert same(model, plsc.models.load_model(tmp_path / "m.safetensors"))


def test_a_bare_timm_state_dict_needs_its_architecture(tmp_path: Path) -> None:
    model = small("timm:test_resnet", size=112)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    with pytest.raises(DataError, match="name the architecture"):
        plsc.models.load_model(tmp_path / "m.pt")
    assert same(model, plsc.models.load_model(tmp_path / "m.pt", architecture="timm:test_resnet"))


def test_weights_load_into_a_model_for_fine_tuning(tmp_path: Path) -> None:
    source, target = small("iresnet18"), small("iresnet18", dropout=0.4)
    torch.nn.init.zeros_(target.fc.weight)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    plsc.models.load_weights(target, tmp_path / "w.pt")
    assert same(source, target)
    assert target.conv1.weight.requires_grad
    assert not target.features.weight.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc.bias"), "lacks fc.bias"),
        (
            lambda s: [s.pop(k) for k in list(s) if k.startswith("layer4")],
            r"lacks layer4.0.bn1.weight, .* and \d+ more",
        ),
        (lambda s: s.update(extra=torch.ones(1)), "has unexpected extra"),
        (lambda s: s.update({"fc.weight": torch.ones(16, 512)}), r"other shapes in fc.weight \(16, 512\) instead of"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    model = small("iresnet18")
    before = model.state_dict()["fc.bias"].clone()
    state = dict(model.state_dict())
    change(state)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(DataError, match=message):
        plsc.models.load_weights(model, tmp_path / "w.pt")
    assert torch.equal(model.state_dict()["fc.bias"], before)


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PWNED",)


@pytest.mark.parametrize("way", ["torch", "pickle", "nested"])
def test_a_pickle_that_would_run_a_command_is_refused(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = {"conv1.weight": Command()}
    if way == "pickle":
        Path("m.pt").write_bytes(pickle.dumps(evil))
    else:
        torch.save({"state_dict": evil} if way == "nested" else evil, "m.pt")
    with pytest.raises(DataError, match=r"m\.pt is refused"):
        plsc.models.load_model("m.pt")
    assert not Path("PWNED").exists()


def test_every_truncation_of_a_file_is_one_line(tmp_path: Path) -> None:
    model = small()
    plsc.models.save_model(model, tmp_path / "m.safetensors")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    for name in ("m.safetensors", "m.pt"):
        whole = (tmp_path / name).read_bytes()
        for length in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
            cut = tmp_path / f"cut{name[1:]}"
            cut.write_bytes(whole[:length])
            with pytest.raises(DataError) as caught:
                plsc.models.load_model(cut)
            assert str(cut) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        *([1, 2], "text", torch.ones(3), {"a": 1}, {1: torch.ones(1)}, {}),
        *({key: torch.ones(1)} for key in ("conv1.weight", "layer1.0.prelu.weight", "conv_sep.layers.0.weight")),
        {"patch_embed.proj.weight": torch.ones(1), "feature.0.weight": torch.ones(1)},
    ],
)
def test_what_is_no_state_dict_is_one_line(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(DataError) as caught:
        plsc.models.load_model(tmp_path / "m.pt")
    assert "\n" not in str(caught.value)


METADATA = {"format": "plsc-backbone-1", "name": "mobilefacenet", "embedding_dim": "16", "image_size": "48"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *({"name": name} for name in ("nosuch", "iresnet18")),
        *({"embedding_dim": dim} for dim in ("x", "99999999999999")),
        *({"options": options} for options in ("[]", "{", '{"x": 1}')),
        *({"image_size": "17"}, {"format": "plsc-backbone-9"}),
    ],
)
def test_metadata_that_lies_is_one_line(change: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(small().state_dict(), path, {**METADATA, "options": "{}", **change})
    with pytest.raises(DataError, match=r"m\.safetensors"):
        plsc.models.load_model(path)


def test_a_model_file_has_no_say_in_what_timm_fetches(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = small("timm:test_vit", size=64)
    options = json.dumps({"pretrained": True, "checkpoint_path": "/nowhere/evil.pt"})
    save_file(model.state_dict(), path, {**METADATA, "name": "timm:test_vit", "image_size": "64", "options": options})
    assert same(model, plsc.models.load_model(path))


def test_the_image_size_of_a_file_from_elsewhere_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    model = small("timm:test_byobnet", size=(1040, 32))  # which takes any size
    plsc.models.save_model(model, path)
    with pytest.raises(DataError, match=r"m\.safetensors takes images of 1040 pixels .* set PLSC_LARGEST_IMAGE"):
        plsc.models.load_model(path)
    assert same(model, plsc.models.load_model(path, own=True))
    monkeypatch.setenv("PLSC_LARGEST_IMAGE", "2k")
    with pytest.raises(UsageError, match="PLSC_LARGEST_IMAGE is '2k'; it takes a number of pixels"):
        plsc.models.load_model(path)
    monkeypatch.setenv("PLSC_LARGEST_IMAGE", "1040")
    assert plsc.models.load_model(path).image_size == (1040, 32)


def test_missing_files_and_wrong_architectures_are_usage_and_data_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        plsc.models.load_model(tmp_path / "no.pt")
    plsc.models.save_model(small(), tmp_path / "m.safetensors")
    with pytest.raises(DataError, match="holds mobilefacenet, not iresnet18"):
        plsc.models.load_model(tmp_path / "m.safetensors", architecture="iresnet18")
    with pytest.raises(PlscError, match="make its folder first"):
        plsc.models.save_model(small(), tmp_path / "no" / "m.safetensors")
