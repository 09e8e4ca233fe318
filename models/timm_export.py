"""A ``timm:NAME`` backbone in the layout of the hub's folders, which timm and plsc both load without a second copy.

``model.safetensors`` holds the trunk under timm's own names. Where timm's classifier is one linear layer behind the
trunk's features, it takes the place of the backbone's last layers: batch normalisation in evaluation is an affine map,
so ``features(fc(x)) = (S fc) x + (bias - S mean)`` with ``S = weight / sqrt(var + eps)``. timm's model then returns the
embeddings; of other families it returns the features. The layers themselves, whose bits the embeddings' contract id
stands for, are in ``embedding.safetensors``, and the metadata of ``model.safetensors`` say so
(:func:`plsc.models.weights.read_state`).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plsc.errors import DataError, UsageError
from plsc.models.backbone import Backbone
from plsc.models.preprocessing import height_and_width
from plsc.models.timm_weights import CONFIG, FETCHING, FILES, LAYERS
from plsc.models.weights import CLASSIFIER, LAYOUT, TIMM_LAYOUT, model_metadata
from plsc.models.wrappers import TIMM_PREFIX, TimmBackbone, timm_model

EMBEDDINGS, FEATURES = "embeddings", "features"
TOLERANCE = 1e-5  # of the largest value
_KEPT = ("fixed_input_size", "pool_size", "first_conv", "classifier")  # of timm's own pretrained_cfg
_CHECKED = 3  # images


class TimmFolder(NamedTuple):
    """What :func:`write_timm_folder` wrote: what timm's model returns, and how far that is from the backbone's."""

    returns: str
    max_abs_error: float
    max_abs_value: float


def write_timm_folder(backbone: Backbone, folder: Path, about: dict[str, Any]) -> TimmFolder:
    """Write config.json, model.safetensors and embedding.safetensors; verified by timm, which loads the folder.

    Args:
        backbone: a :class:`TimmBackbone`.
        folder: exists.
        about: the section ``plsc`` of config.json.

    Raises:
        UsageError: the backbone is none of timm's.
        DataError: timm's model returns something else than the backbone.
    """
    from safetensors.torch import save_file

    if not isinstance(backbone, TimmBackbone):
        raise UsageError(f"timm has no {backbone.name}: only a {TIMM_PREFIX}NAME can be loaded by it")
    whole = _with_classifier(backbone.eval())
    if whole is None:
        arguments = timm_model(backbone.name, backbone.image_size, backbone.options)[1]
        state, classifier = backbone.trunk.state_dict(), ""
    else:
        model, arguments, classifier = whole
        state = model.state_dict()
    layers = {key: tensor for key, tensor in backbone.state_dict().items() if not key.startswith("trunk.")}
    metadata = {**model_metadata(backbone), LAYOUT: TIMM_LAYOUT, CLASSIFIER: classifier}
    save_file(_plain(state), folder / FILES[0], metadata)
    save_file(_plain(layers), folder / LAYERS)
    classes = backbone.embedding_dim if whole else 0
    config = {**_config(backbone, arguments, classes), "plsc": about}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return _verified(backbone, folder, EMBEDDINGS if whole else FEATURES)


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}


def _with_classifier(backbone: TimmBackbone) -> tuple[Any, dict[str, Any], str] | None:
    """timm's model whose classifier stands for the last layers, its arguments, the classifier's name; None: it cannot.

    It cannot where the classifier is no linear layer with a bias over the trunk's features: two classifiers of a
    distilled model, a convolution.
    """
    model, arguments = timm_model(backbone.name, backbone.image_size, backbone.options, backbone.embedding_dim)
    classifier = model.get_classifier()
    name = next((name for name, module in model.named_modules() if module is classifier), "")
    if type(classifier) is not nn.Linear or classifier.bias is None or not name:
        return None
    loaded = model.load_state_dict(backbone.trunk.state_dict(), strict=False)
    own = {f"{name}.weight", f"{name}.bias"}
    if loaded.unexpected_keys or set(loaded.missing_keys) != own or classifier.weight.shape != backbone.fc.weight.shape:
        return None
    norm = backbone.features
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    with torch.no_grad():
        classifier.weight.copy_(backbone.fc.weight.double() * scale[:, None])
        classifier.bias.copy_(norm.bias.double() - norm.running_mean.double() * scale)
        images = torch.randn(_CHECKED, *backbone.preprocessing.shape, generator=torch.Generator().manual_seed(0))
        expected = backbone(images)
        error = (model.eval()(images) - expected).abs().max()
    return (model, arguments, name) if error <= TOLERANCE * expected.abs().max() else None


def _config(backbone: TimmBackbone, arguments: dict[str, Any], num_classes: int) -> dict[str, Any]:
    contract = backbone.preprocessing
    size = height_and_width(contract.image_size)
    mean, std = (list(v) if isinstance(v, tuple) else [v] * 3 for v in (contract.mean, contract.std))
    own = backbone.trunk.pretrained_cfg
    own = own if isinstance(own, dict) else own.to_dict()
    return {
        "architecture": backbone.name.removeprefix(TIMM_PREFIX).partition(".")[0],
        "num_classes": num_classes,
        "num_features": int(backbone.trunk.num_features),
        "pretrained_cfg": {
            **{key: own[key] for key in _KEPT if own.get(key) is not None},
            "input_size": [3, *size],
            "mean": [value / 255 for value in mean],
            "std": [value / 255 for value in std],
            "interpolation": contract.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "squash",  # resized as a whole, as plsc does
            "num_classes": num_classes,
        },
        "model_args": {key: value for key, value in arguments.items() if key not in FETCHING},
    }


def _verified(backbone: TimmBackbone, folder: Path, returns: str) -> TimmFolder:
    """Let timm load the folder, and compare what its model returns."""
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(_CHECKED, *backbone.preprocessing.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = (backbone if returns == EMBEDDINGS else backbone.trunk)(images)
        found = model(images)
    if found.shape != expected.shape:
        raise DataError(f"timm's {backbone.name} returns {tuple(found.shape)}, not {tuple(expected.shape)}")
    error, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not error <= TOLERANCE * largest:
        raise DataError(f"timm's {backbone.name} is off by {error:.2g} (tolerance {TOLERANCE * largest:.2g})")
    return TimmFolder(returns, error, largest)
