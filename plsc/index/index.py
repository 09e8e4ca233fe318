"""The index: a folder in which the stored embeddings nearest to a given one are found.

    IDX/
      manifest.json         with its own digest: kind, rows, held_out, dim, contract_id, model, parameters, recall, …
      vectors.npy           (N, dim) float32, of length 1; the last ``held_out`` rows are not in index.faiss
      ids.npy, labels.npy   (N,) int64; labels into class_names, -1 for none
      keys.npy, keys.offsets.npy, class_names.npy, class_names.offsets.npy  string columns (plsc.embedding.columns)
      metadata.npy, metadata.offsets.npy  a JSON object for each row, if any has some
      index.faiss           kinds ivf, hnsw and pq: the approximate structure over the first N − held_out rows
      index.ivfdata         its cells, where they were larger than the memory allowed; searching maps them

``exact`` searches vectors.npy itself, or 8-bit codes or a bfloat16 copy of it in memory where that is faster. For the
others a few real rows stay outside the structure and are searched by brute force beside it, so that the recall can be
measured again at any time, on the queries that the tuning used.
"""

from __future__ import annotations  # signatures in help() then read as they are written here

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from plsc.arguments import as_integer
from plsc.embedding.columns import Float32, Int64, check_maps, check_unwritten, open_array, open_strings
from plsc.embedding.contracts import UNKNOWN_CONTRACT
from plsc.embedding.embedding_set import LARGEST_DIM, EmbeddingSet
from plsc.embedding.metadata import METADATA_FILES, open_metadata, read_metadata
from plsc.errors import IntegrityError, UsageError
from plsc.files import MANIFEST, holds_manifest, manifest_value, open_described, read_manifest
from plsc.index import ann
from plsc.index.build import (
    COLUMN_FILES,
    FAISS_FILE,
    FORMAT,
    VERSION,
    Labels,
    as_sets,
    build,
    new_index,
)
from plsc.index.on_disk import LISTS_FILE
from plsc.index.recall import Recall, recall_of
from plsc.index.rows import unit_vectors
from plsc.index.scan import ExactSearch
from plsc.index.tuning import BuildOptions, exact_recall
from plsc.signing import is_asked_for, require_signed

