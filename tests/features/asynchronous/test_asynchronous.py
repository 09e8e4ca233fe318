"""Ranks that step by themselves: their weights against a float64 replay, the bound, meetings, runs and their ends."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from reference import Oracle, relative_error
from support.tiny_runs import assert_same_files, each_step, losses, run, stored
from torch import Tensor, nn

import plsc
from plsc.features.asynchronous.change_mail import ChangeMail, Changes
from plsc.features.asynchronous.changes import AsynchronousChanges
from plsc.features.asynchronous.config import AsynchronousConfig
from plsc.head import storage
from plsc.parallel import Mesh
from plsc.train.failures import Interrupted
from plsc.train.metrics import read_metrics

Ranks = Any
CLASSES, INPUT, DIM, BATCH, LR, MOMENTUM, DECAY = 13, 6, 5, 7, 0.05, 0.9, 5e-3
ARCFACE = Oracle("arcface", s=16.0, parameters={"m": 0.3})
NO = torch.zeros(())
EXHAUSTIVE = pytest.mark.exhaustive
WAYS = ["full", pytest.param("half", marks=EXHAUSTIVE)]


def start() -> tuple[Tensor, Tensor]:
    """Weights of a linear backbone, and a class table."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(DIM, INPUT, generator=generator).double(), torch.randn(
        CLASSES, DIM, generator=generator
    ).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(BATCH, INPUT, generator=generator).double(), torch.randint(
        CLASSES, (BATCH,), generator=generator
    )


class Replica:
    """One rank's backbone and table, and their exchange; ``options`` are the head's."""

    def __init__(
        self, mesh: Mesh, way: str, staleness: int, period: int = 1, copied: bool = False, **options: Any
    ) -> None:
        backbone, table = start()
        self.mesh, self.net = mesh, nn.Linear(INPUT, DIM, bias=False).double()
        alone = Mesh(0, 1, 0, mesh.device)
        kinds = {"weight_dtype": torch.float64, "momentum_dtype": torch.float64, "placement": "host", **options}
        with mock.patch.object(storage, "is_staged", return_value=copied):  # as rows are for a GPU
            self.head = plsc.ShardedHead(DIM, CLASSES, alone, plsc.ArcFace(s=16.0, m=0.3), chunk_classes=4, **kinds)
        with torch.no_grad():
            self.net.weight.copy_(backbone)
            self.head.weight.copy_(table.repeat_interleave(self.head.centers, 0))
        given = {"lr": LR / mesh.world_size, "momentum": MOMENTUM, "weight_decay": DECAY}
        self.of_net, self.of_head = torch.optim.SGD(self.net.parameters(), **given), plsc.HeadSGD(self.head, **given)
        exchange = AsynchronousConfig(mode=way, staleness=staleness, period=period)
        self.exchange = AsynchronousChanges(mesh, self.net, exchange)
        self.exchange.take_table(self.of_head)

    def step(self, number: int, stop: int = 0) -> int:
        """Take a step; returns the signal that is obeyed in it."""
        self.exchange.begin(number)
        obeyed = self.exchange.agreed_stop(stop)
        x, y = batch(self.mesh.rank, number)
        loss = self.head(self.net(x), y)
        self.head.prefetch(batch(self.mesh.rank, number + 1)[1])
        loss.backward()
        for optimizer in (self.of_net, self.of_head):
            optimizer.step()
            optimizer.zero_grad()
        self.exchange.commit_or_undo(NO)
        return obeyed

    def state(self) -> list[Tensor]:
        """Copies of the backbone, the table, its momentum and its 1/norms."""
        momentum = [block.local for shard in self.of_head.sharded_state().values() for block in shard.blocks]
        tensors = [self.net.weight, self.head.weight, *momentum, self.head.inverse_norms()]
        return [tensor.detach().clone() for tensor in tensors]


