"""Classes that come and go: a dict of rows and dense float64 tell the same losses, on any ranks and storage."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from reference import Oracle, relative_error
from support.head_problems import HIGH, LOW

import plsc
from plsc.sizes import status_bytes

DIM, LR, MOMENTUM, DECAY = 12, 0.3, 0.9, 1e-3
ARC = plsc.ArcFace(s=16.0, m=0.3)
ORACLE = Oracle("arcface", s=16.0, parameters={"m": 0.3})


def batch(step: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings (B, D) and keys (B,) of a step; the later the step, the more keys."""
    generator = torch.Generator().manual_seed(step)
    keys = torch.randint(3 * step + 4, (size,), generator=generator) * 7919 % 1000
    return torch.randn(size, DIM, generator=generator, dtype=torch.float64) * 3, keys


class Rows:
    """The oracle: rows and momentum (K, D) by class, and the class of each key."""

    def __init__(self, centers: int = 1, frozen: tuple[int, ...] = ()) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.momentum: dict[int, torch.Tensor] = {}
        self.classes: dict[int, int] = {}
        self.centers, self.numbers, self.frozen = centers, itertools.count(), frozen

    def insert(self, key: int, row: torch.Tensor) -> None:
        self.classes[key] = own = next(self.numbers)
        self.rows[own], self.momentum[own] = row.clone(), torch.zeros_like(row)

    def meet(self, x: torch.Tensor, keys: torch.Tensor) -> None:
        for key in set(keys.tolist()) - self.classes.keys():
            units = x[keys == key].float()
            mean = (units / units.norm(dim=1, keepdim=True)).double().mean(0)
            self.insert(key, (mean / mean.norm() * 0.01 * math.sqrt(DIM))[None])

    def step(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        self.meet(x, keys)
        order = sorted(self.rows)
        weight = torch.cat([self.rows[each] for each in order]).requires_grad_()
        labels = torch.tensor([order.index(self.classes[key]) for key in keys.tolist()])
        loss = ORACLE.loss(x, labels, weight, centers=self.centers)
        loss.backward()
        frozen = {self.classes.get(key) for key in self.frozen}
        for each, gradient in zip(order, weight.grad.split(self.centers), strict=True):
            if each in frozen:
                continue
            self.momentum[each] = MOMENTUM * self.momentum[each] + gradient + DECAY * self.rows[each]
            self.rows[each] = self.rows[each] - LR * self.momentum[each]
        return loss.detach()

    def remove(self, keys: list[int]) -> None:
        for key in keys:
            own = self.classes.pop(key)
            if own not in self.classes.values():
                del self.rows[own], self.momentum[own]

    def merge(self, sources: list[int], into: int) -> None:
        rows = [self.rows[self.classes[key]] for key in (into, *sources)]
        own, length = self.classes[into], rows[0].norm(dim=1, keepdim=True)
        mean = sum(row / row.norm(dim=1, keepdim=True) for row in rows)
        self.rows[own] = mean / mean.norm(dim=1, keepdim=True) * length
        self.remove(sources)
        self.classes |= dict.fromkeys(sources, own)

    def split(self, key: int, into: list[int]) -> None:
        for new in into:
            self.insert(new, self.rows[self.classes[key]])

    def rename(self, old: int, new: int) -> None:
        own = self.classes.pop(old)
        self.classes[new] = own


# After the steps of these numbers.
CHANGES = {
    3: [("remove", [7919 % 1000, 7919 * 3 % 1000])],
    5: [("merge", [7919 * 2 % 1000, 7919 * 5 % 1000], 7919 * 4 % 1000), ("insert", [5000, 5001])],
    7: [("split", 7919 * 6 % 1000, [2000, 2001]), ("rename", 7919 * 7 % 1000, 3000)],
    8: [("split", 7919 * 4 % 1000, [7919 * 2 % 1000])],  # one of those that were merged
    9: [("remove", [2000, 7919 * 5 % 1000])],
}


FROZEN = (7919 * 4 % 1000, 7919 * 8 % 1000, 2001, 3000, 7919 * 3 % 1000)  # of merged, split, renamed and removed ones


def changes_after(step: int, known: set[int]) -> list[tuple]:
    """CHANGES, where the keys are there."""
    found = []
    for name, *arguments in CHANGES.get(step, []):
        named = [key for argument in arguments for key in (argument if isinstance(argument, list) else [argument])]
        old = {"remove": named, "merge": named, "split": named[:1], "rename": named[:1], "insert": []}[name]
        if set(old) <= known:
            found.append((name, *arguments))
    return found


def expected(steps: int, frozen: tuple[int, ...] = ()) -> tuple[list[torch.Tensor], Rows]:
    oracle, losses = Rows(frozen=frozen), []
    for step in range(steps):
        losses.append(oracle.step(*batch(step)))
        for name, *arguments in changes_after(step, set(oracle.classes)):
            if name == "insert":
                for key in arguments[0]:
                    oracle.insert(key, given_row(key))
            else:
                getattr(oracle, name)(*arguments)
    return losses, oracle


def given_row(key: int) -> torch.Tensor:
    return torch.randn(1, DIM, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def change(head: plsc.DynamicHead, name: str, arguments: list) -> None:
    if name == "insert":
        rows = torch.stack([given_row(key).expand(head.centers, -1) for key in arguments[0]])
        head.insert(arguments[0], rows)
    else:
        getattr(head, name)(*arguments)


def train(mesh, sizes, steps, options, order=None, optimizer_kind="sgd"):
    """Losses of some steps, all keys and their rows; ``order``: which rank has which part of the batch."""
    head = plsc.DynamicHead(DIM, 120, mesh, ARC, **{**HIGH, **options})
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    losses = []
    for step in range(steps):
        if step % 2 and head.undo_journal:
            head.set_savepoint(step)
        x, keys = batch(step)
        place = mesh.rank if order is None else order[mesh.rank]
        x, keys = (part.split(sizes)[place] for part in (x, keys))
        loss = head(x.to(head.weight.dtype).requires_grad_(), keys)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        for name, *arguments in changes_after(step, set(head.key_map.keys.tolist())):
            change(head, name, arguments)
    keys = head.key_map.keys
    counts = [int(n) for n in np.bincount(head.key_map.shards, minlength=mesh.head.world_size)]
    return losses, keys, head.rows_of(torch.from_numpy(keys)), counts, head.num_classes


@pytest.mark.parametrize(
    ("world", "options", "head_ranks"),
    [
        (1, {}, None),
        pytest.param(2, {"placement": "host"}, None, marks=pytest.mark.exhaustive),
        pytest.param(3, {"placement": "mmap"}, None, marks=pytest.mark.exhaustive),
        (3, {"placement": "mmap", "journal": True}, None),
        (4, {"chunk_classes": 5}, 2),
        pytest.param(3, {"frozen_rows": FROZEN}, None, marks=pytest.mark.feature("frozen")),
    ],
    ids=["one", "host", "mapped", "journaled", "groups", "frozen"],
)
def test_losses_and_rows_are_those_of_a_dict(ranks, tmp_path, world, options, head_ranks):
    if options.get("placement") == "mmap":
        options = {"placement": f"mmap:{tmp_path / 'table'}"}
    sizes = {1: [12], 2: [9, 3], 3: [7, 0, 5], 4: [5, 1, 0, 6]}[world]
    losses, oracle = expected(12, options.get("frozen_rows", ()))
    known = {"head_ranks": head_ranks} if head_ranks else {}
    assert {3000, 2001} <= oracle.classes.keys()  # the last changes were made
    for found, keys, rows, counts, live in ranks(world, train, sizes, 12, options, **known):
        assert relative_error(torch.stack(found), torch.stack(losses)) < 1e-7  # first rows are of float32 units
        assert keys.tolist() == sorted(oracle.classes)
        want = torch.stack([oracle.rows[oracle.classes[key]] for key in keys.tolist()])
        assert relative_error(rows, want) < 1e-6
        assert live == len(oracle.rows)
        assert sum(counts) == len(oracle.classes)


def averaged(steps: int, period: int) -> tuple[list[torch.Tensor], list[Rows]]:
    """Two groups, six samples each, that step by themselves and are averaged, before classes go or change too."""
    groups, losses, count = [Rows(), Rows()], [], 0
    for step in range(steps):
        x, keys = batch(step)
        for group in groups:
            group.meet(x, keys)
        parts = zip(groups, x.split(6), keys.split(6), strict=True)
        losses.append(torch.stack([group.step(*part) for group, *part in parts]).mean())
        count += 1
        changes = changes_after(step, set(groups[0].classes))
        if count == period or {name for name, *_ in changes} & {"remove", "merge", "split"}:
            count = 0
            for values in ([group.rows for group in groups], [group.momentum for group in groups]):
                for each in values[0]:
                    values[0][each] = values[1][each] = (values[0][each] + values[1][each]) / 2
        for group in groups:
            for name, *arguments in changes:
                if name == "insert":
                    for key in arguments[0]:
                        group.insert(key, given_row(key))
                else:
                    getattr(group, name)(*arguments)
    return losses, groups


@pytest.mark.parametrize("placement", ["device", "mmap"])
def test_groups_that_step_by_themselves_are_averaged_before_classes_go(ranks, tmp_path, placement):
    placed = {"placement": f"mmap:{tmp_path / 'table'}", "chunk_classes": 5}
    options = placed if placement == "mmap" else {}
    losses, groups = averaged(11, 4)
    found = ranks(4, train, [5, 1, 0, 6], 11, {**options, "averaging_period": 4}, head_ranks=2)
    assert not torch.equal(found[0][2], found[3][2])  # the last average was some steps ago
    for rank, (mine, keys, rows, _, live) in enumerate(found):
        oracle = groups[rank // 2]
        assert relative_error(torch.stack(mine), torch.stack(losses)) < 1e-7
        assert keys.tolist() == sorted(oracle.classes)
        want = torch.stack([oracle.rows[oracle.classes[key]] for key in keys.tolist()])
        assert relative_error(rows, want) < 1e-6
        assert live == len(oracle.rows)


def late_averages(mesh, placement, rate):
    """This rank's rows and state once replicas are made equal, where classes come while an average is under way."""
    options = {**LOW, "averaging_period": 3, "staleness": 2, "placement": placement, "sample_rate": rate}
    head = plsc.DynamicHead(DIM, 120, mesh, ARC, expire_after=3, **options)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for step in range(8):
        x, keys = (part.split([7, 5])[mesh.rank] for part in batch(step))
        train_step(head, optimizer, x.float(), keys)
    held = head.num_classes
    optimizer.make_replicas_equal()
    rows = [shard.blocks[0].local for shard in (head.sharded_state() | optimizer.sharded_state()).values()]
    return held, [each.clone() for each in rows]


@pytest.mark.parametrize(("placement", "rate"), [("host", 1.0), ("host", 0.4), ("mmap", 1.0)])
def test_replicas_are_equal_after_late_averages_of_a_growing_table(ranks, tmp_path, placement, rate):
    placement = placement if placement == "host" else f"mmap:{tmp_path / 'table'}"
    (held, one), (_, other) = ranks(2, late_averages, placement, rate, head_ranks=1)
    assert held > 12
    assert all(torch.equal(*pair) and pair[0].float().isfinite().all() for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_no_bit_tells_which_rank_brought_a_class(ranks, order):
    """The same samples, on other ranks: keys and first rows are the same, though two ranks bring the same keys."""
    one, *_ = ranks(3, inserted, [4, 4, 4], [0, 1, 2])
    other, *_ = ranks(3, inserted, [4, 4, 4], order)
    assert np.array_equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert max(one[2]) - min(one[2]) <= 1


def inserted(mesh, sizes, order):
    head = plsc.DynamicHead(DIM, 50, mesh, ARC, **HIGH)
    plsc.HeadSGD(head, lr=LR)
    x, _ = batch(0)
    sample, column = torch.meshgrid(torch.arange(len(x)), torch.arange(DIM), indexing="ij")
    x *= 10.0 ** -((7 * sample + 5 * column + 3 * sample * column) % 15).double()  # so that float64 rounds their sums
    keys = torch.tensor([3, 3, 3, 3, 7, 3, 3, 1, 3, 3, 3, 3])
    place = order[mesh.rank]
    head(x.float().split(sizes)[place].requires_grad_(), keys.split(sizes)[place])
    return (
        head.key_map.keys,
        head.rows_of(torch.from_numpy(head.key_map.keys)),
        np.bincount(head.key_map.shards).tolist(),
    )


STORED = [
    {**LOW},
    {**LOW, "sample_rate": 0.4, "centers": 2},
    {"weight_dtype": torch.float32, "sample_rate": 0.0, "placement": "host"},
]


@pytest.mark.first_ring("host-int8", "host-sampled sub-centres", "mmap-sampled sub-centres", "mmap-positives alone")
@pytest.mark.parametrize("options", STORED, ids=["int8", "sampled sub-centres", "positives alone"])
@pytest.mark.parametrize("placement", ["host", "mmap"])
def test_storages_do_not_change_a_bit(ranks, tmp_path, options, placement):
    placed = "host" if placement == "host" else f"mmap:{tmp_path / 'table'}"
    (device, *_), (other, *_) = (
        ranks(2, train, [9, 3], 11, {**options, "placement": where}) for where in ("device", placed)
    )
    assert torch.equal(torch.stack(device[0]), torch.stack(other[0]))
    assert torch.equal(device[2], other[2])


def several_labels(mesh, prefetches):
    """Losses and rows where samples have two keys or one, and rows are fetched ahead."""
    options = {"placement": "host", "sample_rate": 0.3} if prefetches else {}
    head = plsc.DynamicHead(DIM, 120, mesh, ARC, **HIGH, **options)
    optimizer = plsc.HeadSGD(head, lr=LR)
    losses = []
    for step in range(4):
        x, keys = batch(step)
        keys = torch.stack([keys, torch.where(keys % 2 == 0, keys + 1, -1)], 1)
        x, keys = (part.split([9, 3] if mesh.world_size == 2 else [12])[mesh.rank] for part in (x, keys))
        if prefetches:
            head.prefetch(keys)
        loss = head(x.requires_grad_(), keys)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), head.num_classes


def test_samples_of_several_keys_on_ranks_are_those_of_one_process(ranks):
    (one,), (two, *_) = ranks(1, several_labels, False), ranks(2, several_labels, False)
    assert relative_error(two[0], one[0]) < 1e-7
    assert two[1] == one[1] > 12
    losses, classes = ranks(2, several_labels, True)[0]
    assert losses.isfinite().all()
    assert classes == one[1]


@pytest.mark.parametrize("placement", ["device", "mmap"])
def test_a_batch_that_waits_has_the_classes_of_its_own_softmax(placement, tmp_path):
    placement = f"mmap:{tmp_path / 'table'}" if placement == "mmap" else placement
    head = plsc.DynamicHead(DIM, 50, margin=ARC, placement=placement, **HIGH)
    optimizer = plsc.HeadSGD(head, lr=LR)
    oracle = Rows()
    x, keys = batch(0)
    oracle.step(x, keys)
    train_step(head, optimizer, x, keys)
    firsts = {key: oracle.rows[oracle.classes[key]] for key in oracle.classes}
    later, new = batch(1)
    new = new + 500  # none of which is there yet
    for part, labels in ((x, keys), (later, new)):
        head(part.clone().requires_grad_(), labels).backward()
    order = [*sorted(set(keys.tolist())), *sorted(set(new.tolist()))]
    before = head.rows_of(order).detach().clone()
    optimizer.step()
    assert sorted(order) == head.key_map.keys.tolist()
    weight = before[:, 0].clone().requires_grad_()
    own = len(firsts)
    first = ORACLE.loss(x, torch.tensor([order.index(key) for key in keys.tolist()]), weight[:own])
    second = ORACLE.loss(later, torch.tensor([order.index(key) for key in new.tolist()]), weight)
    (first + second).backward()
    assert relative_error(before[:, 0] - head.rows_of(order)[:, 0], LR * weight.grad) < 1e-7  # by arccos near 1


def train_step(head, optimizer, x, keys):
    loss = head(x.clone().requires_grad_(), keys)
    loss.backward()
    optimizer.step()
    return loss.detach()


def saved(mesh, folder, first, last, sizes):
    """Steps [first, last) of a run that goes on from ``folder``, or is saved there."""
    from torch.distributed import checkpoint

    head = plsc.DynamicHead(DIM, 120, mesh, ARC, **HIGH)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    if first:
        head.load_key_state(torch.load(folder / "keys.pt", weights_only=True))
        state = {**head.sharded_state(), **optimizer.sharded_state()}
        checkpoint.load(state, checkpoint_id=folder / "rows", process_group=mesh.group)
    losses = []
    for step in range(first, last):
        x, keys = (part.split(sizes)[mesh.rank] for part in batch(step))
        losses.append(train_step(head, optimizer, x, keys))
        for name, *arguments in changes_after(step, set(head.key_map.keys.tolist())):
            change(head, name, arguments)
    if not first:
        state = {**head.sharded_state(), **optimizer.sharded_state()}
        checkpoint.save(state, checkpoint_id=folder / "rows", process_group=mesh.group)
        if mesh.is_main:
            torch.save(head.key_state(), folder / "keys.pt")
    return losses


def test_a_table_that_was_saved_at_four_ranks_goes_on_at_three(ranks, tmp_path):
    losses, _ = expected(12)
    before = ranks(4, saved, tmp_path, 0, 7, [5, 1, 0, 6])[0]
    after = ranks(3, saved, tmp_path, 7, 12, [7, 0, 5])[0]
    assert relative_error(torch.stack([*before, *after]), torch.stack(losses)) < 1e-7


def test_rows_that_saw_no_sample_keep_their_bits():
    head = plsc.DynamicHead(DIM, 50, margin=ARC, sample_rate=0.0)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    x, keys = batch(0)
    train_step(head, optimizer, x.float(), keys)
    old = sorted(set(keys.tolist()))
    before = head.rows_of(old)
    later = torch.arange(600, 612)
    later[0] = old[0]
    train_step(head, optimizer, x.float(), later)
    assert torch.equal(head.rows_of(old[1:]), before[1:])
    assert not torch.equal(head.rows_of(old[:1]), before[:1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the process's memory")
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.int8])
def test_memory_is_taken_as_classes_come(momentum_dtype):
    """Weights of 256 MB would be, and a momentum, were every reserved row taken."""
    options = {"weight_dtype": torch.float32, "momentum_dtype": momentum_dtype}
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    for room in (100, 1_000_000):  # the first takes the libraries' memory
        before = status_bytes("VmRSS")
        head = plsc.DynamicHead(64, room, margin=ARC, **options)
        optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM)
        for keys in (torch.arange(20), torch.arange(10, 30)):
            train_step(head, optimizer, x, keys)
    assert status_bytes("VmRSS") - before < 32e6
    assert all(len(table.values) == 30 for table in optimizer.tables.values())


def test_a_removed_class_leaves_no_number_behind():
    head = plsc.DynamicHead(DIM, 50, margin=ARC)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM)
    head.use_names([f"person {number}" for number in range(12)])
    x, _ = batch(0)
    train_step(head, optimizer, x.float(), torch.arange(12))
    gone = head.key_map.keys_of(["person 3", "person 11"])
    rows = head.rows_of(torch.from_numpy(gone))
    reserved = [head.softmax.table._reserved, *(state._reserved[0] for state in optimizer.tables.values())]
    content = b"".join(tensor.numpy().tobytes() for tensor in reserved)
    assert all(row.numpy().tobytes() in content for row in rows)
    head.use_names([f"person {number}" for number in range(12) if number not in (3, 11)])
    head.remove(torch.from_numpy(gone))
    content = b"".join(tensor.numpy().tobytes() for tensor in reserved)
    assert not any(row.numpy().tobytes() in content for row in rows)
    text = head.key_state()["name_bytes"].numpy().tobytes()
    assert b"person 4" in text
    assert b"person 3" not in text
    train_step(head, optimizer, x.float()[:10], torch.arange(10))
    assert head.num_classes == 10
