"""The base class of backbones, helpers for their layers, and the registry by which :func:`create` finds them.

To add a backbone, write one file, models/NAME.py, with a subclass of :class:`Backbone` and a function
``NAME(embedding_dim, image_size, *, option=default) -> Backbone`` under ``@register``; then add NAME to the line of
imports in models/__init__.py. In place of it, :func:`register_family` registers a family's variants, and recognises
them in a bare state_dict (.pt), which has no name in it. Configurations, ``plsc plan``, export and the tests of all
backbones take the new name from the registry.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plsc.errors import DataError, UsageError
from plsc.extensions import Registry
from plsc.models.preprocessing import (
    BILINEAR,
    DEFAULT_SIZE,
    PIXEL_MEAN,
    PIXEL_STD,
    Channels,
    ImageSize,
    Preprocessing,
    height_and_width,
)
from plsc.models.preprocessing import image_size as checked_image_size
from plsc.models.recompute import Segment, innermost_blocks, recompute_in_backward
from plsc.nearest import did_you_mean

SIZE_STEP = 16  # every convolutional family halves the image four times
MIN_SIZE = 32
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)

# What arcface_torch calls our backbones; people who ask for one leave out what follows _dp.
ARCFACE_TORCH_NAMES = {
    "iresnet18": "r18",
    "iresnet34": "r34",
    "iresnet50": "r50",
    "iresnet100": "r100",
    "iresnet200": "r200",
    "mobilefacenet": "mbf",
    "mobilefacenet_large": "mbf_large",
    "vit_tiny": "vit_t",
    "vit_small": "vit_s",
    "vit_base": "vit_b",
    "vit_large": "vit_l_dp005_mask_005",
}


class Backbone(nn.Module):
    """Maps (B, 3, H, W) float32 images, as ``preprocessing`` makes them, to (B, D) embeddings that are not normalised.

    Attributes:
        name: the name that :func:`create` knows it by.
        embedding_dim: D.
        preprocessing: the contract that its weights are trained with; (x - 127.5)/127.5 unless they bring their own.
        options: the further keywords that it was created with; JSON can hold them.
        norms_run_once: every batch normalisation of the class runs once in each training pass.
    """

    norms_run_once: ClassVar[bool] = False

    def __init__(self, name: str, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__()
        self.name = name
        self.embedding_dim = embedding_dim
        self.preprocessing = Preprocessing(image_size)
        self.options: dict[str, Any] = {}

    @property
    def image_size(self) -> ImageSize:
        """Side of the square images in pixels, or (height, width)."""
        return self.preprocessing.image_size

    def __call__(self, x: Tensor) -> Tensor:
        """Embed; :class:`UsageError` of images of another size than the backbone was made for."""
        height, width = height_and_width(self.image_size)
        if x.shape[-2:] != (height, width):
            got = "x".join(str(side) for side in x.shape[-2:])
            raise UsageError(f"{self.name} was made for {height}x{width}, got {got}: create it with their image_size")
        embeddings: Tensor = super().__call__(x)
        if not isinstance(embeddings, Tensor) or embeddings.shape != (x.shape[0], self.embedding_dim):
            answer = (
                f"{tuple(embeddings.shape)}" if isinstance(embeddings, Tensor) else f"a {type(embeddings).__name__}"
            )
            raise UsageError(
                f"{self.name} answers {answer} to {x.shape[0]} images; a backbone's answer is (B, {self.embedding_dim})"
            )
        return embeddings

    def extra_repr(self) -> str:
        """What it is called, and what it makes of what."""
        height, width = height_and_width(self.image_size)
        return f"{self.name}: (B, 3, {height}, {width}) -> (B, {self.embedding_dim})"

    def segments(self) -> list[Segment]:
        """Return the parts whose activations can be recomputed, in the order in which they run; perhaps none.

        The default finds the blocks in Sequential and ModuleList; a family with a large stem overrides it.
        """
        return [Segment(block) for block in innermost_blocks(self)]


class ModuleBackbone(Backbone):
    """Any module as a backbone: says which images it takes, so that it can be saved, exported and embedded with.

    The keys in its files are those of the module alone.

    Args:
        module: maps (B, 3, H, W) float32 to (B, D); perhaps wrapped by DistributedDataParallel or torch.compile.
        embedding_dim: D.
        image_size: the side of square images in pixels, or (height, width).
        mean: of pixel values 0 to 255: one number, or a number per channel. It is trained on (x - mean)/std.
        std: likewise.
        interpolation: by which pictures of another size are resized.
        name: by which a package's entry point builds it; None: the name of its class, which no command can build.
    """

    def __init__(
        self,
        module: nn.Module,
        embedding_dim: int,
        image_size: ImageSize,
        *,
        mean: Channels = PIXEL_MEAN,
        std: Channels = PIXEL_STD,
        interpolation: str = BILINEAR,
        name: str | None = None,
    ) -> None:
        while isinstance(module, _WRAPPERS) or hasattr(module, "_orig_mod"):
            module = cast(nn.Module, module.module if isinstance(module, _WRAPPERS) else module._orig_mod)
        kind = re.sub(r"[^\w.]", "_", f"{type(module).__module__}.{type(module).__qualname__}")
        super().__init__(name or kind, embedding_dim, image_size)
        self.preprocessing = Preprocessing(image_size, mean, std, interpolation)
        self.module = module
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, D)."""
        embeddings: Tensor = self.module(x)
        return embeddings


