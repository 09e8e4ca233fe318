"""The process that traces: ``python -m gpu_trace.child OUT SCENARIO…``, with the fake runtime preloaded."""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_trace.scenarios import SCENARIOS, trace


def main(out: Path, names: list[str]) -> None:
    """Trace the scenarios on their ranks, and write all counts to ``out`` as JSON."""
    assert torch.cuda.is_available(), "the fake CUDA runtime is not preloaded"
    warnings.simplefilter("error")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counts = {
        name: {rank: trace(SCENARIOS[name], rank, mode).as_dict() for rank in SCENARIOS[name].traced_ranks}
        for name in names
    }
    out.write_text(json.dumps(counts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
