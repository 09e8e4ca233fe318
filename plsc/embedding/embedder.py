"""One interface to every model that turns images into embeddings, whatever file it comes in."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plsc.devices import shared_units
from plsc.embedding.known_models import find_known, packaged_file
from plsc.errors import DataError, UsageError
from plsc.files import read_json
from plsc.models import Backbone, load_model
from plsc.models.preprocessing import Preprocessing, contract_id, height_and_width, state_digest
from plsc.models.timm_weights import hub_model, is_hub_id
from plsc.models.torch_files import checkpoint_hint
from plsc.parallel import Mesh
from plsc.progress import log_once

RUN_MODEL, RUN_BEST = "model.safetensors", "best.safetensors"
RUN_PROGRESS = "progress.json"  # {"step": of the last weights, "steps": of the whole run}
STATE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTO = "auto"
CPU_BATCH = 16  # as fast per image as larger batches, in a quarter of their memory; fewer, of …
_CPU_PIXELS = CPU_BATCH * 224 * 224  # … so many pixels, where images are larger
FLIP_SUFFIX = "+flip"


class Engine(Protocol):
    """A model on a runtime (torch, onnxruntime): images in, embeddings out."""

    preprocessing: Preprocessing
    embedding_dim: int
    contract_id: str
    compatible_with: tuple[str, ...]
    former_ids: tuple[str, ...]
    precision: str
    at_once: int | None  # a run of so many pictures is as fast for each as a larger one; None: the larger the faster

    def run(self, images_u8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8, B > 0 -> (B, D) float32 on the CPU."""


