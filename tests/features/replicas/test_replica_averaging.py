"""Tables of head groups that step by themselves and are averaged: against all groups in float64 in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from reference import Oracle, relative_error
from torch import Tensor

import plsc
from plsc.errors import UsageError
from plsc.features.replicas.averaging import average_bytes
from plsc.head import storage
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_rows

Ranks = Any
CLASSES, DIM, BATCH, STEPS = 37, 12, 16, 9
LR, MOMENTUM, DECAY = 0.3, 0.9, 5e-3
HIGH = {"weight_dtype": torch.float64, "momentum_dtype": torch.float64}
LOW = {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8}
ARCFACE = Oracle("arcface", parameters={"m": 0.5})
# (period, staleness)
PERIODS = [(3, 0), (3, 1), (3, 3), (1, 1), (4, 2)]


def start() -> Tensor:
    return torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Embeddings and labels of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, DIM, generator=generator).double() * 2
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def sizes_of(world: int) -> list[int]:
    return {2: [10, 6], 4: [5, 3, 6, 2]}[world]


@contextmanager
def staged(copied: bool) -> Iterator[None]:
    """On a CPU a table in host memory is read in place; here rows are copied to the "device", as for a GPU."""
    with mock.patch.object(storage, "is_staged", return_value=copied):
        yield


def make(mesh: Mesh, optimizer: str = "sgd", **options: Any) -> tuple[plsc.ShardedHead, Any]:
    head = plsc.ShardedHead(DIM, CLASSES, mesh, plsc.ArcFace(), **{**HIGH, "chunk_classes": 8, **options})
    with torch.no_grad():
        head.weight.copy_(start()[slice(*head.class_range)])
    if optimizer == "adamw":
        return head, plsc.HeadAdamW(head, lr=0.05)
    return head, plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def trained(
    mesh: Mesh,
    steps: int,
    finish_at: int = 0,
    bad_step: int = -1,
    optimizer: str = "sgd",
    in_place: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """This rank's group after some steps: its table, state and norms; losses and embedding gradients of each step."""
    copied = options.get("placement", "device") == "host" and not in_place
    with staged(copied):
        head, stepper = make(mesh, optimizer, **options)
        losses, gradients = [], []
        sizes = sizes_of(mesh.world_size)
        for step in range(steps):
            x, y = (each.split(sizes)[mesh.rank] for each in batch(step))
            x = x.to(torch.promote_types(head.weight.dtype, torch.float32)).requires_grad_()
            loss = head(x, y) * (float("inf") if step == bad_step else 1)
            head.prefetch(batch(step + 1)[1].split(sizes)[mesh.rank])
            loss.backward()
            stepper.step()
            losses.append(loss.detach())
            gradients.append(x.grad / mesh.world_size)
            if step + 1 == finish_at:
                stepper.make_replicas_equal()
        averaging = head.softmax.exchange
        shards = {**head.sharded_state(), **stepper.sharded_state()}
        return {
            "table": all_gather_rows(head.weight.detach(), mesh.head).clone(),
            "local": [block.local.clone() for shard in shards.values() for block in shard.blocks]
            + [head.inverse_norms().clone()],
            "losses": torch.stack(losses),
            "gradients": gradients,
            "sent": 0 if averaging is None else averaging.sent_bytes,
        }


