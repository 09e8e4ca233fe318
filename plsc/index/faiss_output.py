"""What faiss prints: the names and sizes of its files, on stdout, whoever reads that."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stdout_kept() -> Iterator[None]:
    """Send to stderr what is printed on stdout meanwhile, by C++ as well."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
