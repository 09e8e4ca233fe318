"""The compiled scan: shortlists that overflow, threads; its answers on every path are those of index/test_scan.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.kernel_paths import kernel_paths

from plsc.index import scan as scan_module
from plsc.index.scan import NativeScan, ScanCopy, TorchScan
from plsc.native.scan import ScanKernel, load_scan
from plsc.sizes import status_bytes

compiled = pytest.mark.skipif(load_scan() is None, reason="needs a C++ compiler")


def rows_of(count, dim, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def oracle(queries, vectors, k, allowed):
    scores = np.einsum("qd,nd->qn", queries.astype(np.float64), vectors.astype(np.float64))  # of equal rows equal
    scores[:, ~allowed] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def backends(vectors, precision):
    copy = ScanCopy(vectors, precision, torch.device("cpu"))
    return {"native": NativeScan(copy, load_scan()), "torch": TorchScan(copy)}


@pytest.mark.parametrize("path", kernel_paths())
def test_a_path_multiplies_by_its_own_units(path, monkeypatch):
    monkeypatch.setenv("PLSC_CPU", path)
    assert load_scan().products["bf16"].startswith(path)


def counting(function, scored):
    """``function``, which also notes how many rows it scores in float64."""

    def counted(*args, **kwargs):
        answer = function(*args, **kwargs)
        scored.append(answer[2] if len(answer) == 3 else len(args[2]))
        return answer

    return counted


@compiled
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_shortlists_that_overflow_give_way_to_every_row(monkeypatch, backend):
    """Rows so close together that all are candidates; then not even a full shortlist may cost a true neighbour."""
    middle = rows_of(1, 48)
    vectors = middle + 1e-4 * rows_of(3000, 48, 1)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    queries = np.concatenate([middle, rows_of(4, 48, 2)])
    monkeypatch.setattr(scan_module, "_CANDIDATES", 500)
    monkeypatch.setattr(scan_module, "_SCORES", 1000)
    allowed = np.arange(3000) % 5 != 0
    scored = []
    monkeypatch.setattr(ScanKernel, "__call__", counting(ScanKernel.__call__, scored))
    monkeypatch.setattr(scan_module, "rank", counting(scan_module.rank, scored))
    _, rows = backends(vectors, "bf16")[backend].search(queries, 5, allowed, 2400)
    np.testing.assert_array_equal(rows, oracle(queries, vectors, 5, allowed))
    assert sum(scored) >= 2400


@compiled
def test_threads_change_nothing():
    vectors, queries = rows_of(9000, 64), rows_of(40, 64, 1)
    before = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            answers.append(backends(vectors, "bf16")["native"].search(queries, 12, None, 9000))
    finally:
        torch.set_num_threads(before)
    for scores, rows in answers[1:]:
        np.testing.assert_array_equal(scores, answers[0][0])
        np.testing.assert_array_equal(rows, answers[0][1])


@compiled
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux about this process's memory")
def test_rows_that_tie_take_no_memory(monkeypatch):
    """Every row is a candidate, and ranked; 16 bytes of each would be 32 MB."""
    monkeypatch.setattr(scan_module, "_CANDIDATES", 500)
    native = backends(np.full((2_000_000, 4), 0.5, np.float32), "fp32")["native"]
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmHWM")
    rows = native.search(np.ones((1, 4), np.float32), 5, None, 2_000_000)[1]
    assert rows.tolist() == [[0, 1, 2, 3, 4]]
    assert status_bytes("VmHWM") - before < 8 << 20