LENGTH_TOLERANCE = 1e-3
RECALL_TOLERANCE = 0.005  # k-means and graphs are built by several threads, but what is stored answers alike
_CHECKED_AT_ONCE = 65536  # rows


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

    _temporary = False  # whether its folder is removed with it

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
        self.folder, self._verify = Path(folder), verify
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
        self._metadata = open_metadata(file, files, rows)
        if verify and len(self.labels) and not -1 <= self.labels.min() <= self.labels.max() < self.manifest["classes"]:
            raise IntegrityError(
                f"{self.folder} holds labels outside its {self.manifest['classes']} classes; build it again"
            )
        self._exact = ExactSearch(self.vectors)
        self.structure: Any = None
        self._mapped_cells: dict[str, os.stat_result] = {}
        if self.kind != "exact":
            with contextlib.ExitStack() as open_files:
                names = [name for name in (FAISS_FILE, LISTS_FILE) if name in files]
                structure = [open_files.enter_context(file(name)) for name in names]
                self._mapped_cells = {one.name: os.fstat(one.fileno()) for one in structure[1:]}  # faiss maps them
                self.structure = ann.load(structure, self.kind, self.manifest["parameters"], self.base)

    def _check_manifest(self) -> None:
        """Check what the manifest's digest does not: whoever writes a manifest writes its digest."""
        files = manifest_value(self.folder, self.manifest, "files", dict)
        manifest_value(self.folder, self.manifest, "contract_id", str)
        if "alignments" in self.manifest:  # of embedding sets whose faces were aligned
            manifest_value(self.folder, self.manifest, "alignments", list)
        kind = manifest_value(self.folder, self.manifest, "kind", str)
        numbers = ("rows", "dim", "held_out", "classes")
        rows, dim, held_out, _ = (manifest_value(self.folder, self.manifest, name, int) for name in numbers)
        expected = {*COLUMN_FILES, *({FAISS_FILE} if kind != "exact" else {})}
        known = kind in ann.KINDS and 0 < dim <= LARGEST_DIM and held_out <= rows and rows > 0
        if not known or files.keys() - {LISTS_FILE} - METADATA_FILES != expected:
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

        The other arguments are those of :class:`plsc.index.tuning.BuildOptions`.

        Raises:
            UsageError: the arguments do not go together, or ``folder`` exists. Otherwise as
                :func:`plsc.index.build.build`.
        """
        options = BuildOptions(kind, recall, recall_at, latency_ms, memory, seed, quiet)
        if folder is not None:
            _check_target(Path(folder), overwrite)
        scratch = Path(tempfile.mkdtemp(prefix="plsc-index-"))
        target = scratch / "index" if folder is None else Path(folder)
        try:
            sets = as_sets(embeddings, scratch / "set", keys, labels, contract_id)
            build(sets, target, options, overwrite=overwrite)
            index = cls(target, verify=False)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        shutil.rmtree(scratch if folder is not None else scratch / "set", ignore_errors=True)
        index._temporary = folder is None
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
        with new_index(target) as tmp_path:
            shutil.copytree(self.folder, tmp_path, dirs_exist_ok=True)

    def __repr__(self) -> str:
        """Return its kind and shape, and the folder."""
        return f"<plsc.Index at {self.folder}: {self.kind}, {len(self):,} vectors of {self.dim}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's path, which is opened again; UsageError where the folder goes with this object."""
        if self._temporary:
            raise UsageError(
                "this index is in a temporary folder, which goes with it: index.save(FOLDER), and open that"
            )
        return _opened_again, (type(self), self.folder.absolute(), self._verify, self.manifest)

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
            Rows whose cosines float32 hardly tells apart are in no order; it may change after the first searches.

        Raises:
            UsageError: k < 1, another dimension, NaN, infinity or a zero vector.
            IntegrityError: a file of the index was cut, or written over, since it was opened.
        """
        check_maps(self.vectors, self.ids, self.labels)
        for path, opened in self._mapped_cells.items():
            check_unwritten(path, opened)
        k = min(as_integer(k, "k, the number of neighbours,", 1), len(self))
        queries = unit_vectors(vectors, self.dim)
        scores, rows = self._exact.search(queries, k) if self.structure is None else self._approximate(queries, k)
        return Neighbours(scores, rows, self.ids[rows], self.labels[rows])

    def class_name(self, label: int) -> str | None:
        """The name of class ``label``; None for -1."""
        label = as_integer(label, "a label", -1, len(self.class_names) - 1)
        return None if label < 0 else self.class_names[label]

    def metadata(self, row: int) -> dict[str, Any]:
        """What the source said of a row besides its key and class, by names; {} where it said nothing."""
        return read_metadata(self._metadata, as_integer(row, "a row", 0, len(self) - 1), self.folder)

    def _approximate(self, queries: Float32, k: int) -> tuple[Float32, Int64]:
        beside = ann.Rows(None, np.arange(len(self.base), len(self)), self.held_out_vectors)
        return ann.search_all(self.structure, queries, k, beside, lambda some: self._exact.search(some, k))


def _opened_again(kind: type[Index], folder: Path, verify: bool, manifest: dict[str, Any]) -> Index:
    index = kind(folder, verify=verify)
    if index.manifest != manifest:
        raise IntegrityError(f"{folder} holds another index than the one that was pickled; open it, and pickle that")
    return index


def _check_target(folder: Path, overwrite: bool) -> None:
    """UsageError unless ``folder`` is free, or an index that may be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder.is_dir() and holds_manifest(folder, FORMAT)):
        raise UsageError(f"{folder} exists already and is no index: name another folder")
    if not overwrite:
        raise UsageError(f"{folder} exists already: give overwrite=True to replace it")


def check(folder: str | Path) -> dict[str, Any]:
    """Verify an index and measure its recall again.

    Returns:
        "rows", "kind", "dim", "contract_id", "recall" (as measured now) and "recall_stored".

    Raises:
        DataError: ``folder`` is no index.
        IntegrityError: the first thing that is wrong.
    """
    index = Index.open(folder)
    _check_vectors(index)
    if len(np.unique(index.ids)) != len(index):
        raise IntegrityError(f"{index.folder} uses an id twice; build the index again")
    stored = manifest_value(index.folder, index.manifest, "recall", dict)
    for name in ("recall@1", "recall@10"):
        manifest_value(index.folder, stored, name, float)
    measured = measure_recall(index)
    for name, value in (("recall@1", measured.at_1), ("recall@10", measured.at_10)):
        if value < stored[name] - RECALL_TOLERANCE:
            raise IntegrityError(
                f"{index.folder} has {name} {value:.4f} and was built with {stored[name]:.4f}; build it again"
            )
    return {
        "rows": len(index),
        "kind": index.kind,
        "dim": index.dim,
        "contract_id": index.contract_id,
        "recall": measured.as_json(),
        "recall_stored": stored,
    }


def measure_recall(index: Index) -> Recall:
    """Recall on the rows held out of the structure; of an exact index, on its own rows against float64."""
    if index.structure is None:
        return exact_recall(index.vectors)
    queries = np.array(index.held_out_vectors)
    truth = ExactSearch(index.base).search(queries, 10)[0]
    return recall_of(ann.search(index.structure, queries, truth.shape[1])[0], truth)


def _check_vectors(index: Index) -> None:
    for start in range(0, len(index), _CHECKED_AT_ONCE):
        lengths = np.linalg.norm(index.vectors[start : start + _CHECKED_AT_ONCE], axis=1)
        wrong = np.flatnonzero(~(np.abs(lengths - 1) < LENGTH_TOLERANCE))  # negated so that NaN is wrong too
        if len(wrong):
            raise IntegrityError(
                f"{index.folder}: row {start + int(wrong[0])} is not of length 1; build the index again"
            )