class Architecture(NamedTuple):
    """The arguments of :func:`create`."""

    name: str
    embedding_dim: int
    image_size: ImageSize
    options: dict[str, Any]

    def build(self) -> Backbone:
        """Create a backbone of this architecture."""
        return create(self.name, embedding_dim=self.embedding_dim, image_size=self.image_size, **self.options)


Builder = Callable[..., nn.Module]
Inference = Callable[[Mapping[str, Tensor]], Architecture]
_builders: Registry[Builder] = Registry(
    "plsc.backbones", {}, callable, "a function of (embedding_dim, image_size, **options) that returns a module"
)
_prefixes: dict[str, Callable[[str], Builder]] = {}
_inferences: list[tuple[tuple[str, ...], Inference]] = []


def register(builder: Builder) -> Builder:
    """Register ``builder(embedding_dim, image_size, **options)`` under its own name."""
    _builders[builder.__name__] = builder
    return builder


def register_family(
    family: Callable[..., Backbone], names: Iterable[str], infer: Inference, keys: tuple[str, ...]
) -> None:
    """Register ``family(name, embedding_dim, image_size, **options)`` under each of ``names``.

    ``infer`` infers the architecture of state_dicts that hold all of ``keys``. It raises KeyError, IndexError or
    ValueError for an incomplete state_dict, and StopIteration for a depth or width that no registered name has.
    """
    _builders.update({name: partial(family, name) for name in names})
    _inferences.append((keys, infer))


def register_prefix(prefix: str, resolve: Callable[[str], Builder]) -> None:
    """Register a function that returns the builder of ``prefix`` + NAME, given NAME."""
    _prefixes[prefix] = resolve


def exists(name: str) -> bool:
    """Return whether :func:`create` takes ``name``, which is no ``timm:NAME``; asks packages of a foreign one alone."""
    return _builders.find(name) is not None


def is_ours(name: str) -> bool:
    """Return whether the backbone ``name`` is plsc's own, which computes no tables and takes few options."""
    builder = _builders.find(name)
    return getattr(builder, "func", builder).__module__.startswith("plsc.models.") if builder else False


def names() -> tuple[str, ...]:
    """Return the names that :func:`create` takes, besides ``timm:NAME``; those of installed packages are the last."""
    return _builders.every_name()


def create(name: str, *, embedding_dim: int = 512, image_size: ImageSize = DEFAULT_SIZE, **options: Any) -> Backbone:
    """Create a backbone with fresh weights, (B, 3, H, W) float32 -> (B, D) float32.

    Args:
        name: one of :func:`names`, or ``timm:NAME`` for any model of timm; or ``turned:`` and such a name, for
            :class:`plsc.models.wrappers.RotationTTA` of it.
        embedding_dim: D.
        image_size: the side of square images in pixels, or (height, width); multiples of 16 from 32 up, but for timm's
            models, which take what timm says.
        options: options of the family: ``dropout`` (iresnet); ``drop_path``, ``mask_ratio`` and ``patch_size`` (vit);
            timm's own keywords (timm); ``gradient_checkpointing`` (all), which recomputes every block's activations in
            the backward pass.

    Raises:
        UsageError: the name is unknown (the message has the nearest known one), or a number or option does not fit.
    """
    builder = _builder(name)
    if not isinstance(embedding_dim, int) or isinstance(embedding_dim, bool) or embedding_dim < 1:
        raise UsageError(f"embedding_dim is {embedding_dim!r}; it has to be a whole number of 1 or more")
    size = _checked_size(image_size, SIZE_STEP if name in _builders else 1)
    given = {option: value for option, value in options.items() if option != "gradient_checkpointing"}
    _check_options(name, builder, given)
    built = builder(embedding_dim, size, **given)
    model = built if isinstance(built, Backbone) else ModuleBackbone(built, embedding_dim, size, name=name)
    model.options = dict(options)
    if options.get("gradient_checkpointing"):
        recompute_in_backward(model.segments())
    return model


