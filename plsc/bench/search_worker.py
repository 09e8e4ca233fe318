"""One turn of one contestant: ``python -m plsc.bench.search_worker TASK.json RESULT.json``."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.bench.memory import PeakMemory
from plsc.bench.search_contestants import CONTESTANTS, Contestant, Search
from plsc.bench.search_data import JUDGED, K, SearchData
from plsc.files import write_json
from plsc.index.exact import Float32

LEAST_SEARCHES = 3


def measure(
    contestant: Contestant, data: SearchData, batches: list[int], threads: int, seconds: float
) -> dict[str, Any]:
    """``memory_mib`` at the peak above the libraries, ``build_s``, ``recall`` at 10, and per batch, as a string:
    ``qps``, ``p50_ms`` and ``p99_ms`` of a search, ``searches``, ``note``."""
    queries, k = data.queries, min(K, len(data.rows))
    contestant_memory = PeakMemory(torch.device("cpu"))
    began = time.perf_counter()
    search = contestant.build(data, threads)
    built = time.perf_counter() - began
    by_batch = {}
    for batch in batches:
        note = contestant.prepare(search, queries[:batch])
        by_batch[str(batch)] = {**_time(search, queries, batch, k, seconds), "note": note}
    memory = contestant_memory.above()  # before the judging, whose batch nobody asked for
    found = np.concatenate([search(queries[start : start + 32], k) for start in range(0, JUDGED, 32)])
    hits = [len(set(row) & set(true)) for row, true in zip(found.tolist(), data.truth.tolist(), strict=True)]
    return {"memory_mib": memory, "build_s": built, "recall": sum(hits) / (k * JUDGED), "batches": by_batch}


def _time(search: Search, queries: Float32, batch: int, k: int, seconds: float) -> dict[str, Any]:
    parts = [queries[start : start + batch] for start in range(0, len(queries) - batch + 1, batch)]
    search(parts[0], k)  # not measured: what a first search allocates
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_SEARCHES or time.perf_counter() < end:
        part = parts[len(times) % len(parts)]
        began = time.perf_counter()
        search(part, k)
        times.append(time.perf_counter() - began)
    middle, late = np.percentile(times, [50, 99])
    return {
        "qps": batch * len(times) / sum(times),
        "p50_ms": 1000 * middle,
        "p99_ms": 1000 * late,
        "searches": len(times),
    }


def main() -> int:
    """Measure what the task says."""
    task, result = sys.argv[1:]
    asked = json.loads(Path(task).read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    figures = measure(
        CONTESTANTS[asked["contestant"]],
        SearchData(Path(asked["data"])),
        asked["batches"],
        asked["threads"],
        asked["seconds"],
    )
    write_json(Path(result), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
