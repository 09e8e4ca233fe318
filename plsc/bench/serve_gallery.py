"""What a service is measured on: a store of persons with a face each, an untrained model, and the bare store's rate.

python -m plsc.bench.serve_gallery make|bare TASK.json RESULT.json
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from plsc.bench.search_data import K, SearchData, make_search_data
from plsc.files import read_json, write_json
from plsc.gallery.contract import NewPerson

COLLECTION = "measured"
_TOGETHER = 2000  # persons enrolled at once
_MODEL = "mobilefacenet"


def make_gallery(task: dict[str, Any]) -> dict[str, float]:
    """Draw the data, save a model of that width, and enrol every row; ``{"seconds"}`` of enrolling and compacting."""
    import torch

    from plsc.embed.embedder import open_embedder
    from plsc.gallery.open import open_store
    from plsc.models import create, save_model

    folder = Path(task["data"])
    data = make_search_data(folder, task["rows"], task["dim"])
    torch.manual_seed(0)
    save_model(create(_MODEL, embedding_dim=task["dim"]), folder / "model.safetensors")
    contract = open_embedder(folder / "model.safetensors", device=torch.device("cpu")).contract_id
    begun = time.perf_counter()
    store = open_store(folder / "store")
    try:
        store.create_collection(COLLECTION, task["dim"], contract)
        for start in range(0, task["rows"], _TOGETHER):
            rows = data.rows[start : start + _TOGETHER]
            persons = [NewPerson(row[None], f"person {start + place}") for place, row in enumerate(rows)]
            store.add_persons(COLLECTION, persons, contract)
        store.compact(COLLECTION)
    finally:
        store.close()
    return {"seconds": time.perf_counter() - begun}


def bare_rate(task: dict[str, Any]) -> dict[str, float]:
    """``{"qps", "p50_ms", "p99_ms"}`` of the store's own searches of ``task["batch"]`` queries, without a service."""
    import torch

    from plsc.gallery.open import open_store

    torch.set_num_threads(task["threads"])
    queries = SearchData(Path(task["data"])).queries
    batch = task["batch"]
    store = open_store(Path(task["data"]) / "store")
    try:
        store.search(COLLECTION, queries[:batch], k=K)
        times = []
        end = time.perf_counter() + task["seconds"]
        place = 0
        while (begun := time.perf_counter()) < end:
            store.search(COLLECTION, queries[np.arange(place, place + batch) % len(queries)], k=K)
            times.append(time.perf_counter() - begun)
            place += batch
    finally:
        store.close()
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    return {"qps": batch * len(times) / float(np.sum(times)), "p50_ms": float(p50), "p99_ms": float(p99)}


def main(what: str, task: str, result: str) -> None:
    """Run the task in a file and write its figures into another."""
    write_json(Path(result), {"make": make_gallery, "bare": bare_rate}[what](read_json(Path(task))))


if __name__ == "__main__":
    main(*sys.argv[1:])
