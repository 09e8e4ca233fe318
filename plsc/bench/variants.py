"""Variants of our own training step in turn, and a rank that measures one (``python -m plsc.bench.variants``).

A turn times steps, then traces a few more. Of those it takes what the profiler's own time does not change: how long the
GPU computes, and how often the host launches. What of a timed step the GPU does not compute in is a gap.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from plsc.bench.comparison import Comparison, Contestant, Task, be_contestant, measure_steps
from plsc.bench.harness import Result, environment, failure, in_turn, limit_allocations, processor_name, summary
from plsc.bench.train import Step, as_loaded, make_stepper, random_batch, step_of
from plsc.parallel.mesh import Mesh
from plsc.parallel.step_timeline import StepTimeline
from plsc.progress import Progress
from plsc.train.efficiency import EfficiencyMeter

BASE = "fp32"  # that the others' rates are compared with
_WARM_UP_STEPS = 4  # of compiled passes the first compiles, and CUDA graphs are recorded in the third
_TRACED_STEPS = 3
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
_BY_HOST = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"Launch|MemcpyAsync|MemsetAsync").search
_FIGURES = ("images_per_second", "cpu_s", "wall_s", "mfu", "launches", "kernels", "idle_share", "memory_mib", "loss")
_SIZES = ("backbone", "classes", "image_size", "batch", "nproc", "dim", "steps")


@dataclass(frozen=True)
class Variant:
    """Configuration keys of a variant, beside those of ``plsc bench train``; ``is_for`` says of which backbones."""

    label: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    is_for: Callable[[str], bool] = lambda backbone: True


def _is_vit(backbone: str) -> bool:
    return backbone.startswith("vit_")


def _convolves(backbone: str) -> bool:
    return not _is_vit(backbone)


_BF16 = {"precision": "bf16"}
_COMPILED = {**_BF16, "compile": True}
VARIANTS = {
    BASE: Variant("fp32", {"precision": "fp32"}),
    "bf16": Variant("bf16", _BF16),
    "compile": Variant("bf16, compile", _COMPILED),
    "graphs": Variant("bf16, compile, CUDA graphs", {**_COMPILED, "compile_mode": "reduce-overhead"}),
    "fp16": Variant("fp16", {"precision": "fp16"}),
    "nchw": Variant("bf16, not channels_last", {**_BF16, "channels_last": False}, _convolves),
    "fp8": Variant("fp8", {**_BF16, "fp8": True}, _is_vit),
    "fp8-compile": Variant("fp8, compile", {**_COMPILED, "fp8": True}, _is_vit),
}


def variants_of(backbone: str) -> dict[str, Contestant]:
    """The variants that a backbone has, by name."""
    make = partial(make_stepper, "bfloat16", "int8")
    found = {name: variant for name, variant in VARIANTS.items() if variant.is_for(backbone)}
    keys = {name: {"channels_last": True, **variant.keys} for name, variant in found.items()}
    return {name: Contestant(variant.label, partial(make, **keys[name])) for name, variant in found.items()}


# Measuring ------------------------------------------------------------------------------------------------------------


def measure_variant(task: Task, mesh: Mesh) -> dict[str, Any]:
    """Measure one variant on this rank, the only one.

    Returns:
        What :func:`plsc.bench.comparison.measure_steps` does; ``mfu``, as ``plsc train`` has it; on a GPU ``launches``
        of the host and ``kernels`` in a step, and ``idle_share`` of its time, in which the GPU computes nothing.
    """
    if task.memory_bytes is not None:
        limit_allocations(task.memory_bytes)
    batches = [as_loaded(random_batch(task, mesh, n), mesh) for n in range(task.steps + _WARM_UP_STEPS)]
    made: list[Any] = []

    def build(task: Task, mesh: Mesh) -> Step:
        stepper = variants_of(task.backbone)[task.contestant].build(task, mesh)
        made.extend((stepper, step_of(stepper, task, mesh)))
        return made[1]  # type: ignore[no-any-return]

    figures = measure_steps(task, mesh, build, [(batch,) for batch in batches], _WARM_UP_STEPS)
    stepper, step = made
    meter = EfficiencyMeter(stepper.components, StepTimeline(mesh.device))
    figures |= {"mfu": meter.utilisation(task.batch / figures["wall_s"])}
    if mesh.device.type == "cuda":
        counts = step_counts(_traced(step, batches[:_TRACED_STEPS]), min(_TRACED_STEPS, len(batches)))
        busy = counts.pop("busy_s")
        figures |= {**counts, "idle_share": max(0.0, 1 - busy / figures["wall_s"])}
    return figures


def _traced(step: Step, batches: Sequence[Any]) -> list[dict[str, Any]]:
    """The events of a trace over steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in batches:
            step(batch)
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def step_counts(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """The mean step of a trace, as Chrome's format has it (microseconds).

    Returns:
        ``launches`` that the host makes, copies and whole graphs among them; ``kernels`` that run; ``busy_s``, in which
        some stream of the GPU works.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    launches = sum(event.get("cat") in _BY_HOST and _LAUNCH(event["name"]) is not None for event in whole)
    on_gpu = [event for event in whole if event.get("cat") in _ON_GPU]
    busy, until = 0.0, 0.0
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in on_gpu):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    kernels = sum(event["cat"] == "kernel" for event in on_gpu)
    return {"launches": launches / steps, "kernels": kernels / steps, "busy_s": busy / steps / 1e6}


# Comparing ------------------------------------------------------------------------------------------------------------


def compare_variants(
    comparison: Comparison, keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None, *, quiet: bool = False
) -> dict[str, Any]:
    """Measure all variants in turn, ``comparison.rounds`` times over; ``keep`` gets the rows after each turn.

    Returns:
        ``rows``, one per variant, with ``of_base``, its rate over that of :data:`BASE` (the median of the rounds'
        quotients); ``ratios``, which is empty.
    """
    (classes,), (batch,) = comparison.classes, comparison.batches
    taken: dict[str, list[Result]] = {name: [] for name in comparison.names}

    def turn(name: str) -> Result:
        taken[name].append(comparison.turn(name, classes, batch))
        keep(_rows(comparison, taken))
        return taken[name][-1]

    progress = Progress("measuring", comparison.rounds * len(taken), "starts", interval=2.0, quiet=quiet)
    in_turn(comparison.names, comparison.rounds, turn, progress)
    progress.finish()
    return {"rows": _rows(comparison, taken), "ratios": []}


def _rows(comparison: Comparison, taken: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    return [_row(comparison, name, taken) for name, results in taken.items() if results]


def _row(comparison: Comparison, name: str, taken: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    task, failed = comparison.task, failure(taken[name])
    good = [] if failed is not None else taken[name]
    base = taken.get(BASE, []) if failure(taken.get(BASE, [])) is None else []
    (classes,), (batch,) = comparison.classes, comparison.batches
    rated = [{**result, "images_per_second": batch / result["wall_s"], "of_base": None} for result in good]
    for own, other in zip(rated, base, strict=False):  # a round may not have come to its end
        own["of_base"] = other["wall_s"] / own["wall_s"]
    figures = summary(rated, (*_FIGURES, "of_base"), "images_per_second")
    sizes = {size: getattr(task, size) for size in _SIZES} | {"classes": classes, "batch": batch}
    return {
        **environment(processor_name() if task.device == "cpu" else None),
        "kind": task.device,
        "contestant": name,
        "label": comparison.known[name].label,
        **sizes,
        "rounds": len(taken[name]),
        **figures,
        "failed": failed is not None,
        "note": failed or "",
    }


if __name__ == "__main__":
    be_contestant(measure_variant)
