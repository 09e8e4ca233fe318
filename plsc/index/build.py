"""Building an index: gather, normalise, choose and tune the structure, measure, publish."""

import shutil
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.embed.columns import save_array, save_strings
from plsc.embed.embedding_set import EmbeddingSet
from plsc.errors import UsageError
from plsc.files import atomic_replace_dir, describe_files, holds_manifest, make_folder, write_manifest
from plsc.index import approximate
from plsc.index.choice import Wish, choose
from plsc.index.exact import Float32, Int64
from plsc.index.gather import Gathered, gather
from plsc.index.index import COLUMN_FILES, FAISS_FILE, FORMAT, VERSION
from plsc.index.memory import Within
from plsc.index.on_disk import LISTS_FILE
from plsc.index.planner import HELD_OUT
from plsc.index.recall import Target, choose_held_out

KINDS = ("auto", "exact", "ivf", "hnsw", "pq")
EXACT_UP_TO = 200_000  # rows; below, brute force answers in milliseconds and misses nothing
FEWEST = 1000  # rows from which on a latency asked for can be missed at all


def build(
    sets: Sequence[EmbeddingSet | str | Path],
    folder: Path,
    *,
    kind: str = "auto",
    recall: float = 0.99,
    recall_at: int = 10,
    latency_ms: float | None = None,
    memory: int | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Build the index ``folder`` over ``sets`` and return its manifest.

    kind: "exact", "ivf", "hnsw", "pq" (least memory), or "auto": exact up to 200,000 rows; above that IVF, unless brute
    force answers a single query faster than IVF does with the recall asked. With ``latency_ms``, however many rows:
    exact if a single query then takes no longer, else the first of IVF and HNSW that takes no longer, else the fastest
    of all. The manifest's "latency" holds what was asked and measured, medians in milliseconds.
    recall: least recall of an approximate kind on held-out real rows; recall_at: 1 asks it of the nearest row alone,
    10 of the ten nearest as well. Where an identity has fewer than 11 rows, the last of ten neighbours are
    strangers, alike by chance, and finding them all takes many times the effort.
    memory: bytes that the build may take, whatever the sets' size (see :mod:`plsc.index.memory`): an IVF structure that
    does not fit is trained on a smaller sample, added part by part and merged on disk, which takes three times the
    vectors' bytes there while it lasts; HNSW, which has to fit, is refused. None: as much as it takes.
    An index that ``folder`` holds already is replaced once the new one is whole. Every set is hashed first.

    Raises :class:`UsageError` for a wrong kind or recall, sets that do not go together, a folder that holds something
    else, too few rows for the kind or a recall out of reach; :class:`IntegrityError` for a damaged set.
    """
    _check(folder, kind, recall, recall_at, latency_ms)
    opened = [source if isinstance(source, EmbeddingSet) else EmbeddingSet(source) for source in sets]
    for source in opened:
        source.verify()
    rows = gather(opened)
    began = time.monotonic()
    tmp_path = folder.resolve().with_name(f".{folder.resolve().name}.building")
    make_folder(tmp_path.parent)
    shutil.rmtree(tmp_path, ignore_errors=True)
    make_folder(tmp_path)
    try:
        manifest = _fill(
            tmp_path,
            rows,
            Wish(
                _resolved(kind, len(rows), latency_ms),
                kind == "auto",
                Target(recall, recall_at),
                latency_ms,
                seed,
                quiet,
                None if memory is None else Within(memory, len(rows), rows.sets[0].dim, tmp_path),
            ),
        )
        manifest["build_seconds"] = round(time.monotonic() - began, 3)
        write_manifest(tmp_path, manifest)
        atomic_replace_dir(tmp_path, folder.resolve())
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    return manifest


def _check(folder: Path, kind: str, recall: float, recall_at: int, latency_ms: float | None) -> None:
    if kind not in KINDS:
        raise UsageError(f"no kind {kind!r}; it is one of {', '.join(KINDS)}")
    if not 0 < recall <= 1:
        raise UsageError(f"recall {recall}: it lies above 0 and up to 1")
    if recall_at not in (1, 10):
        raise UsageError(f"recall at {recall_at}: it is measured at 1 and at 10")
    if latency_ms is not None and not latency_ms > 0:
        raise UsageError(f"a latency of {latency_ms} ms: it lies above 0")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not holds_manifest(folder, FORMAT):
        raise UsageError(f"{folder} is not empty and holds no index; name another folder")


def _resolved(kind: str, rows: int, latency_ms: float | None) -> approximate.Kind:
    few = EXACT_UP_TO if latency_ms is None else FEWEST
    if kind == "exact" or (kind == "auto" and rows <= few):
        return "exact"
    chosen: approximate.Kind = "hnsw" if kind == "hnsw" else "pq" if kind == "pq" else "ivf"
    if rows < approximate.LEAST_ROWS[chosen]:
        raise UsageError(f"{chosen} needs {approximate.LEAST_ROWS[chosen]} rows and there are {rows}; use --kind exact")
    return chosen


def _fill(
    tmp_path: Path,
    rows: Gathered,
    wish: Wish,
) -> dict[str, Any]:
    held = np.empty(0, dtype=np.int64)
    if wish.kind != "exact":
        held = choose_held_out(rows.labels, HELD_OUT, wish.seed)
    vectors = _write_columns(tmp_path, rows, held)
    more = choose(vectors, len(held), wish, tmp_path / FAISS_FILE)
    if more["kind"] == "exact":
        (tmp_path / LISTS_FILE).unlink(missing_ok=True)
    first = rows.sets[0].manifest
    files = [*COLUMN_FILES, *(name for name in (FAISS_FILE, LISTS_FILE) if (tmp_path / name).exists())]
    return {
        "format": FORMAT,
        "version": VERSION,
        "rows": len(rows),
        "dim": rows.sets[0].dim,
        "contract_id": rows.contract_id,
        "model": first.get("model"),
        "classes": len(rows.class_names),
        "left_out": rows.left_out,
        "recall_asked": {"share": wish.target.share, "at": wish.target.at},
        **more,
        "sets": [
            {"path": str(s.folder.resolve()), "rows": len(s), "id_offset": offset}
            for s, offset in zip(rows.sets, rows.offsets, strict=True)
        ],
        "files": describe_files(tmp_path, files),
    }


def _write_columns(tmp_path: Path, rows: Gathered, held: Int64) -> Float32:
    """Write vectors, ids, labels and names, the rows ``held`` (ascending) behind all others; return the vectors, mapped
    for reading."""
    last = np.zeros(len(rows), dtype=bool)
    last[held] = True
    path = tmp_path / "vectors.npy"
    _write_vectors(path, rows, last)
    save_array(tmp_path / "ids.npy", np.concatenate([rows.ids[~last], rows.ids[last]]))
    save_array(tmp_path / "labels.npy", np.concatenate([rows.labels[~last], rows.labels[last]]))
    order = chain(np.flatnonzero(~last), held)
    save_strings(tmp_path, "keys", (rows.key(int(row)) for row in order))
    save_strings(tmp_path, "class_names", rows.class_names)
    mapped: Float32 = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def _write_vectors(path: Path, rows: Gathered, last: npt.NDArray[np.bool_]) -> None:
    """Write the rows chunk by chunk, those that are ``last`` (N,) at the end; a map's pages would stay in memory."""
    dim = rows.sets[0].dim
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(rows), dim)}
        np.lib.format.write_array_header_1_0(file, header)
        held = []
        for start, vectors in rows.unit_chunks():
            apart = last[start : start + len(vectors)]
            file.write(np.ascontiguousarray(vectors[~apart], dtype="<f4").data)
            held.append(vectors[apart])
        file.write(np.concatenate(held).astype("<f4").data)
