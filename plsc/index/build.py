"""Building an index: gather the sets' rows, normalise them, choose and tune a structure, measure, publish."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc import files
from plsc.arguments import as_integer
from plsc.embedding.columns import Float32, Int64, Mask, save_array, save_strings, string_files, write_npy_header
from plsc.embedding.contracts import UNKNOWN_CONTRACT
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.metadata import save_metadata
from plsc.embedding.set_writer import write_embedding_set
from plsc.embedding.table_formats import format_at
from plsc.errors import UsageError, quoted
from plsc.index import ann
from plsc.index.merging import MergedSets, gather
from plsc.index.on_disk import LISTS_FILE, MemoryBudget
from plsc.index.recall import choose_held_out
from plsc.index.rows import as_array
from plsc.index.tuning import HELD_OUT, BuildOptions, choose_structure

FORMAT = "plsc index"
VERSION = 1
FAISS_FILE = "index.faiss"
COLUMN_FILES = ("vectors.npy", "ids.npy", "labels.npy", *string_files("keys"), *string_files("class_names"))
EXACT_UP_TO = 200_000  # rows; below, brute force answers in milliseconds and misses nothing
MIN_ROWS_FOR_LATENCY = 1000  # below, no latency that can be asked for is missed

Labels = Sequence[str | None] | Sequence[int] | npt.NDArray[Any]


def build(
    sets: Sequence[EmbeddingSet | str | Path], folder: Path, options: BuildOptions, *, overwrite: bool = False
) -> dict[str, Any]:
    """Build the index ``folder`` over embedding sets and return its manifest.

    Every set is hashed first.

    Args:
        sets: opened, or their folders; of one contract.
        folder: empty, absent, or an index.
        options: the request.
        overwrite: replace an index that ``folder`` holds already, once the new one is whole.

    Raises:
        UsageError: sets that do not go together, a folder that exists, too few rows for the kind, or a recall out of
            reach.
        IntegrityError: a damaged set.
    """
    _check_folder(folder, overwrite)
    scratch = folder.resolve().with_name(f".{folder.name}.rows")
    with files.new_folder(scratch.parent), files.scratch_folder(scratch), ExitStack() as stack:
        places = (scratch / str(number) for number in itertools.count())
        opened = [
            source if isinstance(source, EmbeddingSet) else _open_set(Path(source), next(places), stack)
            for source in sets
        ]
        for source in opened:
            source.verify()
        rows = gather(opened)
        began, kind, memory = time.monotonic(), _resolve_kind(options, len(rows)), options.memory
        with new_index(folder.resolve()) as tmp_path:
            budget = None if memory is None else MemoryBudget(memory, len(rows), rows.dim, tmp_path)
            manifest = _write_index(tmp_path, rows, kind, options, budget)
            manifest["build_seconds"] = round(time.monotonic() - began, 3)
            files.write_manifest(tmp_path, manifest)
        return manifest


def _open_set(path: Path, scratch: Path, stack: ExitStack) -> EmbeddingSet:
    """Open a set until ``stack`` ends: of a table, no set is made, which would be written and read once more."""
    if (table := format_at(path)) is None:
        return EmbeddingSet(path)
    from plsc.embedding.table_sets import streamed

    return stack.enter_context(streamed(path, table, scratch))


@contextmanager
def new_index(folder: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of ``folder``, which takes its place if the block succeeds."""
    tmp_path = folder.with_name(f".{folder.name}.building")
    with files.new_folder(folder.parent), files.replacing_folder(folder, tmp_path, files.make_folder):
        yield tmp_path


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not files.holds_manifest(folder, FORMAT):
        raise UsageError(f"{folder} is not empty and holds no index; name another folder")
    files.check_output(folder, overwrite=overwrite)


def _resolve_kind(options: BuildOptions, rows: int) -> ann.Kind:
    few = EXACT_UP_TO if options.latency_ms is None else MIN_ROWS_FOR_LATENCY
    by_rows: ann.Kind = "exact" if rows <= few else "ivf"
    kind = next((kind for kind in ann.KINDS if kind == options.kind), by_rows)
    if rows < (least := ann.MIN_ROWS.get(kind, 0)):
        raise UsageError(f"{kind} needs {least} rows and there are {rows}; use --kind exact")
    return kind


def _write_index(
    tmp_path: Path, rows: MergedSets, kind: ann.Kind, options: BuildOptions, budget: MemoryBudget | None
) -> dict[str, Any]:
    """Write all files but the manifest; returns the manifest."""
    held_out = np.empty(0, dtype=np.int64)
    if kind != "exact":
        held_out = choose_held_out(rows.labels, HELD_OUT, options.seed)
    vectors, more = _write_columns(tmp_path, rows, held_out)
    structure = choose_structure(vectors, len(held_out), kind, options, budget, tmp_path / FAISS_FILE)
    if structure["kind"] == "exact":
        (tmp_path / LISTS_FILE).unlink(missing_ok=True)  # of a structure that was built and not chosen
    names = [*COLUMN_FILES, *more, *(name for name in (FAISS_FILE, LISTS_FILE) if (tmp_path / name).exists())]
    return {
        "format": FORMAT,
        "version": VERSION,
        "rows": len(rows),
        "dim": rows.dim,
        "contract_id": rows.contract_id,
        "model": rows.sets[0].manifest.get("model"),
        **({"alignments": rows.alignments} if rows.alignments else {}),
        "classes": len(rows.class_names),
        "left_out": rows.left_out,
        "recall_asked": {"share": options.recall, "at": options.recall_at},
        **structure,
        "sets": [
            {"path": str(source.path.resolve()), "rows": len(source), "id_offset": offset}
            for source, offset in zip(rows.sets, rows.offsets, strict=True)
        ],
        "files": files.describe_files(tmp_path, names),
    }


