"""The compiled scan against float64 numpy and PyTorch's path: tiles or none, any cut, overflowing shortlists."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from plsc.index import scan as scan_module
from plsc.index.scan import NativeScan, ScanCopy, TorchScan
from plsc.native import scan as compiled_scan

compiled = pytest.mark.skipif(not compiled_scan.has_scan(), reason="needs a C++ compiler")


def rows_of(count, dim, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def oracle(queries, vectors, k, allowed=None):
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def engines(vectors, precision):
    kept = ScanCopy(vectors, precision, torch.device("cpu"))
    return {"native": NativeScan(kept), "torch": TorchScan(kept)}


@pytest.fixture(params=["tiles", "no tiles"])
def tiles(request, monkeypatch):
    """Both ways to multiply, where the processor has both."""
    if request.param == "no tiles":
        monkeypatch.setattr(scan_module, "has_tiles", lambda: False)
    elif not compiled_scan.has_tiles():
        pytest.skip("needs a processor with bf16 matrix tiles (AMX)")


@compiled
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("count", "dim"), [(1, 1), (31, 7), (33, 32), (2049, 65), (6000, 96), (4500, 512)])
def test_compiled_and_plain_scans_agree(tiles, precision, count, dim):
    vectors = rows_of(count, dim)
    both = engines(vectors, precision)
    for batch in (1, 2, 3, 5, 17, 33, 70):
        queries = rows_of(batch, dim, batch)
        for share in (None, 0.05, 0.9):
            allowed = None if share is None else np.random.default_rng(batch).random(count) < share
            can = count if allowed is None else int(allowed.sum())
            k = min(7, can)
            if k:
                truth = oracle(queries, vectors, k, allowed)
                for name, engine in both.items():
                    scores, rows = engine.search(queries, k, allowed, can)
                    np.testing.assert_array_equal(rows, truth, err_msg=f"{name}, {batch} queries, share {share}")
                    exact = np.einsum("qd,qkd->qk", queries.astype(np.float64), vectors[rows].astype(np.float64))
                    np.testing.assert_allclose(scores, exact, atol=1e-7)


def counting(function, scored):
    """``function``, which also notes how many rows it scores in float64."""

    def counted(*args, **kwargs):
        answer = function(*args, **kwargs)
        scored.append(answer[2] if len(answer) == 3 else len(args[2]))
        return answer

    return counted


@compiled
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_shortlists_that_overflow_give_way_to_every_row(monkeypatch, engine):
    """Rows so close together that all are candidates; then not even a full shortlist may cost a true neighbour."""
    middle = rows_of(1, 48)
    vectors = middle + 1e-4 * rows_of(3000, 48, 1)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    queries = np.concatenate([middle, rows_of(4, 48, 2)])
    monkeypatch.setattr(scan_module, "_CANDIDATES", 500)
    monkeypatch.setattr(scan_module, "_SCORES", 1000)
    allowed = np.arange(3000) % 5 != 0
    scored = []
    for name in ("native_scan", "rank"):
        monkeypatch.setattr(scan_module, name, counting(getattr(scan_module, name), scored))
    _, rows = engines(vectors, "bf16")[engine].search(queries, 5, allowed, 2400)
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
            answers.append(engines(vectors, "bf16")["native"].search(queries, 12, None, 9000))
    finally:
        torch.set_num_threads(before)
    for scores, rows in answers[1:]:
        np.testing.assert_array_equal(scores, answers[0][0])
        np.testing.assert_array_equal(rows, answers[0][1])


def test_without_a_compiler_pytorch_searches():
    program = (
        "import numpy as np; from plsc.index.scan import ExactScan; from plsc.native.scan import has_scan\n"
        "v = np.eye(40, dtype=np.float32)\n"
        "print(has_scan(), ExactScan(v).search(v[3:4], 1)[1].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PLSC_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False [[3]]"
