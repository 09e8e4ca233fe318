"""Weights that timm's models come with: a state_dict, a folder of the Hugging Face hub's layout, or a hub id.

Such a folder, which ``timm.models.save_for_hf`` writes and the hub's snapshots are, holds ``config.json``: the
architecture, the arguments that it was built with, and ``pretrained_cfg``, what its weights expect of an image. A
state_dict alone has none of it; then timm's own registry says what the weights of that name expect.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from plsc.errors import DataError, UsageError, first_line, quoted
from plsc.files import LARGEST_JSON, parse_json
from plsc.models.preprocessing import Preprocessing
from plsc.models.torch_files import checkpoint_hint
from plsc.models.wrappers import TIMM_PREFIX, TimmBackbone
from plsc.signing import MODEL, SUFFIX, is_asked_for, read_signed
from plsc.text_files import read_text

HUB_PREFIX = "hf-hub:"
CONFIG = "config.json"
FILES = ("model.safetensors", "pytorch_model.bin")  # the first of them that a folder holds
LAYERS = "embedding.safetensors"  # of a TimmBackbone whose trunk is stored under timm's names: the layers behind it
_HUB_SECONDS = 5.0  # for its first answer
_ARCHITECTURE = re.compile(rf"({TIMM_PREFIX})?[\w.-]{{1,128}}")
_TIMMS_OWN_ID = re.compile(r"timm/[\w.-]+")
# timm's options that fetch or open other files: a file must not set them.
FETCHING = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
# What plsc gives to timm itself.
_GIVEN = ("num_classes", "in_chans", "img_size")


class SnapshotConfig(NamedTuple):
    """Content of a ``config.json``: what the weights expect, and the model's arguments."""

    pretrained_cfg: Mapping[str, Any]
    model_args: Mapping[str, Any]


def weights_file(source: str | Path) -> Path:
    """Return the file of weights that ``source`` names.

    Args:
        source: a file; a folder with one of :data:`FILES`; ``hf-hub:ORG/NAME``, perhaps with ``@REVISION``, or
            ``timm/NAME``, which are downloaded to huggingface_hub's cache, or found in it.

    Raises:
        UsageError: there is no such thing, or the hub does not give it.
    """
    path = Path(source)
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).is_file()), None)
        if found is None:
            mend = checkpoint_hint(path) or "; name the file of weights"
            raise UsageError(f"{path} holds neither {' nor '.join(FILES)}{mend}")
        return found
    text = str(source)
    if not path.exists() and (text.startswith(HUB_PREFIX) or _TIMMS_OWN_ID.fullmatch(text)):
        return _downloaded(text, FILES)
    return path


def is_hub_id(source: str | Path) -> bool:
    """Return whether ``source`` names a repository of the hub: ``hf-hub:ORG/NAME``, perhaps with ``@REVISION``."""
    return str(source).startswith(HUB_PREFIX)


def hub_model(hub_id: str) -> Path:
    """Return the model.safetensors of a repository of the hub, with the files that it needs beside it.

    Nothing that is pickled is asked for. Without the hub, or with HF_HUB_OFFLINE, it is found in the cache.

    Raises:
        UsageError: the hub and its cache do not have it.
    """
    return _downloaded(hub_id, FILES[:1])


def _downloaded(hub_id: str, weights: tuple[str, ...]) -> Path:
    from huggingface_hub import hf_hub_download

    repository, _, revision = hub_id.removeprefix(HUB_PREFIX).partition("@")
    silence = why_no_hub()
    get = partial(hf_hub_download, repository, revision=revision or None, local_files_only=silence is not None)
    try:
        config = get(CONFIG)
        *others, last = weights
        found = next((path for name in others if (path := _if_there(get, name))), None) or get(last)
        if LAYERS in read_text(Path(config), LARGEST_JSON):
            get(LAYERS)
        if is_asked_for():
            for name in (CONFIG, Path(found).name, LAYERS):
                _if_there(get, name + SUFFIX)
        return Path(found)
    except Exception as error:  # errors of the hub, its HTTP client and its checks of names share no base class
        raise UsageError(
            f"{hub_id} cannot be had from the Hugging Face hub ({silence or first_line(error)}); check its name and "
            f"the network, or name a folder with its {CONFIG} and {FILES[0]}"
        ) from None


def _if_there(get: Callable[[str], str], name: str) -> str | None:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return get(name)
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError) and not name.endswith(SUFFIX):  # the hub was not reached
            raise
        return None


