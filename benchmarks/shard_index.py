"""The index of a data set of hundreds of millions of pictures: joined once, then opened by a fresh process.

    python benchmarks/shard_index.py --folder BIG [--rows 700000000] [--shards 100] [--classes 20000000]

The shards are empty files of a made-up format, whose scan gives offsets and labels at random: what is measured is the
index alone. At 700 million rows it takes 10 GB in BIG, and some minutes. Before it is opened, the kernel is asked to
drop what it has cached of the index. Prints the figures, and adds a row to benchmarks/results/shard_index.csv (or into
--out).
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from results_file import in_process, print_and_add, script_parser

from plsc.data import shard_index
from plsc.data.sharded import ShardedDataset
from plsc.data.shards import Scanned, ShardFormat

PICTURE_BYTES = 5000
ASKED = 1_000_000  # random offsets and labels


class MadeUp(ShardFormat):
    """Shards that are named by their number, and hold what ``rows`` and ``classes`` in the options say."""

    suffixes = (".made-up",)
    options = {"rows": "of a shard", "classes": "of all"}  # noqa: RUF012 (a ClassVar of the base)

    def scan(self, shard: Path) -> Scanned:
        """Offsets one behind the other, labels at random."""
        rows = int(self.given["rows"])
        labels = np.random.default_rng(int(shard.stem)).integers(0, int(self.given["classes"]), rows)
        return Scanned((np.arange(rows, dtype=np.int64) * PICTURE_BYTES)[:, None], labels)

    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """There are no pictures."""
        raise NotImplementedError


def opened(folder: Path, rows: int, shards: int, classes: int) -> ShardedDataset:
    """The data set, whose files are made where they are missing: sparse, and of no bytes on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:05d}{MadeUp.suffixes[0]}" for number in range(shards)]
    for path in paths:
        if not path.exists():
            path.touch()
            os.truncate(path, PICTURE_BYTES * (rows // shards) + 1)
    shard_index.PARALLEL_FROM = 2**62  # processes could not import this script's format
    given = {"rows": str(rows // shards), "classes": str(classes)}
    return ShardedDataset("made up", paths, MadeUp(given), 112, max_bad_records=0)


def memory() -> dict[str, float]:
    """GiB of this process: its own, and pages of files, which all processes share and the kernel may drop."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        f"{text}_gib": round(int(lines[name].split()[0]) / 2**20, 3)
        for text, name in (("own", "RssAnon"), ("mapped", "RssFile"))
    }


def ask(dataset: ShardedDataset, seed: int) -> float:
    """Offsets and labels at random places a second."""
    rows = np.random.default_rng(seed).integers(0, len(dataset), ASKED)
    began = time.perf_counter()
    dataset.index.places[rows], dataset.labels[rows]
    return round(ASKED / (time.perf_counter() - began))


def drop_cached(folder: Path) -> None:
    """Ask the kernel to drop its pages of the index, so that opening reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != MadeUp.suffixes[0]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # pages that are not written yet are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = script_parser(__doc__, results="shard_index", rows=700_000_000, shards=100, classes=20_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="where the shards and their index are written")
    parser.add_argument("--part", choices=("join", "open"), help="measure this alone, as JSON")
    args = parser.parse_args()
    sizes = {"rows": args.rows, "shards": args.shards, "classes": args.classes}
    if args.part is not None:
        began = time.perf_counter()
        dataset = opened(args.folder, **sizes)
        figures: dict[str, float] = {f"{args.part}_s": round(time.perf_counter() - began, 3), **memory()}
        if args.part == "open":
            figures |= {"cold_per_s": ask(dataset, 0), "warm_per_s": max(ask(dataset, 0) for _ in range(3))}
        print(json.dumps(figures))
        return
    joined = in_process(sys.argv[0], "join", folder=args.folder, **sizes)
    drop_cached(args.folder)
    figures = in_process(sys.argv[0], "open", folder=args.folder, **sizes)
    print_and_add("shard_index", {**sizes, "join_s": joined["join_s"], **figures}, args.out)


if __name__ == "__main__":
    main()
