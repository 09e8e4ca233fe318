"""The choice of checkpointed blocks for a share of the activations' memory, from one pass on fake tensors.

Blocks go by the bytes that each frees per operation that it repeats. In a convolutional network the first blocks, whose
maps are large and channels few, free several times as much as the last ones for the same work.
"""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from plsc.errors import UsageError
from plsc.models.backbone import Backbone
from plsc.models.preprocessing import ImageSize, height_and_width
from plsc.models.recompute import Segment, every_kth, recompute_in_backward


def recompute_activations(
    backbone: Backbone,
    method: str,
    *,
    every: int = 1,
    budget: float = 0.6,
    images: int = 32,
    dtype: torch.dtype | None = None,
) -> int:
    """Let the backward pass of ``backbone`` recompute activations of some of its blocks; return of how many.

    Args:
        backbone: on a CPU, not wrapped.
        method: "none"; "every_k" for every ``every``-th block; "budget" for as many as keep the peak of the
            activations at ``budget`` of what it is without, those first that free most for what they repeat.
        every: for "every_k".
        budget: for "budget"; above 0, at most 1.
        images: of a micro-batch, for "budget".
        dtype: of autocast, for "budget"; None: float32.

    Raises:
        UsageError: the backbone has no blocks, or the budget is out of reach.
    """
    if method == "none":
        return 0
    segments = backbone.segments()
    if not segments:
        raise UsageError(
            f'recompute = "{method}" finds no blocks in {backbone.name}, in a Sequential or a ModuleList; give "none"'
        )
    if method == "budget":
        profile = measure(backbone, segments, images, backbone.image_size, dtype)
        chosen = [segments[index] for index in choose(profile, budget, backbone.name)]
    else:
        chosen = every_kth(segments, every)
    recompute_in_backward(chosen)
    return len(chosen)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while they live, and FLOPs of products.

    Args:
        known: its parameters and buffers are left out.

    Attributes:
        live: bytes at present.
        peak: the most so far.
        flops: so far.
    """

    def __init__(self, known: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.flops = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in (*known.parameters(), *known.buffers()):
            self._seen.add(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count its outputs."""
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._enter(tensor.untyped_storage())
        return out

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, size).atexit = False

    def _leave(self, size: int) -> None:
        self.live -= size


@dataclass
class ActivationProfile:
    """Bytes that each segment's operations save for the backward pass, as one pass on fake tensors found them.

    A place is the number of segments that have begun: what comes before the first has place 0, the first one place 1.

    Attributes:
        sizes: bytes of each saved storage, by its key.
        saved: keys of the storages that segment i saves.
        inputs: keys of the storages that segment i is given.
        outside: the first place at which no segment, but an operation between them, saves a storage.
        flops: what a recomputation of segment i costs; it ends when the last tensor is there that is saved.
        transient: the most that the backward pass of segment i holds besides what is saved at its place and before.
        tail: likewise of what comes after the last segment, and of the forward pass.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    saved: list[dict[int, None]] = field(default_factory=list)
    inputs: list[set[int]] = field(default_factory=list)
    outside: dict[int, int] = field(default_factory=dict)
    flops: list[int] = field(default_factory=list)
    transient: list[int] = field(default_factory=list)
    tail: int = 0

    def peak(self, recomputed: frozenset[int]) -> int:
        """The most bytes in a pass that recomputes the segments of these indices, weights' gradients left out."""
        held = self._held(recomputed)
        below = self._bytes_below(held)
        highest = below[-1] + self.tail
        for index, saved in enumerate(self.saved):
            rebuilt = 0
            if index in recomputed:
                rebuilt = sum(self.sizes[key] for key in saved if held.get(key, index + 2) > index + 1)
            highest = max(highest, below[index + 1] + rebuilt + self.transient[index])
        return highest

    def close(self, peaks: Sequence[int]) -> None:
        """Set what the passes hold besides; ``peaks``: the most bytes of the forward pass, and behind each segment."""
        tail, *behind = peaks
        below = self._bytes_below(self._held(frozenset()))
        self.tail = tail - below[-1]
        self.transient = [peak - held for peak, held in zip(reversed(behind), below[1:], strict=True)]

    def _held(self, recomputed: frozenset[int]) -> dict[int, int]:
        """The first place at which each storage is kept, by its key."""
        held = dict(self.outside)
        for index, (saved, inputs) in enumerate(zip(self.saved, self.inputs, strict=True)):
            for key in inputs if index in recomputed else saved:
                held[key] = min(held.get(key, index + 1), index + 1)
        return held

    def _bytes_below(self, held: dict[int, int]) -> list[int]:
        """The bytes that are kept at each place and before."""
        added = [0] * (len(self.saved) + 1)
        for key, place in held.items():
            added[place] += self.sizes[key]
        return list(accumulate(added))


