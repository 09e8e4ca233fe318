"""The exact scan against float64 numpy: any size, filters, ties, near-ties that low precision cannot tell apart.

Every test runs without a compiler, and by each part of the CPU's instructions that this machine has.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_paths import kernel_paths, use_path

from plsc.errors import DataError, IntegrityError, UsageError
from plsc.index.scan import ExactScan, ExactSearch, ScanCopy
from plsc.native.scan import load_scan


@pytest.fixture(autouse=True, params=kernel_paths("no compiler"))
def path(request, monkeypatch):
    use_path(request.param, monkeypatch)
    return request.param


def test_the_backend_is_chosen_by_what_the_machine_has(path):
    assert ExactScan(rows_of(3, 2)).backend == ("torch" if path == "no compiler" else "native")


def unit(rows):
    return (rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)).astype(np.float32)


def rows_of(count, dim, seed=0):
    return unit(np.random.default_rng(seed).standard_normal((count, dim)))


def oracle(queries, vectors, k, allowed=None):
    """Scores (Q, k) float64 and rows (Q, k): all products, sorted, ties by row number.

    A matrix product may add up equal rows in different orders, as its kernels for a processor have it.
    """
    scores = np.einsum("qd,nd->qn", queries.astype(np.float64), vectors.astype(np.float64))
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
        k = min(k, int(allowed.sum()))
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


def agree(found, truth):
    np.testing.assert_array_equal(found[1], truth[1])
    np.testing.assert_allclose(found[0], truth[0], atol=1e-7)
    assert found[0].dtype == np.float32
    assert found[1].dtype == np.int64


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
@settings(max_examples=30)
@given(
    rows=st.integers(0, 700),
    dim=st.integers(1, 70),
    queries=st.integers(0, 40),
    k=st.integers(0, 800),
    share=st.sampled_from([None, 0.0, 0.02, 0.5, 0.98]),
    seed=st.integers(0, 10**6),
)
def test_any_size_gives_the_float64_ranking(precision, rows, dim, queries, k, share, seed):
    vectors, asked = rows_of(rows, dim, seed), rows_of(queries, dim, seed + 1)
    allowed = None if share is None else np.random.default_rng(seed).random(rows) < share
    found = ExactScan(vectors, precision=precision).search(asked, k, allowed=allowed)
    agree(found, oracle(asked, vectors, k, allowed))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("queries", [1, 2, 16, 33, pytest.param(256, marks=pytest.mark.exhaustive)])
def test_batches_over_many_rows(precision, queries):
    vectors, asked = rows_of(20_000, 48), rows_of(queries, 48, 1)
    scan = ExactScan(vectors, precision=precision)
    agree(scan.search(asked, 10), oracle(asked, vectors, 10))
    allowed = np.random.default_rng(2).random(20_000) < 0.3
    agree(scan.search(asked, 10, allowed=allowed), oracle(asked, vectors, 10, allowed))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("share", [None, 0.2, 0.8])
def test_many_queries_of_a_width_that_is_no_multiple_of_a_register(precision, share):
    """More queries than are multiplied by one part of the rows, and rows of more than one part."""
    vectors, asked = rows_of(2500, 301), rows_of(150, 301, 1)
    vectors[1000:1040] = vectors[7]
    asked[149] = vectors[7]
    allowed = None if share is None else np.random.default_rng(2).random(2500) < share
    found = ExactScan(vectors, precision=precision).search(asked, 50, allowed=allowed)
    agree(found, oracle(asked, vectors, 50, allowed))


def near_ties(count, dim, seed=0):
    """(query (1, D), rows (count, D)) whose scores differ in the sixth digit: bfloat16 cannot rank them."""
    query = rows_of(1, dim, seed)
    aside = np.random.default_rng(seed + 1).standard_normal((count, dim))
    aside -= (aside @ query.T.astype(np.float64)) * query
    aside /= np.linalg.norm(aside, axis=1, keepdims=True)
    cosine = 0.5 + np.random.default_rng(seed + 2).uniform(0, 2e-5, (count, 1))
    return query, (cosine * query + np.sqrt(1 - cosine**2) * aside).astype(np.float32)


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
def test_rows_closer_than_the_low_precision_are_ranked_truly(precision):
    query, close = near_ties(5000, 96)
    vectors = np.concatenate([rows_of(3000, 96, 9), close])
    queries = np.concatenate([query, rows_of(3, 96, 5)])
    truth = oracle(queries, vectors, 10)
    low = torch.from_numpy(query).bfloat16().float() @ torch.from_numpy(vectors).bfloat16().float().T
    assert set(low[0].topk(40).indices.tolist()) < set(range(3000, 8000))
    assert not set(truth[1][0]) <= set(low[0].topk(40).indices.tolist()), "the usual shortlist would miss some"
    agree(ExactScan(vectors, precision=precision).search(queries, 10), truth)


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_torchs_faster_products_of_float32_change_no_answer(setting):
    close = unit(rows_of(1, 256) + 0.05 * rows_of(3000, 256, 1))
    query = unit(close[:9] + 0.02 * rows_of(9, 256, 2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        agree(ExactScan(close, precision="fp32").search(query, 10), oracle(query, close, 10))
    finally:
        torch.set_float32_matmul_precision(before)


def test_two_rows_may_be_off_by_as_much_in_opposite_directions():
    """bfloat16 rounds each number of one row up, and of a better one down, by nearly half of a last place."""
    query = np.random.default_rng(3).choice([-1.0, 1.0], (1, 64)).astype(np.float32) / 8
    half = 2.0**-8  # of a last place behind 1
    up, better = np.full((1, 64), 1 + 1.02 * half), np.full((1, 64), 1 + 0.98 * half)
    better[0, 0] = 1 + 4 * half  # as it is
    rows = (np.concatenate([up, better, np.zeros((9, 64))]) * np.sign(query)).astype(np.float32)
    scores = torch.from_numpy(rows[:2] * query).bfloat16().float().sum(1)
    assert oracle(query, rows, 1)[1] == 1, "though its score in bfloat16 is smaller"
    assert scores[0] > scores[1] + half * 8
    agree(ExactScan(rows, precision="bf16").search(query, 1), oracle(query, rows, 1))


def test_equal_rows_come_by_number():
    vectors = np.repeat(rows_of(40, 32), 50, axis=0)[np.random.default_rng(3).permutation(2000)]
    agree(ExactScan(vectors).search(vectors[:5], 60), oracle(vectors[:5], vectors, 60))
    same = np.repeat(rows_of(1, 32), 3000, axis=0)
    assert ExactScan(same).search(same[:2], 7)[1].tolist() == [list(range(7))] * 2
    allowed = np.arange(3000) % 3 == 2
    assert ExactScan(same).search(same[:1], 4, allowed=allowed)[1].tolist() == [[2, 5, 8, 11]]


def test_wide_ranges_within_a_row():
    """One large number and many tiny ones, some too small for a normal float32."""
    vectors = np.full((500, 40), 1e-42, dtype=np.float32) * np.arange(1, 501)[:, None].astype(np.float32)
    vectors[:, 0] = 1
    query = np.zeros((1, 40), dtype=np.float32)
    query[0, 1] = 1
    found = ExactScan(vectors).search(query, 5)
    assert found[1].tolist() == [[499, 498, 497, 496, 495]]


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
def test_a_query_may_be_as_large_as_float32_goes(precision):
    """bfloat16 rounds it to infinity, its length is no float32, and infinity times 0 is no number."""
    vectors = rows_of(3000, 64)
    vectors[::2, :3] = 0
    query = np.zeros((2, 64), dtype=np.float32)
    query[0, :3] = query[1, 0] = 3.4e38
    for k in (5, 700):
        agree(ExactScan(vectors, precision=precision).search(query, k), oracle(query, vectors, k))
    zeros = np.zeros((100, 64), dtype=np.float32)
    agree(ExactScan(zeros, precision=precision).search(query, 5), oracle(query, zeros, 5))


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize(("of_rows", "of_queries"), [(1, 1e-24), (1, 1e-33), (1e-24, 1), (1e-20, 1e-15)])
def test_lengths_whose_squares_are_0_in_float32(precision, of_rows, of_queries):
    near = unit(rows_of(1, 64) + 0.01 * np.random.default_rng(0).standard_normal((2000, 64)))
    vectors = (near * of_rows).astype(np.float32)
    queries = (rows_of(3, 64, 1) * of_queries).astype(np.float32)
    found, truth = ExactScan(vectors, precision=precision).search(queries, 9), oracle(queries, vectors, 9)
    np.testing.assert_array_equal(found[1], truth[1])
    np.testing.assert_allclose(found[0], truth[0], rtol=1e-6)


def test_a_mask_may_be_a_part_of_another():
    vectors, queries = rows_of(3000, 32), rows_of(3, 32, 1)
    allowed = (np.random.default_rng(2).random(6000) < 0.7)[::2]
    agree(ExactScan(vectors).search(queries, 5, allowed=allowed), oracle(queries, vectors, 5, allowed))


def test_so_many_queries_are_searched_at_once_as_memory_holds(monkeypatch):
    monkeypatch.setattr("plsc.index.scan._RESULTS", 100)
    vectors, queries = rows_of(60, 24), rows_of(9, 24, 1)
    scan, counts = ExactScan(vectors), []
    real = scan._scan.search
    monkeypatch.setattr(scan._scan, "search", lambda *args: (counts.append(len(args[0])), real(*args))[1])
    agree(scan.search(queries, 2), oracle(queries, vectors, 2))
    assert counts == [4, 4, 1]


def test_a_map_is_read_from_its_file(tmp_path: Path):
    vectors, queries = rows_of(9_000, 64), rows_of(3, 64, 1)
    np.save(tmp_path / "v.npy", vectors)
    mapped = np.load(tmp_path / "v.npy", mmap_mode="r")
    scan, part = ExactScan(mapped, precision="bf16"), ExactScan(mapped[100:5_000])
    assert (len(scan), scan.memory_bytes) == (9_000, vectors.nbytes // 2)
    (tmp_path / "v.npy").unlink()  # a new generation of the file changes nothing for who has opened the old one
    rows_of(1, 1).tofile(tmp_path / "v.npy")
    for k in (10, 4_900):
        agree(scan.search(queries, k), oracle(queries, vectors, k))
        agree(part.search(queries, k), oracle(queries, vectors[100:5_000], k))


def test_a_private_map_is_read_from_memory(tmp_path: Path):
    vectors, queries = rows_of(500, 16), rows_of(3, 16, 1)
    np.save(tmp_path / "v.npy", vectors)
    private = np.load(tmp_path / "v.npy", mmap_mode="c")
    private[7] = queries[0]
    found = ExactScan(private).search(queries, 10)
    assert found[1][0, 0] == 7
    agree(found, oracle(queries, np.array(private), 10))


def test_a_file_that_was_cut_is_an_error_and_no_answer(tmp_path: Path):
    vectors = rows_of(3000, 32)
    np.save(tmp_path / "v.npy", vectors)
    scan = ExactScan(np.load(tmp_path / "v.npy", mmap_mode="r"))
    with (tmp_path / "v.npy").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(IntegrityError, match=r"v\.npy was cut, or written over, while it was in use"):
        scan.search(vectors[-2:], 3)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux about this process's memory")
def test_the_copy_may_lie_in_large_pages():
    copy = ScanCopy(np.ones((5000, 64), dtype=np.float32), "bf16", torch.device("cpu")).rows
    assert copy is not None
    place, flags = copy.data_ptr(), []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= place < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()
    assert "hg" in flags  # large pages are wanted
    assert "sh" not in flags  # shared memory gets none, unless the whole system is set up so


def test_what_does_not_fit_is_refused():
    vectors = rows_of(20, 8)
    with pytest.raises(UsageError, match="precision 'int4'"):
        ExactScan(vectors, precision="int4")
    with pytest.raises(UsageError, match="float32 rows"):
        ExactScan(vectors.astype(np.float64))
    with pytest.raises(UsageError, match="float32 rows"):
        ExactScan(vectors[:, ::2])
    broken = vectors.copy()
    broken[7, 3] = np.nan
    with pytest.raises(DataError, match="row 7"):
        ExactScan(broken)
    scan = ExactScan(vectors)
    with pytest.raises(UsageError, match=r"\[Q, 8\]"):
        scan.search(rows_of(2, 9), 1)
    for number in (np.nan, np.inf):
        with pytest.raises(UsageError, match="NaN or infinity"):
            scan.search(np.full((1, 8), number, np.float32), 1)
    with pytest.raises(UsageError, match="k is -1"):
        scan.search(vectors, -1)
    with pytest.raises(UsageError, match=r"bool \[20\]"):
        scan.search(vectors, 1, allowed=np.ones(19, dtype=bool))


@pytest.mark.parametrize("least", [0, 1 << 22])
def test_answers_before_and_after_the_copy_are_the_same(monkeypatch, least):
    """Which brute force answers is a matter of speed."""
    monkeypatch.setattr("plsc.index.scan.SCAN_FROM", least)
    vectors, queries = rows_of(3000, 40), rows_of(12, 40, 1)
    truth = oracle(queries, vectors, 10)[1]
    search = ExactSearch(vectors)
    for k in (10, 5000):
        for _ in range(3):
            scores, rows = search.search(queries, k)
            np.testing.assert_array_equal(rows[:, :10], truth)
            assert rows.shape == scores.shape == (12, min(k, 3000))
    assert (search._scan is not None) == (load_scan() is not None and least == 0)
