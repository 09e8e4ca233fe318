"""IVF structures larger than memory: trained once on a sample, added part by part, merged on disk.

The cells of the merged structure lie in a file of their own, ``index.ivfdata``, which searching maps: it takes the
memory that the system has to spare, and answers from the disk where it has none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from plsc.errors import UsageError
from plsc.index import approximate
from plsc.index.exact import load_faiss
from plsc.index.faiss_output import stdout_kept
from plsc.index.memory import Within
from plsc.index.refined import Refined
from plsc.progress import Progress

LISTS_FILE = "index.ivfdata"
_READ_BYTES = 1 << 20  # of the rows that are added at once


def built(kind: approximate.Kind, base: approximate.Base, seed: int, within: Within | None, *, quiet: bool) -> Any:
    """The faiss index of ``kind`` over ``base`` (N, D): in memory where that is allowed, else with its cells on disk.

    Raises :class:`UsageError` for a kind that has to be in memory and does not fit.
    """
    if within is None or within.holds(kind):
        return approximate.train_and_add(kind, base, seed, quiet=quiet)
    if kind == "hnsw":
        raise UsageError(f"hnsw keeps all {len(base):,} rows in memory, and --memory allows less; use --kind ivf")
    return _built_in_parts(kind, base, seed, within, quiet=quiet)


def _built_in_parts(kind: approximate.Kind, base: approximate.Base, seed: int, within: Within, *, quiet: bool) -> Any:
    from faiss.contrib.ondisk import merge_ondisk

    structure = approximate.trained_ivf(kind, base, seed, most=within.sample_rows)
    index = structure.index if isinstance(structure, Refined) else structure
    together = within.part_rows(index.code_size, index.nlist)
    merged = within.folder / LISTS_FILE
    progress = Progress(f"index ({kind})", len(base), "rows", quiet=quiet)
    with _parts(within.folder, index, base, together, progress) as parts, stdout_kept():
        merge_ondisk(index, [str(part) for part in parts], str(merged))
    settle(structure)
    return structure


@contextmanager
def _parts(folder: Path, empty: Any, base: approximate.Base, together: int, progress: Progress) -> Iterator[list[Path]]:
    """Files of the rows' parts, each a structure like ``empty``, while they are needed."""
    faiss = load_faiss()
    written: list[Path] = []
    try:
        for start in range(0, len(base), together):
            part = faiss.clone_index(empty)
            stop = min(start + together, len(base))
            _add(part, base, start, stop, progress)
            written.append(folder / f".part-{len(written):05d}.faiss")
            faiss.write_index(part, str(written[-1]))
            del part
        progress.finish()
        yield written
    finally:
        for path in written:
            path.unlink(missing_ok=True)


def _add(part: Any, base: approximate.Base, start: int, stop: int, progress: Progress) -> None:
    count = max(1, _READ_BYTES // (4 * base.shape[1]))
    for first in range(start, stop, count):
        rows = np.ascontiguousarray(base[first : min(first + count, stop)])
        part.add_with_ids(rows, np.arange(first, first + len(rows), dtype=np.int64))
        progress.advance(len(rows))


def settle(index: Any) -> None:
    """Let searches read mapped cells by themselves: faiss would start 32 threads to fetch them, for every search."""
    faiss = load_faiss()
    inner = index.index if isinstance(index, Refined) else index
    lists = faiss.downcast_InvertedLists(inner.invlists) if hasattr(inner, "invlists") else None
    if isinstance(lists, faiss.OnDiskInvertedLists):
        lists.prefetch_nthread = 0
