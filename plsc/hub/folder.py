"""The folder of a hub's repository: weights, config.json, model.onnx and the card.

model.safetensors      the backbone. Of a timm:NAME under timm's own names, so that one file serves timm and plsc
embedding.safetensors  of a timm:NAME: the layers behind its trunk, as they were trained
config.json            what timm reads, and a section "plsc": architecture, preprocessing, contract id
model.onnx             the same embeddings for onnxruntime
README.md              the model card
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.embedding.export import export_onnx
from plsc.errors import UsageError
from plsc.files import check_output, remove_leftovers
from plsc.hub.card import CardFacts, model_card
from plsc.models import Backbone, save_model
from plsc.models.preprocessing import contract_id, state_digest
from plsc.models.timm_export import TimmFolder, write_timm_folder
from plsc.models.timm_weights import CONFIG, FETCHING, FILES, LAYERS
from plsc.models.weights import FORMAT
from plsc.models.wrappers import TimmBackbone

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ONNX, CARD = "model.onnx", "README.md"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def check_repository(name: str) -> str:
    """Return ``name`` if it is ``ORG/NAME``; :class:`UsageError` if not."""
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name or name.endswith((".git", ".", "-")):
        raise UsageError(f"{name!r} is no name of a repository; give ORG/NAME of letters, digits, - _ and .")
    return name


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse to write over a file, or over a folder of something else, even where ``overwrite`` is given."""
    check_output(folder, overwrite=overwrite)
    if folder.exists() and not (folder.is_dir() and ((folder / CONFIG).is_file() or not any(folder.iterdir()))):
        raise UsageError(f"{folder} is no folder of a model with a {CONFIG}; name another one")
    remove_leftovers(folder)


def embeddings_contract(model: Backbone) -> str:
    """Return the contract id of a backbone's embeddings."""
    return contract_id(model.preprocessing, state_digest(model.state_dict()))


def write_folder(
    model: Backbone, folder: Path, facts: CardFacts, *, key: "Ed25519PrivateKey | None" = None
) -> dict[str, Any]:
    """Write all files of a repository into ``folder``, which exists; ``key`` signs what plsc reads.

    Returns:
        ``contract_id``, ``files`` and, of timm's models, ``timm``: what timm's model returns.

    Raises:
        DataError: what was written does not give the model's embeddings; or a report lacks something.
    """
    written = _write_weights(model, folder)
    contract = embeddings_contract(model)
    (folder / CARD).write_text(model_card(model, contract, facts, written), encoding="utf-8")
    export_onnx(model, folder / ONNX)
    _sign(folder, key)
    files = sorted(path.name for path in folder.iterdir())
    return {"contract_id": contract, "files": files, "timm": written.returns if written else None}


def write_timm(
    model: Backbone, folder: Path, *, key: "Ed25519PrivateKey | None" = None
) -> tuple[dict[str, Any], TimmFolder]:
    """Write the folder that timm and plsc load, of a backbone of timm's; :class:`UsageError` of any other."""
    about = _about(model, [FILES[0], LAYERS])
    written = write_timm_folder(model, folder, about)
    _sign(folder, key)
    return about, written


def _write_weights(model: Backbone, folder: Path) -> TimmFolder | None:
    if isinstance(model, TimmBackbone):
        return write_timm_folder(model, folder, _about(model, [FILES[0], LAYERS]))
    save_model(model, folder / FILES[0])
    content = {"plsc": _about(model, [FILES[0]])}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return None


def _about(model: Backbone, files: list[str]) -> dict[str, Any]:
    """The section of config.json that says what the model is."""
    from plsc import __version__

    return {
        "format": FORMAT,
        "version": __version__,
        "name": model.name,
        "embedding_dim": model.embedding_dim,
        "options": {name: value for name, value in model.options.items() if name not in FETCHING},
        "preprocessing": model.preprocessing.to_dict(),
        "contract_id": embeddings_contract(model),
        "files": files,
    }


def _sign(folder: Path, key: "Ed25519PrivateKey | None") -> None:
    from plsc.signing import sign

    for name in (CONFIG, FILES[0], LAYERS, ONNX):
        if key is not None and (folder / name).is_file():
            sign(folder / name, key)
