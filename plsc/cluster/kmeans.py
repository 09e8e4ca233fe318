"""Spherical k-means over an embedding set, on any number of ranks, resumable after a kill at any moment.

An iteration assigns every point to its nearest centre, exactly, and makes each centre the normalised mean of its points
(Dhillon & Modha, "Concept decompositions for large sparse text data using clustering", 2001). A centre without points
is put onto one of the points that fit worst. ``mini_batch`` takes that many points an iteration, and keeps the mean of
all that a centre was ever given (Sculley, "Web-scale k-means clustering", 2010). ``balanced`` bounds the sizes of
clusters (:mod:`plsc.cluster.balanced`).

What an iteration makes depends on its centres alone, whatever ranks and threads there are: assignments are exact, sums
have no rounding (:mod:`plsc.cluster.means`), and draws are seeded by the iteration. So its centres are all that is kept
to resume, written whole after each iteration.
"""

import json
import time
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plsc.cluster.assignment import Assigner, Points, unit_rows, usable_rows
from plsc.cluster.balanced import balanced_labels
from plsc.cluster.means import Sums, inertia
from plsc.cluster.starts import first_centres
from plsc.embedding.columns import Float32, Float64, Int64
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import DataError, first_line
from plsc.files import atomic_write, sync
from plsc.parallel.collectives import all_gather_object, on_main
from plsc.parallel.mesh import Mesh
from plsc.progress import StatusLine, duration

_FITTING_WORST = 4  # of so many points for each empty centre one is drawn


@dataclass(frozen=True)
class KMeansOptions:
    """What k-means is asked for; see :mod:`plsc.tools.cluster`.

    Attributes:
        k: centres.
        iterations: at most.
        tolerance: it ends where an iteration lowers the inertia by less than this share.
        seeds: runs from different first centres, of which the one of least inertia is kept.
        seed: of all draws.
        balanced: no cluster has more than this times n / k points, rounded up; None: any number.
        mini_batch: points of an iteration; None: all.
    """

    k: int
    iterations: int = 25
    tolerance: float = 1e-4
    seeds: int = 1
    seed: int = 0
    balanced: float | None = None
    mini_batch: int | None = None


@dataclass
class State:
    """One run: what a file of it holds.

    Attributes:
        centres: (k, D) float32.
        sums, counts: of mini-batches, else empty.
        history: for each iteration "inertia" (of its points), "moved" (None just after it was resumed), "reseeded".
        done: it has converged, or used its iterations up; ``inertia`` is that of the centres then.
    """

    centres: Float32
    sums: Int64 = field(default_factory=lambda: np.empty((0, 0), np.int64))
    counts: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    history: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    inertia: float = np.inf


