"""The compiled scan against float64 numpy and PyTorch's path: every processor path, overflowing shortlists."""

import numpy as np
import pytest
import torch

from plsc.index import scan as scan_module
from plsc.index.scan import ExactScan, NativeScan, ScanCopy, TorchScan
from plsc.native import build
from plsc.native.scan import ScanKernel, load_scan

compiled = pytest.mark.skipif(load_scan() is None, reason="needs a C++ compiler")


def rows_of(count, dim, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def oracle(queries, vectors, k, allowed=None):
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def backends(vectors, precision):
    copy = ScanCopy(vectors, precision, torch.device("cpu"))
    return {"native": NativeScan(copy, load_scan()), "torch": TorchScan(copy)}


@pytest.fixture(params=["avx2", "avx512", "amx"])
def path(request, monkeypatch):
    """Every part of the processor's instructions that the kernels are compiled for."""
    if request.param not in build.available_paths():
        pytest.skip(f"this machine cannot run {request.param}")
    monkeypatch.setenv("PLSC_CPU", request.param)
    return request.param


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("count", "dim"), [(1, 1), (31, 7), (33, 32), (2049, 65), (6000, 96), (4500, 512)])
def test_compiled_and_plain_scans_agree(path, precision, count, dim):
    assert load_scan().products[0].startswith(path)
    vectors = rows_of(count, dim)
    both = backends(vectors, precision)
    for batch in (1, 2, 3, 5, 17, 33, 70):
        queries = rows_of(batch, dim, batch)
        for share in (None, 0.05, 0.9):
            allowed = None if share is None else np.random.default_rng(batch).random(count) < share
            can = count if allowed is None else int(allowed.sum())
            k = min(7, can)
            if k:
                truth = oracle(queries, vectors, k, allowed)
                for name, scan in both.items():
                    scores, rows = scan.search(queries, k, allowed, can)
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


def test_without_a_compiler_pytorch_searches(monkeypatch):
    monkeypatch.setenv("PLSC_NATIVE", "0")
    vectors = np.eye(40, dtype=np.float32)
    scan = ExactScan(vectors)
    assert scan.backend == "torch"
    assert scan.search(vectors[3:4], 1)[1].tolist() == [[3]]