def measure(
    backbone: nn.Module, segments: Sequence[Segment], images: int, image_size: ImageSize, dtype: torch.dtype | None
) -> ActivationProfile:
    """Return what a pass over ``images`` of ``image_size`` pixels saves, by segment; it takes no memory.

    Args:
        backbone: on a CPU, whose weights are not touched.
        segments: of it, in the order in which they run.
        images: of a micro-batch.
        image_size: the side of squares, or (height, width).
        dtype: of autocast; None: float32.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        fake, copies = copy.deepcopy((backbone, list(segments)))
    fake.train()
    for parameter in fake.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    with mode, LiveBytes(fake) as ledger:
        recorder = _Recorder(fake, ledger)
        for index, segment in enumerate(copies):
            setattr(segment.module, segment.method, partial(recorder.run, index, segment.function))
        x = torch.empty(images, 3, *height_and_width(image_size))
        with torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                embeddings = fake(x)
            del x
            embeddings = embeddings.float()
        embeddings.backward(torch.empty_like(embeddings))
    recorder.profile.close([*recorder.peaks, ledger.peak])
    return recorder.profile


def choose(profile: ActivationProfile, share: float, name: str) -> list[int]:
    """Return the indices of the segments to recompute, so that the peak is at most ``share`` of that without.

    Raises:
        UsageError: recomputing all of them does not reach it; the message says what does.
    """
    whole = profile.peak(frozenset())
    freed = [
        sum(profile.sizes[key] for key in saved if key not in inputs)
        for saved, inputs in zip(profile.saved, profile.inputs, strict=True)
    ]
    # Equal ones from the first on: late ones are freed before the backward pass comes to the recomputed.
    order = sorted(range(len(freed)), key=lambda index: (-freed[index] / max(profile.flops[index], 1), index))
    chosen: set[int] = set()
    for index in order:
        if profile.peak(frozenset(chosen)) <= share * whole:
            break
        chosen.add(index)
    reached = profile.peak(frozenset(chosen))
    if reached > share * whole:
        least = -(-100 * min(reached, profile.peak(frozenset(order))) // whole) / 100
        raise UsageError(
            f"recompute_budget = {share:g} is out of reach of {name}: with every block recomputed, activations take "
            f"{least:g} of what they take without; give that or more"
        )
    for index in sorted(chosen, key=lambda index: -profile.flops[index]):
        if profile.peak(frozenset(chosen - {index})) <= share * whole:
            chosen.remove(index)
    return sorted(chosen)


class _Recorder:
    """Notes what is saved during a pass, and by which segment."""

    def __init__(self, known: nn.Module, ledger: LiveBytes) -> None:
        self._ledger = ledger
        self.profile = ActivationProfile()
        self._keys: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._known = {self._key(tensor) for tensor in (*known.parameters(), *known.buffers())}
        self._running: int | None = None
        self._flops_before = 0
        self.peaks: list[int] = []  # up to the gradient of the last segment's output, of the one before, ...

    def run(self, index: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run segment ``index``, which is ``function``."""
        profile = self.profile
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        profile.inputs.append({self._key(tensor) for tensor in tensors} - self._known)
        profile.saved.append({})
        profile.flops.append(0)
        self._running, self._flops_before = index, self._ledger.flops
        out = function(*args, **kwargs)
        self._running = None
        out.register_hook(self._enter_backward)
        return out

    def save(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps."""
        key, profile = self._key(tensor), self.profile
        if key in self._known:
            return tensor
        if self._running is None:
            profile.outside.setdefault(key, len(profile.saved))
        else:
            profile.saved[self._running][key] = None
            profile.flops[self._running] = self._ledger.flops - self._flops_before
        return tensor

    def _enter_backward(self, _: Tensor) -> None:
        self.peaks.append(self._ledger.peak)
        self._ledger.peak = self._ledger.live

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage not in self._keys:
            self._keys[storage] = len(self.profile.sizes)
            self.profile.sizes[self._keys[storage]] = storage.nbytes()
        return self._keys[storage]