def _write_columns(tmp_path: Path, rows: MergedSets, held_out: Int64) -> tuple[Float32, list[str]]:
    """Write vectors, ids, labels and names, the rows ``held_out`` (ascending) last.

    Returns:
        The vectors, mapped, and the names of files that not every index has.
    """
    last = np.zeros(len(rows), dtype=bool)
    last[held_out] = True
    path = tmp_path / "vectors.npy"
    _write_vectors(path, rows, last)
    save_array(tmp_path / "ids.npy", np.concatenate([rows.ids[~last], rows.ids[last]]))
    save_array(tmp_path / "labels.npy", np.concatenate([rows.labels[~last], rows.labels[last]]))
    order = np.concatenate([np.flatnonzero(~last), held_out])
    save_strings(tmp_path, "keys", rows.keys(order))
    more = []
    if any(source.has_metadata for source in rows.sets):
        more = save_metadata(tmp_path, (rows.metadata(int(row)) for row in order))
    save_strings(tmp_path, "class_names", rows.class_names)
    return np.load(path, mmap_mode="r", allow_pickle=False), more


def _write_vectors(path: Path, rows: MergedSets, last: Mask) -> None:
    """Write the rows chunk by chunk, those that are ``last`` (N,) at the end.

    Not through a memory map, whose dirty pages would count towards the memory of the build.
    """
    with path.open("wb") as file:
        write_npy_header(file, (len(rows), rows.dim))
        held_out = []
        for start, vectors in rows.unit_chunks():
            is_last = last[start : start + len(vectors)]
            file.write(np.ascontiguousarray(vectors[~is_last], dtype="<f4").data)
            held_out.append(vectors[is_last])
        file.write(np.concatenate(held_out).astype("<f4").data)


def as_sets(
    embeddings: Any, folder: Path, keys: Sequence[str] | None, labels: Labels | None, contract_id: str
) -> Sequence[EmbeddingSet | str | Path]:
    """The embedding sets that ``embeddings`` are or name; an array is written into ``folder`` as one.

    Raises:
        UsageError: they are neither, or keys, labels and contract do not fit them.
    """
    if hasattr(embeddings, "__array__"):  # numpy's, and tensors on the CPU
        array = as_array(embeddings)
        if array.ndim != 2 or array.dtype.kind != "f" or not array.size:
            raise UsageError(f"embeddings are {array.dtype}{list(array.shape)}; give floats of shape [N, D]")
        class_names, numbers = _numbered(labels)
        names = None if keys is None else [str(key) for key in _listed(keys, "keys")]
        with np.errstate(over="ignore"):  # what overflows is infinite, and left out of the index
            rows = array.astype(np.float32)
        written = write_embedding_set(
            folder, rows, contract_id=contract_id, keys=names, labels=numbers, class_names=class_names
        )
        return [written]
    if keys is not None or labels is not None or contract_id != UNKNOWN_CONTRACT:
        raise UsageError("an embedding set has keys, labels and a contract of its own: leave them out")
    is_one = isinstance(embeddings, EmbeddingSet | str | Path) or not isinstance(embeddings, Iterable)
    sets = [embeddings] if is_one else list(embeddings)
    for entry in sets:
        if not isinstance(entry, EmbeddingSet | str | Path):
            raise UsageError(f"an index is built over an array (N, D) or embedding sets, not {type(entry).__name__}")
    return sets


def _numbered(labels: Labels | None) -> tuple[list[str], Int64 | None]:
    """The names of the classes in order, and for each of ``labels`` the number of its class, -1 for none."""
    if labels is None:
        return [], None
    given = _listed(labels, "labels")
    given = [None if isinstance(label, float) and math.isnan(label) else label for label in given]  # a Series' None
    if not all(isinstance(label, str | None) for label in given):
        whole = [-1 if label is None else as_integer(label, "a label that is no name", -1) for label in given]
        given = [None if label < 0 else label for label in whole]
    classes = sorted({label for label in given if label is not None})
    numbers = {label: number for number, label in enumerate(classes)}
    found = np.array([-1 if label is None else numbers[label] for label in given], dtype=np.int64)
    return [str(label) for label in classes], found


def _listed(values: Any, name: str) -> list[Any]:
    """The entries of a list, array or Series, as Python's own."""
    entries = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise UsageError(f"{name} are one for each row: give a list or array, not {quoted(values)}")
    return list(entries)
