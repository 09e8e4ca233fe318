"""The optimizers of the class table: step() runs pass 2 and updates each chunk's rows as soon as their gradient exists.

The arithmetic of a chunk is in :mod:`plsc.head.update_rules` and in the head's backend.
"""

import numbers
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from plsc.errors import PlscError, UsageError
from plsc.head.backends import choose_updater
from plsc.head.backends.self_check import Shard
from plsc.head.backends.torch_backend import Updater, squared_norm
from plsc.head.low_precision import Rounding, RowState
from plsc.head.replica_exchange import Averages
from plsc.head.sharded_head import ShardedHead
from plsc.head.update_rules import AdamWRule, SgdRule, Update, UpdateKind, UpdateRule
from plsc.optim.verdict import UpdateCounter, Verdict
from plsc.parallel.collectives import all_reduce_max, all_reduce_sum
from plsc.parallel.tensor_shard import TensorShard


class HeadOptimizer(torch.optim.Optimizer):
    """A torch Optimizer over one :class:`ShardedHead`'s table; learning-rate schedulers work on it.

    ``step()`` consumes the batches whose loss went through backward() since the last step. Where the loss or its
    derivative is not finite, it leaves weights, state and norms as they are, bit for bit, on every rank. On a GPU the
    device decides that: ``step()`` waits for the verdict of the step before it, and not for its own.

    Args:
        head: the table, made with ``update="fused"``.
        defaults: hyper-parameters.
        rounding: how low-precision weights and state are stored.
        state_dtypes: of the tables that the rule keeps beside the weights, by name.

    Subclasses make the rule of a step from the parameter group.
    """

    # torch.amp.GradScaler then hands scale and found_inf over instead of looking for gradients in the parameters
    _step_supports_amp_scaling = True

    def __init__(
        self, head: ShardedHead, defaults: dict[str, Any], rounding: Rounding, state_dtypes: Mapping[str, torch.dtype]
    ) -> None:
        if head.update != "fused":
            raise UsageError('the head was made with update="autograd"; use any torch optimizer on it, or "fused"')
        if rounding not in get_args(Rounding):
            raise UsageError(f'rounding must be "stochastic" or "nearest", not {rounding!r}')
        for name in ("lr", "weight_decay"):
            if not _number(name, defaults[name]) >= 0:
                raise UsageError(f"{name} must not be negative, but is {defaults[name]}")
        self._softmax, self._table, self._pending = head.softmax, head.softmax.table, head.softmax.pending
        super().__init__([self._table.parameter], defaults)
        self.head, self.rounding = head, rounding
        self._updates = UpdateCounter()
        self._number = 0  # of the update that is enqueued
        self._verdict: Verdict | None = None
        self._given_verdict: Verdict | None = None
        self._state = self._table.new_state(state_dtypes, rounding)
        shard = Shard(head.mesh.device, self._table.parameter.dtype, head.dim)
        self._updater = choose_updater(head.backend, UpdateKind(self._rule(), state_dtypes, rounding), shard)
        self._pending.attach(self)

    @property
    def steps(self) -> int:
        """Updates made. May be set. Asking waits for the last one's verdict."""
        return self._updates.count

    @steps.setter
    def steps(self, value: int) -> None:
        self._updates.count = self._number = value

    @property
    def skipped(self) -> bool:
        """Whether the last step() left everything as it was. Asking waits for its verdict."""
        return self._verdict is not None and self._verdict.skipped

    @property
    def tables(self) -> dict[str, RowState]:
        """The state beside the weights, by name."""
        return self._state.tables

    @abstractmethod
    def _rule(self) -> UpdateRule:
        """The rule of this step, by the parameter group's present values."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run pass 2 over the batches seen since the last step, and update every row that took part.

        Raises:
            PlscError: ``head.weight`` was written to between a batch's forward and this step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._pending.batches:
            return loss
        scale = getattr(self, "grad_scale", None)  # torch.amp.GradScaler sets it for the length of this call
        if scale is not None:
            self.scale_gradients(scale.double().reciprocal())
        self._check_version()
        self._verdict = verdict = self._given_verdict or self._agreed_verdict()
        self._number = self._updates.begin(verdict)
        decided = verdict.host_decides(self.head.mesh.device)
        if not (decided and verdict.skipped):
            step = self._step(skip=None if decided else verdict.flag)
            self._softmax.update_rows(self._pending.batches, self._state, self._updater, step)
            self._table.norms_are_current()
        self._softmax.exchange.after_step(self.averages())
        self._pending.clear()
        self.head.end_step()
        return loss

    def step_unless(self, verdict: Verdict) -> None:
        """Call step() with a verdict that is the same on every rank, and speaks for this rank's batches too.

        Raises:
            PlscError: as step() does.
        """
        self._given_verdict = verdict
        try:
            self.step()  # and not a part of it: learning-rate schedulers watch whether it is called
        finally:
            self._given_verdict = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the batches seen since the last step."""
        self._pending.clear()
        super().zero_grad(set_to_none)

    def make_replicas_equal(self) -> None:
        """Make replicas equal that step by themselves, as before a checkpoint; a period of theirs begins anew.

        Every rank calls; does nothing for other tables.
        """
        self._softmax.exchange.finish(self.averages())

    def wrap_updater(self, wrap: Callable[[Updater], Updater]) -> None:
        """Let what ``wrap`` returns of it take the place of what updates a chunk, from the next step on."""
        self._updater = wrap(self._updater)

    def averages(self) -> Averages:
        """What averages and changes of replicas need of this optimizer now."""
        return Averages(self._state, self.rounding, self.head.seed, self._number)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """‖∂loss/∂W‖ over all shards (float64 scalar), of the batches that wait for step(). Costs one more pass 2.

        Rows that no update changes have no gradient.

        Raises:
            UsageError: replicas step by themselves, each by another gradient.
        """
        self._softmax.exchange.check_clipping()
        total = torch.zeros((), dtype=torch.float64, device=self.head.mesh.device)
        if self._pending.batches:
            for chunk, gradient in self._softmax.gradient_chunks(self._pending.batches):
                if self._table.kept is not None:
                    gradient.masked_fill_(self._table.kept.in_chunk(chunk)[:, None], 0)
                total += squared_norm(gradient, chunk)
        return all_reduce_sum(total, self.head.mesh.head).sqrt()

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply the gradient that step() will apply."""
        for pending in self._pending.batches:
            assert pending.grad_loss is not None
            pending.grad_loss *= factor

    def gradients_are_finite(self) -> bool:
        """Return whether step() would go through, the same on every rank. Every rank calls; waits for the device."""
        return not self._agreed_verdict().skipped

    @torch.no_grad()
    def not_finite(self) -> Tensor:
        """1 where step() has to leave everything as it is for this rank's batches, else 0: float32, on the device."""
        device = self.head.mesh.device
        found = getattr(self, "found_inf", None)  # torch.amp.GradScaler sets it for the length of step()
        if isinstance(found, Tensor):
            bad = (found != 0).float().to(device).reshape(())
        else:
            bad = torch.full((), float(bool(found)), device=device)
        waiting = self._pending.batches
        facts = [torch.stack([p.log_z.sum(), p.target_grad.sum(), p.loss_gradient.double()]) for p in waiting]
        if facts:
            bad = torch.maximum(bad, (~torch.isfinite(torch.stack(facts)).all()).float())
        return bad

    def sharded_state(self) -> dict[str, TensorShard]:
        """State tables for torch.distributed.checkpoint, loadable at any number of ranks."""
        return self._state.row_shards()

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and the number of steps; the tables are in :meth:`sharded_state`."""
        return {
            "steps": self.steps,
            "param_groups": [
                {name: value for name, value in group.items() if name != "params"} for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.steps = int(state_dict["steps"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def _step(self, factor: float = 1.0, skip: Tensor | None = None) -> Update:
        """This step of the rule, for all rows; ``factor`` multiplies the gradient."""
        seed, first_row = self.head.seed, self._table.first_row
        return Update(self._rule(), factor, self.rounding, seed, self._number, first_row, skip)

    def _check_version(self) -> None:
        if any(pending.version != self._table.version for pending in self._pending.batches):
            raise PlscError(
                "head.weight was written to between a loss and its step(); write after step() or zero_grad()"
            )

    def _agreed_verdict(self) -> Verdict:
        """The verdict of all ranks, as head groups see other samples. Moves 4 bytes."""
        mesh = self.head.mesh
        return Verdict(all_reduce_max(self.not_finite(), mesh).reshape(1), mesh.timeout)


class HeadSGD(HeadOptimizer):
    """torch.optim.SGD's arithmetic (m = μm + g + λW; W −= lr·m) on a :class:`plsc.ShardedHead`.

    Only rows that took part in the step are read or written: with sampling, the others keep weight and momentum.

    Args:
        head: its table, and its ``momentum_dtype``.
        lr: learning rate.
        momentum: μ; 0 keeps no state, as does ``momentum_dtype=None``.
        weight_decay: λ, coupled as in torch.optim.SGD.
        nesterov: look ahead by one step of momentum.
        rounding: how low-precision weights and state are stored; "nearest" exists to show what it breaks.

    Raises:
        UsageError: a value out of range, or momentum without a ``momentum_dtype``.
    """

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        rounding: Rounding = "stochastic",
    ) -> None:
        _check_head(head, "HeadSGD", "SGD")
        if not 0 <= _number("momentum", momentum) < 1:
            raise UsageError(f"momentum lies in [0, 1), not {momentum}")
        if momentum and head.momentum_dtype is None:
            raise UsageError("the head keeps no momentum (momentum_dtype=None); pass momentum=0")
        if nesterov and not momentum:
            raise UsageError("nesterov needs momentum")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        state = {"momentum": head.momentum_dtype} if momentum and head.momentum_dtype is not None else {}
        super().__init__(head, defaults, rounding, state)

    def _rule(self) -> SgdRule:
        group = self.param_groups[0]
        return SgdRule(float(group["lr"]), group["momentum"], group["weight_decay"], group["nesterov"])


class HeadAdamW(HeadOptimizer):
    """torch.optim.AdamW's arithmetic (Loshchilov & Hutter, ICLR 2019) on a :class:`plsc.ShardedHead`.

    Only rows that took part in the step are read or written. The first moment is kept in the head's
    ``momentum_dtype``. The second spans too many orders of magnitude for int8: it is bfloat16 where the first is
    bfloat16 or int8.

    Args:
        head: its table, and its ``momentum_dtype``, which may not be None.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the second moment's root.
        weight_decay: decoupled; W shrinks by lr·weight_decay.
        rounding: how low-precision weights and state are stored; "nearest" exists to show what it breaks.

    Raises:
        UsageError: a value out of range, or a head without a ``momentum_dtype``.
    """

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rounding: Rounding = "stochastic",
    ) -> None:
        _check_head(head, "HeadAdamW", "AdamW")
        if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= _number("betas", b) < 1 for b in betas):
            raise UsageError(f"betas are two numbers in [0, 1), not {betas!r}")
        if not _number("eps", eps) >= 0:
            raise UsageError(f"eps must not be negative, but is {eps}")
        if head.momentum_dtype is None:
            raise UsageError("AdamW keeps moments; give the head a momentum_dtype")
        low = head.momentum_dtype in (torch.bfloat16, torch.int8)
        state = {"first_moment": head.momentum_dtype, "second_moment": torch.bfloat16 if low else head.momentum_dtype}
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(head, defaults, rounding, state)

    def _rule(self) -> AdamWRule:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        return AdamWRule(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], self._number)


class HeadState:
    """All that a class table and its optimizer have to go on from, as torch's Stateful.

    ``torch.distributed.checkpoint.save({"head": HeadState(optimizer)}, checkpoint_id=FOLDER)`` writes it, each rank its
    rows; ``load`` of the same reads it, at any number of ranks. Torchtitan's CheckpointManager takes it as one of its
    states. Everything is a tensor, so that nothing is unpickled. Rows are written in place: save and load between
    step() and the next loss.

    Args:
        optimizer: of the head.
    """

    def __init__(self, optimizer: HeadOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Tensor]:
        """Rows of table and optimizer, not copied; numbers of batches and steps, the rate, the margin's statistics."""
        head, optimizer = self._optimizer.head, self._optimizer
        numbers = head.get_extra_state()
        return {
            **head.sharded_state(),
            **optimizer.sharded_state(),
            "forwards": torch.tensor(numbers["forwards"]),
            "steps": torch.tensor(optimizer.steps),
            "lr": torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float64),
            **{f"margin.{name}": torch.tensor(v, dtype=torch.float64) for name, v in numbers["margin"].items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the numbers; rows were read into what :meth:`state_dict` returned."""
        margin = {key.partition(".")[2]: float(v) for key, v in state_dict.items() if key.startswith("margin.")}
        self._optimizer.head.set_extra_state({"forwards": state_dict["forwards"], "margin": margin})
        self._optimizer.steps = int(state_dict["steps"])
        self._optimizer.param_groups[0]["lr"] = float(state_dict["lr"])


def _check_head(head: object, optimizer: str, torch_optimizer: str) -> None:
    if not isinstance(head, ShardedHead):
        raise UsageError(
            f"plsc.{optimizer} takes the plsc.ShardedHead itself, not a {type(head).__name__}; "
            f"parameters of other modules are for torch.optim.{torch_optimizer}"
        )


def _number(name: str, value: object) -> float:
    """``value``, which a Tensor may hold, as torch's optimizers admit; UsageError if it is no number."""
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, Tensor)):
        raise UsageError(f"{name} must be a number, not {value!r}")
    return float(value)
