"""Models, embeddings, evaluation and alignment as functions of ``plsc``: what the commands do, for a program.

``plsc.load_model``, ``plsc.embed`` and so on are these functions; docs/python.md shows each.
"""

from __future__ import annotations  # signatures in help() then read as they are written here

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from plsc.arguments import as_integer
from plsc.data.alignment import align_face
from plsc.data.codec import to_rgb_tensor
from plsc.data.dataset import ImageDataset
from plsc.embedding.embedder import (
    AUTO,
    PRECISIONS,
    EmbeddingModel,
    auto_precision,
    backbone_engine,
    model_file,
    open_embedder,
)
from plsc.embedding.pipeline import embed_dataset
from plsc.embedding.sources import open_images
from plsc.errors import DataError, UsageError
from plsc.evaluation import evaluate as evaluate_sets
from plsc.evaluation import ijb as evaluate_ijb
from plsc.evaluation import raw_pixels
from plsc.models import Backbone
from plsc.models import load_model as load_backbone
from plsc.models.preprocessing import ImageSize, Preprocessing
from plsc.models.weights import unwrapped
from plsc.parallel.mesh import Mesh, require_mesh, to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from plsc.data.codec import ImageLike
    from plsc.embedding.pipeline import Embed
    from plsc.embedding.sources import ImageSource
    from plsc.evaluation.roc import Roc

RAW_PIXELS = "raw-pixels"


def load_model(
    source: str | Path | nn.Module,
    *,
    device: str | torch.device | None = None,
    precision: str = "auto",
    architecture: str | None = None,
    best: bool = False,
    provider: str = "auto",
    module: nn.Module | None = None,
) -> EmbeddingModel:
    """Load a model that turns images into embeddings.

    Args:
        source: a run directory of ``plsc train``, which stands for its last weights; a .safetensors file; a state_dict
            of arcface_torch (backbone.pth); a .pt2 file of ``plsc export``; an .onnx file with one input and one
            output; ``sface``, a file of an installed package (docs/faces.md); or ``hf-hub:ORG/NAME``, perhaps with
            ``@REVISION``: what ``plsc push`` put on the Hugging Face hub. Or a backbone in memory, of which a copy is
            taken: of :func:`plsc.models.create`, or a :class:`plsc.models.ModuleBackbone`, which any module can be.
        device: where to run; a GPU if there is one, by default.
        precision: "fp32", "bf16", "fp16", or "auto": on GPUs bf16 (fp16 on Volta and Turing, fp32 on older ones), fp32
            on CPUs and for .onnx.
        architecture: a backbone's name, for a state_dict from which it cannot be inferred.
        best: of a run directory, take the weights of the best evaluation (``best.safetensors``).
        provider: of onnxruntime, for an .onnx file: "cpu", "cuda", "tensorrt", "openvino" or "coreml"; where it is not
            installed, a warning is logged and the CPU's runs. "auto" is what ``device`` says.
        module: of your own, which takes the weights of a run or file that was made with its like, strictly; a
            :class:`plsc.models.ModuleBackbone` for a file that says nothing of images.

    Returns:
        The model. Its ``embedding_dim`` is D, its ``image_size`` the side of square images or (height, width), its
        ``preprocessing`` the whole contract; embeddings of one ``contract_id`` may be compared. Called with uint8
        images (B, 3, H, W), it returns their embeddings (B, D) as a float32 tensor on the CPU.

    Raises:
        UsageError: there is no such file, or the request does not fit it.
        DataError: the file is corrupt, or is no embedding model.
    """
    chosen = None if device is None else to_device(device)
    if isinstance(source, nn.Module):
        if module is not None or architecture is not None or best or provider != AUTO:
            raise UsageError(
                "module, architecture, best and provider are of files; leave them out of a model in memory"
            )
        return backbone_embedder(copy.deepcopy(unwrapped(source)), device=chosen, precision=precision)
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a model is a module, or is named by its file or run directory, not by a {type(source).__name__}"
        )
    if module is not None:
        if provider != AUTO:
            raise UsageError("a module runs on torch, which has no provider; leave provider out")
        backbone = load_backbone(model_file(source, best=best), architecture=architecture, module=module)
        return backbone_embedder(backbone, device=chosen, precision=precision, source=str(source))
    return open_embedder(
        source, device=chosen, precision=precision, architecture=architecture, best=best, provider=provider
    )


