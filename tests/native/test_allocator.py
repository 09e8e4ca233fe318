"""Memory that is freed stays with the process, where the C library can keep it."""

import ctypes
import os
import subprocess
import sys

import pytest

COUNT = """
import resource
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from plsc.native.allocator import keep_freed_memory

def new_pages():
    np.ones(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def in_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(new_pages).result()

print(new_pages(), int(keep_freed_memory()), new_pages(), in_thread())
"""


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_what_is_freed_is_used_again() -> None:
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, env=without_gpu)
    before, kept, after, in_thread = (int(number) for number in ran.stdout.split())
    assert kept
    assert before > 20  # large pages, where the system gives them, are few
    assert after < before / 10
    assert in_thread < before / 10


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from plsc.native.allocator import keep_freed_memory

    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