@contextmanager
def delivering(replica: Replica, period: int, staleness: int, meeting: list[bool]) -> Iterator[None]:
    """Let each step find what the bound asks for and nothing else, however fast the ranks are; a meeting finds all."""
    take, held, known = ChangeMail.arrived, list[tuple[int, Any]](), dict[int, int]()

    def exactly(mail: ChangeMail, *, wait: bool) -> list[tuple[int, Any]]:
        if meeting[0]:
            found, held[:] = [*held, *([] if held else take(mail, wait=True))], []
            return found
        step = replica.exchange._step
        bound = step - step % period + period - 1 - staleness
        while any(known.get(rank, 0) < bound for rank in mail.others):
            for rank, came in take(mail, wait=True):
                held.append((rank, came))
                known[rank] = came.stop
        ready = [one for one in held if isinstance(one[1], Changes) and one[1].first < bound]
        held[:] = [one for one in held if all(one is not other for other in ready)]
        return ready

    with mock.patch.object(ChangeMail, "arrived", exactly):
        yield


def replayed(
    mesh: Mesh, way: str, staleness: int, period: int, steps: int, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's state before and after the meeting behind its steps; others' changes came as late as they may."""
    replica, meeting = Replica(mesh, way, staleness, period, **options), [False]
    try:
        with delivering(replica, period, staleness, meeting):
            for number in range(steps):
                replica.step(number)
            before, meeting[0] = replica.state(), True
            with replica.exchange.averaged():
                return before, replica.state()
    finally:
        replica.exchange.close()


def reference(world: int, staleness: int, period: int, steps: int) -> tuple[list[Any], list[Tensor]]:
    """The weights of every rank before the meeting, and of all behind it, in float64 by autograd alone."""
    weights = [[each.clone() for each in start()] for _ in range(world)]
    momenta = [[torch.zeros_like(each) for each in start()] for _ in range(world)]
    rounds: list[list[list[Tensor]]] = [[] for _ in range(world)]  # of each rank, what each round has changed
    added = [[0] * world for _ in range(world)]

    def add(rank: int, stop: int) -> None:
        for other in range(world):
            while other != rank and added[rank][other] < stop:
                for weight, change in zip(weights[rank], rounds[other][added[rank][other]], strict=True):
                    weight += change
                added[rank][other] += 1

    for step in range(steps):
        for rank in range(world):
            bound = step + period - 1 - staleness  # changes of steps before it have come
            if step % period == 0:
                add(rank, max(-(-bound // period), 0))
        for rank in range(world):
            if step % period == 0:
                rounds[rank].append([torch.zeros_like(each) for each in start()])
            leaves = [each.clone().requires_grad_() for each in weights[rank]]
            x, y = batch(rank, step)
            ARCFACE.loss(x @ leaves[0].T, y, leaves[1]).backward()
            for leaf, weight, momentum, change in zip(
                leaves, weights[rank], momenta[rank], rounds[rank][-1], strict=True
            ):
                momentum.mul_(MOMENTUM).add_(leaf.grad + DECAY * weight)
                weight -= LR / world * momentum
                change -= LR / world * momentum
    before = [[each.clone() for each in own] for own in weights]
    for rank in range(world):
        add(rank, len(rounds[rank]))
    return before, [*weights[0], torch.stack([own[1] for own in momenta]).mean(0)]


@pytest.mark.parametrize(
    ("world", "way", "staleness", "period"),
    [(2, "full", 2, 1), (2, "half", 4, 3), pytest.param(3, "full", 1, 1, marks=EXHAUSTIVE)],
)
def test_ranks_add_what_others_changed_as_late_as_the_bound_lets_them(
    world: int, way: str, staleness: int, period: int, ranks: Ranks
) -> None:
    before, behind = reference(world, staleness, period, steps=8)
    for rank, (early, late) in enumerate(ranks(world, replayed, way, staleness, period, 8)):
        for found, expected in zip(early[:2], before[rank], strict=True):
            assert relative_error(found, expected) < 1e-12
        for found, expected in zip(late[:3], behind, strict=True):
            assert relative_error(found, expected) < 1e-12
        assert relative_error(late[3], 1 / behind[1].norm(dim=1)) < 1e-12
    assert not torch.equal(before[0][0], before[1][0])  # they were apart


@pytest.mark.exhaustive
@pytest.mark.parametrize("sample_rate", [1.0, 0.4])
def test_rows_that_are_fetched_ahead_have_what_others_changed(sample_rate: float, ranks: Ranks) -> None:
    options = {"sample_rate": sample_rate, "placement": "host"}
    copied, in_place = (ranks(2, replayed, "full", 2, 1, 8, copied=copied, **options) for copied in (True, False))
    for found, expected in zip(copied, in_place, strict=True):
        for states, others in zip(found, expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(states, others, strict=True))


def met(mesh: Mesh, way: str, period: int, **options: Any) -> list[list[Tensor]]:
    """This rank's states behind two meetings, between which ranks run as fast as they can."""
    replica, states = Replica(mesh, way, 3, period, **options), []
    try:
        for number in range(14):
            replica.step(number)
            if number in (6, 13):
                with replica.exchange.averaged():
                    states.append(replica.state())
    finally:
        replica.exchange.close()
    return states


LOW = {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8, "sample_rate": 0.4}
KINDS = [
    pytest.param({"weight_dtype": torch.float32, "momentum_dtype": torch.float32}, id="float32"),
    pytest.param(LOW, id="bfloat16, sampled"),
    pytest.param({"sample_rate": 0.4, "centers": 2, "frozen_rows": [1, 2]}, id="two centres, frozen", marks=EXHAUSTIVE),
]


@pytest.mark.parametrize(("way", "period"), [("full", 1), pytest.param("half", 2, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("options", KINDS)
def test_replicas_are_equal_to_the_last_bit_where_they_meet(
    options: dict[str, Any], way: str, period: int, ranks: Ranks
) -> None:
    first, *others = ranks(3, met, way, period, **options)
    for other in others:
        for states, theirs in zip(first, other, strict=True):
            assert all(torch.equal(one, another) for one, another in zip(states, theirs, strict=True))
    assert not torch.equal(first[0][1], first[1][1])


def held_up(mesh: Mesh, staleness: int) -> tuple[int, int, float]:
    """The last rank does not begin until the others can go no further.

    Returns the steps that this rank has taken by then, by a counter of its own, and those that it has at the end, and
    the largest staleness of a step.
    """
    replica, taken, late = Replica(mesh, "full", staleness), [0], mesh.rank == mesh.world_size - 1
    store = torch.distributed.PrefixStore(f"steps-{staleness}", torch.distributed.distributed_c10d._get_default_store())
    steps = 2 * staleness + 3

    def total() -> int:
        return int(store.add("taken", 0))

    if late:
        replica.exchange._step = 0
        replica.exchange._opened_mail()
        while total() < (staleness + 1) * (mesh.world_size - 1):
            time.sleep(0.01)
        time.sleep(0.3)  # in which a rank that is not held up would go on
        store.set("seen", str(total()))
    for number in range(steps):
        replica.step(number)
        taken[0] += 1
        if not late:
            store.add("taken", 1)
    with replica.exchange.averaged():
        largest = replica.exchange.figures()["staleness"]
    replica.exchange.close()
    return int(store.get("seen")), taken[0], largest


@pytest.mark.parametrize(("world", "staleness"), [(2, 3), pytest.param(4, 1, marks=EXHAUSTIVE)])
def test_a_rank_waits_for_one_that_is_more_steps_behind_than_the_bound(
    world: int, staleness: int, ranks: Ranks
) -> None:
    for rank, (seen, taken, largest) in enumerate(ranks(world, held_up, staleness)):
        assert seen == (world - 1) * (staleness + 1)
        assert taken == 2 * staleness + 3
        assert rank == world - 1 or largest == staleness


def left_alone(mesh: Mesh) -> str:
    """The first rank's error when the other has ended its part of the run."""
    replica = Replica(mesh, "full", 2)
    replica.step(0)
    error = ""
    try:
        for number in range(1, 9 if mesh.rank == 0 else 2):
            replica.step(number)
    except RuntimeError as found:
        error = str(found)
    replica.exchange.close()
    return error


def test_a_rank_that_leaves_does_not_let_the_others_wait(ranks: Ranks) -> None:
    assert ranks(2, left_alone) == ["rank 1 has ended its part of the run", ""]


CHANGES: dict[str, Any] = {
    "backbone": "plain",
    "epochs": None,
    "steps": 16,
    "head_ranks": 1,
    "head.placement": "host",
    "optim.schedule": "constant",
    "optim.lr": 0.02,
    "checkpoint.every_steps": 8,
    "asynchronous.mode": "full",
    "asynchronous.staleness": 2,
}


@pytest.mark.slow
def test_a_run_without_staleness_is_the_synchronous_one_bit_for_bit(tmp_path: Path, ranks: Ranks) -> None:
    for name, changes in (("async", {"asynchronous.staleness": 0}), ("sync", {"asynchronous.mode": "none"})):
        ranks(2, run, tmp_path / name, {**CHANGES, **changes}, head_ranks=1)
    assert losses(tmp_path / "async") == losses(tmp_path / "sync")
    assert_same_files(tmp_path / "async", tmp_path / "sync")
    found, expected = (ranks(1, stored, tmp_path / name, 16, "")[0] for name in ("async", "sync"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_learns_meets_at_its_checkpoints_and_goes_on(way: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**CHANGES, "asynchronous.mode": way, "asynchronous.period": 3, "ema_decay": 0.9}
    changes |= {"data.batch_size": 4, "optim.accumulate": 2}
    ranks(3, run, tmp_path, {**changes, "steps": 8}, head_ranks=1)
    begun = losses(tmp_path)
    tensors = ranks(1, stored, tmp_path, 8, "")[0]
    own = [[tensors[f"exchange.{rank}.{place}.weight"] for place in range(8)] for rank in range(3)]
    assert all(torch.equal(one, other) for theirs in own[1:] for one, other in zip(own[0], theirs, strict=True))
    ranks(3, run, tmp_path, changes, "auto", head_ranks=1)
    whole = losses(tmp_path)
    assert sorted(whole) == list(range(1, 17))
    assert {step: whole[step] for step in begun} == begun
    assert sum(whole[step] for step in range(13, 17)) < sum(whole[step] for step in range(1, 5)) / 2
    assert max(line["staleness"] for line in read_metrics(tmp_path) if "staleness" in line) <= 2
    ranks(
        2,
        run,
        tmp_path / "sync",
        {**changes, "asynchronous.mode": "none", "steps": 18},
        str(tmp_path),
        head_ranks=1,
    )
    assert sorted(losses(tmp_path / "sync")) == [17, 18]


def stopped(mesh: Mesh, out: Path, changes: dict[str, Any]) -> str:
    """Train; one rank is asked to stop at its fourth step."""

    def stopping(take: Any, _: Any, group: Any, number: int, stop: int) -> Any:
        return take(group, number, signal.SIGTERM if mesh.rank == 1 and number >= 3 else stop)

    with each_step(stopping):
        try:
            run(mesh, out, changes)
        except Interrupted as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_signal_on_one_rank_stops_all_after_the_same_step(way: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**CHANGES, "asynchronous.mode": way, "asynchronous.period": 3}
    first, *others = ranks(3, stopped, tmp_path, changes, head_ranks=1)
    assert first.startswith("stopped by a signal after step ")
    assert others == [first, first]
    ranks(3, run, tmp_path, changes, "auto", head_ranks=1)
    assert max(losses(tmp_path)) == 16
