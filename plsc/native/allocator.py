"""Tune the C library's allocator: a network's next batch takes the memory again that this one frees."""

import ctypes
from contextlib import suppress

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt(3), malloc.h
_LARGEST_KEPT = 1 << 30  # bytes of a block; larger ones, such as class tables, go back at once
_MOST_KEPT = (1 << 31) - 1  # bytes free at the heap's end


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, from now on; whether it does: with glibc and without a GPU.

    To be called before there are threads, and so before :func:`plsc.init`: they then share one heap. Heaps of their own
    would give blocks back.

    PyTorch frees every map of a batch on CPUs and asks for it again in the next, and glibc gives such large blocks back
    to the system each time. A MobileFaceNet's training step of 32 pictures at 48x48 then touches 10,000 new pages,
    embedding 64 pictures at 112x112 touches 50,000 (benchmarks/freed_memory.py).
    """
    if torch.cuda.is_available():  # the maps are in its memory
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of that name
        return False
    wishes = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGEST_KEPT, _TRIM_THRESHOLD: _MOST_KEPT}
    return all(bool(mallopt(what, value)) for what, value in wishes.items())


def return_freed_memory() -> None:
    """Give the memory that this process has freed back to the system, as far as glibc can; without it, do nothing."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