def backbone_embedder(
    backbone: Backbone,
    *,
    device: torch.device | None = None,
    precision: str = AUTO,
    mesh: Mesh | None = None,
    source: str | None = None,
) -> EmbeddingModel:
    """Make a backbone in memory ready to embed: as :func:`plsc.embedding.embedder.open_embedder` makes one of a file.

    The backbone is put into evaluation mode, onto the device. ``source`` stands in messages; None: its name.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if precision == AUTO:
        precision = auto_precision(Path(), mesh or Mesh(0, 1, 0, device))
    elif precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}; it has to be one of {', '.join((AUTO, *PRECISIONS))}")
    return EmbeddingModel(backbone_engine(backbone, device, precision, channels_last=True), source or backbone.name)


def embed(
    model: EmbeddingModel | str | Path | nn.Module,
    images: ImageSource | ImageDataset,
    *,
    flip: bool = False,
    landmarks: str | Path | None = None,
    detector: str | None = None,
    batch_size: int = 64,
    workers: int = 0,
    errors: dict[int, str] | None = None,
) -> NDArray[np.float32]:
    """Embed images, as ``plsc embed`` does: resized to the model's size and normalised as it was trained.

    Face models expect aligned crops of one face: give those, or ``landmarks`` or a ``detector``, or :func:`align` them.

    Args:
        model: of :func:`load_model`, or what that takes.
        images: a path of an image, a folder, a list file or a .rec, or ``avatars:IDSxIMAGES``; an image in memory: its
            file's bytes, a Pillow image, a uint8 RGB array (H, W, 3) or grey (H, W), a uint8 tensor (3, H, W); a
            sequence of images, such as a list of paths or an array (N, H, W, 3); or what :func:`open_images` returned.
        flip: average over each image and its mirror image. Compare such embeddings with their like only.
        landmarks: a file of five points for each image, by which faces are aligned.
        detector: ``mtcnn``, ``yunet`` or ``onnx:FILE``, which finds each image's largest face.
        batch_size: images per step of the model.
        workers: decoding processes; 0: none but this.
        errors: is filled with {row: problem} of images that cannot be read, aligned or embedded, whose rows are zero.
            None: the first such image raises.

    Returns:
        (N, D) float32 in the order of the images, not normalised to unit length. Files of a folder are in the order of
        their paths.

    Raises:
        UsageError: there is no such source, or something in the sequence is no image.
        DataError: an image has a problem, and ``errors`` is None.
    """
    embedder = model if isinstance(model, EmbeddingModel) else load_model(model)
    batch_size, workers = as_integer(batch_size, "batch_size", 1), as_integer(workers, "workers", 0)
    if isinstance(images, ImageDataset):
        if landmarks is not None or detector is not None:
            raise UsageError("give landmarks or a detector to plsc.open_images(), which aligns")
        if images.image_size != embedder.image_size:
            raise UsageError(
                f"the images have a size of {images.image_size}, and the model takes {embedder.image_size}: "
                "open them with plsc.open_images(source, model.image_size)"
            )
        dataset = images
    else:
        dataset = open_images(images, embedder.image_size, landmarks=landmarks, detector=detector)
    rows, problems, *_ = embed_dataset(embedder, dataset, batch_size=batch_size, workers=workers, flip=flip)
    if errors is not None:
        errors.update(problems)
    elif problems:
        row, problem = min(problems.items())
        key = dataset.key(row)
        raise DataError(problem if key in problem else f"{key}: {problem}")
    return rows


def evaluate(
    model: EmbeddingModel | str | Path | nn.Module,
    sets: str | Path | Sequence[str | Path] = (),
    *,
    ijb: str | Path | None = None,
    flip: bool | None = None,
    precision: str = "auto",
    batch_size: int = 64,
    seed: int = 0,
    image_size: ImageSize = 112,
    mesh: Mesh | None = None,
    quiet: bool = True,
    rocs: dict[str, Roc] | None = None,
    groups: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Evaluate a model on identities that it was not trained on, as ``plsc eval`` does.

    Args:
        model: of :func:`load_model`, what that takes, or "raw-pixels", a baseline.
        sets: .bin files of pairs; folders of a folder per identity, lists, .rec files, ``avatars:IDSxIMAGES@FIRST``.
        ijb: the folder IJBB or IJBC, with meta/ and loose_crop/ in it.
        flip: add each image's mirror image to its embedding. None does so for .bin and IJB sets only.
        precision: of a model that is still to be loaded, as :func:`load_model` takes it.
        batch_size: images per step of the model.
        seed: draws the pairs for accuracy, and the identities unknown to the open set.
        image_size: of "raw-pixels".
        mesh: ranks that share the work, each of which calls. None: this process does all.
        quiet: print no progress.
        rocs: is filled with each set's exact ROC, which :func:`plsc.evaluation.calibration.calibrate` takes.
        groups: of identities by their names: labelled sets then have "by_group", error rates at one threshold.

    Returns:
        What ``plsc eval --json`` writes: {"model", "contract_id", "sets": {NAME: {"accuracy", "auc", "tar@far",
        "rank1", …}}}, with None for what a set cannot give; the contract id of "raw-pixels" is None.

    Raises:
        UsageError: there is nothing to evaluate on, or no such set.
        DataError: a set is malformed or has too many unreadable images, or an embedding is not finite.
    """
    sources = [str(each) for each in ([sets] if isinstance(sets, str | Path) else sets)]
    if not sources and ijb is None:
        raise UsageError('nothing to evaluate on: give sets="lfw.bin", a folder of identities, or ijb=FOLDER')
    batch_size, seed = as_integer(batch_size, "batch_size", 1), as_integer(seed, "seed", 0)
    mesh = Mesh(0, 1, 0, torch.device("cpu")) if mesh is None else require_mesh(mesh)
    function: Embed
    if isinstance(model, EmbeddingModel):
        name, function, contract = model.source, model, model.preprocessing
    elif model == RAW_PIXELS:
        name, function, contract = RAW_PIXELS, raw_pixels, Preprocessing(image_size)
    else:
        on_ranks: dict[str, Any] = {"device": mesh.device, "mesh": mesh} if mesh.world_size > 1 else {}
        if isinstance(model, nn.Module):
            loaded = backbone_embedder(copy.deepcopy(unwrapped(model)), precision=precision, **on_ranks)
        else:
            loaded = open_embedder(model, precision=precision, **on_ranks)
        name, function, contract = loaded.source, loaded, loaded.preprocessing
    options: dict[str, Any] = {
        "image_size": contract.image_size,
        "mesh": mesh,
        "batch_size": batch_size,
        "curves": True,
        "quiet": quiet,
    }
    results = evaluate_sets(
        function,
        sources,
        interpolation=contract.interpolation,
        seed=seed,
        flip=flip,
        rocs=rocs,
        groups=groups,
        **options,
    )
    if ijb is not None:
        results |= evaluate_ijb(function, Path(ijb), **options)
    contract_id = function.contract_id if isinstance(function, EmbeddingModel) else None
    return {"model": name, "contract_id": contract_id, "sets": results}


def align(
    image: ImageLike, landmarks: NDArray[Any] | Sequence[Sequence[float]], *, image_size: int = 112
) -> NDArray[np.uint8]:
    """Cut a face out of an image: rotated, scaled and shifted onto the template that face models are trained on.

    Args:
        image: a file's path or bytes, a Pillow image, a uint8 RGB array (H, W, 3), or a uint8 tensor (3, H, W).
        landmarks: (5, 2): x and y in pixels of the left and the right eye (as seen in the image), the tip of the nose,
            the left and the right corner of the mouth.
        image_size: side of the crop in pixels.

    Returns:
        The crop, uint8 RGB (image_size, image_size, 3): black outside the image.

    Raises:
        DataError: the image does not decode, or the landmarks form no face or lie outside the image.
    """
    image_size = as_integer(image_size, "image_size", 1)
    name = str(image) if isinstance(image, str | Path) else "image"
    crop = align_face(to_rgb_tensor(image, name), landmarks, image_size, name)
    return crop.permute(1, 2, 0).contiguous().numpy()
