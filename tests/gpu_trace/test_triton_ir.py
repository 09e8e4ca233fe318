"""What launches reach and move, read off kernels whose answer is plain."""

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
import triton.language as tl

from gpu_trace.triton_ir import Access, accesses, intermediate

pytestmark = [pytest.mark.slow, pytest.mark.live]
BLOCK = 128


@triton.jit
def scale(source, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(source + offset, mask=offset < n) * 2.0, mask=offset < n)


@triton.jit
def sum_row(table, index, out, dim, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.load(index + tl.program_id(0))
    row = row.to(tl.int64) if WIDE else row
    at = table + row * dim + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, dim, BLOCK):
        total += tl.load(at)
        at += BLOCK
    tl.atomic_add(out, tl.sum(total, 0))


@triton.jit
def row_of_program(table, out, dim, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    if row > 3:
        row += 1
    tl.store(out + tl.arange(0, BLOCK), tl.load(table + row * dim + tl.arange(0, BLOCK)))


@triton.jit
def first_free(taken, places):
    place = tl.program_id(0) % places
    while tl.atomic_cas(taken + place, 0, 1) != 0:
        place = (place + 1) % places


def launch(kernel, pointers, numbers, constants, programs) -> dict[str, Access]:
    types = {**pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr")}
    signature = tuple((name, types[name]) for name in kernel.arg_names)
    values = {**dict.fromkeys(pointers), **numbers}
    return accesses(intermediate(kernel, signature, tuple(constants.items())), values, (programs,))


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def test_each_element_of_an_operand_is_moved_once():
    found = launch(scale, {"source": "*fp32", "out": "*fp32"}, {"n": 1000}, {"BLOCK": BLOCK}, 8)
    assert {name: access.elements(1000) for name, access in found.items()} == {"source": 1000, "out": 1000}
    assert (found["source"].stored, found["out"].loaded) == (0, 0)
    assert found["source"].high == 1023


def test_a_loop_walks_over_the_whole_row():
    types = {"table": "*fp32", "index": "*i64", "out": "*fp32"}
    found = launch(sum_row, types, {"dim": 512}, {"WIDE": True, "BLOCK": BLOCK}, 10)
    assert found["table"].loaded == 10 * 512
    assert found["index"].loaded == 10
    assert (found["out"].loaded, found["out"].stored) == (10, 10)
    assert not any(access.wraps for access in found.values())


def test_a_row_that_is_loaded_may_be_any_row():
    types = {"table": "*fp32", "index": "*i32", "out": "*fp32"}
    wide, narrow = (
        launch(sum_row, types, {"dim": 512}, {"WIDE": w, "BLOCK": BLOCK}, 10)["table"] for w in (True, False)
    )
    assert not wide.wraps
    assert "muli" in narrow.wraps


@pytest.mark.parametrize(
    ("rows", "wide", "wraps"), [(1 << 21, False, False), (1 << 23, False, True), (1 << 23, True, False)]
)
def test_an_offset_wraps_where_it_leaves_32_bits(rows, wide, wraps):
    types = {"table": "*bf16", "out": "*bf16"}
    found = launch(row_of_program, types, {"dim": 512}, {"WIDE": wide, "BLOCK": BLOCK}, rows)
    assert bool(found["table"].wraps) == wraps
    assert wraps or found["table"].high == rows * 512 + BLOCK - 1


def test_a_while_loop_stays_within_what_a_round_makes_of_its_values():
    found = launch(first_free, {"taken": "*i32"}, {"places": 6}, {}, 100)
    assert (found["taken"].low, found["taken"].high, found["taken"].wraps) == (0, 5, "")
