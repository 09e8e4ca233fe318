"""Profile of a few steps: a trace of every operation for Perfetto, and a picture of where the time went."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from plsc.evaluation.report import COLOURS
from plsc.files import atomic_write, make_folder
from plsc.parallel.step_timeline import PARTS, Interval, StepTimeline
from plsc.progress import counted

FOLDER = "profile"
_WARM_UP_STEPS = 10  # before the profile, of which the last is the profiler's own; a short run has fewer
_LETTER_SHARE = 0.011  # of a bar, that a letter takes
_GRID, _INK = "#d9d9d9", "#333333"
_LIGHT = ("data", "evaluation", "other")  # colours that black letters are readable on
_PART_COLOURS = {
    "data": COLOURS[5],
    "backbone": COLOURS[0],
    "head": COLOURS[1],
    "communication": COLOURS[3],
    "optimizer": COLOURS[2],
    "evaluation": COLOURS[4],
    "checkpoint": COLOURS[6],
    "other": "#bbbbbb",
}


class StepProfiler:
    """Ends the steps of a run on a timeline, and profiles some of them.

    Args:
        timeline: of the run.
        folder: where ``steps-A-B.json``, a trace by torch.profiler, and ``steps-A-B.png`` are written.
        steps: to profile; 0 for none.
        left: steps that the run is still to take.
        device: whose work is traced beside the host's.
        report: writes a line that stays.
    """

    def __init__(
        self,
        timeline: StepTimeline,
        folder: Path,
        *,
        steps: int,
        left: int,
        device: torch.device,
        report: Callable[[str], None],
    ) -> None:
        self._timeline, self._folder, self._device, self._report = timeline, folder, device, report
        self._steps = max(min(steps, left - 1), 0)
        self._begins = min(_WARM_UP_STEPS, left - self._steps)  # after so many steps
        self._taken = 0
        self._ends: list[float] = []
        self._profile: torch.profiler.profile | None = None
        if self._steps and self._begins == 1:
            self._profile = self._start()
        if steps and not self._steps:
            report(f"log.profile = {steps}: none is profiled, as {counted(max(left, 0), 'step')} is left to train")

    def end_step(self, number: int) -> None:
        """End step ``number`` of the run."""
        self._taken += 1
        since = self._taken - self._begins
        if self._profile is not None and since == 0:
            self._profile.step()  # from warming up to recording, which is the warm-up's time
        self._timeline.end_step()
        if not self._steps:
            return
        if since == -1:
            self._profile = self._start()
        if 0 <= since <= self._steps:
            self._timeline.synchronize()
            self._ends.append(self._timeline.now)
            if since == 0:
                self._timeline.kept = []
            elif self._profile is not None:
                self._profile.step()
        if since == self._steps:
            self._write(number - self._steps + 1, number)

    def close(self) -> None:
        """Stop a profile that the run has not come to the end of."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _start(self) -> torch.profiler.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        made = torch.profiler.profile(
            activities=activities, schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1)
        )
        # Its library writes of its own beginning and end, and of a machine without a GPU, which are no warnings.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        made.start()
        return made

    def _write(self, first: int, last: int) -> None:
        assert self._profile is not None
        assert self._timeline.kept is not None
        intervals, self._timeline.kept = self._timeline.kept, None
        make_folder(self._folder)
        trace = self._folder / f"steps-{first}-{last}.json"
        with atomic_write(trace) as tmp_path:
            self._profile.export_chrome_trace(str(tmp_path))
        picture = trace.with_suffix(".png")
        draw_steps(intervals, self._ends, first, picture)
        self.close()
        self._report(f"profile: {trace} (open it in ui.perfetto.dev), {picture}")


def draw_steps(intervals: Sequence[Interval], ends: Sequence[float], first: int, path: Path) -> None:
    """Draw consecutive steps: when each part had its turn, and what the mean step consists of.

    Args:
        intervals: in their order, one beginning where the one before it ends.
        ends: seconds at which the first step begins and every step ends.
        first: the number of the first step.
        path: of a .png file.
    """
    from matplotlib.figure import Figure

    totals = {name: sum(each.end - each.start for each in intervals if each.part == name) for name in PARTS}
    shown = [name for name in PARTS if totals[name] > 0]
    figure = Figure(figsize=(9.0, 2.6 + 0.32 * len(shown)), layout="constrained")
    lanes, bar = figure.subplots(2, 1, height_ratios=[0.6 + 0.32 * len(shown), 1.0])
    for axes in (lanes, bar):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9, length=0)
        axes.xaxis.label.set_color(_INK)
        axes.set_axisbelow(True)
    _draw_lanes(lanes, intervals, ends, shown)
    lanes.set_title(_title(first, len(ends) - 1), loc="left", fontsize=11, color=_INK)
    means = {name: 1000 * totals[name] / (len(ends) - 1) for name in shown}
    _draw_mean(bar, means)
    for lane, mean in enumerate(means.values()):
        text = f"{_amount(mean)} ms, {mean / sum(means.values()):.0%}"
        lanes.text(1.01, lane, text, va="center", fontsize=9, color=_INK, transform=lanes.get_yaxis_transform())
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format="png", dpi=160)


def _title(first: int, steps: int) -> str:
    return f"Step {first:,}" if steps == 1 else f"Steps {first:,} to {first + steps - 1:,}"


def _draw_lanes(axes: Any, intervals: Sequence[Interval], ends: Sequence[float], shown: Sequence[str]) -> None:
    """Draw a lane for each part, from the first one at the top, over milliseconds."""
    begin = ends[0]
    for lane, name in enumerate(shown):
        own = [each for each in intervals if each.part == name]
        bars = [((each.start - begin) * 1000, (each.end - each.start) * 1000) for each in own]
        axes.broken_barh(bars, (lane - 0.36, 0.72), color=_PART_COLOURS[name])
    for end in ends:
        axes.axvline((end - begin) * 1000, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, (ends[-1] - begin) * 1000)
    axes.set_xlabel("milliseconds")
    axes.grid(True, axis="x", color=_GRID, linewidth=0.7)


def _draw_mean(axes: Any, milliseconds: dict[str, float]) -> None:
    """Draw the mean step as one bar, with the names of the parts that are long enough for them."""
    whole, left = sum(milliseconds.values()), 0.0
    for name, length in milliseconds.items():
        axes.barh(0, length, left=left, height=0.6, color=_PART_COLOURS[name])
        if length >= _LETTER_SHARE * whole * len(name):
            colour = "black" if name in _LIGHT else "white"
            axes.text(left + length / 2, 0, name, ha="center", va="center", fontsize=9, color=colour)
        left += length
    axes.set_xlim(0, whole)
    axes.set_ylim(-0.32, 0.32)
    axes.set_yticks([])
    axes.set_xlabel("milliseconds")
    axes.set_title(f"The mean step: {_amount(whole)} ms", loc="left", fontsize=11, color=_INK)


def _amount(milliseconds: float) -> str:
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f}"
