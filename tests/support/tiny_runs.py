"""Training runs that take a second: a small backbone, small avatars, and ranks that can be killed.

Runs happen in worker processes only, so that the backbone is never known to the process that collects tests.
"""

import multiprocessing as mp
import os
import pkgutil
import signal
import socket
import tempfile
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.ranks import HANG_SECONDS, RankError, offer_stacks, stacks_of

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
    "log.tensorboard": False,
    "eval.every_steps": 0,
    "checkpoint.every_steps": 4,
}  # 60 images: 5 steps an epoch, 20 in all


def register_tiny() -> None:
    """Make backbones known: "tiny", "plain" (without dropout), "smooth" (nor batch normalisation), "residual".

    The last one has three blocks after its stem, a tensor that is no multiple of any number of ranks, and one weight
    that is not trained. "tiny_vit" has two transformer blocks of 8 heads, and drops nothing.
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
        vit.SHAPES["tiny_vit"] = vit.Shape(32, 2)
        return vit.VisionTransformer("tiny_vit", embedding_dim, image_size, drop_path=0.0)

    for builder in (tiny, plain, smooth, residual, tiny_vit):
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


def run_until(mesh: Any, out: Path, changes: dict[str, Any], resume: str | None, step: int) -> None:
    """Train up to a step, as by a signal there."""
    import signal

    from plsc.train import step as steps
    from plsc.train.failures import Interrupted

    take = steps.Stepper.step

    def stopping(self: Any, group: Any, number: int, stop: int = 0) -> Any:
        return take(self, group, number, signal.SIGTERM if number == step - 1 else stop)

    steps.Stepper.step = stopping  # type: ignore[method-assign]
    try:
        run(mesh, out, changes, resume)
    except Interrupted:
        pass
    finally:
        steps.Stepper.step = take  # type: ignore[method-assign]


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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.out = out
        self.ranks: list[BaseProcess] = []
        self._stacks = [Path(tempfile.mkstemp(prefix=f"rank{rank}-")[1]) for rank in range(world)]
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
