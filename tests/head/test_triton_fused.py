"""Pass 2 with the update in the same kernel, interpreted on the CPU: the bits of the gradient and the row update."""

import copy
from dataclasses import replace

import pytest
import torch
from reference import relative_error
from support.head_problems import everything, filled_state

import plsc
from plsc.head.backends.torch_backend import Batch, PassInputs, TorchBackend
from plsc.head.backends.triton_backend import TritonBackend
from plsc.head.backends.triton_passes import force_parks
from plsc.head.backends.triton_tiles import Tile, force_tile
from plsc.head.backends.triton_update import update_rows
from plsc.head.class_table import ClassRows, renew_norms
from plsc.head.update_rules import AdamWRule, SgdRule, Update

FIRST_ROW = 2**33 + 17  # beyond 32 bits
SGD = SgdRule(lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=False)
ADAMW = AdamWRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=1e-2, step=3)
BF16, F32, I8 = torch.bfloat16, torch.float32, torch.int8
TILES = {"straight": Tile(16, 16, 32), "flipped": Tile(16, 32, 16, flipped=True)}
KINDS = {
    "sgd int8": (SGD, BF16, {"momentum": I8}),
    "sgd bfloat16": (SGD, BF16, {"momentum": BF16}),
    "nesterov float32": (replace(SGD, nesterov=True), F32, {"momentum": F32}),
    "sgd without momentum": (replace(SGD, momentum=0.0), F32, {}),
    "adamw int8": (ADAMW, BF16, {"first_moment": I8, "second_moment": BF16}),
    "adamw bfloat16": (ADAMW, BF16, {"first_moment": BF16, "second_moment": BF16}),
    "adamw float32": (ADAMW, F32, {"first_moment": F32, "second_moment": F32}),
}


def problem(kind: str, dim: int = 32, *, centers: int = 1, some: bool = False, mask: bool = False) -> dict:
    """Rows with a state that is not zero, and samples; some classes have no sample."""
    rule, dtype, state_dtypes = KINDS[kind]
    classes, batch = 37, 9
    generator = torch.Generator().manual_seed(dim)
    count = classes * centers
    weight = torch.randn(count, dim, generator=generator).to(dtype)
    rows = ClassRows(weight, torch.empty(count), centers, torch.arange(0, classes, 2) if some else None)
    renew_norms(rows, slice(0, count))
    state = filled_state(count, dim, state_dtypes)
    features = torch.nn.functional.normalize(torch.randn(batch, dim, generator=generator)).to(dtype)
    position = rows.positions(torch.arange(batch) * 5 - 5)
    samples = {
        "log_z": torch.full((batch,), 9.0),
        "scale": torch.rand(batch, generator=generator),
        "target_grad": -torch.rand(batch, generator=generator),
    }
    member = torch.rand(rows.num_classes, batch, generator=generator) < 0.7 if mask else None
    given = Batch(features, position, torch.zeros(batch), plsc.ArcFace(s=30.0), {})
    return {"rows": rows, "batch": given, **samples, "member": member, "state": state, "rule": rule}


def updated(
    given: dict, way: str, tile: str = "straight", rounding: str = "stochastic", skip: float | None = None
) -> list[torch.Tensor]:
    """Weights, norms and state after a step: "fused", by "two" kernels, or by "torch"."""
    given = copy.deepcopy(given)  # tensors cross to another process as shared memory
    rows, dim = given["rows"], given["rows"].weight.shape[1]
    backend = TorchBackend("expected") if way == "torch" else TritonBackend("tested", dim=dim, with_passes=True)
    flag = None if skip is None else torch.tensor(skip)
    update = Update(given["rule"], 0.5, rounding, 3, 2, FIRST_ROW, flag)
    state = given["state"]
    for table in state.values():
        table.rounding = rounding
    samples = [given[name] for name in ("log_z", "scale", "target_grad")]
    inputs = PassInputs(rows, given["batch"], *samples, 16, given["member"])
    version = rows.weight._version
    with force_tile(TILES[tile]):
        if way == "two":
            for chunk, gradient in backend.second_pass(inputs):
                update_rows(chunk, gradient, state, update)
        else:
            updater = backend.update if way == "torch" else update_rows
            backend.update_pass(inputs, updater, lambda chunk: state, update)
    assert rows.weight._version > version
    tables = [tensor for table in state.values() for tensor in table.tensors("state").values()]
    return [rows.weight, rows.inverse_norm, *tables]