class KMeans:
    """k-means of a set by one of several ranks, which all call the same methods.

    Args:
        points: this rank's.
        source: the set that they are of.
        options: what is asked for, with no more centres than points.
        folder: where states are kept.
        mesh: the ranks.
        quiet: print no progress.
    """

    def __init__(
        self,
        points: Points,
        source: EmbeddingSet,
        options: KMeansOptions,
        folder: Path,
        mesh: Mesh,
        *,
        quiet: bool = False,
    ) -> None:
        self.points = points
        self._source, self._options, self._folder, self._mesh = source, options, folder, mesh
        self._status = None if quiet or not mesh.is_main else StatusLine()

    def fit(self) -> State:
        """Make or resume all runs, and return the best one's state, the same on every rank."""
        best: State | None = None
        for run in range(self._options.seeds):
            state = self._run(run)
            if best is None or state.inertia < best.inertia:
                best = state
        assert best is not None
        return best

    def _run(self, run: int) -> State:
        options, path = self._options, self._folder / f"run-{run:03d}.npz"
        on_main(lambda: self._begin(run, path), self._mesh)
        state = read_state(path, (options.k, self.points.dim))
        assigner, sums = Assigner(self.points), Sums(options.k, self.points.dim)
        if len(state.counts):
            sums.sums, sums.counts = state.sums, state.counts
        first, started = len(state.history), time.monotonic()
        while not state.done:
            seed = (options.seed, run, len(state.history))
            if len(state.history) == options.iterations:
                self._assign(assigner, state.centres)
                state.done, state.inertia = True, inertia(assigner.cosines, self._mesh)
            elif options.mini_batch is not None:
                self._small_step(state, sums, seed)
            else:
                self._step(state, assigner, sums, seed)
            on_main(lambda: write_state(path, state), self._mesh)
            self._report(run, state, (time.monotonic() - started) / max(1, len(state.history) - first))
        return state

    def _begin(self, run: int, path: Path) -> None:
        """Check the state as it was left, or draw the first centres."""
        shape = (self._options.k, self.points.dim)
        if path.exists():
            read_state(path, shape)
        else:
            rows = usable_rows(self._source)
            seed = self._options.seed, run
            write_state(path, State(first_centres(self._source, rows, shape[0], seed, self.points.where)))

    def _step(self, state: State, assigner: Assigner, sums: Sums, seed: tuple[int, ...]) -> None:
        """One iteration over all points; the run is done where it lowers the inertia too little, or changes nothing."""
        is_resumed = bool(state.history) and not sums.counts.any()
        changed, former = self._assign(assigner, state.centres)
        now = inertia(assigner.cosines, self._mesh)
        before = state.history[-1]["inertia"] if state.history else np.inf
        sums.move(self.points, changed, former, assigner.labels, self._mesh)
        centres = sums.centres(state.centres)
        empty = np.flatnonzero(sums.counts == 0)
        if len(empty):
            centres[empty] = self._worst(assigner.cosines, len(empty), seed)
        moved = sum(all_gather_object(len(changed), self._mesh))
        state.history.append({"inertia": now, "moved": None if is_resumed else moved, "reseeded": len(empty)})
        is_settled = abs(before - now) <= self._options.tolerance * now and not len(empty)
        if is_settled or np.array_equal(centres, state.centres):
            state.done, state.inertia = True, now  # of these centres, whose assignment this was
        else:
            state.centres = centres

    def _assign(self, assigner: Assigner, centres: Float32) -> tuple[Int64, Int64]:
        if self._options.balanced is None:
            return assigner.assign(centres)
        return assigner.adopt(centres, balanced_labels(self.points, centres, self._options.balanced, self._mesh))

    def _small_step(self, state: State, sums: Sums, seed: tuple[int, ...]) -> None:
        """One iteration over a mini-batch, which all ranks draw alike and each assigns its part of."""
        points, random = self.points, np.random.default_rng(seed)
        size = min(self._options.mini_batch or 1, points.total)
        drawn = np.sort(random.choice(points.total, size, replace=False, shuffle=False)) - points.start
        batch = Points.of(points.take(drawn[(drawn >= 0) & (drawn < len(points))]), points.where)
        assigner = Assigner(batch)
        changed, former = assigner.assign(state.centres)
        sums.move(batch, changed, former, assigner.labels, self._mesh)
        state.centres = sums.centres(state.centres)
        state.sums, state.counts = sums.sums, sums.counts
        state.history.append({"inertia": inertia(assigner.cosines, self._mesh), "moved": size, "reseeded": 0})

    def _worst(self, cosines: Float64, count: int, seed: tuple[int, ...]) -> Float32:
        """Draw ``count`` of the points that fit worst, over all ranks: (count, D)."""
        pool = min(_FITTING_WORST * count, self.points.total)
        order = np.argsort(cosines, kind="stable")[:pool]
        own = [(float(cosines[at]), self.points.start + int(at)) for at in order]
        worst = sorted(entry for part in all_gather_object(own, self._mesh) for entry in part)[:pool]
        chosen = np.random.default_rng(seed).choice(len(worst), count, replace=False)
        rows = usable_rows(self._source)[[worst[number][1] for number in chosen.tolist()]]
        order = np.argsort(rows)
        vectors = np.empty((count, self.points.dim), dtype=np.float32)
        vectors[order] = unit_rows(self._source, rows[order])
        return vectors

    def _report(self, run: int, state: State, seconds: float) -> None:
        """Print the state after an iteration; ``seconds`` is the time of one."""
        if self._status is None or not state.history:
            return
        last, options, made = state.history[-1], self._options, len(state.history)
        name = "cluster" if options.seeds == 1 else f"cluster (run {run + 1} of {options.seeds})"
        parts = [f"{name}: iteration {made} of {options.iterations}"]
        parts.append(f"inertia {last['inertia'] / (options.mini_batch or self.points.total):.6f} a point")
        parts += [f"{last['moved']:,} moved"] if last["moved"] is not None else []
        parts += [f"{last['reseeded']:,} empty centres put elsewhere"] if last["reseeded"] else []
        if state.done:
            self._status.print(", ".join([*parts, "done"]))
        else:
            self._status.update(", ".join([*parts, f"at most {duration(seconds * (options.iterations - made))} to go"]))


def write_state(path: Path, state: State) -> None:
    """Write ``state`` so that ``path`` is whole at any moment."""
    told = {"history": state.history, "done": state.done, "inertia": state.inertia}
    text = np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)
    with atomic_write(path) as tmp_path:
        with tmp_path.open("wb") as file:
            np.savez(file, centres=state.centres, sums=state.sums, counts=state.counts, told=text)
        sync(tmp_path)


def read_state(path: Path, shape: tuple[int, int]) -> State:
    """Read what :func:`write_state` wrote; :class:`DataError` unless it is whole, and of centres of ``shape``."""
    try:
        with (
            path.open("rb") as opened,
            np.load(opened, allow_pickle=False) as file,
        ):  # zip archives have a checksum of each member
            told = json.loads(file["told"].tobytes())
            state = State(file["centres"], file["sums"], file["counts"], told["history"], told["done"], told["inertia"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {first_line(error)}; give --overwrite to start anew") from None
    if state.centres.shape != shape or state.centres.dtype != np.float32:
        raise DataError(f"{path} does not hold {shape[0]} centres of {shape[1]}; give --overwrite to start anew")
    return state
