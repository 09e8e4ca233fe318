"""Model files: safetensors with the metadata to rebuild the backbone, bare state_dicts (.pt), and weights of timm."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from plsc.errors import DataError, UsageError, first_line
from plsc.files import atomic_write, pinned
from plsc.models import timm_weights
from plsc.models.backbone import Architecture, Backbone, ModuleBackbone, exists, infer, is_ours
from plsc.models.preprocessing import ImageSize, Preprocessing, check_side, height_and_width, image_size
from plsc.models.torch_files import archive_names, check_tensors, checkpoint_hint, load_torch_file
from plsc.models.trial import Inputs, require_trial
from plsc.models.wrappers import ROTATION_KEYS, ROTATION_PREFIX, TIMM_PREFIX, RotationTTA, TimmBackbone
from plsc.signing import MODEL, is_asked_for, open_signed

FORMAT = "plsc-backbone-1"
LAYOUT, TIMM_LAYOUT = "layout", "timm"  # in the metadata of a file that timm reads too, and …
CLASSIFIER = "classifier"  # … the name there of timm's last layer, which stands for the layers of timm_weights.LAYERS
_PLAIN_NAME = re.compile(rf"({ROTATION_PREFIX})?({TIMM_PREFIX})?[\w.-]+")  # timm would fetch hf-hub:X, read local-dir:X

_LARGEST_HEADER = 4 << 20  # of .safetensors: some 100 bytes for each tensor
_LARGEST_OPTION = 1 << 16  # of a model: layers or channels
_FLOAT = 4  # bytes of a number of a model that is built, whatever type its file has
_MOST_RENAMED = 2  # parameters that timm's conversion makes of one in a file, at most: it splits some, and joins more

# Prefixes that data parallel wrappers and torch.compile put before a state_dict's keys …
_PREFIXES = ("module.", "_orig_mod.")
# … and keys under which training scripts store it in a checkpoint; of timm's two, the averaged weights come first.
_WRAPPERS = ("state_dict_backbone", "state_dict_ema", "model_ema", "state_dict", "backbone", "model")


def save_model(model: nn.Module, path: str | Path) -> None:
    """Write a backbone (perhaps wrapped by data parallel or torch.compile) to ``path``, a .safetensors file.

    The metadata hold what :func:`load_model` needs: name, embedding_dim, options, preprocessing. Of a module of your
    own, :class:`plsc.models.ModuleBackbone` says them.

    Raises:
        UsageError: it is no backbone, or its state holds something that is no tensor, or lies in parts on the ranks.
    """
    with atomic_write(Path(path)) as tmp_path:
        tmp_path.write_bytes(serialize_model(model))


def serialize_model(model: nn.Module) -> bytes:
    """Return the content of :func:`save_model`'s file: a copy of the weights as they are now."""
    from safetensors.torch import save

    backbone = unwrapped(model)
    held = _holder(backbone).state_dict()
    if others := [key for key, value in held.items() if not isinstance(value, Tensor)]:
        raise UsageError(
            f"{backbone.name} has {others[0]} in its state, which is no tensor; .safetensors holds no other"
        )
    if any(hasattr(value, "full_tensor") for value in held.values()):
        mend = "save a whole copy that has torch's get_model_state_dict with full_state_dict (examples/fsdp2_dcp.py)"
        raise UsageError(f"{backbone.name} lies in parts on several ranks: {mend}")
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in held.items()}
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in state.values())
    # The file has no form for weights that two layers share: each has its own copy there.
    alone = {k: t.clone() if users[t.untyped_storage().data_ptr()] > 1 else t for k, t in state.items()}
    return save(alone, model_metadata(backbone))


def model_metadata(backbone: Backbone) -> dict[str, str]:
    """Return what a file says of a backbone: name, embedding_dim, options and preprocessing, as texts."""
    return {
        "format": FORMAT,
        "name": backbone.name,
        "embedding_dim": str(backbone.embedding_dim),
        "options": json.dumps(backbone.options, default=str),
        **backbone.preprocessing.metadata(),
    }


