"""The index: a folder in which the stored embeddings nearest to a given one are found.

    IDX/
      manifest.json         with its own digest: kind, rows, held_out, dim, contract_id, model, parameters, recall, …
      vectors.npy           (N, dim) float32, of length 1; the last ``held_out`` rows are not in index.faiss
      ids.npy, labels.npy   (N,) int64; labels into class_names, -1 for none
      keys.npy, keys.offsets.npy, class_names.npy, class_names.offsets.npy  string columns (plsc.embedding.columns)
      index.faiss           kinds ivf, hnsw and pq: the approximate structure over the first N − held_out rows
      index.ivfdata         its cells, where they were larger than the memory allowed; searching maps them

``exact`` searches vectors.npy itself, or a bfloat16 copy of it in memory where that is faster. For the others a few
real rows stay outside the structure and are searched by brute force beside it, so that the recall can be measured
again at any time, on the queries that the tuning used.
"""

from __future__ import annotations  # signatures in help() then read as they are written here

import contextlib
import math
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from plsc.arguments import as_integer
from plsc.embedding.columns import open_array, open_strings, string_files
from plsc.embedding.embedding_set import LARGEST_DIM, EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import IntegrityError, UsageError, quoted
from plsc.files import (
    MANIFEST,
    atomic_replace_dir,
    holds_manifest,
    make_folder,
    manifest_value,
    open_described,
    read_manifest,
)
from plsc.index import ann
from plsc.index.exact import ExactSearch, knn, merge_topk
from plsc.index.on_disk import LISTS_FILE
from plsc.index.rows import Float32, Int64, as_array, unit_vectors
from plsc.signing import is_asked_for, require_signed

FORMAT = "plsc index"
UNKNOWN_CONTRACT = "unknown"  # of vectors whose model was not named
VERSION = 1
FAISS_FILE = "index.faiss"
KINDS = ("exact", "ivf", "hnsw", "pq")
Labels = Sequence[str | None] | Sequence[int] | npt.NDArray[Any]
COLUMN_FILES = ("vectors.npy", "ids.npy", "labels.npy", *string_files("keys"), *string_files("class_names"))


@dataclass(frozen=True)
class Neighbours:
    """Results of Q queries, best first: scores (Q, k) float32 cosines; rows, ids and labels (Q, k) int64."""

    scores: Float32
    rows: Int64
    ids: Int64
    labels: Int64


