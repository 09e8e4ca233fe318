"""A build in a process of its own, whose memory is watched: run by test_memory.py.

    watched_build.py MEMORY KIND OUT SET...

MEMORY: bytes that the build is allowed, 0 for any number. Prints {"kind", "peak"}: the most bytes that it had beyond
those of the interpreter and its libraries, of memory that the system could not have taken back.
"""

import json
import sys
import threading
from pathlib import Path

import numpy as np

from plsc.index.build import build
from plsc.index.scan import load_faiss
from plsc.index.tuning import BuildOptions
from plsc.sizes import status_bytes


class Peak(threading.Thread):
    """Watches the anonymous memory that is resident."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self.bytes = max(self.bytes, status_bytes("RssAnon"))


def warm_up() -> None:
    """Let the libraries allocate what they keep for good."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(1)
    rows = np.random.default_rng(0).standard_normal((2000, 64)).astype(np.float32)
    structure = faiss.index_factory(64, "IVF8,Flat")
    structure.train(rows)
    structure.add(rows)
    faiss.knn(rows[:64], rows, 10)
    np.dot(rows.astype(np.float64), rows.astype(np.float64).T)


def main() -> None:
    memory, kind, out, *sets = sys.argv[1:]
    warm_up()
    peak = Peak()
    peak.start()
    before = status_bytes("RssAnon")
    manifest = build(sets, Path(out), BuildOptions(kind=kind, recall=0.5, memory=int(memory) or None, quiet=True))
    peak.over.set()
    peak.join()
    print(json.dumps({"kind": manifest["kind"], "peak": peak.bytes - before}))


if __name__ == "__main__":
    main()
