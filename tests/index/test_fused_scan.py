"""The exact scan by Triton's kernels, interpreted: the float64 ranking, bit by bit what torch's scan answers."""

import importlib.util
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from plsc.index import triton_scan
from plsc.index.scan import ExactScan

PRECISIONS = ["int8", "bf16", "fp32"]


def unit(rows):
    return (rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)).astype(np.float32)


def rows_of(count, dim, seed=0):
    return unit(np.random.default_rng(seed).standard_normal((count, dim)))


def answers(vectors, queries, k, allowed, precision, kind="cpu", **limits: int) -> dict[str, Any]:
    """The answers of both scans where kernels are interpreted, and what was left to torch and to the processor.

    Args:
        vectors, queries, k, allowed, precision: of a search.
        kind: of the GPU for which the kernels read their blocks.
        limits: numbers of :mod:`plsc.index.triton_scan` that stand in for its own.
    """
    scan = ExactScan(vectors, precision=precision)
    fused, torchs, ranked = scan._scan, [], []
    kept = fused.by_torch.search, triton_scan.rank
    options = triton_scan.block_options

    def by_torch(asked, *rest):
        torchs.append(len(asked))
        return kept[0](asked, *rest)

    def rank(query, source, rows, k):
        ranked.append(len(rows))
        return kept[1](query, source, rows, k)

    with (
        patch.object(fused.by_torch, "search", by_torch),
        patch.object(triton_scan, "rank", rank),
        patch.object(triton_scan, "block_options", lambda _, **shape: options(kind, **shape) | {"WIDEN": True}),
        patch.multiple(triton_scan, **{"_PROGRAMS": 2, **limits}),
    ):
        found = scan.search(queries, k, allowed=allowed)
    scan._scan = fused.by_torch
    return {
        "found": found,
        "torch": scan.search(queries, k, allowed=allowed),
        "backend": scan.backend,
        "by torch": sum(torchs),
        "ranked": ranked,
    }


def products(queries, vectors):
    """Those of equal rows are equal, which a matrix product does not promise."""
    return np.einsum("qd,nd->qn", queries.astype(np.float64), vectors.astype(np.float64))


