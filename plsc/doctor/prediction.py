"""What ``plsc plan`` predicts of the class head at a small size, beside what it takes on this device."""

from dataclasses import replace

import torch

from plsc.bench.comparison import Task
from plsc.bench.harness import MIB
from plsc.bench.head import measure_head
from plsc.config import Config
from plsc.devices import Device
from plsc.doctor.report import Line, Tick, checked, failed, found
from plsc.errors import first_line
from plsc.head.sharded_head import ShardedHead
from plsc.optim.head_optimizers import HeadSGD
from plsc.parallel.mesh import Mesh
from plsc.plan.memory import head_memory
from plsc.plan.plan_config import PlanConfig
from plsc.plan.timing import head_seconds

_DIM = 512
_SIZES = {"cpu": (20_000, 64), "cuda": (1_000_000, 1024)}  # classes, samples
_STEPS = 4
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
    run = PlanConfig(config, classes, 1, 1, 1)
    tick("plan")
    planned_table, planned_scratch = head_memory(run, speeds)
    planned_seconds = sum(head_seconds(run, speeds).values())
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
    advice = "plan with so much less memory (plsc plan --gpu-memory); send this report"
    return checked(name, text, measured <= planned + tolerance, advice, **figures)


def _measure(device: torch.device, classes: int, batch: int, tick: Tick) -> tuple[int, float, float]:
    """Bytes of the table and its state; the peak of a step, both included; its median seconds."""
    mesh = Mesh(0, 1, 0, device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    tick("the head's steps and the plan")
    task = Task("plsc", classes, batch, _DIM, nproc=1, steps=_STEPS, device=device.type)
    measured = measure_head(task, mesh)
    head = ShardedHead(_DIM, classes, mesh, weight_dtype="bfloat16", momentum_dtype="int8")
    state = [shard.blocks[0].local for shard in HeadSGD(head, momentum=0.9).sharded_state().values()]
    table = sum(tensor.nbytes for tensor in (head.weight, head.inverse_norms(), *state))
    return table, measured["memory_mib"] * MIB - before, measured["wall_s"]