class Index:
    """A searchable set of embeddings; made by :meth:`build`, kept by :meth:`save`, opened by :meth:`open`.

    Attributes:
        manifest: the content of manifest.json.
        contract_id: of the model and preprocessing that made the vectors.
        dim: numbers in a vector.
        kind: "exact", "ivf", "hnsw" or "pq".
        vectors: (N, dim) float32 of length 1, memory-mapped.
        ids, labels: (N,) int64.
        keys: N strings, the origin of each row.
        class_names: by label.
        held_out: the number of last rows outside the approximate structure.
        structure: the faiss index, None for an exact index.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        """Open an index.

        Args:
            folder: of the index.
            verify: hash every file; False trusts the columns, but faiss' own files are hashed all the same, because
                faiss crashes on damaged ones.

        Raises:
            UsageError: there is no such folder.
            DataError: ``folder`` is no index.
            IntegrityError: a file is damaged.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UsageError(f"there is no folder {folder}")
        self.manifest = read_manifest(self.folder, FORMAT, VERSION)
        require_signed(self.folder, "index", self.manifest)
        verify = verify or is_asked_for()  # else the signature is of hashes that nobody compares
        self._check_manifest()
        rows, files = self.manifest["rows"], self.manifest["files"]

        def file(name: str) -> BinaryIO:
            return open_described(self.folder, name, files[name], verify=verify or name in (FAISS_FILE, LISTS_FILE))

        self.kind: ann.Kind = self.manifest["kind"]
        self.dim: int = self.manifest["dim"]
        self.contract_id: str = self.manifest["contract_id"]
        self.held_out: int = self.manifest["held_out"]
        self.vectors: Float32 = open_array(file("vectors.npy"), (rows, self.dim), "float32")
        self.ids: Int64 = open_array(file("ids.npy"), (rows,), "int64")
        self.labels: Int64 = open_array(file("labels.npy"), (rows,), "int64")
        self.keys: Sequence[str] = open_strings(file, "keys", rows)
        self.class_names: Sequence[str] = open_strings(file, "class_names", self.manifest["classes"])
        if verify and len(self.labels) and not -1 <= self.labels.min() <= self.labels.max() < self.manifest["classes"]:
            raise IntegrityError(
                f"{self.folder} holds labels outside its {self.manifest['classes']} classes; build it again"
            )
        self._exact = ExactSearch(self.vectors)
        self.structure: Any = None
        if self.kind != "exact":
            with contextlib.ExitStack() as open_files:
                names = [name for name in (FAISS_FILE, LISTS_FILE) if name in files]
                structure = [open_files.enter_context(file(name)) for name in names]
                self.structure = ann.load(structure, self.kind, self.manifest["parameters"], self.base)

    def _check_manifest(self) -> None:
        """Check what the manifest's digest does not: whoever writes a manifest writes its digest."""
        files = manifest_value(self.folder, self.manifest, "files", dict)
        manifest_value(self.folder, self.manifest, "contract_id", str)
        kind = manifest_value(self.folder, self.manifest, "kind", str)
        numbers = ("rows", "dim", "held_out", "classes")
        rows, dim, held_out, _ = (manifest_value(self.folder, self.manifest, name, int) for name in numbers)
        expected = {*COLUMN_FILES, *({FAISS_FILE} if kind != "exact" else {})}
        known = kind in KINDS and 0 < dim <= LARGEST_DIM and held_out <= rows and rows > 0
        if not known or files.keys() - {LISTS_FILE} != expected:
            raise IntegrityError(f"{self.folder / MANIFEST} does not describe an index; use another copy")
        if kind != "exact":
            effort = "efSearch" if kind == "hnsw" else "nprobe"
            manifest_value(self.folder, manifest_value(self.folder, self.manifest, "parameters", dict), effort, int)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> Index:
        """Open an index folder; the same as ``Index(folder)``."""
        return cls(folder, verify=verify)

    @classmethod
    def build(
        cls,
        embeddings: npt.NDArray[Any] | EmbeddingSet | str | Path | Sequence[EmbeddingSet | str | Path],
        folder: str | Path | None = None,
        *,
        keys: Sequence[str] | None = None,
        labels: Labels | None = None,
        contract_id: str = UNKNOWN_CONTRACT,
        overwrite: bool = False,
        kind: str = "auto",
        recall: float = 0.99,
        recall_at: int = 10,
        latency_ms: float | None = None,
        memory: int | None = None,
        seed: int = 0,
        quiet: bool = False,
    ) -> Index:
        """Build an index over an array of embeddings, or over embedding sets.

        Args:
            embeddings: (N, D) numbers, as :func:`plsc.embed` returns them; or one embedding set of ``plsc embed``, or
                several of one contract. Rows that are zero, not finite or errors cannot be found; ``ids`` tells which
                rows of an array are in the index.
            folder: to write. None: a temporary one, which :meth:`save` copies, and which is removed with the object.
            keys: N strings, the origin of each row of an array; None: the row numbers.
            labels: N names of the rows' classes, such as persons, None for none; or N integers, which name them by
                their digits, -1 for none: a list, array or Series. Of an array. Classes are numbered in the order of
                their names or integers.
            contract_id: of the model that made the array (``model.contract_id``); the index then refuses images that
                another model embeds.
            overwrite: replace an index that ``folder`` holds, once the new one is whole.
            kind, recall, recall_at, latency_ms, memory, seed, quiet: as in :func:`plsc.index.build.build`.

        Raises:
            UsageError: the arguments do not go together, or ``folder`` exists. Otherwise as
                :func:`plsc.index.build.build`.
        """
        from plsc.index.build import build

        if folder is not None:
            _check_target(Path(folder), overwrite)
        scratch = Path(tempfile.mkdtemp(prefix="plsc-index-"))
        target = scratch / "index" if folder is None else Path(folder)
        try:
            build(
                _as_sets(embeddings, scratch / "set", keys, labels, contract_id),
                target,
                kind=kind,
                recall=recall,
                recall_at=recall_at,
                latency_ms=latency_ms,
                memory=memory,
                seed=seed,
                quiet=quiet,
                overwrite=overwrite,
            )
            index = cls(target, verify=False)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        shutil.rmtree(scratch if folder is not None else scratch / "set", ignore_errors=True)
        if folder is None:
            weakref.finalize(index, shutil.rmtree, scratch, ignore_errors=True)
        return index

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Copy the index into ``folder``, which appears whole or not at all, and which :meth:`open` opens.

        Raises:
            UsageError: ``folder`` exists and ``overwrite`` is not given, or it is no index.
        """
        target = Path(folder).resolve()
        if target == self.folder.resolve():
            return
        _check_target(target, overwrite)
        make_folder(target.parent)
        tmp_path = target.with_name(f".{target.name}.saving")
        shutil.rmtree(tmp_path, ignore_errors=True)  # of a call that was killed
        try:
            shutil.copytree(self.folder, tmp_path)
            atomic_replace_dir(tmp_path, target)
        finally:
            shutil.rmtree(tmp_path, ignore_errors=True)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def base(self) -> Float32:
        """(N − held_out, dim): the rows that the approximate structure covers."""
        return self.vectors[: len(self) - self.held_out]

    @property
    def held_out_vectors(self) -> Float32:
        """(held_out, dim): the rows outside it."""
        return self.vectors[len(self) - self.held_out :]

    def search(self, vectors: npt.NDArray[Any] | Sequence[Sequence[float]], k: int = 10) -> Neighbours:
        """Find the ``k`` nearest rows to each of ``vectors`` (Q, dim), by cosine.

        Returns:
            min(k, N) neighbours each, best first: where an approximate structure finds fewer, the exact search answers.

        Raises:
            UsageError: k < 1, another dimension, NaN, infinity or a zero vector.
        """
        k = min(as_integer(k, "k, the number of neighbours,", 1), len(self))
        queries = unit_vectors(vectors, self.dim)
        scores, rows = self._exact.search(queries, k) if self.structure is None else self._approximate(queries, k)
        return Neighbours(scores, rows, self.ids[rows], self.labels[rows])

    def class_name(self, label: int) -> str | None:
        """The name of class ``label``; None for -1."""
        label = as_integer(label, "a label", -1, len(self.class_names) - 1)
        return None if label < 0 else self.class_names[label]

    def _approximate(self, queries: Float32, k: int) -> tuple[Float32, Int64]:
        inside = ann.search(self.structure, queries, min(k, len(self.base)))
        short = (inside[1] < 0).any(axis=1)
        held_out = knn(queries, self.held_out_vectors, k)
        scores, rows = merge_topk(inside, (held_out[0], held_out[1] + len(self.base)), k)
        if short.any():
            scores[short], rows[short] = self._exact.search(queries[short], k)
        return scores, rows


def _check_target(folder: Path, overwrite: bool) -> None:
    """UsageError unless ``folder`` is free, or an index that may be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder.is_dir() and holds_manifest(folder, FORMAT)):
        raise UsageError(f"{folder} exists already and is no index: name another folder")
    if not overwrite:
        raise UsageError(f"{folder} exists already: give overwrite=True to replace it")