def why_no_hub() -> str | None:
    """The reason why the hub is not asked, but its cache alone; None where it answers.

    hf_hub_download would try five times, for half a minute, with a line of its own for each; nothing sets fewer.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache has not all of it"
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # of whichever HTTP client it uses
        return f"{constants.ENDPOINT}: {first_line(error)}"
    return None


def snapshot_config(file: Path, name: str | None = None) -> SnapshotConfig | None:
    """Read the ``config.json`` beside a file of weights; None where there is none, or it is not timm's.

    Raises:
        DataError: it is broken, or of another architecture than the backbone ``name``'s.
    """
    path = file.with_name(CONFIG)
    if not path.is_file():
        return None
    content = parse_json(read_signed(path, MODEL, LARGEST_JSON), path)
    if not isinstance(content, dict) or "architecture" not in content:
        return None
    found_name = str(content["architecture"])
    if not _ARCHITECTURE.fullmatch(found_name):
        raise DataError(f"{path} names a model {quoted(found_name)}, which is none; use another copy")
    pretrained_cfg = content.get("pretrained_cfg", content)  # timm's older files have all in one
    model_args = content.get("model_args") or {}
    if not isinstance(pretrained_cfg, dict) or not isinstance(model_args, dict):
        raise DataError(f"{path} is no config of timm: pretrained_cfg and model_args are tables; use another copy")
    wanted, found = (text.removeprefix(TIMM_PREFIX).partition(".")[0] for text in (name or found_name, found_name))
    if wanted != found:
        raise DataError(f'{file} holds {found}, and the backbone is {name}; give backbone = "{TIMM_PREFIX}{found}"')
    return SnapshotConfig(pretrained_cfg, model_args)


def model_options(file: Path) -> dict[str, Any]:
    """Return the arguments of timm's model that the weights in ``file`` were made for, beside those that plsc gives."""
    config = snapshot_config(file)
    given = {} if config is None else config.model_args
    return {name: value for name, value in given.items() if name not in (*FETCHING, *_GIVEN)}


def timm_preprocessing(name: str, file: Path) -> Preprocessing:
    """Return what timm says that the weights in ``file`` expect of an image.

    timm's crop_pct is left out: images here are crops already, and are resized to the input size as a whole.

    Args:
        name: of the backbone, ``timm:NAME`` or ``timm:NAME.TAG``.
        file: its weights; the ``config.json`` beside them counts, or else timm's registry.

    Raises:
        DataError: the config is of another architecture, or its numbers are none.
    """
    import timm
    from timm.data import resolve_data_config

    config = snapshot_config(file, name)
    if config is not None:
        pretrained_cfg = dict(config.pretrained_cfg)
    else:
        registered = timm.get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
        pretrained_cfg = {} if registered is None else registered.to_dict()
    try:
        expected = resolve_data_config({}, pretrained_cfg=pretrained_cfg)
        channels, *size = expected["input_size"]
        if channels != 3:
            raise DataError(f"{file} takes images of {channels} channels; plsc gives three, RGB")
        mean, std = ([round(255 * value, 9) for value in expected[key]] for key in ("mean", "std"))
        return Preprocessing(size, mean, std, expected["interpolation"])  # type: ignore[arg-type]
    except (UsageError, TypeError, ValueError, AssertionError) as error:
        raise DataError(f"what timm says of the images for {file} cannot be used: {first_line(error)}") from None


def is_timms_own(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state_dict is of a model of timm alone, and not of a :class:`TimmBackbone` around one."""
    return not any(key.startswith("trunk.") for key in state)


def trunk_state(backbone: TimmBackbone, state: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return timm's state_dict as ``backbone.trunk`` takes it, perhaps with keys that do not fit.

    The classifier is left out. Where keys or shapes differ, the conversion that timm has for this family renames keys
    of the original authors and resamples position embeddings to the trunk's image size.

    Raises:
        DataError: the weights are of another architecture, or timm's conversion fails.
    """
    snapshot_config(file, backbone.name)
    trunk = backbone.trunk
    own = {key: tensor.shape for key, tensor in trunk.state_dict().items()}
    found = _without_classifier(state, trunk, own)
    if {key: tensor.shape for key, tensor in found.items()} == own:
        return found
    # timm's name for it in the module of every family
    convert = getattr(sys.modules[type(trunk).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return found
    try:
        return _without_classifier(convert(dict(state), trunk), trunk, own)
    except Exception as error:  # conversions index keys and reshape tensors of files that may be of anything
        raise DataError(
            f"{file} does not fit the model: timm's conversion of its keys fails ({first_line(error)}); its first keys "
            f"are {', '.join(list(state)[:3])}, and the model's {', '.join(list(own)[:3])}"
        ) from None


def _without_classifier(state: Mapping[str, Tensor], trunk: Any, own: Mapping[str, Any]) -> dict[str, Tensor]:
    classifier = trunk.pretrained_cfg.get("classifier") or ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    prefixes = tuple(f"{name}." for name in names)
    return {key: tensor for key, tensor in state.items() if key in own or not key.startswith(prefixes)}
