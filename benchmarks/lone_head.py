"""What the scripts share that train a class head alone: the head, embeddings for it, and what memory it takes."""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import plsc
from plsc.sizes import status_bytes

IDENTITIES = 2000


def resident(kind: str) -> float:
    """This process's memory in MiB: VmRSS, RssAnon, RssFile or VmHWM (the peak since :func:`forget_peak`)."""
    return status_bytes(kind) / 2**20


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def batches(args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless unit embeddings (B, D) around their identities' centres, and labels (B,) all over the classes."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(IDENTITIES, args.dim, generator=generator)
    classes = torch.randperm(IDENTITIES, generator=generator) * (args.classes // IDENTITIES)
    while True:
        chosen = torch.randint(IDENTITIES, (args.batch,), generator=generator)
        x = centres[chosen] + 0.3 * torch.randn(args.batch, args.dim, generator=generator)
        yield torch.nn.functional.normalize(x), classes[chosen]


def sizes_of(args: argparse.Namespace) -> dict[str, float]:
    """What is asked of the run: columns of its row, and options of its processes."""
    return {name: getattr(args, name) for name in ("classes", "dim", "sample_rate", "batch", "steps")}


def worker_command(script: str, args: argparse.Namespace, *words: str, **more: object) -> list[str]:
    """The command of a process of ``script`` that trains as ``args`` say; ``more`` are further options."""
    options = {**sizes_of(args), "save_every": args.save_every, **more}
    return [
        *(sys.executable, script, "--worker", *words),
        *(word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))),
    ]


class LoneHead:
    """A sampled class head in bfloat16 with an int8 momentum, on a CPU; ``options`` are further ones of the head."""

    def __init__(self, args: argparse.Namespace, **options: Any) -> None:
        self.args, self.mesh = args, plsc.init("cpu")
        self.head = plsc.ShardedHead(
            args.dim,
            args.classes,
            self.mesh,
            sample_rate=args.sample_rate,
            weight_dtype=torch.bfloat16,
            momentum_dtype=torch.int8,
            **options,
        )
        self.optimizer = plsc.HeadSGD(self.head, lr=0.5, momentum=0.9, weight_decay=5e-4)
        self.labels = torch.empty(0, dtype=torch.int64)  # of the last batch

    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {**self.head.sharded_state(), **self.optimizer.sharded_state()}

    def train(self, done: int) -> Iterator[tuple[int, float, float, float]]:
        """Train from step ``done`` to the last one: each step's number, loss, seconds and CPU seconds."""
        feed = batches(self.args)
        for _ in range(done):
            next(feed)
        upcoming = next(feed)
        for step in range(done + 1, self.args.steps + 1):
            begin, cpu = time.monotonic(), time.process_time()
            (x, self.labels), upcoming = upcoming, next(feed)
            loss = self.head(x, self.labels)
            self.head.prefetch(upcoming[1])
            loss.backward()
            self.optimizer.step()
            yield step, loss.item(), time.monotonic() - begin, time.process_time() - cpu
