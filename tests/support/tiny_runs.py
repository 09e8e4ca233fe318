"""Training runs that take a second: a small backbone, small avatars, and ranks that can be killed.

Runs happen in worker processes only, so that the backbone is never known to the process that collects tests.
"""

import multiprocessing as mp
import os
import pkgutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from support.ranks import HANG_SECONDS, RankError, offer_stacks, stacks_file, stacks_of
from support.waiting import free_port

TINY: dict[str, Any] = {
    "backbone": "tiny",
    "embedding_dim": 16,
    "precision": "fp32",
    "epochs": 4,
    "data.train": "avatars:10x6",
    "data.image_size": 32,
    "data.batch_size": 12,
    "data.workers": 0,
    "head.s": 16.0,
    "head.m": 0.1,
    "optim.lr": 0.05,
    "optim.warmup_steps": 2,
    "log.every_steps": 1,
    "log.to": (),
    "eval.every_steps": 0,
    "checkpoint.every_steps": 4,
}  # 60 images: 5 steps an epoch, 20 in all


def register_tiny() -> None:
    """Make backbones known: "tiny", "plain" (without dropout), "smooth" (nor batch normalisation), "residual".

    The last one has three blocks after its stem, a tensor that is no multiple of any number of ranks, and one weight
    that is not trained. "tiny_vit" has two transformer blocks of 8 heads, "vit_of_pipelines" four; they drop nothing.
    """
    from plsc.models import Backbone, names, register, vit

    if "tiny" in names():
        return

    class Tiny(Backbone):
        def __init__(self, name: str, embedding_dim: int, image_size: int, dropout: float) -> None:
            super().__init__(name, embedding_dim, image_size)
            self.layers = nn.Sequential(
                nn.Conv2d(3, 8, 5, stride=4, padding=2, bias=False),
                nn.BatchNorm2d(8),
                nn.PReLU(8),
                nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.PReLU(16),
                nn.Flatten(),
                nn.Dropout(dropout),
                nn.Linear(16 * (image_size // 8) ** 2, embedding_dim),
            )

        def forward(self, x: Tensor) -> Tensor:
            embeddings: Tensor = self.layers(x)
            return embeddings

    def tiny(embedding_dim: int, image_size: int) -> Backbone:
        return Tiny("tiny", embedding_dim, image_size, 0.1)

    def plain(embedding_dim: int, image_size: int) -> Backbone:
        return Tiny("plain", embedding_dim, image_size, 0.0)

    def smooth(embedding_dim: int, image_size: int) -> Backbone:
        model = Tiny("smooth", embedding_dim, image_size, 0.0)
        model.layers = nn.Sequential(*[each for each in model.layers if not isinstance(each, nn.BatchNorm2d)])
        return model

    def residual(embedding_dim: int, image_size: int) -> Backbone:
        model = Tiny("residual", embedding_dim, image_size, 0.0)
        blocks = nn.Sequential(*[_Residual(7) for _ in range(3)])
        model.layers = nn.Sequential(
            nn.Conv2d(3, 7, 8, stride=8), blocks, nn.Flatten(), nn.Linear(7 * (image_size // 8) ** 2, embedding_dim)
        )
        model.layers[3].bias.requires_grad_(False)
        return model

    def tiny_vit(embedding_dim: int, image_size: int) -> Backbone:
        return vit.VisionTransformer("tiny_vit", embedding_dim, image_size, drop_path=0.0)

    def vit_of_pipelines(embedding_dim: int, image_size: int) -> Backbone:
        return vit.VisionTransformer("vit_of_pipelines", embedding_dim, image_size, drop_path=0.0)

    vit.SHAPES |= {"tiny_vit": vit.Shape(32, 2), "vit_of_pipelines": vit.Shape(32, 4)}
    for builder in (tiny, plain, smooth, residual, tiny_vit, vit_of_pipelines):
        register(builder)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.PReLU(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.body(x)
        return y


def run(mesh: Any, out: Path, changes: dict[str, Any] | None = None, resume: str | None = None) -> dict[str, Any]:
    """Train in this process, which is one rank of ``mesh``."""
    from plsc import config
    from plsc.train import train

    register_tiny()
    return train(config.load(None, {**TINY, **(changes or {})}), mesh, out=out, resume=resume, quiet=True)


def refusal(mesh: Any, out: Path, changes: dict[str, Any] | None = None, resume: str | None = None) -> str:
    """Train, and return "KIND: message" of the error that ends the run; empty where none does."""
    from plsc.errors import PlscError

    try:
        run(mesh, out, changes, resume)
    except PlscError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def each_step(taking: Callable[..., Any]) -> Iterator[None]:
    """Let ``taking(take, stepper, group, number, stop)`` take each step within; ``take`` does so as ever."""
    from plsc.train.step import Stepper

    take = Stepper.step

    def step(self: Any, group: Any, number: int, stop: int = 0) -> Any:
        return taking(partial(take, self), self, group, number, stop)

    with mock.patch.object(Stepper, "step", step):
        yield


def run_until(mesh: Any, out: Path, changes: dict[str, Any], resume: str | None, step: int) -> None:
    """Train up to a step, as by a signal there."""
    from plsc.train.failures import Interrupted

    def stopping(take: Any, _: Any, group: Any, number: int, stop: int) -> Any:
        return take(group, number, signal.SIGTERM if number == step - 1 else stop)

    with each_step(stopping), suppress(Interrupted):
        run(mesh, out, changes, resume)


def poisoned(
    mesh: Any, out: Path, changes: dict[str, Any], bad_steps: list[int], rank: int
) -> tuple[dict[str, Any] | str, list[bool]]:
    """Train with one rank's embeddings multiplied by infinity in some steps.

    Returns the result, or the error, and whether each step changed nothing. Results of steps are read by the run alone.
    """
    from plsc.errors import PlscError
    from plsc.train.step import Stepper

    compute, same, now = Stepper._loss, list[bool](), -1

    def state(components: Any) -> list[Tensor]:
        (table,) = components.tables
        shards = [*table.head.sharded_state().values(), *table.optimizer.sharded_state().values()]
        tensors = [*components.strategy.backbone.state_dict().values(), *table.head.margin_state.values()]
        tensors += [shard.blocks[0].local for shard in shards]
        tensors += [] if components.average is None else components.average.values.values()
        tensors += [t for entry in components.optimizer.state.values() for t in entry.values()] if now > 0 else []
        return [tensor.clone() for tensor in tensors if isinstance(tensor, Tensor)]

    def poisoning(self: Any, totals: Any, group: Any, batch: Any, upcoming: Any, embeddings: Any, *rest: Any) -> Any:
        factor = float("inf") if now in bad_steps and mesh.rank == rank else 1.0
        return compute(self, totals, group, batch, upcoming, embeddings * factor, *rest)

    def stepping(take: Any, stepper: Any, group: Any, number: int, stop: int) -> Any:
        nonlocal now
        now = number
        before = state(stepper.components)
        enqueued = take(group, number, stop)
        same.append(all(torch.equal(a, b) for a, b in zip(before, state(stepper.components), strict=True)))
        return enqueued

    with mock.patch.object(Stepper, "_loss", poisoning), each_step(stepping):
        try:
            return run(mesh, out, changes), same
        except PlscError as error:
            return str(error), same


@contextmanager
def open_trainer(mesh: Any, out: Path, changes: dict[str, Any], resume: str | None = "auto") -> Iterator[Any]:
    """A trainer that has begun or resumed its run, and takes no steps by itself."""
    from plsc import config
    from plsc.train.trainer import Trainer

    register_tiny()
    trainer = Trainer.from_config(config.load(None, {**TINY, **changes}), mesh, out, resume, quiet=True)
    try:
        yield trainer
    finally:
        for each in (trainer.profiler, trainer.checkpointer, trainer.metrics, trainer.report):
            each.close()


def stored(mesh: Any, out: Path, step: int, prefix: str = "backbone.") -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin with ``prefix``, by the rest of their names."""
    from plsc.train.checkpoint_reader import open_checkpoint

    return open_checkpoint(out / f"checkpoints/step-{step:08d}", mesh).read(prefix)


def assert_same_losses(out: Path, theirs: Path, rel: float = 1e-4) -> None:
    """Two runs have taken the same steps, with losses as near as ``rel``."""
    found, expected = losses(out), losses(theirs)
    assert sorted(found) == sorted(expected)
    assert [found[step] for step in sorted(found)] == pytest.approx([expected[step] for step in sorted(found)], rel=rel)


def assert_same_files(out: Path, theirs: Path) -> None:
    """Two runs have shipped the same weights, bit for bit."""
    found, expected = (load_file(each / "model.safetensors") for each in (out, theirs))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def losses(out: Path) -> dict[int, float]:
    """The loss of each step, as metrics.jsonl has it."""
    from plsc.train.metrics import read_metrics

    return {line["step"]: line["loss"] for line in read_metrics(out) if "loss" in line}


class Killable:
    """``world`` ranks of one run as processes of their own."""

    def __init__(
        self,
        world: int,
        out: Path,
        changes: dict[str, Any] | None = None,
        resume: str | None = None,
        fault: str = "",
    ) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "plsc.train", "support.tiny_runs"])
        self.out, port = out, free_port()
        self.ranks: list[BaseProcess] = []
        self._stacks = [stacks_file(rank) for rank in range(world)]
        for rank, stacks in enumerate(self._stacks):
            process = context.Process(target=_be_rank, args=(rank, world, port, out, changes, resume, fault, stacks))
            process.start()
            self.ranks.append(process)

    def wait_for_step(self, step: int) -> None:
        """Return when metrics.jsonl has a line of ``step``."""
        while step not in losses(self.out):
            assert any(process.is_alive() for process in self.ranks), "the run ended before that step"
            time.sleep(0.005)

    def kill(self, ranks: list[int], number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        for rank in ranks:
            pid = self.ranks[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def wait(self) -> list[int | None]:
        """Every rank's exit code."""
        deadline = time.monotonic() + HANG_SECONDS
        for process in self.ranks:
            process.join(max(deadline - time.monotonic(), 0))
        if hanging := [rank for rank, process in enumerate(self.ranks) if process.is_alive()]:
            stacks = [f"rank {rank}:\n{stacks_of(self.ranks[rank], self._stacks[rank])}" for rank in hanging]
            self.kill(hanging)
            raise RankError("\n".join(["the run does not end", *stacks]))
        for path in self._stacks:
            path.unlink(missing_ok=True)
        return [process.exitcode for process in self.ranks]


def _be_rank(
    rank: int,
    world: int,
    port: int,
    out: Path,
    changes: dict[str, Any] | None,
    resume: str | None,
    fault: str,
    stacks: Path,
) -> None:
    import sys

    import plsc
    from plsc.errors import PlscError

    offer_stacks(stacks)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (what a killed peer makes gloo say is expected)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if fault:
        _arm(fault)
    try:
        run(plsc.init("cpu"), out, changes, resume)
    except PlscError as error:
        os._exit(error.exit_code)
    except RuntimeError:
        os._exit(70)
    os._exit(0)


def _arm(fault: str) -> None:
    """Kill this process at a place in the second checkpoint's writing: before or after a function is called.

    ``fault`` is FUNCTION:before or FUNCTION:after, of plsc.train, with :N for another call than the second.
    """
    name, when, *count = fault.split(":")
    path, _, attribute = f"plsc.train.{name}".rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, attribute)
    calls = 0

    def killing(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        is_fatal = calls == int(count[0] if count else 2)
        if is_fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **keywords)
        if is_fatal and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, killing)
