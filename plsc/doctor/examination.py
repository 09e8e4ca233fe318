"""The whole examination: its sections in order, on all ranks in step, with a limit to every wait."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from plsc.doctor import SECTIONS, kernels, machine, prediction, rates, training
from plsc.doctor.report import Line, Report, failed, merge
from plsc.errors import UsageError, first_line
from plsc.parallel.mesh import init, shutdown
from plsc.parallel.rank_monitor import Hang, RankMonitor


class Examination:
    """All checks of this rank.

    Args:
        only: sections to look at; empty for all.
        limit: seconds without progress after which a rank is reported as hanging.
        save: called with the report as it stands when a rank hangs, before this process ends.
    """

    def __init__(self, only: Sequence[str], limit: float, save: Callable[[dict[str, Any]], None]) -> None:
        self._only, self._save = only or SECTIONS, save
        self._section = "ranks"
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.report = Report(world_size, sys.stdout if rank == 0 else None)
        self._monitor = RankMonitor(limit, self._hung)

    def run(self) -> dict[str, Any] | None:
        """Look at everything; the report as JSON, on the first rank only."""
        try:
            return self._run()
        finally:
            self._monitor.end()

    def _run(self) -> dict[str, Any] | None:
        self._examine("versions", machine.versions)
        self._examine("machine", lambda: [*machine.machine(), *machine.devices()])
        self._monitor.meet("forming the process group")
        mesh = init()
        device, tick = mesh.device, self._at
        measured = functools.cache(lambda: rates.device_rates(device, tick))  # once, for "rates" or "plan"
        self._examine("choices", lambda: kernels.chosen(device))
        self._examine("kernels", lambda: [*kernels.head(device, tick), *kernels.scans(device, tick)])
        self._examine("rates", lambda: measured()[0])
        self._examine("collectives", lambda: rates.collectives(mesh, self._monitor.meet))
        self._examine("training", lambda: training.steps(mesh, tick))
        self._examine("plan", lambda: prediction.head(device, measured()[1], tick))
        self._monitor.meet("the end")
        shutdown()
        self.report.close()
        return self.report.as_dict() if mesh.is_main else None

    def _examine(self, section: str, look: Callable[[], list[Line]]) -> None:
        """Run a section on this rank, and add what all ranks found."""
        if section not in self._only:
            return
        self._section = section
        self.report.begin(section)
        self._at(section)
        try:
            lines = look()
        except UsageError:
            raise
        except Exception as error:  # a report of what is wrong must not end at the first thing that is
            lines = [failed(section, f"{type(error).__name__}: {first_line(error)}", "send this report")]
        by_rank = self._monitor.gather(f"lines of {section}", [asdict(line) for line in lines])
        self.report.add(section, merge([[Line(**line) for line in of_rank] for of_rank in by_rank]))

    def _at(self, place: str) -> None:
        self._monitor.at(place)
        self.report.show_work(place)

    def _hung(self, hang: Hang) -> None:
        """Report ranks that hang, save the report, and end this process: nothing that hangs can be waited for."""
        if self.report.out is None:  # the first rank hangs itself
            self.report.out = sys.stdout
        advice = "look at that rank's machine (dmesg, nvidia-smi, py-spy dump --pid); then start again"
        self.report.add(self._section, [failed("ranks", hang.line, advice)])
        self.report.close()
        try:
            self._save(self.report.as_dict())
        finally:
            os._exit(1)
