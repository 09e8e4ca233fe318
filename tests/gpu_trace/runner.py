"""Traces scenarios in processes that see the fake devices, and collects their counts."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_trace import ratchet, runtime
from gpu_trace.scenarios import SCENARIOS

PROCESSES = 2
Traced = dict[str, dict[int, dict[str, Any]]]  # counts by scenario (or planted fault) and rank


def trace_all(names: Iterable[str]) -> Traced:
    """Trace scenarios and planted faults, by their names, on all ranks that they name."""
    names = list(names)
    traced: Traced = {}
    with TemporaryDirectory() as folder:
        library = runtime.build(Path(folder))
        environment = runtime.environment(library)
        tests = Path(__file__).parents[1]
        environment["PYTHONPATH"] = f"{tests}:{tests.parent}"
        outputs = [Path(folder) / f"{number}.json" for number in range(PROCESSES)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "gpu_trace.child", str(output), *names[number::PROCESSES]],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, output in enumerate(outputs)
        ]
        for child, output in zip(children, outputs, strict=True):
            errors = child.communicate()[1]
            if child.returncode:
                raise RuntimeError(f"the tracing process ended with {child.returncode}:\n{errors[-4000:]}")
            counts = json.loads(output.read_text(encoding="utf-8"))
            traced |= {name: {int(rank): each for rank, each in ranks.items()} for name, ranks in counts.items()}
    return {name: traced[name] for name in names}


def summaries(traced: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """What is committed of traced scenarios: the counts of each one's first rank."""
    return {
        name: ratchet.summary(ranks[SCENARIOS[name].traced_ranks[0]], SCENARIOS[name].rows)
        for name, ranks in traced.items()
    }
