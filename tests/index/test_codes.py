"""8-bit codes of rows: their bound against float64, and answers where codes alone would rank wrongly.

The answers are asked of every part of this machine's instructions, and of PyTorch where no kernel is compiled.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.kernel_paths import kernel_paths, use_path

from plsc.errors import DataError, UsageError
from plsc.index import codes
from plsc.index.scan import ExactScan, best_precision


@pytest.fixture(params=kernel_paths("no compiler"))
def path(request, monkeypatch):
    use_path(request.param, monkeypatch)
    return request.param


def unit(rows):
    return (rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)).astype(np.float32)


def encoded(rows):
    kept, bounds = np.zeros((len(rows), codes.stride_of(rows.shape[1])), np.uint8), np.empty((3, len(rows)), np.float32)
    codes.encode_into(kept, bounds, 0, rows)
    return kept[:, : rows.shape[1]].astype(np.float64) - codes.ZERO, bounds


def oracle(queries, vectors, k, allowed=None):
    scores = (queries.astype(np.float64)[:, None] * vectors.astype(np.float64)).sum(axis=2)
    scores[:, ~allowed if allowed is not None else []] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


numbers = st.one_of(
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, 1e-45, -3e-39, 1e-30, 1e-20, 1e-8, 0.5, -1.0]),
)


@settings(max_examples=150)
@given(rows=hnp.arrays(np.float32, (3, 7), elements=numbers), query=hnp.arrays(np.float32, (1, 7), elements=numbers))
@pytest.mark.parametrize("compiled", [True, False])
def test_a_score_by_codes_is_within_its_bound(compiled, rows, query):
    """Proven for real numbers; here the integers' product is the kernels', and the rest is float64."""
    if compiled:
        whole, bounds = encoded(rows)
    else:
        coded, bound = codes.encode_rows(0, torch.from_numpy(rows))
        whole, bounds = coded.numpy().astype(np.float64) - codes.ZERO, bound.numpy()
    meant = whole * bounds[0].astype(np.float64)[:, None]
    left = np.linalg.norm(rows.astype(np.float64) - meant, axis=1)
    assert (left <= bounds[1]).all()
    assert (np.linalg.norm(meant, axis=1) <= bounds[2]).all()
    asked = codes.encode_queries(query, (float(bounds[2].max()), float(bounds[1].max())))
    high, low = asked.digits[0, :, :7].astype(np.float64)
    assert max(np.abs(high).max(), np.abs(low).max()) <= 64
    products = whole @ (128 * high + low) * float(asked.steps[0]) * bounds[0]
    scaled = np.ldexp(query[0].astype(np.float64), -np.frexp(float(np.abs(query).max()))[1])
    off = np.abs(rows.astype(np.float64) @ scaled - products)
    assert (off <= float(asked.lengths[0]) * bounds[1] + float(asked.margin[0]) / 2).all()


def awkward_rows():
    """(700, 70): spread, near one direction, equal, with one huge coordinate, with tiny numbers, zero."""
    random = np.random.default_rng(0)
    spread = unit(random.standard_normal((300, 70)))
    middle = unit(random.standard_normal((1, 70)))
    close = unit(middle + 1e-3 * random.standard_normal((250, 70)))
    huge = 1e-3 * random.standard_normal((100, 70)).astype(np.float32)
    huge[np.arange(100), np.arange(100) % 70] = 0.99
    equal = np.repeat(middle, 30, axis=0)
    tiny = (1e-30 * spread[:19]).astype(np.float32)
    rows = np.concatenate([spread, close, huge, equal, tiny, np.zeros((1, 70), np.float32)])
    return rows[random.permutation(len(rows))], np.concatenate([middle, spread[:3], huge[:3], -middle, tiny[:2]])


def test_awkward_rows_are_ranked_truly(path):
    vectors, queries = awkward_rows()
    scan = ExactScan(vectors, precision="int8")
    allowed = np.arange(len(vectors)) % 3 != 1
    for asked in (queries, queries[:1], np.tile(queries, (4, 1))):
        for k in (1, 10, 60):
            np.testing.assert_array_equal(scan.search(asked, k)[1], oracle(asked, vectors, k))
            found = scan.search(asked, k, allowed=allowed)
            np.testing.assert_array_equal(found[1], oracle(asked, vectors, k, allowed))


def test_a_bound_of_its_own_keeps_a_row_that_its_codes_rank_low(path):
    """Each query's best row is coded far worse than the others: it is found by its own bound alone."""
    dim, others = 64, 500
    random = np.random.default_rng(1)
    query = unit(random.standard_normal((1, dim)))
    # As long as a row may be beside its largest number, which makes a step, and below half a step, so that all is lost.
    best = np.zeros((1, dim), np.float32)
    best[0, 0] = 0.9 * np.sign(query[0, 0])
    best[0, 1:] = 0.45 * 0.9 / 127 * np.sign(query[0, 1:])
    score = float(best[0].astype(np.float64) @ query[0])
    aside = random.standard_normal((others, dim))
    aside -= (aside @ query.T.astype(np.float64)) * query
    aside = unit(aside)
    rows = (score - 1e-4) * query + 0.01 * aside
    vectors = np.concatenate([rows, best, rows[::-1]]).astype(np.float32)
    whole, bounds = encoded(vectors)
    assert (whole[others, 1:] == 0).all(), "its codes lose all but the largest number"
    assert (whole * bounds[0][:, None] @ query[0])[others] < score - 0.01
    assert ExactScan(vectors, precision="int8").search(query, 1)[1].tolist() == [[others]]


