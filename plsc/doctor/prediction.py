"""What ``plsc plan`` predicts of the class head at a small size, beside what it takes on this device."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from plsc.bench.harness import MIB, PeakMemory
from plsc.config import Config
from plsc.devices import Device
from plsc.doctor.report import Line, failed, found
from plsc.errors import first_line
from plsc.head.sharded_head import ShardedHead
from plsc.optim.head_optimizers import HeadSGD
from plsc.parallel.mesh import Mesh
from plsc.plan.memory import head_memory
from plsc.plan.plan_config import PlanConfig
from plsc.plan.timing import head_seconds

Tick = Callable[[str], None]

_DIM = 512
_SIZES = {"cpu": (20_000, 64), "cuda": (1_000_000, 1024)}  # classes, samples
_STEPS, _REHEARSAL_CLASSES = 5, 4096
# The table is computed to the byte. The rest is a peak: on a CPU of the resident set, in which libraries move too.
_TABLE_TOLERANCE = 0.01
_PEAK_TOLERANCE = {"cpu": (0.25, 64 * MIB), "cuda": (0.10, 16 * MIB)}


def head(device: torch.device, speeds: Device, tick: Tick) -> list[Line]:
    """Memory and time of the head alone, exact, in bfloat16 + int8, on this rank by itself."""
    classes, batch = _SIZES[device.type]
    base = Config()
    data = replace(base.data, batch_size=batch)
    storage = replace(base.head, weight_dtype="bfloat16", momentum_dtype="int8")
    config = replace(base, embedding_dim=_DIM, data=data, head=storage, optim=replace(base.optim, head="sgd"))
    setup = PlanConfig(config, classes, 1, 1, 1)
    tick("plan")
    planned_table, planned_scratch = head_memory(setup, speeds)
    planned_seconds = sum(head_seconds(setup, speeds).values())
    try:
        table, peak, seconds = _measure(device, classes, batch, tick)
    except RuntimeError as error:
        return [failed("plan, head", first_line(error), "send this report")]
    size = f"{classes:,} classes, {batch} samples"
    text = f"{planned_seconds * 1e3:.3g} ms planned, {seconds * 1e3:.3g} ms measured ({size})"
    share, slack = _PEAK_TOLERANCE[device.type]
    return [
        _memory("plan, table and state", planned_table, table, _TABLE_TOLERANCE * planned_table),
        _memory("plan, peak of a step", planned_table + planned_scratch, peak, share * planned_table + slack),
        found("plan, time of a step", text, planned_seconds=planned_seconds, measured_seconds=seconds),
    ]


def _memory(name: str, planned: int, measured: float, tolerance: float) -> Line:
    text = f"{planned / MIB:,.1f} MiB planned, {measured / MIB:,.1f} MiB measured"
    figures = {"planned": planned, "measured": measured}
    if measured <= planned + tolerance:
        return found(name, text, **figures)
    return failed(name, text, "plan with so much less memory (plsc plan --gpu-memory); send this report", **figures)


def _measure(device: torch.device, classes: int, batch: int, tick: Tick) -> tuple[int, float, float]:
    """Bytes of the table and its state; the peak of a step, both included; its median seconds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, _DIM, generator=generator).to(device).requires_grad_()
    labels = torch.randint(classes, (batch,), generator=generator).to(device)
    _Step(device, _REHEARSAL_CLASSES)(x, labels % _REHEARSAL_CLASSES)  # what libraries load first is not the head's
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    memory = PeakMemory(device)
    tick("the head's steps and the plan")
    step = _Step(device, classes)
    times = []
    for number in range(_STEPS):
        tick(f"the head's step {number} and the plan")
        times.append(step(x, labels))
    above = memory.above() * MIB - before
    return step.table_bytes(), above, statistics.median(times[1:])


class _Step:
    """A head and its optimizer; a call is a step, and returns its seconds."""

    def __init__(self, device: torch.device, classes: int) -> None:
        mesh = Mesh(0, 1, 0, device)
        self._head = ShardedHead(_DIM, classes, mesh, weight_dtype="bfloat16", momentum_dtype="int8")
        self._optimizer = HeadSGD(self._head, lr=0.1, momentum=0.9, weight_decay=5e-4)

    def __call__(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        start = self._now()
        self._head(x, labels).backward()
        self._optimizer.step()
        return self._now() - start

    def table_bytes(self) -> int:
        """Weights, 1/norms and the optimizer's state."""
        state = [shard.blocks[0].local for shard in self._optimizer.sharded_state().values()]
        return sum(tensor.nbytes for tensor in (self._head.weight, self._head.inverse_norms(), *state))

    def _now(self) -> float:
        if self._head.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._head.mesh.device)
        return time.perf_counter()