def _as_sets(
    embeddings: Any,
    folder: Path,
    keys: Sequence[str] | None,
    labels: Labels | None,
    contract_id: str,
) -> Sequence[EmbeddingSet | str | Path]:
    """The embedding sets that ``embeddings`` are or name; an array is written into ``folder`` as one."""
    if hasattr(embeddings, "__array__"):  # numpy's, and tensors on the CPU
        return [_written(as_array(embeddings), folder, keys, labels, contract_id)]
    if keys is not None or labels is not None or contract_id != UNKNOWN_CONTRACT:
        raise UsageError("an embedding set has keys, labels and a contract of its own: leave them out")
    is_one = isinstance(embeddings, EmbeddingSet | str | Path) or not isinstance(embeddings, Iterable)
    sets = [embeddings] if is_one else list(embeddings)
    for entry in sets:
        if not isinstance(entry, EmbeddingSet | str | Path):
            raise UsageError(f"an index is built over an array (N, D) or embedding sets, not {type(entry).__name__}")
    return sets


def _written(
    embeddings: npt.NDArray[Any],
    folder: Path,
    keys: Sequence[str] | None,
    labels: Labels | None,
    contract_id: str,
) -> EmbeddingSet:
    if embeddings.ndim != 2 or embeddings.dtype.kind != "f" or not embeddings.size:
        raise UsageError(f"embeddings are {embeddings.dtype}{list(embeddings.shape)}; give floats of shape [N, D]")
    names, numbers = _numbered(labels)
    with np.errstate(over="ignore"):  # what overflows is infinite, and left out of the index
        vectors = embeddings.astype(np.float32)
    return write_embedding_set(
        folder,
        vectors,
        contract_id=contract_id,
        keys=None if keys is None else [str(key) for key in _listed(keys, "keys")],
        labels=numbers,
        class_names=names,
    )


def _numbered(labels: Labels | None) -> tuple[list[str], Int64 | None]:
    """The names of the classes in order, and for each of ``labels`` the number of its class, -1 for none."""
    if labels is None:
        return [], None
    given = [None if _is_missing(label) else label for label in _listed(labels, "labels")]
    if not all(isinstance(label, str | None) for label in given):
        whole = [-1 if label is None else as_integer(label, "a label that is no name", -1) for label in given]
        given = [None if label < 0 else label for label in whole]
    classes = sorted({label for label in given if label is not None})
    numbers = {label: number for number, label in enumerate(classes)}
    found = np.array([-1 if label is None else numbers[label] for label in given], dtype=np.int64)
    return [str(label) for label in classes], found


def _is_missing(label: Any) -> bool:
    return label is None or (isinstance(label, float) and math.isnan(label))  # as a Series tells it


def _listed(values: Any, name: str) -> list[Any]:
    """The entries of a list, array or Series, as Python's own."""
    entries = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise UsageError(f"{name} are one for each row: give a list or array, not {quoted(values)}")
    return list(entries)