def load_model(
    path: str | Path, *, architecture: str | None = None, module: nn.Module | None = None, own: bool = False
) -> Backbone:
    """Load a backbone, in evaluation mode, on the CPU.

    Args:
        path: a .safetensors file of :func:`save_model`, or a state_dict of arcface_torch (.pt, .pth, .bin or
            .safetensors), whose architecture is inferred from its keys and shapes.
        architecture: the name to use if it cannot be inferred (``timm:NAME``), or that the file must have.
        module: takes the weights, strictly, in the place of a backbone that is built: a module of your own, for a file
            of :func:`save_model`; a :class:`plsc.models.ModuleBackbone` of it, for a file that says nothing of images.
        own: this process wrote it: a signature is not asked for (:mod:`plsc.signing`).

    Raises:
        UsageError: there is no such file.
        DataError: it is no model file, it is corrupt, or its weights do not fit the architecture.
        IntegrityError: it is not signed, where that is asked for.
    """
    path = Path(path)
    if architecture is not None and module is not None:
        raise UsageError("an architecture and a module are given; one of them takes the weights")
    state, metadata = read_state(path, own=own)
    stated = _from_metadata(metadata, path)
    if module is not None:
        model = _given(module, stated, path, own=own)
        _assign(_holder(model), state, path)
        return _prepared(model, metadata, path)
    found = stated or _from_state(state, architecture, path)
    if architecture is not None and found.name != architecture:
        raise DataError(f"{path} holds {found.name}, not {architecture}; leave the architecture out")
    _require_builder(found.name, path)
    build = partial(_build, found, len(state), path, state)
    if not own and not is_asked_for():
        check_side(found.image_size, path)
        _require_trial(path, found, state, build)
    model = build()
    _assign(_holder(model), state, path)
    return _prepared(model, metadata, path)


def _given(module: nn.Module, stated: Architecture | None, path: Path, *, own: bool) -> Backbone:
    """The backbone of a caller's module, with what the file says of it where it does not say so itself."""
    if isinstance(module, Backbone):
        return module
    if stated is None:
        mend = "give module=plsc.models.ModuleBackbone(MODULE, EMBEDDING_DIM, IMAGE_SIZE)"
        raise DataError(f"{path} does not say which images its weights take: {mend}")
    if not own and not is_asked_for():
        check_side(stated.image_size, path)
    model = ModuleBackbone(module, stated.embedding_dim, stated.image_size, name=stated.name)
    model.options = stated.options
    return model


def _prepared(model: Backbone, metadata: dict[str, str], path: Path) -> Backbone:
    """The backbone that has its weights, with the contract that the file states, in evaluation mode."""
    if contract := _contract(metadata, path):
        adopt_preprocessing(model, contract)
    return model.eval()


def _holder(backbone: Backbone) -> nn.Module:
    """The module whose keys stand in files: that of a user without what plsc puts around it."""
    return backbone.module if isinstance(backbone, ModuleBackbone) else backbone


def load_weights(model: nn.Module, source: str | Path) -> None:
    """Copy weights into ``model``, strictly, and adopt the mean, std and interpolation that they were trained with.

    The class head is not part of a backbone, so the number of classes does not matter. Weights of a
    :class:`plsc.models.wrappers.RotationTTA` fit the backbone inside it. Weights of timm's own model fit the ``trunk``
    of a ``timm:NAME``, whose last layers, ``fc`` and ``features``, stay as they are.

    Args:
        model: a backbone, perhaps wrapped.
        source: a file, or what :func:`plsc.models.timm_weights.weights_file` takes.

    Raises:
        UsageError: there is no such file.
        DataError: it is unreadable, or keys are missing, unexpected or of another shape (named).
    """
    path = timm_weights.weights_file(source)
    state, metadata = read_state(path)
    backbone = unwrapped(model)
    contract = _brought(backbone.name, state, metadata, path)
    if not isinstance(backbone, RotationTTA):
        within = (f"{ROTATION_KEYS}module.",) if isinstance(backbone, ModuleBackbone) else ()
        state = _without_prefixes(state, (*within, ROTATION_KEYS))
    if isinstance(backbone, TimmBackbone) and timm_weights.is_timms_own(state):
        _assign(backbone.trunk, timm_weights.trunk_state(backbone, state, path), path)
    else:
        _assign(_holder(backbone), state, path)
    if contract is not None:
        adopt_preprocessing(backbone, contract)


def create_for(source: str | Path, name: str, *, embedding_dim: int, image_size: ImageSize) -> Backbone:
    """Create a backbone with fresh weights, and with the options that the weights in ``source`` were made for.

    A snapshot of timm's model holds the arguments that it was built with; other weights fit the default options.

    Args:
        source: as :func:`load_weights` takes it; "": there are no weights.
        name, embedding_dim, image_size: as :func:`plsc.models.create` takes them.

    Raises:
        UsageError: as of :func:`plsc.models.create`; there is no such file.
        DataError: its arguments are of another model than the weights, or of one that takes more than those tell.
    """
    options: dict[str, Any] = {}
    if source and name.startswith(TIMM_PREFIX):
        path = timm_weights.weights_file(source)
        options = timm_weights.model_options(path)
    architecture = Architecture(name, embedding_dim, image_size, options)
    if not options:
        return architecture.build()
    config, (state, _) = path.with_name(timm_weights.CONFIG), read_state(path)
    build = partial(_build, architecture, _MOST_RENAMED * len(state), config)
    if not is_asked_for():
        _require_trial(config, architecture, state, build)
    return build()


