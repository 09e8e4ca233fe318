"""Asking for backbones: names, sizes, options, and what a wrong request is told."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plsc.models
from plsc.errors import UsageError
from plsc.models import backbone


def test_names_are_the_families_in_order_of_size() -> None:
    assert plsc.models.names()[:13] == (  # behind them are those that other tests have registered
        *("iresnet18", "iresnet34", "iresnet50", "iresnet100", "iresnet200"),
        *("mobilefacenet", "mobilefacenet_large", "resnet7", "resnet8"),
        *("vit_tiny", "vit_small", "vit_base", "vit_large"),
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("iresnet51", "iresnet50"),
        ("IResNet50", "iresnet50"),
        ("r100", "iresnet100"),
        ("mbf", "mobilefacenet"),
        ("mobilefacnet", "mobilefacenet"),
        ("vit_s", "vit_small"),
        ("vit-base", "vit_base"),
        ("timm:resnet19", "resnet18"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_right_one(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match=rf"did you mean {right}\?"):
        plsc.models.create(wrong)


@given(st.text(max_size=20))
@settings(max_examples=50, deadline=None)
def test_no_text_but_a_name_makes_a_backbone(name: str) -> None:
    if name not in plsc.models.names():
        with pytest.raises(UsageError):
            plsc.models.create(name)


@pytest.mark.parametrize(("size", "near"), [(16, "32"), (0, "32"), (-112, "32"), (100, "96"), (113, "112")])
def test_a_size_that_does_not_fit_is_answered_with_one_that_does(size: int, near: str) -> None:
    with pytest.raises(UsageError, match=f"try {near}"):
        plsc.models.create("mobilefacenet", image_size=size)


@pytest.mark.parametrize(
    "request_",
    [
        {"image_size": 112.0},
        {"image_size": "112"},
        {"image_size": True},
        {"embedding_dim": 0},
        {"embedding_dim": -4},
        {"embedding_dim": 2.5},
        {"drop_out": 0.1},
        {"drop_path": 1.0},
        {"mask_ratio": -0.1},
        {"patch_size": 0},
        {"patch_size": 113},
    ],
)
def test_wrong_numbers_and_options_are_refused_in_one_line(request_: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        plsc.models.create("vit_tiny", **request_)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_registered_function_is_created_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "_builders", copy.copy(backbone._builders))

    @plsc.models.register
    def my_backbone(embedding_dim: int, image_size: int) -> plsc.models.Backbone:
        return plsc.models.Backbone("my_backbone", embedding_dim, image_size)

    assert plsc.models.create("my_backbone", embedding_dim=7).embedding_dim == 7
    assert "my_backbone" in plsc.models.names()


def test_timm_gets_the_image_size_where_it_takes_one_and_what_it_cannot_build_is_one_line() -> None:
    model = plsc.models.create("timm:test_vit", image_size=64, embedding_dim=8).eval()
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 8)
    with pytest.raises(UsageError, match="timm cannot build"):
        plsc.models.create("timm:test_vit", image_size=64, no_such_option=3)


def test_rotation_tta_concatenates_four_embeddings() -> None:
    torch.manual_seed(0)
    model = plsc.models.create("turned:mobilefacenet", image_size=48, embedding_dim=32).eval()
    plain = plsc.models.create("mobilefacenet", image_size=48, embedding_dim=8).eval()
    plain.load_state_dict({key.removeprefix("upright."): value for key, value in model.state_dict().items()})
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        views = model(images).split(8, dim=1)
        for turns, view in enumerate(views):
            torch.testing.assert_close(view, plain(torch.rot90(images, turns, (2, 3))))
    with pytest.raises(UsageError, match="a multiple of 4"):
        plsc.models.create("turned:mobilefacenet", image_size=48, embedding_dim=30)
    with pytest.raises(UsageError, match="no backbone is called 'mobilefacenets'"):
        plsc.models.create("turned:mobilefacenets", image_size=48, embedding_dim=32)
