"""Millions of embeddings from Parquet into an exact index, beside reading them by pyarrow and writing them by numpy.

    python benchmarks/embedding_sets.py --folder BIG [--rows 10000000] [--dim 128] [--rounds 3]

BIG gets a file of random rows with keys, as plsc embed --out X.parquet writes it, and for the time being what each way
makes of it: at 10 million rows of 128 some 11 GB, all of which is removed in the end. The ways take turns, each in a
process of its own, and the kernel is asked to drop what it has cached of the file. Ours is what plsc index build does,
to the last hash and with the check of exact search against float64, whose seconds are told apart; the peer's is
pyarrow.parquet.read_table and numpy's bytes of the vectors into a file. Both wait until the disk has it all. Prints
medians, and adds a row to benchmarks/results/embedding_sets.csv (or into --out).
"""

import json
import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from results_file import in_process, print_and_add, script_parser

GROUP = 32768  # rows of a row group


def write_file(path: Path, rows: int, dim: int) -> None:
    """The table that ``plsc embed`` writes, of random rows."""
    import pyarrow as pa
    from pyarrow import parquet

    from plsc.embedding.embedding_set import FORMAT, VERSION
    from plsc.embedding.table_formats import ABOUT

    about = {"format": FORMAT, "version": VERSION, "normalized": False, "dim": dim, "contract_id": "random"}
    number = pa.list_(pa.field("element", pa.float32()), dim)
    columns = [("key", pa.string()), ("embedding", number), ("id", pa.int64()), ("label", pa.string())]
    columns += [("class", pa.int64()), ("error", pa.string())]
    random = np.random.default_rng(0)
    with parquet.ParquetWriter(path, pa.schema(columns, {ABOUT: json.dumps(about)})) as writer:
        for start in range(0, rows, GROUP):
            ids = np.arange(start, min(start + GROUP, rows))
            vectors = pa.array(random.standard_normal(len(ids) * dim, dtype=np.float32))
            none = pa.nulls(len(ids), pa.string())
            keys = pa.array([f"people/{row:09d}.jpg" for row in ids.tolist()])
            values = [keys, pa.FixedSizeListArray.from_arrays(vectors, type=number), pa.array(ids), none]
            writer.write_batch(pa.record_batch([*values, pa.array(np.full(len(ids), -1)), none], writer.schema), GROUP)


def drop_cached(path: Path) -> None:
    """Ask the kernel to drop its pages of a file, so that it is read from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # pages that are not written yet are not dropped
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class Memory:
    """The most GiB that this process has held, without pages of files, looked at ten times a second."""

    def __init__(self) -> None:
        self.most, self._done = 0.0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
            self.most = max(self.most, int(line.split()[1]) / 2**20)


def ours(path: Path, out: Path) -> dict[str, float]:
    """Build the index; seconds of all, and of the check of the search."""
    from plsc.index import build, tuning

    check: list[float] = []

    def timed(*args: Any) -> dict[str, Any]:
        began = time.perf_counter()
        found: dict[str, Any] = tuning.choose_structure(*args)
        check.append(time.perf_counter() - began)
        return found

    memory, began = Memory(), time.perf_counter()
    with patch.object(build, "choose_structure", timed):
        build.build([path], out, tuning.BuildOptions(kind="exact", quiet=True))
    return {"ours_s": time.perf_counter() - began, "check_s": sum(check), "ours_gib": memory.most}


def peer(path: Path, out: Path) -> dict[str, float]:
    """Read the table, and write its vectors."""
    from pyarrow import parquet

    memory, began = Memory(), time.perf_counter()
    column = parquet.read_table(path).column("embedding")
    with out.open("wb") as file:
        for chunk in column.chunks:
            file.write(chunk.flatten().to_numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return {"peer_s": time.perf_counter() - began, "peer_gib": memory.most}


def main() -> None:
    parser = script_parser(__doc__, results="embedding_sets", rows=10_000_000, dim=128, rounds=3)
    parser.add_argument("--folder", type=Path, required=True, help="where the file and what is made of it are")
    parser.add_argument("--part", choices=("ours", "peer"), help="measure this alone, as JSON")
    args = parser.parse_args()
    path, made = args.folder / "rows.parquet", args.folder / "made"
    if args.part is not None:
        print(json.dumps({"ours": ours, "peer": peer}[args.part](path, made)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, float]] = []
    try:
        write_file(path, args.rows, args.dim)
        for _ in range(args.rounds):
            found: dict[str, float] = {}
            for part in ("peer", "ours"):
                drop_cached(path)
                found |= in_process(sys.argv[0], part, folder=args.folder)
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            rounds.append(found)
            print(json.dumps(found), flush=True)
    finally:
        path.unlink(missing_ok=True)
    medians = {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
    ratios = [(each["ours_s"] / each["peer_s"], (each["ours_s"] - each["check_s"]) / each["peer_s"]) for each in rounds]
    whole, unchecked = (round(statistics.median(column), 2) for column in zip(*ratios, strict=True))
    sizes = {"rows": args.rows, "dim": args.dim, "rounds": args.rounds}
    print_and_add("embedding_sets", {**sizes, **medians, "ratio": whole, "ratio_without_check": unchecked}, args.out)


if __name__ == "__main__":
    main()