class EmbeddingModel:
    """A model ready to embed.

    Attributes:
        embedding_dim: D.
        preprocessing: the contract that images have to meet, and that a call applies to them but for resizing.
        image_size: side of the square images in pixels, or (height, width).
        contract_id: embeddings with the same id may be compared. A run, its .safetensors, the state_dict and what
            :mod:`plsc.embedding.export` made of them, but for int8, share one; any other file has its own, by weights
            and preprocessing.
        compatible_with: the contract ids of older models whose embeddings those of this one may be compared with, as
            its export states them (``plsc export --compatible-with``).
        former_ids: the contract ids by which earlier versions knew this very model; what states them is still its own.
        precision: of the computation: "fp32", "bf16" or "fp16"; of an .onnx file "fp32", or what it was exported in:
            "fp16" or "int8".
        source: the file or run directory that was opened.
    """

    def __init__(self, engine: Engine, source: str) -> None:
        self._engine = engine
        self.source = source
        self.embedding_dim = engine.embedding_dim
        self.preprocessing = engine.preprocessing
        self.image_size = engine.preprocessing.image_size
        self.contract_id = engine.contract_id
        self.compatible_with = engine.compatible_with
        self.former_ids = engine.former_ids
        self.precision = engine.precision

    @property
    def at_once(self) -> int | None:
        """Pictures of a run that is as fast for each as a larger one; None: the larger, the faster."""
        return self._engine.at_once

    def __repr__(self) -> str:
        """Return what it makes of what, and the file."""
        height, width = height_and_width(self.image_size)
        shapes = f"(B, 3, {height}, {width}) uint8 -> (B, {self.embedding_dim}) float32"
        return f"<EmbeddingModel of {self.source}: {shapes}, computed in {self.precision}>"

    def __call__(self, images_u8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 RGB -> (B, D) float32 on the CPU, not normalised.

        Raises:
            UsageError: the images have another shape or type.
            DataError: the model does not run, or answers in another shape than it promised.
        """
        expected = self.preprocessing.shape
        if images_u8.dtype != torch.uint8 or images_u8.dim() != 4 or tuple(images_u8.shape[1:]) != expected:
            height, width = height_and_width(self.image_size)
            raise UsageError(
                f"{self.source} takes uint8 images (B, 3, {height}, {width}), "
                f"not {images_u8.dtype} {tuple(images_u8.shape)}; resize them first"
            )
        if len(images_u8) == 0:
            return torch.empty(0, self.embedding_dim)
        return self._engine.run(images_u8)


def contract_of(embedder: EmbeddingModel, flip: bool) -> str:
    """The contract id of embeddings: the embedder's, marked where they are averages over image and mirror image."""
    return embedder.contract_id + (FLIP_SUFFIX if flip else "")


def own_contracts(embedder: EmbeddingModel, flip: bool) -> tuple[str, ...]:
    """The contract ids of the embedder's own embeddings: :func:`contract_of`, and those of earlier versions."""
    return tuple(each + (FLIP_SUFFIX if flip else "") for each in (embedder.contract_id, *embedder.former_ids))


def compatible_contracts(embedder: EmbeddingModel, flip: bool) -> tuple[str, ...]:
    """The contract ids that embeddings may be compared with besides :func:`contract_of`."""
    return tuple(each + (FLIP_SUFFIX if flip else "") for each in (*embedder.compatible_with, *embedder.former_ids))


def stated_contracts(embedder: EmbeddingModel, flip: bool, alignment: str) -> dict[str, Any]:
    """What a set's manifest states of how its embeddings were made; ``alignment`` is "" where there is none."""
    return {
        "contract_id": contract_of(embedder, flip),
        "dim": embedder.embedding_dim,
        "image_size": embedder.image_size,
        "flip": flip,
        **({"compatible_with": list(others)} if (others := compatible_contracts(embedder, flip)) else {}),
        **({"alignment": alignment} if alignment else {}),
    }


def embed_images(embedder: EmbeddingModel, images: Tensor, flip: bool) -> Tensor:
    """Embed uint8 (B, 3, H, W) into float32 (B, D), not normalised; ``flip`` averages over image and mirror image."""
    if not flip:
        return embedder(images)
    return (embedder(images) + embedder(images.flip(-1))) / 2


def embed_whole(embedder: EmbeddingModel, images: Tensor, flip: bool, batch_size: int) -> Tensor:
    """As :func:`embed_images`, in runs of one size, the last of which is filled up with black.

    Kernels are chosen by the size of a batch, and differ in the last bits. In runs of one size a row's bits are those
    of its picture, whatever else is embedded beside it. On a GPU the size is ``batch_size``.
    """
    count = len(images)
    if missing := -count % (embedder.at_once or batch_size):
        images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
    return embed_images(embedder, images, flip)[:count]


@dataclass(eq=False)
class TorchEngine:
    """A PyTorch module on a device, with autocast in "bf16" and "fp16".

    ``channels_last`` converts the module to that memory format, in which convolutions are faster; an exported module
    cannot be converted.
    """

    module: nn.Module
    preprocessing: Preprocessing
    embedding_dim: int
    contract_id: str
    device: torch.device
    precision: str
    channels_last: bool = False
    compatible_with: tuple[str, ...] = ()
    former_ids: tuple[str, ...] = ()
    at_once: int | None = field(init=False)

    def __post_init__(self) -> None:
        fewer = max(1, min(CPU_BATCH, _CPU_PIXELS // math.prod(self.preprocessing.shape[1:])))
        self.at_once = fewer if self.device.type == "cpu" else None
        self.module.to(self.device)
        if self.channels_last:
            self.module.to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def run(self, images_u8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8, in pinned memory or not -> (B, D) float32 on the CPU."""
        if self.at_once is None:
            return self._run_batch(images_u8).cpu()
        return torch.cat([self._run_batch(part) for part in images_u8.split(self.at_once)])

    def _run_batch(self, images_u8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> (B, D) float32 on the device; a GPU may still be computing it."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        dtype = PRECISIONS[self.precision]
        images = images_u8.to(self.device, non_blocking=True).contiguous(memory_format=layout)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            embeddings: Tensor = self.module(self.preprocessing(images))
        return embeddings.float()


def open_embedder(
    source: str | Path,
    *,
    device: torch.device | None = None,
    precision: str = AUTO,
    architecture: str | None = None,
    best: bool = False,
    mesh: Mesh | None = None,
    provider: str = AUTO,
) -> EmbeddingModel:
    """Open a model for embedding.

    Args:
        source: a run directory; ``hf-hub:ORG/NAME``; ``sface``; a .safetensors file of ours; a state_dict of
            arcface_torch (.pt, .pth, .bin); a program that ``plsc export --format torch`` wrote; or an .onnx file with
            one input and one output.
        device: where to run; a GPU if there is one, by default.
        precision: "fp32", or "bf16" or "fp16" by autocast; or "auto", see :func:`auto_precision`. An .onnx file runs in
            the precision that it was exported in, for which "fp32" stands.
        architecture: a backbone's name, for a state_dict from which it cannot be inferred.
        best: of a run directory, open the weights of the best evaluation instead of the last (:func:`model_file`).
        mesh: ranks that share the work and all call, for which "auto" is the same. None: this process is alone.
        provider: of onnxruntime, for an .onnx file: "cpu", "cuda", "tensorrt", "openvino" or "coreml", in place of
            ``device``; the CPU's, and a warning, where it is not installed. "auto" is what ``device`` says.

    Raises:
        UsageError: there is no such file, or the request does not fit it.
        DataError: the file is corrupt, refused, or no embedding model.
        IntegrityError: it is not signed, where :mod:`plsc.signing` asks for that.
    """
    if precision not in (AUTO, *PRECISIONS):
        raise UsageError(f"precision is {precision!r}; it has to be one of {', '.join((AUTO, *PRECISIONS))}")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = model_file(source, best=best)
    if precision == AUTO:
        precision = auto_precision(path, mesh or Mesh(0, 1, 0, device))
    return EmbeddingModel(_engine(path, device, precision, architecture, provider), str(path if best else source))


def auto_precision(path: Path, mesh: Mesh) -> str:
    """Return what ``precision = "auto"`` is for embedding with the model ``path``; every rank calls.

    On GPUs it is the best precision that all of them have units for, as in training. On CPUs it is fp32, whatever their
    units, and so it is for .onnx files: all CPUs and exports then agree to about 1e-5, and decide alike. In bf16
    a ResNet-8's cosines of 179,700 pairs of avatars moved by up to 0.008 (0.002 in the root mean square); on a CPU with
    AVX512-BF16 it was 1.3 (MobileFaceNet) to 1.8 times (IResNet-18) as fast.
    """
    if path.suffix == ".onnx" or mesh.device.type == "cpu":
        return "fp32"
    return shared_units(mesh).best


def backbone_engine(
    model: Backbone, device: torch.device, precision: str = "fp32", *, channels_last: bool = False
) -> TorchEngine:
    """Make the engine of a backbone in memory; switches it to evaluation mode, and to channels_last if so asked."""
    preprocessing = model.preprocessing
    contract = contract_id(preprocessing, state_digest(model.state_dict()))
    return TorchEngine(model.eval(), preprocessing, model.embedding_dim, contract, device, precision, channels_last)


def is_named_model(source: str | Path) -> bool:
    """Whether ``source`` is no path, but a repository of the hub or a known model of a package."""
    return not Path(source).exists() and (is_hub_id(source) or find_known(source) is not None)


def model_file(source: str | Path, *, best: bool = False) -> Path:
    """Return the model file that ``source`` names.

    A run directory stands for the weights at the end of the training (``model.safetensors``), or with ``best`` for
    those of the best evaluation (``best.safetensors``); a file stands for itself; ``hf-hub:ORG/NAME``, perhaps with
    ``@REVISION``, for what ``plsc push`` put there; ``sface`` for the file of an installed package
    (:mod:`plsc.embedding.known_models`). A line is logged of a run that is not at its end.

    Raises:
        UsageError: there is no such file, or ``best`` is asked of a file, or of a run without an evaluation.
    """
    path = Path(source)
    if is_named_model(source):
        if best:
            raise UsageError(f"{source}: --best chooses among the weights of a run directory; leave it out")
        return hub_model(str(source)) if is_hub_id(source) else packaged_file(str(source))
    if not path.exists():
        raise UsageError(f"{path} does not exist; name a run directory or a model file")
    if not path.is_dir():
        if best:
            raise UsageError(f"{path} is a file: --best chooses among the weights of a run directory; leave it out")
        return path
    if not (path / RUN_MODEL).is_file():
        mend = checkpoint_hint(path) or "; name the model file itself"
        raise UsageError(f"{path} is no run directory: it has no {RUN_MODEL}{mend}")
    if best and not (path / RUN_BEST).is_file():
        raise UsageError(f"{path} has no {RUN_BEST}: it was trained without [eval] sets; leave --best out")
    model = path / (RUN_BEST if best else RUN_MODEL)
    _report_stopped(path)
    return model


def _report_stopped(run: Path) -> None:
    """Log a line where a run's weights are of an earlier step than its last."""
    progress = read_json(run / RUN_PROGRESS) if (run / RUN_PROGRESS).is_file() else {}
    step, steps = (progress.get(name) if isinstance(progress, dict) else None for name in ("step", "steps"))
    if isinstance(step, int) and isinstance(steps, int) and step < steps:
        place = f"{run} stopped at step {step:,} of {steps:,}, or is training still"
        log_once("plsc.embedding", f"{place}; `plsc train CONFIG --out {run} --resume auto` goes on")


def _engine(path: Path, device: torch.device, precision: str, architecture: str | None, provider: str) -> Engine:
    from plsc.embedding.program import is_program, open_program

    if path.suffix == ".onnx":
        from plsc.embedding.onnx_engine import OnnxEngine

        if precision != "fp32":
            raise UsageError(f"{path} runs in the precision it was exported in; leave {precision} out")
        return OnnxEngine(path, device, provider=provider)
    if provider != AUTO:
        raise UsageError(f"{path} is no .onnx file, which alone has a provider; leave {provider} out, or export it")
    if is_program(path):
        module, preprocessing, embedding_dim, contract = open_program(path, device)
        return TorchEngine(module, preprocessing, embedding_dim, contract, device, precision)
    if path.suffix not in STATE_SUFFIXES:
        known = ".safetensors, .pt, .pth, .bin, .onnx, .pt2"
        raise DataError(f"{path} is no model file that is known here ({known}){checkpoint_hint(path)}")
    model = load_model(path, architecture=architecture)
    return backbone_engine(model, device, precision, channels_last=True)