def reference(world: int, groups: int, period: int, staleness: int, steps: int, finish_at: int = 0) -> dict[str, Any]:
    """SGD of every group on its own samples' mean loss, weighted by their number, and averages that come late."""
    tables, momenta = [start() for _ in range(groups)], [torch.zeros(CLASSES, DIM).double() for _ in range(groups)]
    per_group = world // groups
    sizes = sizes_of(world)
    parts = [sum(sizes[group * per_group : (group + 1) * per_group]) for group in range(groups)]
    under_way: Any = None
    count, losses, gradients = 0, [], []
    for step in range(steps):
        total, by_embeddings = torch.zeros(()).double(), []
        for group, (x, y) in enumerate(zip(*(each.split(parts) for each in batch(step)), strict=True)):
            x, weight = x.clone().requires_grad_(), tables[group].clone().requires_grad_()
            loss = ARCFACE.loss(x, y, weight) * parts[group] / BATCH
            loss.backward()
            total += loss.detach()
            by_embeddings.append(x.grad)
            momenta[group] = MOMENTUM * momenta[group] + groups * weight.grad + DECAY * tables[group]
            tables[group] = tables[group] - LR * momenta[group]
        losses.append(total)
        gradients.append(torch.cat(by_embeddings))
        count += 1
        if under_way is not None and (count >= staleness or step + 1 == finish_at):
            tables, momenta, under_way = *take_in(tables, momenta, under_way), None
        if count == period:
            under_way, count = ([each.clone() for each in tables], [each.clone() for each in momenta]), 0
        if under_way is not None and (staleness == 0 or step + 1 == finish_at):
            tables, momenta, under_way = *take_in(tables, momenta, under_way), None
        if step + 1 == finish_at:
            tables, momenta, count = *take_in(tables, momenta, (tables, momenta)), 0
    return {"tables": tables, "losses": torch.stack(losses), "gradients": gradients}


def take_in(tables: Any, momenta: Any, read: Any) -> Any:
    return [
        [now + torch.stack(before).mean(0) - own for now, own in zip(values, before, strict=True)]
        for values, before in zip((tables, momenta), read, strict=True)
    ]


