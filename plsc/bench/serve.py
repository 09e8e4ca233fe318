"""The service measured: batched and unbatched in turn, over the number of callers, beside its own bare store."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.bench.circumstances import circumstances, processor
from plsc.bench.search_data import QUERIES
from plsc.bench.serve_gallery import COLLECTION
from plsc.errors import DataError, UsageError
from plsc.files import read_json, write_json
from plsc.progress import Progress

BATCHED, UNBATCHED, BARE, BARE_AT_BATCH = "batched", "unbatched", "bare", "bare-at-batch"
LABELS = {
    BATCHED: "plsc serve",
    UNBATCHED: "plsc serve --max-batch 1",
    BARE: "the store alone, as many at once",
    BARE_AT_BATCH: "the store alone, in the service's batches",
}
_FIGURES = ("qps", "p50_ms", "p99_ms", "mean_batch")
FORMS = ("vector", "vector_b64")


@dataclass(frozen=True)
class ServeComparison:
    """What to measure; ``seconds`` are those of a number of callers in a turn.

    Raises :class:`UsageError` for a number out of range.
    """

    rows: int = 200_000
    dim: int = 512
    clients: Sequence[int] = (1, 8, 32, 64)
    threads: int = 2
    rounds: int = 3
    seconds: float = 3.0
    form: str = "vector_b64"
    limit: float = 900.0

    def __post_init__(self) -> None:
        for name in ("rows", "dim", "threads", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}: it must be at least 1")
        for clients in self.clients:
            if not 1 <= clients <= QUERIES:
                raise UsageError(f"--clients {clients}: it lies between 1 and {QUERIES}")
        if not self.seconds > 0:
            raise UsageError(f"--seconds {self.seconds}: it must be more than 0")
        if self.form not in FORMS:
            raise UsageError(f"--form {self.form}: it is one of {', '.join(FORMS)}")


def compare_serving(comparison: ServeComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure all in turn, ``comparison.rounds`` times over.

    Returns ``rows``, one per contestant and number of callers (see :func:`row_of`), and ``ratios``: for every number of
    callers how the batched service compares with the unbatched and with the bare store, medians over the rounds.
    """
    turns: list[dict[tuple[str, int], dict[str, float]]] = []
    progress = Progress("measuring", len(LABELS) * comparison.rounds + 1, "turns", interval=2.0, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="plsc-serve-") as folder:
        made = _in_process(
            comparison,
            ["plsc.bench.serve_gallery", "make"],
            {
                "data": folder,
                "rows": comparison.rows,
                "dim": comparison.dim,
            },
            Path(folder),
        )
        progress.advance(note=f"enrolled in {made['seconds']:.0f} s")
        for _ in range(comparison.rounds):
            turns.append(_round(comparison, Path(folder), progress))
    progress.finish()
    rows = [row_of(comparison, name, clients, turns) for clients in comparison.clients for name in LABELS]
    return {"rows": rows, "ratios": ratios_of(comparison, turns)}


def row_of(
    comparison: ServeComparison, name: str, clients: int, turns: Sequence[dict[tuple[str, int], dict[str, float]]]
) -> dict[str, Any]:
    """A contestant's row at a number of callers: circumstances, sizes, medians over the rounds.

    ``qps`` are searches per second, ``qps_low`` and ``qps_high`` the extreme rounds, ``p50_ms`` and ``p99_ms`` what a
    caller waits, ``mean_batch`` the queries that the store was asked at once.
    """
    here = [turn[name, clients] for turn in turns]
    row: dict[str, Any] = circumstances(processor()) | {
        "contestant": name,
        "label": LABELS[name],
        "rows": comparison.rows,
        "dim": comparison.dim,
        "clients": clients,
        "threads": comparison.threads,
        "rounds": comparison.rounds,
        "form": comparison.form,
    }
    row |= {key: statistics.median(figures[key] for figures in here) for key in _FIGURES}
    rates = [figures["qps"] for figures in here]
    return row | {"qps_low": min(rates), "qps_high": max(rates)}