def test_a_bound_of_its_own_lets_no_row_that_its_codes_rank_high_put_others_out(path):
    """The best row is coded as it is; another's codes score better than it, by nearly all of that row's bound."""
    dim = 64
    query = np.random.default_rng(2).choice([-1.0, 1.0], (1, dim)).astype(np.float32) / 8
    high = np.full((1, dim), 0.55 / 127)  # of a step of the largest number: rounded up to a whole one
    high[0, 0] = 1
    best = np.full((1, dim), (1 + 63 * 0.6 / 127) / dim)  # all are the largest: 127 steps
    far = np.repeat(-best, 9, axis=0)  # of fewer rows, all are scored in float64
    vectors = (np.concatenate([high, best, far]) * np.sign(query)).astype(np.float32)
    assert oracle(query, vectors, 1).tolist() == [[1]]
    whole, bounds = encoded(vectors)
    by_codes = whole * bounds[0][:, None] @ query[0]
    assert by_codes[0] > by_codes[1] + bounds[1][1] + 0.01
    assert ExactScan(vectors, precision="int8").search(query, 1)[1].tolist() == [[1]]


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e18])
def test_queries_of_any_scale(path, scale):
    vectors, queries = awkward_rows()
    asked = (queries[1:5].astype(np.float64) * scale).astype(np.float32)
    np.testing.assert_array_equal(ExactScan(vectors, precision="int8").search(asked, 9)[1], oracle(asked, vectors, 9))


def test_codes_made_before_are_used(path):
    vectors, queries = awkward_rows()
    vectors.setflags(write=False)  # as those are that a store reads
    kept, bounds = np.zeros((len(vectors), 128), np.uint8), np.empty((3, len(vectors)), np.float32)
    for start in range(0, len(vectors), 256):
        codes.encode_into(kept, bounds, start, vectors[start : start + 256])
    scan = ExactScan(vectors, precision="int8", row_codes=codes.RowCodes(kept, bounds))
    np.testing.assert_array_equal(scan.search(queries, 5)[1], oracle(queries, vectors, 5))
    assert scan.memory_bytes == len(vectors) * (128 + 8)


def test_what_codes_cannot_be_is_refused(path):
    vectors, _ = awkward_rows()
    vectors[123, 5] = np.inf
    with pytest.raises(DataError, match="row 123 of the vectors is not finite"):
        ExactScan(vectors, precision="int8")
    with pytest.raises(UsageError, match="int8 takes rows of up to 65,536 numbers"):
        ExactScan(np.zeros((1, codes.LARGEST_DIM + 1), np.float32), precision="int8")


def test_the_best_precision_is_that_of_the_processors_units(path):
    has_bytes = path in ("avx2", "avx512", "avx512-bf16", "amx")  # NEON has them where it has dot products
    assert best_precision(512) == ("int8" if has_bytes else "bf16") or path.startswith("neon")
    assert best_precision(codes.LARGEST_DIM + 1) == "bf16"
    assert ExactScan(np.eye(3, dtype=np.float32)).precision == best_precision(3)


WITHOUT_VNNI = """
import numpy as np, torch
from plsc.index.scan import ExactScan, _multiply_bytes
random = np.random.default_rng(0)
rows = 1 + 0.05 * random.standard_normal((3000, 128))
rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
found = ExactScan(rows, precision="int8").search(rows[:9], 1)[1]
assert found[:, 0].tolist() == list(range(9)), found
for precision in ("highest", "medium"):
    torch.set_float32_matmul_precision(precision)
    digits, codes = torch.full((2, 5000), -64, dtype=torch.int8), torch.full((3, 5000), 127, dtype=torch.int8)
    codes[1, ::2] = -127
    codes[2, 4999] = 126
    assert _multiply_bytes(digits, codes).tolist() == [[-5000 * 64 * 127, 0, -5000 * 64 * 127 + 64]] * 2
"""


@pytest.mark.live
def test_bytes_are_multiplied_exactly_on_a_processor_without_vnni():
    """There, oneDNN's product of bytes saturates pairs of them in 16 bits."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PLSC_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", WITHOUT_VNNI], env=environment, check=True)