def weights_preprocessing(name: str, source: str | Path) -> Preprocessing | None:
    """Return the contract that the weights in ``source`` bring to the backbone ``name``; None where they do not say.

    Raises as :func:`load_weights` does.
    """
    path = timm_weights.weights_file(source)
    contract = _brought(name, *read_state(path), path)
    if contract is not None and not is_asked_for():
        check_side(contract.image_size, path)
    return contract


def adopt_preprocessing(backbone: Backbone, contract: Preprocessing) -> None:
    """Let ``backbone`` take images as ``contract`` says, in its own size."""
    backbone.preprocessing = dataclasses.replace(contract, image_size=backbone.image_size)


def _brought(name: str, state: dict[str, Tensor], metadata: dict[str, str], path: Path) -> Preprocessing | None:
    if name.startswith(TIMM_PREFIX) and timm_weights.is_timms_own(state):
        return timm_weights.timm_preprocessing(name, path)
    return _contract(metadata, path)


def _contract(metadata: dict[str, str], path: Path) -> Preprocessing | None:
    """Read the contract from a file's metadata; None where they are not plsc's."""
    if metadata.get("format") != FORMAT:
        return None
    with _metadata_errors(path):
        return Preprocessing.from_metadata(metadata)


@contextmanager
def _metadata_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} has incomplete metadata: {first_line(error)}; save it again") from None


