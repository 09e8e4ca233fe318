"""The exact search on a GPU, traced: launches, bytes and host waits of a search, by chunks of rows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_trace import runtime

pytestmark = pytest.mark.live

MISSING = runtime.missing()
ROOT = Path(__file__).parents[2]
ROWS, DIM, QUERIES, CHUNK = 1000, 64, 8, 400
FUSED_ROWS, FUSED_QUERIES, GROUP = 4000, 200, 64
FUSED_LAUNCHES = {
    "bf16": 44, "bf16, filtered": 45, "fp32": 76, "fp32, filtered": 77, "int8": 33, "int8, filtered": 34
}  # fmt: skip
LAUNCHES = {"bf16": 75, "bf16, filtered": 82, "fp32": 68, "fp32, filtered": 75}
SCRIPT = f"""
import json, warnings
from itertools import product
from unittest.mock import patch
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from gpu_trace.tracer import Tracer, traced
from gpu_trace.triton_launches import launches_recorded
from plsc.cluster import scan as points_scan
from plsc.cluster.assignment import Nearest
from plsc.index import scan, triton_scan

warnings.simplefilter("error")
rows = {{"torch": {ROWS}, "fused": {FUSED_ROWS}}}
found = {{}}
with (
    FakeTensorMode(allow_non_fake_inputs=True),
    patch.object(FakeTensor, "numpy", lambda tensor: np.zeros(tensor.shape, np.int64)),
    patch.object(scan, "rank", lambda query, source, candidates, k: (np.zeros(k), np.zeros(k))),
    patch.object(scan, "_SCORES", {QUERIES * CHUNK}),
):
    for way, precision, mask in product(rows, ("bf16", "fp32", "int8"), (False, True)):
        if (way, precision) == ("torch", "int8"):
            continue
        vectors = np.eye({DIM}, dtype=np.float32)[np.arange(rows[way]) % {DIM}]
        tracer = Tracer([1], 1, share_kept=0.02)
        allowed = np.arange(rows[way]) % 3 > 0 if mask else None
        fused = patch.object(triton_scan, "runs_on", lambda _: way == "fused")
        with traced(tracer), launches_recorded(tracer), fused:
            exact = scan.ExactScan(vectors, precision=precision, device="cuda")
            assert exact.backend == way.replace("fused", "triton")
            tracer.begin_step(last=True)
            exact.search(vectors[: {QUERIES} if way == "torch" else {FUSED_QUERIES}], 10, allowed=allowed)
        found[f"{{way}}, {{precision}}{{', filtered' if mask else ''}}"] = tracer.counts.as_dict()
    tracer = Tracer([1], 1, share_kept=0.02)
    kernels = [patch.object(module, "runs_on", lambda _: True) for module in (triton_scan, points_scan)]
    with traced(tracer), launches_recorded(tracer), kernels[0], kernels[1]:
        nearest = Nearest(vectors, 1 << 20, points_scan.SearchDevice("cuda:0"))
        tracer.begin_step(last=True)
        nearest.find(vectors[: nearest.block])
    found["nearest"] = tracer.counts.as_dict()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The counts of a search by precision and filter."""
    environment = runtime.environment(runtime.build(tmp_path_factory.mktemp("runtime")))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_function(counts: dict[str, int]) -> dict[str, int]:
    """Counts without the files that their places are in."""
    return {place.rpartition(":")[2]: count for place, count in counts.items()}


def ways(traces: dict[str, Any], way: str) -> dict[str, Any]:
    """The traces of a way to search, by precision and filter."""
    return {name.removeprefix(f"{way}, "): found for name, found in traces.items() if name.startswith(way)}


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_torchs_search_waits_once_for_each_chunk_and_reads_each_row_once(traces: dict[str, Any]) -> None:
    chunks = -(-ROWS // CHUNK)
    for name, found in ways(traces, "torch").items():
        width = 2 if name.startswith("bf16") else 4
        assert found["problems"] == {}
        assert by_function(found["waits"]) == {
            "TorchScan._shortlists blocking H2D copy": 2 if "filtered" in name else 1,  # queries, and the mask
            "_CandidatePool.add nonzero": chunks,
            "_CandidatePool._prune item": 1,
            "_CandidatePool._prune index by a mask": 3,
            "_CandidatePool.finish blocking D2H copy": 2,
            "_CandidatePool.finish tolist": 1,
        }
        products = by_function(found["moved"])["TorchScan._shortlists mm"]
        assert products == width * (ROWS * DIM + chunks * QUERIES * DIM + ROWS * QUERIES)
        launches = by_function(found["launches"])
        assert launches["_CandidatePool.add"] == 9 * chunks
        assert sum(launches.values()) == LAUNCHES[name], launches
        assert found["peak"] < 3 * width * ROWS * DIM


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_tritons_search_waits_a_few_times_and_reads_each_row_once(traces: dict[str, Any]) -> None:
    """Of any number of rows: the first kernel moves rows, queries and the best score of each group."""
    for name, found in ways(traces, "fused").items():
        is_coded, is_filtered = name.startswith("int8"), "filtered" in name
        ranked = name.startswith("fp32")  # on the GPU
        assert found["problems"] == {}
        assert found["triton"] == {"group_maxima": 1, "group_scores": 1}
        assert by_function(found["waits"]) == {
            **({"FusedScan.search blocking H2D copy": 1} if is_filtered else {}),
            "FusedScan._asked blocking H2D copy": 4 if is_coded else 1,
            "FusedScan._candidates nonzero": 2,
            **({"FusedScan._ranked item": 1} if ranked else {}),
            "FusedScan._answer blocking D2H copy": 3 if ranked else 1,
        }
        groups, width, outputs = -(-FUSED_ROWS // GROUP), 1 if is_coded else 2, 2 if is_coded else 1
        moved = width * DIM * (FUSED_ROWS + outputs * FUSED_QUERIES) + 4 * outputs * groups * FUSED_QUERIES
        moved += 8 * (FUSED_ROWS + FUSED_QUERIES) if is_coded else 0  # steps and bounds
        moved += FUSED_ROWS if is_filtered else 0
        assert by_function(found["moved"])["FusedScan.maxima group_maxima"] == moved
        assert sum(found["launches"].values()) == FUSED_LAUNCHES[name], found["launches"]
        assert found["peak"] < 5 * (4 if ranked else width) * FUSED_ROWS * DIM


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_block_of_points_finds_its_nearest_centres_in_one_search(traces: dict[str, Any]) -> None:
    found = traces["nearest"]
    assert found["problems"] == {}
    assert found["triton"] == {"group_maxima": 1, "group_scores": 1}
    assert by_function(found["waits"]) == {
        "FusedScan._asked blocking H2D copy": 1,
        "FusedScan._candidates nonzero": 2,
        "FusedScan._ranked item": 1,
        "FusedScan._answer blocking D2H copy": 3,
    }