def fused_and_two(given: dict, tile: str, rounding: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return updated(given, "fused", tile, rounding), updated(given, "two", tile, rounding)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_one_kernel_has_the_bits_of_two(interpreter, kind, rounding):
    for fused, apart in zip(*interpreter(fused_and_two, problem(kind), "straight", rounding), strict=True):
        assert torch.equal(fused, apart)


@pytest.mark.parametrize("options", [{"some": True}, {"centers": 3}, {"centers": 3, "some": True, "mask": True}])
@pytest.mark.parametrize("tile", list(TILES))
def test_so_with_sampled_rows_and_several_centres(interpreter, options, tile):
    given = problem("sgd int8", **options)
    results = interpreter(fused_and_two, given, tile, "stochastic")
    for fused, apart in zip(*results, strict=True):
        assert torch.equal(fused, apart)
    rest = torch.ones(len(given["rows"].weight), dtype=torch.bool)
    rest[given["rows"].row_index(0, given["rows"].num_classes)] = False
    assert torch.equal(results[0][0][rest], given["rows"].weight[rest])


@pytest.mark.slow
@pytest.mark.parametrize("dim", [96, 512, 1024])
def test_so_at_every_width(interpreter, dim):
    for fused, apart in zip(*interpreter(fused_and_two, problem("adamw int8", dim), "flipped", "nearest"), strict=True):
        assert torch.equal(fused, apart)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_step_is_the_plain_paths(interpreter, kind):
    given = problem(kind)
    got, expected = interpreter(updated, given, "fused"), updated(given, "torch")
    before = given["rows"].weight.float()
    assert relative_error(got[0].float() - before, expected[0].float() - before) < 5e-2
    assert relative_error(got[1], expected[1]) < 1e-3
    if given["rows"].weight.dtype == F32:
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_skipped_step_leaves_every_bit(interpreter, kind):
    given = problem(kind)
    left = interpreter(updated, given, "fused", skip=1.0)
    tables = [tensor for table in given["state"].values() for tensor in table.tensors("state").values()]
    for after, before in zip(left, [given["rows"].weight, given["rows"].inverse_norm, *tables], strict=True):
        assert torch.equal(after, before)


def test_a_step_that_is_not_skipped_is_taken(interpreter):
    given = problem("adamw int8")
    taken, expected = interpreter(updated, given, "fused", skip=0.0), interpreter(updated, given, "fused")
    for after, wanted in zip(taken, expected, strict=True):
        assert torch.equal(after, wanted)


def updated_in_few_parts(given: dict, parks: int) -> list[torch.Tensor]:
    with force_parks(parks):
        return updated(given, "fused")


@pytest.mark.parametrize("parks", [1, 2])
def test_parts_of_the_parking_serve_one_program_after_another(interpreter, parks):
    given = problem("sgd int8")
    results = interpreter(updated_in_few_parts, given, parks), interpreter(updated, given, "two")
    for fused, apart in zip(*results, strict=True):
        assert torch.equal(fused, apart)


def placed(placement: str, sample_rate: float) -> list[torch.Tensor]:
    """Weights, norms and momentum after two steps of a head whose rows are copied to compute with them, or not."""
    generator = torch.Generator().manual_seed(0)
    head = plsc.ShardedHead(
        32,
        50,
        placement=placement,
        weight_dtype=BF16,
        momentum_dtype=I8,
        chunk_classes=16,
        sample_rate=sample_rate,
        fp32_precision="ieee",
    )
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    for _ in range(2):
        head(torch.randn(6, 32, generator=generator), torch.arange(6) * 8).backward()
        optimizer.step()
    return everything(head, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
def test_rows_in_a_file_take_the_same_steps(interpreter, tmp_path, sample_rate):
    resident = interpreter(placed, "device", sample_rate)
    copied = interpreter(placed, f"mmap:{tmp_path / 'rows'}", sample_rate)
    for mine, theirs in zip(copied, resident, strict=True):
        assert (mine != theirs).float().mean() < 1e-2  # sums over classes group otherwise
        assert relative_error(mine, theirs) < 1e-3