def read_state(path: Path, *, own: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors by key, without wrappers' prefixes, and the metadata (of .safetensors only)."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}{checkpoint_hint(path) or '; name a model file (.safetensors, .pt)'}")
    if path.suffix in ("", ".distcp") and (mend := checkpoint_hint(path)):
        raise DataError(f"{path} is no model file{mend}")
    if path.suffix == ".onnx":
        raise UsageError(f"{path} is an ONNX model, which can only embed; name a .safetensors or .pt file")
    with path.open("rb") if own else open_signed(path, MODEL) as file:
        is_safe = path.suffix == ".safetensors"
        state, metadata = _read_safetensors(file, path) if is_safe else (_read_torch(file, path), {})
    if not state:
        raise DataError(f"{path} holds no tensors")
    if is_safe and metadata.get(LAYOUT) == TIMM_LAYOUT:
        return _joined(state, metadata.get(CLASSIFIER, ""), path, own=own), metadata
    # What plsc wrote has no wrapper's prefix, but perhaps a module that is called as such.
    return state if metadata.get("format") == FORMAT else _without_prefixes(state), metadata


def _joined(trunk: dict[str, Tensor], classifier: str, path: Path, *, own: bool) -> dict[str, Tensor]:
    """The state of a TimmBackbone whose trunk is in ``path`` under timm's names, and its last layers beside it."""
    layers, _ = read_state(path.with_name(timm_weights.LAYERS), own=own)
    kept = {key: tensor for key, tensor in trunk.items() if not (classifier and key.startswith(f"{classifier}."))}
    return {f"trunk.{key}": tensor for key, tensor in kept.items()} | layers


def unwrapped(model: nn.Module) -> Backbone:
    """Return the backbone inside data parallel and torch.compile wrappers."""
    inner: Any = model
    while not isinstance(inner, Backbone):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            name = type(model).__name__
            mend = "plsc.models.ModuleBackbone(MODULE, EMBEDDING_DIM, IMAGE_SIZE) makes one of it"
            raise UsageError(f"{name} is no backbone of plsc.models.create: {mend}")
    return inner


def _read_safetensors(file: BinaryIO, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _LARGEST_HEADER:
        raise DataError(f"{path} is truncated or corrupt: it announces a header of {header_bytes:,} bytes")
    try:
        with safe_open(pinned(file), framework="pt") as tensors:
            # Copied, because views of the mapped file are aligned as its header is long, and the last bits of a
            # convolution depend on its weights' alignment.
            state = {key: tensors.get_tensor(key).clone() for key in tensors.keys()}  # noqa: SIM118
            return state, dict(tensors.metadata() or {})
    except (SafetensorError, ValueError) as error:
        raise DataError(f"{path} is truncated or corrupt: {first_line(error)}; use another copy") from None


def _read_torch(file: BinaryIO, path: Path) -> dict[str, Tensor]:
    if any(name.endswith((".py", "/archive_format")) or "/models/" in name for name in archive_names(file)):
        raise DataError(f"{path} is an exported program, not a state_dict; only embedding works with it")
    loaded = load_torch_file(file)
    tensors = _tensors(loaded, path)
    check_tensors(tensors, path)
    return tensors


def _tensors(loaded: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(loaded, Mapping):
        wrapper = next((key for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if wrapper is None:
            break
        loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping):
        raise DataError(f"{path} holds a {type(loaded).__name__}, not a state_dict; save model.state_dict()")
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise DataError(f"{path} is no state_dict: its entry {key!r} is a {type(value).__name__}")
    return dict(loaded)


def _without_prefixes(state: dict[str, Tensor], prefixes: Iterable[str] = _PREFIXES) -> dict[str, Tensor]:
    while prefix := next((p for p in prefixes if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    return state


def _from_metadata(metadata: dict[str, str], path: Path) -> Architecture | None:
    if "format" not in metadata or "name" not in metadata:
        return None
    if metadata["format"] != FORMAT:
        raise DataError(f"{path} has the format {metadata['format']!r}; this version reads {FORMAT!r}")
    if not _PLAIN_NAME.fullmatch(metadata["name"]):
        raise DataError(f"{path} names a model {metadata['name'][:80]!r}, which is none; use another copy")
    with _metadata_errors(path):
        options = {
            key: value for key, value in json.loads(metadata["options"]).items() if key not in timm_weights.FETCHING
        }
        if any(isinstance(value, int) and value > _LARGEST_OPTION for value in options.values()):
            raise ValueError(f"an option above {_LARGEST_OPTION:,}")
        size = image_size(json.loads(metadata["image_size"]))
        return Architecture(metadata["name"], int(metadata["embedding_dim"]), size, options)


def _from_state(state: dict[str, Tensor], architecture: str | None, path: Path) -> Architecture:
    if architecture is None or not architecture.startswith(TIMM_PREFIX):
        return infer(state, str(path))
    if "fc.weight" not in state:
        raise DataError(f"{path} lacks fc.weight, so it is no {architecture} of plsc")
    return Architecture(architecture, state["fc.weight"].shape[0], 112, {})


def _require_builder(name: str, path: Path) -> None:
    """Refuse weights whose module nothing here builds: a file brings no code."""
    name = name.removeprefix(ROTATION_PREFIX)
    if not name.startswith(TIMM_PREFIX) and not exists(name):
        raise DataError(
            f"{path} holds weights of {name[:80]}, which neither plsc nor an installed package builds: give Python its "
            "module, plsc.load_model(FILE, module=…), or install its package; an .onnx or .pt2 export needs neither "
            "(docs/features/own_backbones.md)"
        )


def _require_trial(
    path: Path, architecture: Architecture, state: Mapping[str, Tensor], build: Callable[[], Backbone]
) -> None:
    """Let a process of its own build what a file describes, and embed a picture; plsc's own backbones need none."""
    name = architecture.name.removeprefix(ROTATION_PREFIX)
    if is_ours(name):
        return
    if name.startswith(TIMM_PREFIX):
        import timm  # noqa: F401  (here, and not in each trial)
    inputs = Inputs("", "float32", ((1, 3, *height_and_width(architecture.image_size)),))
    require_trial(path, "backbone", build, inputs, sum(tensor.numel() * _FLOAT for tensor in state.values()))


def _build(
    architecture: Architecture, parameters: int, path: Path, state: Mapping[str, Tensor] | None = None
) -> Backbone:
    """Build the backbone that ``path`` describes: first without memory, with so many parameters at most, for ``state``.

    So a file takes no more than its weights do. plsc's own, which have no tables, stay without memory.
    """
    try:
        with torch.device("meta"), _at_most_parameters(parameters):
            model = architecture.build()
        if state is not None:
            _check_fit(_holder(model), state, path)
        if is_ours(architecture.name.removeprefix(ROTATION_PREFIX)):
            return model
        return architecture.build()  # its buffers may have values that no state_dict holds
    except DataError:
        raise
    except Exception as error:  # timm's models are built of options that a file may give any value
        raise DataError(f"{path} describes a model that cannot be built: {first_line(error)}") from None


@contextmanager
def _at_most_parameters(count: int) -> Iterator[None]:
    """End the building of a model that gets more parameters than ``count``: of a million layers it would not end."""
    left = count

    def take(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        left -= parameter is not None
        if left < 0:
            raise UsageError(f"it has more than the {count:,} parameters of the file")

    hook = register_module_parameter_registration_hook(take)
    try:
        yield
    finally:
        hook.remove()


def _assign(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    _check_fit(model, state, path)
    own = model.state_dict()
    as_build = {key: tensor.to(own[key].dtype) for key, tensor in state.items()}
    model.load_state_dict(as_build, strict=True, assign=any(tensor.is_meta for tensor in own.values()))


def _check_fit(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    own = model.state_dict()
    others = [(key, state[key].shape, own[key].shape) for key in own if key in state]
    problems = {
        "lacks": [key for key in own if key not in state],
        "has unexpected": [key for key in state if key not in own],
        "has other shapes in": [f"{key} {tuple(a)} instead of {tuple(b)}" for key, a, b in others if a != b],
    }
    for problem, keys in problems.items():
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise DataError(f"{path} does not fit the model: it {problem} {', '.join(keys[:3])}{more}")
