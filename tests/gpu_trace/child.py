"""The process that traces: ``python -m gpu_trace.child OUT SCENARIO…``, with the fake runtime preloaded."""

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_trace.faults import FAULTS
from gpu_trace.scenarios import SCENARIOS, short_vit, trace


def main(out: Path, names: list[str]) -> None:
    """Trace the scenarios on their ranks, and write all counts to ``out`` as JSON."""
    assert torch.cuda.is_available(), "the fake CUDA runtime is not preloaded"
    warnings.simplefilter("error")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counts = {name: _trace(name, mode) for name in names}
    out.write_text(json.dumps(counts), encoding="utf-8")


def _trace(name: str, mode: FakeTensorMode) -> dict[int, dict[str, Any]]:
    """The counts of a scenario, or of a planted fault, by rank."""
    planted, scenario = FAULTS.get(name, (nullcontext, name))
    with planted(), short_vit():
        return {rank: trace(SCENARIOS[scenario], rank, mode).as_dict() for rank in SCENARIOS[scenario].traced_ranks}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
