"""AdamW whose two moments are kept in 8 bits, with a scale for each block of a row (Dettmers et al., ICLR 2022).

torchao has the numbers' format (dynamic quantization: 256 values between -1 and 1, dense around 0) and the update,
which it computes in float32. Its own optimizer cuts blocks where a rank's part of a weight begins, compiles the update
for each shape of a weight, and keeps the moments in a type of tensor that checkpoints would have to know. Here blocks
end where rows do, so that a checkpoint goes on wherever the rows lie; one compiled update serves all shapes; and codes
and scales are plain tensors.
"""

import functools
import importlib
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from plsc.errors import UsageError

BLOCK_SIZES = (256, 128, 64)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_Kept = tuple[Tensor, Tensor, Tensor]  # codes, scales, and the values that codes stand for


def block_size(shape: Sequence[int]) -> int | None:
    """Return how many numbers of a row share a scale; None: the weight's moments stay in float32.

    That is so for vectors, and for rows that no size of BLOCK_SIZES divides, as of a first convolution's 27 numbers.
    """
    row = math.prod(shape[1:])
    return next((size for size in BLOCK_SIZES if row % size == 0), None)


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW with moments in 8 bits: m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², w ← w − γ(m̂ / (√v̂ + ε) + λw).

    The update sees both moments before they are rounded. Weights are float32. Of those with blocks ``state[weight]``
    has ``exp_avg`` and ``exp_avg_sq``, uint8 of the weight's shape, and ``exp_avg_scale`` and ``exp_avg_sq_scale``,
    float32 (rows, numbers of a row / block size): 2 + 8 / block size bytes per number in place of 8.

    Args:
        groups: parameter groups; each may have values of its own.
        lr: learning rate γ.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        compiled: compile the update, some ten seconds at the first step. Without, it takes several passes over memory.

    Raises:
        UsageError: torchao is not installed.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compiled: bool = True,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = _compiled_update() if compiled else _update()
        self._maps = functools.cache(_quantization_maps)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = _zeros(weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None and weight.numel()]
            self._step_plain([weight for weight in weights if "exp_avg_scale" not in self.state[weight]], group)
            for weight in weights:
                if "exp_avg_scale" in self.state[weight]:
                    self._step_blocks(weight, group)

    def _step_plain(self, weights: list[Tensor], group: Mapping[str, Any]) -> None:
        states = [self.state[weight] for weight in weights]
        if weights:
            beta1, beta2 = group["betas"]
            adamw(
                weights,
                [weight.grad for weight in weights if weight.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                **{name: group[name] for name in ("lr", "weight_decay", "eps")},
            )

    def _step_blocks(self, weight: Tensor, group: Mapping[str, Any]) -> None:
        state, size = self.state[weight], block_size(weight.shape)
        assert weight.grad is not None
        assert size is not None
        state["step"] += 1
        signed, unsigned = self._maps(weight.device)
        blocks = _viewed(weight.data, size)
        self._update(
            blocks,
            _viewed(weight.grad, size),
            state["step"],
            (_viewed(state["exp_avg"], size), _viewed(state["exp_avg_scale"]), signed),
            (_viewed(state["exp_avg_sq"], size), _viewed(state["exp_avg_sq_scale"]), unsigned),
            torch.tensor(group["lr"]),  # a number would be compiled into the update
            *group["betas"],
            group["weight_decay"],
            group["eps"],
        )
        if not weight.is_contiguous():  # channels_last
            weight.copy_(blocks.view(weight.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch's optimizers do, which would turn codes into numbers of the weights' type."""
        states: dict[int, dict[str, Any]] = state_dict["state"]
        others = {
            number: {name: value for name, value in state.items() if not _is_codes(value)}
            for number, state in states.items()
        }
        super().load_state_dict({**state_dict, "state": others})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, state in states.items():
            for name in filter(lambda name: _is_codes(state[name]), state):
                codes = torch.empty(state[name].shape, dtype=torch.uint8, device=weights[number].device)
                self.state[weights[number]][name] = codes.copy_(state[name])


def _viewed(tensor: Tensor, *sizes: int) -> Tensor:
    """Return the numbers of a contiguous tensor, or a contiguous copy, as (-1, *sizes).

    That is no view to torch: the update would be compiled for each shape of a view's base.
    """
    return tensor.contiguous().view(-1, *sizes).data


def _zeros(weight: Tensor) -> dict[str, Tensor]:
    """The state of a weight before its first step."""
    state, size = {"step": torch.tensor(0.0)}, block_size(weight.shape)
    for name in _MOMENTS:
        if size is None:
            state[name] = torch.zeros_like(weight)
        else:
            state[name] = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
            scales = (len(weight), math.prod(weight.shape[1:]) // size)
            state[f"{name}_scale"] = torch.zeros(scales, device=weight.device)
    return state


def _is_codes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.uint8


def _quantization_maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values that codes stand for: of the first moment, and of the second."""
    formats = import_torchao("torchao.optim.subclass_8bit")
    signed, unsigned = (
        torch.tensor(values, device=device) for values in (formats.get_qmap_signed(), formats.get_qmap_unsigned())
    )
    torch._dynamo.mark_static(signed)  # their 256 values would be taken for the size of the first weight's blocks
    torch._dynamo.mark_static(unsigned)
    return signed, unsigned


@functools.cache
def _update() -> Callable[..., None]:
    """torchao's update of one weight; the numbers are lr, β₁, β₂, weight decay and ε."""
    moment = import_torchao("torchao.optim.subclass_8bit").OptimState8bit
    single_param_adam = import_torchao("torchao.optim.adam").single_param_adam

    def update(weight: Tensor, gradient: Tensor, step: Tensor, first: _Kept, second: _Kept, *numbers: Any) -> None:
        averages = moment(*first, True, torch.float32), moment(*second, False, torch.float32)
        single_param_adam(weight, gradient, step, *averages, None, *numbers, True, False)

    return update


@functools.cache
def _compiled_update() -> Callable[..., None]:
    """The same, compiled once for all shapes."""
    return torch.compile(_update(), fullgraph=True, dynamic=True)


def import_torchao(module: str) -> ModuleType:
    """Import a module of torchao, without what it reports of itself to its own authors.

    Raises:
        UsageError: torchao is not installed.
    """
    logger, quiet = logging.getLogger("torch.utils._pytree"), logging.Filter("nothing")  # of an enumeration of torchao
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.addFilter(quiet)
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"torchao is not installed ({error}): pip install plsc-torch[torchao]") from None
        finally:
            logger.removeFilter(quiet)
