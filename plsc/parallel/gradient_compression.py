"""Compressed exchange of the backbone's gradients between ranks, for networks slower than the GPUs (``comm_hook``).

Half precision and PowerSGD are torch's DDP communication hooks. Deep Gradient Compression (Lin et al., ICLR 2018,
arXiv:1712.01887), which torch has not, is here: each rank adds its gradients up and sends the largest sums only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from plsc.extensions import Registry, is_subclass
from plsc.parallel.collectives import all_gather_equal, all_reduce_sum
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.ddp import ExchangeOptions as ExchangeOptions
from plsc.parallel.strategies.ddp import GradientExchange as GradientExchange
from plsc.parallel.strategies.ddp import PlannedExchange as PlannedExchange
from plsc.parallel.strategies.ddp import in_memory_order

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel  # late where it is used: it takes long to import

_WARMUP_STAGES = 4  # densities 1/4, 1/16, 1/64 and 1/256 (section 3.3 of the paper)
_MIN_COMPRESSION_RATE = 2  # PowerSGD leaves a matrix dense that it would not shrink by more
# Bytes that are read and written on the device for each byte of a float32 gradient. Counted from operations. 16 bits:
# rounded, read again; powersgd: error added, two products, their product, the new error; dgc: momentum, residual,
# magnitudes, a radix selection of four passes, the elements cleared, both states kept or not.
_ROUNDING_TRAFFIC, _POWER_SGD_TRAFFIC, _DGC_TRAFFIC = 3, 12, 24


class BFloat16(GradientExchange):
    """torch's bf16_compress_hook: gradients are divided, rounded and summed in 16 bits."""

    _hook = "bf16_compress_hook"

    def register(self, net: "DistributedDataParallel") -> None:
        """Register torch's hook."""
        self._register(net, self._hook)

    def sent_bytes(self, parameters: Iterable[nn.Parameter], step: int) -> int:
        """Return two bytes for each element."""
        return 2 * sum(parameter.numel() for parameter in parameters)

    @classmethod
    def planned(cls, weights: Sequence[Tensor], options: ExchangeOptions, states: int) -> PlannedExchange:
        """Say what ``plsc plan`` counts."""
        whole = sum(weight.nbytes for weight in weights)
        return PlannedExchange(whole // 2, traffic=_ROUNDING_TRAFFIC * whole)


class Float16(BFloat16):
    """torch's fp16_compress_hook."""

    _hook = "fp16_compress_hook"


class PowerSGD(GradientExchange):
    """torch's PowerSGD (Vogels et al., NeurIPS 2019, arXiv:1905.13727) with error feedback and warm start."""

    delays_gradients = True
    forgets = "PowerSGD's error feedback, which begins at zero after one step that is exchanged whole"

    def __init__(self, mesh: Mesh, module: nn.Module, options: ExchangeOptions) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        super().__init__(mesh, module, options)
        self._start, self._rank = options.powersgd_start_step, options.powersgd_rank
        self._hook = _power_sgd()
        # a matrix of zeros, a frozen layer's say, must not be divided by its norm
        self._torch_state = powerSGD_hook.PowerSGDState(
            mesh.group,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=self._start,
            min_compression_rate=_MIN_COMPRESSION_RATE,
            orthogonalization_epsilon=1e-8,
        )
        self._are_buckets_final = False

    def register(self, net: "DistributedDataParallel") -> None:
        """Register torch's hook."""
        net.register_comm_hook(self, PowerSGD.exchange)

    def begin(self, step: int) -> None:
        """Count the steps of the run, not of the process. The process's first stays dense, as DDP reorders after it."""
        self._torch_state.iter = step if self._are_buckets_final else 0

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Exchange a bucket (a DDP communication hook)."""
        if bucket.is_last():
            self._are_buckets_final = True
        future: Future[Tensor] = self._hook(self._torch_state, bucket)
        if self._mesh.device.type == "cpu":
            # The hook begins its second collective where the first one ends, on one of gloo's few threads: of several
            # buckets under way, ranks would take the collectives in different orders.
            future.wait()
        return future

    def commit_or_undo(self, skip: Tensor) -> None:
        """Begin anew, with no error to feed back, after a step that was not finite. The host waits, as in the hook."""
        if self._torch_state.error_dict and bool(skip):
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self._torch_state, memory).clear()

    def sent_bytes(self, parameters: Iterable[nn.Parameter], step: int) -> int:
        """Count P and Q of every tensor that is compressed, and the others whole."""
        rank = self._rank if step >= self._start else 0
        return sum(_power_sgd_elements(parameter, rank) * parameter.element_size() for parameter in parameters)

    @classmethod
    def planned(cls, weights: Sequence[Tensor], options: ExchangeOptions, states: int) -> PlannedExchange:
        """Say what ``plsc plan`` counts; another residual is there during a bucket's exchange."""
        whole = sum(weight.nbytes for weight in weights)
        sent = sum(_power_sgd_elements(weight, options.powersgd_rank) * weight.element_size() for weight in weights)
        return PlannedExchange(sent, traffic=_POWER_SGD_TRAFFIC * whole, kept={"backbone error feedback": whole})


def _power_sgd_elements(weight: Tensor, rank: int) -> int:
    """Numbers of P and Q by which PowerSGD sends a weight's gradient; all of it where they are many, or rank is 0."""
    rows = weight.shape[0] if weight.dim() else 1
    columns = weight.numel() // max(rows, 1)
    factors = (rows + columns) * min(rows, columns, rank)
    return factors if 0 < factors * _MIN_COMPRESSION_RATE < weight.numel() else weight.numel()


def _power_sgd() -> Callable[..., Future[Tensor]]:
    """torch's PowerSGD hook, which makes columns orthogonal by two passes where torch makes one of Gram-Schmidt.

    torch does at rank 2, and at every rank in 16 bits. One pass leaves nearly parallel columns far from orthogonal, as
    those of a gradient of rank 1 are (Giraud et al., 2005: twice is enough), and the approximation is none then.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def orthogonalize(matrices: Tensor, epsilon: float = 0) -> None:
        by_gram_schmidt = matrices.shape[2] == 2 or matrices.dtype.itemsize == 2
        for _ in range(2 if by_gram_schmidt else 1):
            powerSGD_hook._orthogonalize(matrices, epsilon)

    hook = powerSGD_hook.powerSGD_hook
    return FunctionType(hook.__code__, {**vars(powerSGD_hook), "_orthogonalize": orthogonalize})


class DeepGradientCompression(GradientExchange):
    """Deep Gradient Compression: top-k of each tensor, with momentum and what was not sent kept on each rank.

    For a tensor's gradient g on a rank, with weight decay λ and momentum m: u ← m·u + clip(g) + λ·w, v ← v + u; the
    elements of v that are largest in magnitude are sent, and set to 0 in v and in u (momentum factor masking). The
    optimizer steps by the mean over the ranks of what was sent, without momentum or decay of its own. At sparsity 0
    nothing is delayed, so nothing is masked, and the steps are those of SGD with momentum.

    Clipping is by tensor, to clip_norm / √ranks, before the exchange, as in Paddle's DGCMomentumOptimizer; the paper
    takes the norm of all tensors, which DDP's buckets do not show before they are sent.
    """

    delays_gradients = True
    keeps_state = True
    keeps: ClassVar[Mapping[str, str]] = {"residual": "gradients that were not sent yet (parallel.comm_hook)"}

    def __init__(self, mesh: Mesh, module: nn.Module, options: ExchangeOptions) -> None:
        super().__init__(mesh, module, options)
        self._names = {
            parameter: str(index)
            for index, parameter in enumerate(p for p in module.parameters() if p.requires_grad)
            if parameter.numel() >= options.dgc_dense_below
        }
        self.clipped_locally = frozenset(self._names)
        self._decay = dict.fromkeys(self._names, 0.0)
        self._factor = dict.fromkeys(self._names, 0.0)
        self._momentum = {parameter: torch.zeros_like(parameter) for parameter in self._names}
        self._residual = {parameter: torch.zeros_like(parameter) for parameter in self._names}
        # What the exchange would make of them: whether it counts is known when all ranks have voted on the step.
        self._pending: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._step = 0

    def register(self, net: "DistributedDataParallel") -> None:
        """Register :meth:`exchange`."""
        net.register_comm_hook(self, DeepGradientCompression.exchange)

    def take_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Take momentum and weight decay of the compressed tensors out of ``optimizer``, a plain torch.optim.SGD.

        Each of its groups that holds both kinds of tensors becomes two.
        """
        groups = optimizer.param_groups
        for group in groups:
            for parameter in self.clipped_locally.intersection(group["params"]):
                self._factor[parameter], self._decay[parameter] = group["momentum"], group["weight_decay"]
                optimizer.state.pop(parameter, None)
        optimizer.param_groups = [part for group in groups for part in self._split(group)]

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        whole = [parameter for parameter in group["params"] if parameter not in self._names]
        compressed = [parameter for parameter in group["params"] if parameter in self._names]
        parts = [{**group, "params": whole}, {**group, "params": compressed, "momentum": 0.0, "weight_decay": 0.0}]
        return [part for part in parts if part["params"]]

    def begin(self, step: int) -> None:
        """Take the sparsity of this step."""
        self._step = step

    def sparsity(self, step: int) -> float:
        """Return the share of elements that is not sent at a step: in the warm-up 3/4, 15/16, 63/64, then 255/256."""
        final, warmup = self._options.dgc_sparsity, self._options.dgc_warmup_steps
        if step >= warmup:
            return final
        return min(final, 1 - 0.25 ** (1 + _WARMUP_STAGES * step // warmup))

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Replace a bucket's gradients by what the optimizer is to step by (a DDP communication hook)."""
        buffer, sparsity = bucket.buffer(), self.sparsity(self._step)
        dense = _slices(bucket)
        compressed = {parameter: dense.pop(parameter) for parameter in list(dense) if parameter in self._names}
        for parameter, gradient in compressed.items():
            self._accumulate(parameter, gradient)
        if sparsity == 0:
            self._send_whole(compressed)
            dense |= compressed
        elif compressed:
            self._exchange_largest(buffer, compressed, sparsity)
        self._average(list(dense.values()))
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done

    def _accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Momentum correction and local accumulation, of the gradient clipped."""
        if self._options.clip_norm:
            bound = self._options.clip_norm * self._mesh.world_size**-0.5
            gradient.mul_((bound / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp(max=1.0))
        momentum = self._momentum[parameter] * self._factor[parameter]
        flat = in_memory_order(momentum)
        flat.add_(gradient).add_(in_memory_order(parameter.detach()), alpha=self._decay[parameter])
        self._pending[parameter] = momentum, self._residual[parameter] + momentum

    def _send_whole(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        for parameter, gradient in gradients.items():
            residual = self._pending[parameter][1]
            gradient.copy_(in_memory_order(residual))
            residual.zero_()

    def _average(self, parts: list[Tensor]) -> None:
        if not parts:
            return
        means = all_reduce_sum(torch.cat(parts), self._mesh).div_(self._mesh.world_size)
        for part, mean in zip(parts, means.split([each.numel() for each in parts]), strict=True):
            part.copy_(mean)

    def _exchange_largest(self, buffer: Tensor, parts: dict[nn.Parameter, Tensor], sparsity: float) -> None:
        """Leave the mean over the ranks of each tensor's largest elements in ``parts``, views of ``buffer``.

        Added up rank by rank, in which no element is written twice: atomic additions in any order would let the
        replicas part.
        """
        values, indices = [], []
        for parameter, part in parts.items():
            momentum, residual = (in_memory_order(tensor) for tensor in self._pending[parameter])
            largest = residual.abs().topk(_sent_elements(parameter, sparsity), sorted=False).indices
            values.append(residual[largest])
            indices.append(largest + (part.storage_offset() - buffer.storage_offset()))
            residual[largest] = 0.0
            momentum[largest] = 0.0
            part.zero_()
        packed = torch.cat([torch.cat(values).float().view(torch.int32), torch.cat(indices).to(torch.int32)])
        for rank in all_gather_equal(packed, self._mesh):
            sent, places = rank.chunk(2)
            buffer.index_add_(0, places, sent.view(torch.float32).to(buffer), alpha=1 / self._mesh.world_size)

    def commit_or_undo(self, skip: Tensor) -> None:
        """Keep momentum and residual of this step, or those before it, by the device's own decision."""
        for parameter, (momentum, residual) in self._pending.items():
            for kept, changed in ((self._momentum, momentum), (self._residual, residual)):
                kept[parameter] = torch.where(skip != 0, kept[parameter], changed)
        self._pending.clear()

    def sent_bytes(self, parameters: Iterable[nn.Parameter], step: int) -> int:
        """Count a float32 and an int32 for each element sent, and the small tensors whole."""
        sparsity = self.sparsity(step)
        return sum(_dgc_bytes(weight, sparsity if weight in self._names else 0.0) for weight in parameters)

    @classmethod
    def planned(cls, weights: Sequence[Tensor], options: ExchangeOptions, states: int) -> PlannedExchange:
        """Say what ``plsc plan`` counts: momentum and residual take the place of the optimizer's states."""
        whole, least = sum(weight.nbytes for weight in weights), options.dgc_dense_below
        compressed = [weight for weight in weights if weight.numel() >= least]
        sparsity = options.dgc_sparsity
        return PlannedExchange(
            sum(_dgc_bytes(weight, sparsity if weight.numel() >= least else 0.0) for weight in weights),
            is_gathered=True,
            words="all-gather of the largest",
            traffic=_DGC_TRAFFIC * whole,
            kept={"backbone gradients not sent": (2 - states) * sum(weight.nbytes for weight in compressed)},
            transient=2 * whole,
        )

    def state(self) -> dict[str, Tensor]:
        """Momentum and residual of this rank, by the tensor's place among the trained ones."""
        held = {"momentum": self._momentum, "residual": self._residual}
        return {
            f"{self._names[parameter]}.{name}": tensor.contiguous()
            for name, tensors in held.items()
            for parameter, tensor in tensors.items()
        }

    def restore(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
        """Take the momentum out of ``optimizer`` and the residual out of ``tensors``; zeros where they have none."""
        for parameter, name in self._names.items():
            momentum = optimizer.state.pop(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                self._momentum[parameter].copy_(momentum)
            if f"{name}.residual" in tensors:
                self._residual[parameter].copy_(tensors[f"{name}.residual"])


# Every kind by its name in the configuration, and those of installed packages.
HOOKS: Registry[type[GradientExchange]] = Registry(
    "plsc.gradient_hooks",
    {
        "none": GradientExchange,
        "bf16": BFloat16,
        "fp16": Float16,
        "powersgd": PowerSGD,
        "dgc": DeepGradientCompression,
    },
    is_subclass(GradientExchange),
    "a subclass of plsc.parallel.gradient_compression.GradientExchange",
)


def gradient_exchange(
    hook: str, module: nn.Module, mesh: Mesh, options: ExchangeOptions | None = None
) -> GradientExchange:
    """Return the exchange of gradients that ``hook`` names in HOOKS; with one rank there is none, whatever its name."""
    return _kind(hook, mesh.world_size)(mesh, module, options or ExchangeOptions())


def planned_exchange(
    hook: str, weights: Sequence[Tensor], ranks: int, options: ExchangeOptions, states: int
) -> PlannedExchange:
    """What ``plsc plan`` counts of :func:`gradient_exchange` over ``ranks``; see :meth:`GradientExchange.planned`."""
    return _kind(hook, ranks).planned(weights, options, states)


def _kind(hook: str, ranks: int) -> type[GradientExchange]:
    return HOOKS[hook] if ranks > 1 else GradientExchange


def _slices(bucket: GradBucket) -> dict[nn.Parameter, Tensor]:
    """The part of a bucket's buffer that each parameter's gradient takes."""
    buffer, parts = bucket.buffer(), dict[nn.Parameter, Tensor]()
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        assert isinstance(parameter, nn.Parameter)
        start = gradient.storage_offset() - buffer.storage_offset()
        parts[parameter] = buffer[start : start + parameter.numel()]
    return parts


def _sent_elements(weight: Tensor, sparsity: float) -> int:
    return max(1, round(weight.numel() * (1 - sparsity)))


def _dgc_bytes(weight: Tensor, sparsity: float) -> int:
    """A float32 and an int32 for each element sent; at sparsity 0 the whole gradient."""
    return 8 * _sent_elements(weight, sparsity) if sparsity > 0 else weight.numel() * weight.element_size()
