"""Measurement of the service: with and without batching, in turn, over the number of callers, beside its own store."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plsc.bench.harness import environment, measure_on_ranks, processor_name, summary, thread_limits
from plsc.bench.serve_worker import COLLECTION
from plsc.errors import DataError
from plsc.progress import Progress

BATCHED, UNBATCHED, BARE, BARE_AT_BATCH = "batched", "unbatched", "bare", "bare-at-batch"
LABELS = {
    BATCHED: "plsc serve",
    UNBATCHED: "plsc serve --max-batch 1",
    BARE: "the store alone, as many at once",
    BARE_AT_BATCH: "the store alone, in the service's batches",
}
_FIGURES = ("qps", "p50_ms", "p99_ms", "mean_batch")

Figures = dict[int, dict[str, float]]  # by the number of callers
Round = Mapping[tuple[str, int], Mapping[str, float]]  # by variant and number of callers


@dataclass(frozen=True)
class ServeComparison:
    """Request of a measurement; ``seconds`` is the time of a number of callers in a turn."""

    rows: int = 200_000
    dim: int = 512
    clients: Sequence[int] = (1, 8, 32, 64)
    threads: int = 2
    rounds: int = 3
    seconds: float = 3.0
    form: str = "vector_b64"
    limit: float = 900.0


def compare_serving(comparison: ServeComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure all variants in turn, ``comparison.rounds`` times over.

    Returns:
        ``rows``, one per variant and number of callers (see :func:`result_row`), and ``ratios`` (see
        :func:`serve_ratios`).
    """
    rounds: list[Round] = []
    progress = Progress("measuring", len(LABELS) * comparison.rounds + 1, "turns", interval=2.0, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="plsc-serve-") as name:
        folder = Path(name)
        enrolled = _run(comparison, folder, "enrol")
        progress.advance(note=f"enrolled in {enrolled['seconds']:.0f} s")
        for _ in range(comparison.rounds):
            rounds.append(_round(comparison, folder, progress))
    progress.finish()
    rows = [serve_row(comparison, name, clients, rounds) for clients in comparison.clients for name in LABELS]
    return {"rows": rows, "ratios": serve_ratios(comparison, rounds)}


# A round ------------------------------------------------------------------------------------------------------------


def _round(comparison: ServeComparison, folder: Path, progress: Progress) -> Round:
    """Measure every variant once; the bare store repeats the batch sizes that the service has just formed."""
    by_variant: dict[tuple[str, int], dict[str, float]] = {}

    def add(name: str, figures: Figures) -> Figures:
        by_variant.update({(name, clients): values for clients, values in figures.items()})
        progress.advance(note=name)
        return figures

    add(BARE, _measure_store(comparison, folder, {clients: clients for clients in comparison.clients}))
    batched = add(BATCHED, _measure_service(comparison, folder, []))
    batches = {clients: max(round(values["mean_batch"]), 1) for clients, values in batched.items()}
    add(BARE_AT_BATCH, _measure_store(comparison, folder, batches))
    add(UNBATCHED, _measure_service(comparison, folder, ["--max-batch", "1"]))
    return by_variant


def _measure_store(comparison: ServeComparison, folder: Path, batches: Mapping[int, int]) -> Figures:
    figures = {}
    for clients, batch in batches.items():
        figures[clients] = {**_run(comparison, folder, "store", batch=batch), "mean_batch": float(batch)}
    return figures


def _measure_service(comparison: ServeComparison, folder: Path, options: Sequence[str]) -> Figures:
    figures = {}
    with _service(comparison, folder, options) as (address, metrics):
        for clients in comparison.clients:
            rows_before, batches_before = search_batches(metrics)
            path = f"/v1/collections/{COLLECTION}/search"
            measured = _run(comparison, folder, "load", address=address, path=path, clients=clients)
            rows, batches = search_batches(metrics)
            mean_batch = (rows - rows_before) / max(batches - batches_before, 1)
            figures[clients] = {**measured, "mean_batch": mean_batch}
    return figures


@contextlib.contextmanager
def _service(comparison: ServeComparison, folder: Path, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Run ``plsc serve`` of the gallery; yield its address and that of its metrics."""
    command = [sys.executable, "-m", "plsc.tools.entry", "serve", "--device", "cpu", "--port", "0"]
    command += ["--model", str(folder / "model.safetensors"), "--store", str(folder / "store"), "--metrics-port", "0"]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **thread_limits(comparison.threads)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "serving at " not in line:
            raise DataError(f"the service did not start: {process.communicate()[1].strip()[-300:]}")
        yield line.split()[2].rstrip(":"), line.rpartition("metrics at ")[2].strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def search_batches(metrics_address: str) -> tuple[float, float]:
    """Return the service's counts of rows searched and of batches that they came in."""
    import httpx

    lines = httpx.get(metrics_address, timeout=10).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("plsc_batch_rows"))
    rows, batches = (float(values.get(f'plsc_batch_rows_{field}{{kind="search"}}', 0)) for field in ("sum", "count"))
    return rows, batches


def _run(comparison: ServeComparison, folder: Path, action: str, **task: Any) -> dict[str, float]:
    """Run an action of :mod:`plsc.bench.serve_worker` in a new process."""
    task = {**asdict(comparison), "action": action, "data": str(folder), **task}
    worker = "plsc.bench.serve_worker"
    result = measure_on_ranks(worker, task, threads=comparison.threads, limit=comparison.limit)
    if "reason" in result:
        raise DataError(f"the measurement's {action} process failed: {result['reason']}")
    return dict(result)


# Rows and ratios ----------------------------------------------------------------------------------------------------


def serve_row(comparison: ServeComparison, name: str, clients: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """Return a variant's row at a number of callers: environment, sizes, medians over the rounds.

    ``qps`` are searches per second, ``qps_low`` and ``qps_high`` the extreme rounds; ``p50_ms`` and ``p99_ms`` are a
    caller's latency; ``mean_batch`` is the number of queries that reached the store together.
    """
    figures = [variants[name, clients] for variants in rounds]
    row: dict[str, Any] = environment(processor_name()) | {
        "contestant": name,
        "label": LABELS[name],
        "rows": comparison.rows,
        "dim": comparison.dim,
        "clients": clients,
        "threads": comparison.threads,
        "rounds": comparison.rounds,
        "form": comparison.form,
    }
    return row | summary(figures, _FIGURES, "qps")


def serve_ratios(comparison: ServeComparison, rounds: Sequence[Round]) -> list[dict[str, float]]:
    """Return, for every number of callers, the batched rate over that of each other variant.

    ``share_of_bare`` compares with the store searching for all callers at once, ``share_of_bare_at_batch`` with the
    store in the service's own batch sizes; all are medians of the rounds' quotients.
    """

    def times(clients: int, other: str) -> float:
        return statistics.median(
            variants[BATCHED, clients]["qps"] / variants[other, clients]["qps"] for variants in rounds
        )

    return [
        {
            "clients": clients,
            "times_unbatched": times(clients, UNBATCHED),
            "share_of_bare": times(clients, BARE),
            "share_of_bare_at_batch": times(clients, BARE_AT_BATCH),
        }
        for clients in comparison.clients
    ]