def ratios_of(
    comparison: ServeComparison, turns: Sequence[dict[tuple[str, int], dict[str, float]]]
) -> list[dict[str, float]]:
    """For every number of callers: the batched rate by the unbatched, and by the bare store's with as many queries at
    once as there are callers, or as were in the service's batches; medians of the rounds' quotients."""

    def times(clients: int, other: str) -> float:
        return statistics.median(turn[BATCHED, clients]["qps"] / turn[other, clients]["qps"] for turn in turns)

    return [
        {
            "clients": clients,
            "times_unbatched": times(clients, UNBATCHED),
            "share_of_bare": times(clients, BARE),
            "share_of_bare_at_batch": times(clients, BARE_AT_BATCH),
        }
        for clients in comparison.clients
    ]


def _round(comparison: ServeComparison, folder: Path, progress: Progress) -> dict[tuple[str, int], dict[str, float]]:
    """Everyone's turn; the bare store's between those of the service, whose batches it repeats."""
    figures: dict[tuple[str, int], dict[str, float]] = {}

    def take(name: str, measured: dict[int, dict[str, float]]) -> None:
        figures.update({(name, clients): one for clients, one in measured.items()})
        progress.advance(note=name)

    take(BARE, _bare(comparison, folder, {clients: clients for clients in comparison.clients}))
    batched = _served(comparison, folder, [])
    take(BATCHED, batched)
    sizes = {clients: max(round(one["mean_batch"]), 1) for clients, one in batched.items()}
    take(BARE_AT_BATCH, _bare(comparison, folder, sizes))
    take(UNBATCHED, _served(comparison, folder, ["--max-batch", "1"]))
    return figures


def _bare(comparison: ServeComparison, folder: Path, batches: dict[int, int]) -> dict[int, dict[str, float]]:
    figures = {}
    for clients, batch in batches.items():
        task = {"data": str(folder), "batch": batch, "threads": comparison.threads, "seconds": comparison.seconds}
        measured = _in_process(comparison, ["plsc.bench.serve_gallery", "bare"], task, folder)
        figures[clients] = {**measured, "mean_batch": float(batch)}
    return figures


def _served(comparison: ServeComparison, folder: Path, options: Sequence[str]) -> dict[int, dict[str, float]]:
    figures = {}
    with _service(comparison, folder, options) as (address, metrics):
        for clients in comparison.clients:
            task = {
                "data": str(folder),
                "address": address,
                "path": f"/v1/collections/{COLLECTION}/search",
                "clients": clients,
                "seconds": comparison.seconds,
                "form": comparison.form,
            }
            rows, batches = _batches(metrics)
            measured = _in_process(comparison, ["plsc.bench.serve_load"], task, folder)
            more_rows, more_batches = _batches(metrics)
            figures[clients] = {**measured, "mean_batch": (more_rows - rows) / max(more_batches - batches, 1)}
    return figures


@contextlib.contextmanager
def _service(comparison: ServeComparison, folder: Path, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A running ``plsc serve`` of the gallery: its address, and that of its metrics."""
    command = [
        sys.executable,
        "-m",
        "plsc.tools.entry",
        "serve",
        "--model",
        str(folder / "model.safetensors"),
        "--store",
        str(folder / "store"),
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--device",
        "cpu",
        *options,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(comparison)
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


def _batches(address: str) -> tuple[float, float]:
    """Rows and batches of searches so far, as the service counts them."""
    import httpx

    lines = httpx.get(address, timeout=10).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("plsc_batch_rows"))
    return tuple(float(values.get(f'plsc_batch_rows_{what}{{kind="search"}}', 0)) for what in ("sum", "count"))  # type: ignore[return-value]


def _in_process(
    comparison: ServeComparison, module: Sequence[str], task: dict[str, Any], folder: Path
) -> dict[str, float]:
    """The figures of a task in a fresh process; :class:`DataError` tells why there are none."""
    given, result = folder / "task.json", folder / "result.json"
    result.unlink(missing_ok=True)
    write_json(given, task)
    name, *arguments = module
    try:
        done = subprocess.run(
            [sys.executable, "-m", name, *arguments, str(given), str(result)],
            env=_environment(comparison),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=comparison.limit,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{name} took longer than {comparison.limit:g} s; measure less") from None
    if done.returncode or not result.exists():
        raise DataError(f"{name} failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1][:300]}")
    figures: dict[str, float] = read_json(result)
    return figures


def _environment(comparison: ServeComparison) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(comparison.threads))}