def agree(answer: dict[str, Any], vectors, queries, k, allowed=None) -> None:
    """The answer is that of torch, bit by bit, and the ranking in float64."""
    for mine, torchs in zip(answer["found"], answer["torch"], strict=True):
        np.testing.assert_array_equal(mine, torchs)
    exact = products(queries, vectors)
    if allowed is not None:
        exact[:, ~allowed] = -np.inf
        k = min(k, int(allowed.sum()))
    rows = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(answer["found"][1], rows)
    np.testing.assert_allclose(answer["found"][0], np.take_along_axis(exact, rows, axis=1), atol=1e-7)


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=6)
@given(
    rows=st.integers(0, 700),
    dim=st.integers(1, 70),
    queries=st.integers(0, 20),
    k=st.integers(1, 4),
    share=st.sampled_from([None, None, 0.0, 0.02, 0.5]),
    kind=st.sampled_from(["cpu", "sm_80"]),
    seed=st.integers(0, 10**6),
)
def test_any_size_gives_the_float64_ranking(interpreter, precision, rows, dim, queries, k, share, kind, seed):
    vectors, asked = rows_of(rows, dim, seed), rows_of(queries, dim, seed + 1)
    allowed = None if share is None else np.random.default_rng(seed).random(rows) < share
    answer = interpreter(answers, vectors, asked, k, allowed, precision, kind)
    agree(answer, vectors, asked, k, allowed)
    assert answer["backend"] == "triton"
    found = k if allowed is None else min(k, int(allowed.sum()))
    if queries and found and -(-rows // triton_scan.GROUP) >= 4 * found:
        assert answer["by torch"] == 0


@pytest.mark.slow
@pytest.mark.first_ring("bf16-cpu", "fp32-sm_80")
@pytest.mark.parametrize("kind", ["cpu", "sm_80"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_and_queries_that_fill_no_block(interpreter, precision, kind):
    """More queries than a block has, rows whose last group and block are cut, D above a block's columns."""
    vectors, asked = rows_of(300, 75), rows_of(131, 75, 1)
    answer = interpreter(answers, vectors, asked, 1, None, precision, kind)
    agree(answer, vectors, asked, 1)
    assert answer["by torch"] == 0
    assert len(answer["ranked"]) == (0 if precision == "fp32" else 131)
    assert max(answer["ranked"], default=0) < 100


@pytest.mark.parametrize("precision", PRECISIONS)
def test_there_are_no_rows_behind_the_last(interpreter, precision):
    """Of a query whose scores are all below 0."""
    vectors, asked = np.abs(rows_of(280, 33)), -np.abs(rows_of(2, 33, 1))
    agree(interpreter(answers, vectors, asked, 1, None, precision), vectors, asked, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_that_may_not_be_found_are_not(interpreter, precision):
    """Whole groups of them, and fewer groups with others than rows to find."""
    vectors, asked = rows_of(1000, 40), rows_of(3, 40, 1)
    vectors[:64] = asked[0]
    allowed = np.zeros(1000, dtype=bool)
    allowed[[1, 70, 71, 72, 998]] = True
    vectors[0] = vectors[2] = asked[1]
    agree(interpreter(answers, vectors, asked, 3, allowed, precision), vectors, asked, 3, allowed)
    allowed[64:] = True
    agree(interpreter(answers, vectors, asked, 3, allowed, precision), vectors, asked, 3, allowed)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_closer_than_the_low_precision_are_ranked_truly(interpreter, precision):
    asked = rows_of(1, 96)
    aside = np.random.default_rng(1).standard_normal((900, 96))
    aside -= (aside @ asked.T.astype(np.float64)) * asked
    aside /= np.linalg.norm(aside, axis=1, keepdims=True)
    cosine = 0.5 + np.random.default_rng(2).uniform(0, 2e-5, (900, 1))
    vectors = (cosine * asked + np.sqrt(1 - cosine**2) * aside).astype(np.float32)
    low = (torch.from_numpy(asked).bfloat16().float() @ torch.from_numpy(vectors).bfloat16().float().T)[0]
    truth = np.argsort(-(vectors.astype(np.float64) @ asked[0]), kind="stable")[:3]
    assert not set(truth.tolist()) <= set(low.topk(20).indices.tolist())
    agree(interpreter(answers, vectors, asked, 3, None, precision), vectors, asked, 3)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_two_rows_may_be_off_by_as_much_in_opposite_directions(interpreter, precision):
    """bfloat16 rounds each number of a row up, and of a better one in another group down, by half of a last place."""
    query = np.random.default_rng(3).choice([-1.0, 1.0], (1, 64)).astype(np.float32) / 8
    half = 2.0**-8
    rows = np.zeros((400, 64))
    rows[0], rows[390] = 1 + 1.02 * half, 1 + 0.98 * half
    rows[390, 0] = 1 + 4 * half
    vectors = (rows * np.sign(query)).astype(np.float32)
    low = (torch.from_numpy(vectors).bfloat16().float() * torch.from_numpy(query)).sum(1)
    assert low[0] > low[390]
    assert interpreter(answers, vectors, query, 1, None, precision)["found"][1].tolist() == [[390]]


def test_one_large_number_in_a_row_loosens_no_other_rows_bound(interpreter):
    """Of codes, where the row's bound is wide, and its score may be anything within."""
    asked = rows_of(1, 64)
    vectors = rows_of(600, 64, 1)
    vectors[300] = 0.3 * asked[0]
    vectors[300, 5] = 40.0 * np.sign(asked[0, 5])
    answer = interpreter(answers, vectors, asked, 2, None, "int8")
    agree(answer, vectors, asked, 2)
    assert answer["ranked"][0] < 60


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equal_rows_come_by_number(interpreter, precision):
    vectors = np.repeat(rows_of(300, 32), 3, axis=0)[np.random.default_rng(3).permutation(900)]
    answer = interpreter(answers, vectors, vectors[:4], 3, None, precision)
    agree(answer, vectors, vectors[:4], 3)
    assert len(answer["ranked"]) == 4  # a tie is for the processor


def test_sums_that_depend_on_the_order_of_adding_are_left_to_the_processor(interpreter):
    """The same numbers in another order: float64 sums that differ in the last place, or not, and rank either way."""
    generator = np.random.default_rng(0)
    asked = np.full((1, 96), 96**-0.5, dtype=np.float32)
    first = unit(generator.standard_normal((1, 96)) + 2)[0]
    vectors = rows_of(700, 96, 1)
    for row in range(0, 700, 90):
        vectors[row] = generator.permutation(first)
    answer = interpreter(answers, vectors, asked, 2, None, "fp32")
    assert answer["ranked"] == [8]
    for mine, torchs in zip(answer["found"], answer["torch"], strict=True):
        np.testing.assert_array_equal(mine, torchs)


def test_a_score_between_two_float32_numbers_is_left_to_the_processor(interpreter):
    """Exactly between, so that another order of adding may round it to either."""
    asked = np.array([[1, 2.0**-24] + [0] * 30], dtype=np.float32)
    vectors = 0.4 * rows_of(300, 32)
    vectors[77] = asked[0] > 0
    vectors[77] *= np.float32(0.5)
    answer = interpreter(answers, vectors, asked, 1, None, "fp32")
    agree(answer, vectors, asked, 1)
    assert answer["ranked"] == [1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_queries_with_too_many_candidates_are_left_to_torch(interpreter, precision):
    vectors, asked = rows_of(900, 32), rows_of(3, 32, 1)
    vectors[::30] = unit(asked[1:2] + 1e-5 * rows_of(30, 32, 2))
    answer = interpreter(answers, vectors, asked, 1, None, precision, _PAIRS=24)
    agree(answer, vectors, asked, 1)
    assert 1 <= answer["by torch"] < 3
    whole = interpreter(answers, vectors, asked, 1, None, precision)
    agree(whole, vectors, asked, 1)
    assert whole["by torch"] == 0


@pytest.mark.parametrize("limits", [{"_MAXIMA": 40}, {"_PAIRS": 40}, {"_LEAST_GROUPS": 100}])
def test_few_queries_go_at_once_where_memory_is_small_and_torch_takes_few_groups(interpreter, limits):
    vectors, asked = rows_of(900, 32), rows_of(6, 32, 1)
    answer = interpreter(answers, vectors, asked, 1, None, "fp32", **limits)
    agree(answer, vectors, asked, 1)
    assert answer["by torch"] == (6 if "_LEAST_GROUPS" in limits else 0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("of_query", [3.4e38, 1e-33])
def test_queries_of_any_length(interpreter, precision, of_query):
    vectors, asked = rows_of(600, 64), rows_of(2, 64, 1)
    asked = (asked / np.abs(asked).max() * np.float32(of_query)).astype(np.float32)
    answer = interpreter(answers, vectors, asked, 2, None, precision)
    exact = products(asked, vectors)
    np.testing.assert_array_equal(answer["found"][1], np.argsort(-exact, axis=1, kind="stable")[:, :2])
    np.testing.assert_array_equal(answer["found"][0], answer["torch"][0])


def footprint(vectors, precision) -> int:
    return ExactScan(vectors, precision=precision).memory_bytes


def test_float32_rows_are_scanned_with_a_copy_in_bfloat16(interpreter):
    vectors = rows_of(100, 64)
    assert interpreter(footprint, vectors, "fp32") == vectors.nbytes * 3 // 2
    assert interpreter(footprint, vectors, "bf16") == vectors.nbytes // 2


# The check -----------------------------------------------------------------------------------------------------------


def checked(precision, part=None, wrong=None) -> tuple[str | None, bool]:
    """What the check says of kernels with a part that is wrong, and whether they are used then."""
    device = torch.device("cpu")
    scan = ExactScan(rows_of(9, 40), precision=precision)._scan
    triton_scan.why_not_trusted.cache_clear()
    kept = getattr(triton_scan.FusedScan, part or "maxima")

    def spoilt(*args):
        return kept(*args) if wrong is None else wrong(kept(*args))

    with (
        patch.object(triton_scan.FusedScan, part or "maxima", spoilt),
        patch.object(triton_scan, "is_interpreted", lambda: False),
        patch.object(triton_scan, "warn", lambda *_: None),
    ):
        is_used = triton_scan.fused(scan._copy, scan.by_torch) is not None
        return triton_scan.why_not_trusted(device, precision, 40), is_used


def lower(found):
    return (found[0] - 0.05, found[1] - 0.05)


def loose(found):
    return (found[0] + 1, found[1] - 1)


def off(found):
    return found - 0.1


def without_mask(found):
    return found.clamp(min=-1.0)


@pytest.mark.slow
@pytest.mark.first_ring("bf16")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernels_that_disagree_with_float64_are_switched_off(interpreter, precision):
    assert interpreter(checked, precision) == (None, True)
    for part, wrong, name in (
        ("maxima", lower, "best scores of groups"),
        ("maxima", loose, "range of best scores"),
        ("scores", off, "scores of rows"),
        ("scores", without_mask, "scores of rows not to be found"),
    ):
        problem, is_used = interpreter(checked, precision, part, wrong)
        assert name in str(problem), problem
        assert not is_used