@pytest.mark.parametrize(("world", "head_ranks"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(("period", "staleness"), PERIODS)
def test_groups_step_and_are_averaged_as_the_recurrence_says(
    world: int, head_ranks: int, period: int, staleness: int, ranks: Ranks
) -> None:
    placement = "host" if staleness else "device"
    options = {"averaging_period": period, "staleness": staleness, "placement": placement}
    found = ranks(world, trained, STEPS, **options, head_ranks=head_ranks)
    expected = reference(world, world // head_ranks, period, staleness, STEPS)
    for rank, result in enumerate(found):
        assert relative_error(result["table"], expected["tables"][rank // head_ranks]) < 1e-11
        assert relative_error(result["losses"], expected["losses"]) < 1e-11
    for step in range(STEPS):
        gradient = torch.cat([result["gradients"][step] for result in found])
        assert relative_error(gradient, expected["gradients"][step]) < 1e-11


@pytest.mark.parametrize(("period", "staleness", "finish_at"), [(4, 0, 6), (4, 2, 5), (4, 3, 8)])
def test_replicas_are_equal_after_a_checkpoint_and_the_period_begins_anew(
    period: int, staleness: int, finish_at: int, ranks: Ranks
) -> None:
    options = {"averaging_period": period, "staleness": staleness, "placement": "host"}
    for steps in (finish_at, finish_at + 3):
        found = ranks(2, trained, steps, finish_at, **options, head_ranks=1)
        expected = reference(2, 2, period, staleness, steps, finish_at)
        for result, table in zip(found, expected["tables"], strict=True):
            assert relative_error(result["table"], table) < 1e-11
        are_equal = all(torch.equal(a, b) for a, b in zip(found[0]["local"], found[1]["local"], strict=True))
        assert are_equal == (steps == finish_at)


@pytest.mark.parametrize("options", [HIGH, LOW, {**LOW, "sample_rate": 0.4}], ids=["float64", "low", "sampled"])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_period_1_without_staleness_is_the_synchronous_step_bit_for_bit(
    options: dict[str, Any], placement: str, ranks: Ranks
) -> None:
    plain = ranks(2, trained, 5, **options, head_ranks=1)
    found = ranks(2, trained, 5, **options, placement=placement, averaging_period=1, staleness=0, head_ranks=1)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one["losses"], other["losses"])
        assert all(torch.equal(a, b) for a, b in zip(one["local"], other["local"], strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("staleness", [0, 2])
def test_copied_rows_and_rows_in_place_are_averaged_alike(
    optimizer: str, rate: float, staleness: int, ranks: Ranks
) -> None:
    given = {"averaging_period": 3, "staleness": staleness, "placement": "host"}
    options = {**LOW, **given, "sample_rate": rate, "optimizer": optimizer, "head_ranks": 1}
    first, second = ranks(2, trained, STEPS, **options, in_place=True)
    for one, other in zip(ranks(2, trained, STEPS, **options), (first, second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["local"], other["local"], strict=True))
    are_equal = all(torch.equal(a, b) for a, b in zip(first["local"], second["local"], strict=True))
    assert are_equal == (staleness == 0)  # after three periods


@pytest.mark.parametrize(("period", "staleness"), [(3, 0), (3, 2)])
def test_low_precision_tables_follow_float64_without_a_bias(period: int, staleness: int, ranks: Ranks) -> None:
    options = {**LOW, "averaging_period": period, "staleness": staleness, "placement": "host"}
    found = ranks(2, trained, STEPS, STEPS, **options, head_ranks=1)
    assert all(torch.equal(a, b) for a, b in zip(found[0]["local"], found[1]["local"], strict=True))
    expected = reference(2, 2, period, staleness, STEPS, STEPS)["tables"][0]
    gap = found[0]["table"].double() - expected
    assert relative_error(found[0]["table"].double() - start(), expected - start()) < 0.05
    assert abs(float(gap.mean())) < 3 * float(gap.std()) / gap.numel() ** 0.5


def test_a_skipped_step_changes_no_table_and_counts(ranks: Ranks) -> None:
    options = {"averaging_period": 3, "head_ranks": 1}
    before, after = (ranks(2, trained, steps, bad_step=4, **options) for steps in (4, 5))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one["table"], other["table"])
    first, second = ranks(2, trained, 6, bad_step=4, **options)
    assert torch.equal(first["table"], second["table"])


def test_bytes_are_those_of_the_rows_that_took_part(ranks: Ranks) -> None:
    float32 = {"weight_dtype": torch.float32, "momentum_dtype": torch.float32, "averaging_period": 4}
    for result in ranks(2, trained, 8, **float32, head_ranks=1):
        assert result["sent"] == 2 * average_bytes(CLASSES, DIM, 1)
    for result in ranks(2, trained, 8, **float32, sample_rate=0.0, head_ranks=1):
        taken = sum(len(torch.cat([batch(step)[1] for step in part]).unique()) for part in (range(4), range(4, 8)))
        assert result["sent"] == average_bytes(taken, DIM, 1)
    for result in ranks(2, trained, 8, averaging_period=4):  # one table: nothing to average
        assert result["sent"] == 0


def refusals(mesh: Mesh) -> list[str]:
    messages = []
    for options in (
        {"averaging_period": 0},
        {"averaging_period": 2, "staleness": 3, "placement": "host"},
        {"averaging_period": 2, "staleness": 1},
        {"averaging_period": 2, "update": "autograd"},
        {"averaging_period": 2.5},
    ):
        try:
            plsc.ShardedHead(DIM, CLASSES, mesh, **options)
        except UsageError as error:
            messages.append(str(error))
    head, optimizer = make(mesh, averaging_period=2)
    x, y = batch(0)
    head(x.requires_grad_(), y).backward()
    try:
        plsc.optim.clip_grad_norm_([], 1.0, optimizer)
    except UsageError as error:
        messages.append(str(error))
    return messages


def test_what_has_no_meaning_is_refused(ranks: Ranks) -> None:
    messages = ranks(2, refusals, head_ranks=1)[0]
    wanted = ["at least 1", "from 0 to averaging_period", 'placement="host"', 'update="fused"', "integer", "to clip"]
    assert len(messages) == len(wanted)
    assert all(part in message for part, message in zip(wanted, messages, strict=True))