def infer(state: Mapping[str, Tensor], source: str) -> Architecture:
    """Infer the architecture of a state_dict (arcface_torch's key names) from its keys and shapes.

    Raises:
        DataError: it is incomplete or of no known architecture; the message names ``source``.
    """
    for keys, inference in _inferences:
        if all(key in state for key in keys):
            try:
                return inference(state)
            except (KeyError, IndexError, ValueError) as error:
                raise DataError(f"{source} is no complete state_dict: it lacks or misshapes {error}") from None
            except StopIteration:
                raise DataError(f"{source} holds a backbone of a depth or width that is not known here") from None
    first = ", ".join(list(state)[:3])
    raise DataError(
        f"{source} holds none of the known architectures (its keys begin {first}); "
        "name the architecture, or give a state_dict of iresnet, mobilefacenet or vit"
    )


def last_map(image_size: ImageSize) -> tuple[int, int]:
    """Return (height, width) of the map that a convolutional family makes of an image by halving it four times."""
    height, width = height_and_width(image_size)
    return height // SIZE_STEP, width // SIZE_STEP


def positions(image_size: ImageSize) -> int:
    """Return the number of positions in :func:`last_map`."""
    return math.prod(last_map(image_size))


def count_blocks(state: Mapping[str, Tensor], pattern: str) -> int:
    """Return one more than the largest number that ``pattern``'s group matches in the keys; 0 without a match."""
    numbers = [int(match[1]) for key in state if (match := re.match(pattern, key))]
    return max(numbers, default=-1) + 1


def _builder(name: str) -> Builder:
    if (builder := _builders.find(name)) is not None:
        return builder
    for prefix, resolve in _prefixes.items():
        if name.startswith(prefix):
            return resolve(name.removeprefix(prefix))
    theirs = {known: ARCFACE_TORCH_NAMES.get(known, known).partition("_dp")[0] for known in _builders}
    hint = did_you_mean(name, {known: (known, their) for known, their in theirs.items()})
    raise UsageError(f"no backbone is called {name!r}{hint} (known: {', '.join(names())}, timm:NAME)")


def _check_options(name: str, builder: Builder, options: dict[str, Any]) -> None:
    parameters = inspect.signature(builder).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise UsageError(f"{name} has no option {option!r}{did_you_mean(option, known)} (it takes: {takes})")


def _checked_size(image_size: Any, step: int) -> ImageSize:
    """Return ``image_size`` in its normal form; :class:`UsageError` unless its sides are multiples of ``step``."""
    # What a whole number should be, however small, is said below.
    is_whole = isinstance(image_size, int) and not isinstance(image_size, bool)
    size: ImageSize = image_size if is_whole else checked_image_size(image_size)
    sides = height_and_width(size)
    if min(sides) < MIN_SIZE or any(side % step for side in sides):
        near = [max(MIN_SIZE, round(side / step) * step) for side in sides]
        multiple = f"a multiple of {step} from {MIN_SIZE} up" if step > 1 else f"{MIN_SIZE} or more"
        shown, nearest = (size, near[0]) if isinstance(size, int) else (list(size), near)
        raise UsageError(f"image_size is {shown}; it has to be {multiple}: try {nearest}")
    return size


class PReLU(nn.PReLU):
    """``nn.PReLU`` with a fast backward pass on CPUs: same parameters, same results.

    PyTorch's CPU kernel for the gradient is not vectorised: with it, a bf16 training step of MobileFaceNet takes 1.5
    times as long on CPUs (benchmarks/cpu_layers.py). This serves those who train small models without a GPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W): max(x, 0) + weight · min(x, 0), with a weight per channel."""
        trains = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if trains and x.device.type == "cpu" and x.dim() == 4:
            return cast(Tensor, _ChannelPReLU.apply(x, self.weight))
        return super().forward(x)


class _ChannelPReLU(torch.autograd.Function):
    """PReLU whose backward pass is a few vectorised passes over the map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.prelu(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        positive = torch.ops.aten.threshold_backward(grad, x, 0)  # the gradient where x > 0
        negative = grad - positive
        # Summed in the weight's fp32: bf16 loses the small terms of a sum over a whole map.
        grad_weight = (negative * x).sum((0, 2, 3), dtype=weight.dtype).sum_to_size(weight.shape)
        slope = weight.to(x.dtype).view(1, -1, 1, 1)
        return torch.addcmul(positive, negative, slope), grad_weight


def in_full_precision(x: Tensor, dtype: torch.dtype, *layers: nn.Module) -> Tensor:
    """Apply ``layers`` to ``x`` in ``dtype`` (that of their weights), also inside an autocast region.

    The last layers determine the embedding's direction, so they are not rounded to bf16.
    """
    # Not x.to(dtype) always: an exported program would keep a conversion to the same type, and with it a type check.
    x = x if x.dtype == dtype else x.to(dtype)
    device_type = x.device.type  # the meta device has no autocast
    is_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    region: AbstractContextManager[Any] = torch.autocast(device_type, enabled=False) if is_autocast else nullcontext()
    with region:
        for layer in layers:
            x = layer(x)
    return x
