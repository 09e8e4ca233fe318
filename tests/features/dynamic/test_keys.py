"""Keys of classes that come and go: names that have one hash, when a class comes and goes, and what is refused."""

import numpy as np
import pytest
import torch
from reference import relative_error
from support.head_problems import HIGH

import plsc
from plsc.errors import DataError, UsageError
from plsc.features.dynamic import key_map
from plsc.features.dynamic.key_map import KeyMap

DIM, LR = 12, 0.3
ARC = plsc.ArcFace(s=16.0, m=0.3)


def embeddings(size=12):
    return torch.randn(size, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


def train_step(head, optimizer, x, keys):
    loss = head(x.clone().requires_grad_(), keys)
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_ten_thousand_names_of_one_hash_get_a_key_each(monkeypatch):
    real = key_map.name_key
    monkeypatch.setattr(key_map, "name_key", lambda name, attempt=0: real(name, attempt) if attempt else 42)
    names = [f"{number}" for number in range(10_000)]
    one, other = KeyMap(), KeyMap()
    keys = one.keys_of(names)
    assert len(np.unique(keys)) == len(names)
    assert np.array_equal(other.keys_of(names[::-1])[::-1], keys)
    assert np.array_equal(one.keys_of(names[:7]), keys[:7])
    shards = np.zeros(len(keys), np.int32)
    one.add(keys, shards, np.arange(len(keys)))
    third = KeyMap()
    third.load_state(one.state([0]), [0])
    assert np.array_equal(third.keys_of(names), keys)
    assert np.array_equal(third.find(keys)[1], np.arange(len(keys)))


@pytest.mark.parametrize("keys", [[7, 7], [3, 7]])
def test_a_key_map_takes_no_key_twice(keys):
    held = KeyMap()
    held.enter_names({7: "Ada"})
    held.add(np.array([3]), np.zeros(1, np.int32), np.array([0]))
    before = held.state([0])
    with pytest.raises(UsageError, match=r"the class (Ada|of the key 3) is added twice, or has a row already"):
        held.add(np.array(keys), np.zeros(2, np.int32), np.array([1, 2]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.state([0]).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": [5, 5]}, "no keys of a class table"),
        ({"classes": [0, 2]}, "leave out class numbers"),
        ({"classes": [0, 2**62]}, "leave out class numbers"),
        ({"named_keys": [5, 5]}, "no keys of a class table"),
        ({"name_bytes": list(b"AdaAda"), "name_ends": [3, 6]}, "two keys of a class table have one name"),
    ],
)
def test_keys_that_would_mix_up_classes_are_not_loaded(changes, message):
    held = KeyMap()
    held.enter_names({5: "Ada", 9: "Bob"})
    held.add(np.array([5, 9]), np.zeros(2, np.int32), np.array([0, 1]))
    state = held.state([0])
    state |= {name: torch.tensor(values, dtype=state[name].dtype) for name, values in changes.items()}
    with pytest.raises(DataError, match=message):
        KeyMap().load_state(state, [0])


def wrong(mesh, case):
    head = plsc.DynamicHead(DIM, 6, mesh, ARC)
    plsc.HeadSGD(head, lr=LR)
    x = embeddings()
    head.insert([10, 11, 12])
    try:
        if case == "negative":
            head(x.float(), torch.full((12,), -5 if mesh.rank == 1 else 10))
        elif case == "full":
            head(x.float().requires_grad_(), torch.arange(12))
        elif case == "unknown":
            head.remove([10, 99])
        elif case == "other keys":
            head.remove([10 + mesh.rank])
        elif case == "known":
            head.rename(10, 11)
        elif case == "another's":
            head.merge([11], 10)
            head.split(10, [11, 12])
        elif case == "itself":
            head.split(10, [10])
        elif case == "waiting":
            head(x.float().requires_grad_(), torch.full((12,), 10)).backward()
            head.remove([10])
        elif case == "rows":
            head.insert([20], torch.zeros(2, DIM))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("negative", "rank 1: labels are keys from 0 on"),
        ("full", "10 new classes do not fit beside 3: max_classes is 6"),
        ("unknown", "the key 99 has no row in the head"),
        ("other keys", "ranks name other keys"),
        ("known", "the key 11 has a row in the head already"),
        ("another's", "the key 12 has a row in the head already"),
        ("itself", "the key 10 has a row in the head already"),
        ("waiting", "the head's classes cannot change between a loss and its step()"),
        ("rows", r"rows are \(2, 12\); 1 new classes take \(1, 12\)"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks, case, message):
    for said in ranks(2, wrong, case):
        assert said.startswith(message.replace("\\", ""))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"frozen_rows": "0:4"}, marks=pytest.mark.feature("frozen")),
        {"update": "autograd"},
        {"first_rows": "zeros"},
    ],
)
def test_arguments_of_fixed_tables_are_refused(options):
    with pytest.raises(UsageError, match=r"classes come and go|first_rows must be"):
        plsc.DynamicHead(DIM, 6, **options)


def test_without_training_unknown_keys_are_no_labels():
    head = plsc.DynamicHead(DIM, 6, margin=ARC, **HIGH)
    head.insert([10, 11])
    x = embeddings(3)
    head.eval()
    loss = head(x, torch.tensor([10, 99, 11]))
    assert relative_error(loss, head(x[[0, 2]], torch.tensor([10, 11]))) < 1e-12
    assert head.num_classes == 2
    assert head.mean_norm() == pytest.approx(0.01 * DIM**0.5, rel=0.5)


def test_admitted_after_some_samples_and_removed_after_some_batches(ranks):
    for found in ranks(2, comes_and_goes):
        assert found == [
            ([], 0.0),  # each key once
            ([1, 3], None),  # 1 twice by now, 3 three times in this batch
            ([1, 3], None),
            ([3], None),  # 1 was not seen for two batches
            ([1, 3], None),  # two samples, as of a class that is new
        ]


def comes_and_goes(mesh):
    head = plsc.DynamicHead(DIM, 20, mesh, ARC, admit_after=2, expire_after=1, **HIGH)
    optimizer = plsc.HeadSGD(head, lr=LR)
    x = embeddings()
    said = []
    for keys in ([1, 2], [1, 3, 3, 3], [3, 4], [3], [1, 1, 3]):
        own = torch.tensor(keys)[mesh.rank :: 2]
        loss = train_step(head, optimizer, x[: len(own)], own)
        assert loss.isfinite()
        said.append((head.key_map.keys.tolist(), loss.item() if not head.num_classes else None))
    return said


STREAM = [
    [1, 2, 3, 4],
    [5, 6, 1, 7],
    [8, 2, 5, 8],
    [8, 8, 9, 5],
    [4, 6, 6, 9],
    [9, 9, 6, 5],
    [1, 6, 9, 9],
    [9, 9, 9, 6],
]


def accumulated(mesh, parts, expire_after):
    """The keys after each step of STREAM's batches, each in so many micro-batches as its number in ``parts``."""
    head = plsc.DynamicHead(DIM, 20, mesh, ARC, expire_after=expire_after, **HIGH)
    optimizer = plsc.HeadSGD(head, lr=LR)
    x = embeddings(4)
    held = []
    for keys, number in zip(STREAM, parts * len(STREAM), strict=False):
        for rows in torch.arange(4).split(4 // number):
            own = rows[mesh.rank :: mesh.world_size]
            head(x[own].requires_grad_(), torch.tensor(keys)[own]).backward()
        optimizer.step()
        held.append(head.key_map.keys.tolist())
    return held, head.get_extra_state()["steps"], head.softmax.forwards


@pytest.mark.parametrize("expire_after", [1, 2, 3])
def test_micro_batches_of_a_step_count_as_one(ranks, expire_after):
    alone = plsc.parallel.Mesh(0, 1, 0, torch.device("cpu"))
    last_had = {}
    expected = []
    for step, keys in enumerate(STREAM):
        last_had |= dict.fromkeys(keys, step)
        last_had = {key: had for key, had in last_had.items() if step - had <= expire_after}
        expected.append(sorted(last_had))
    for parts in ([1], [2], [4], [1, 2, 2]):  # an epoch's last group may be shorter, and moves those that follow
        held, steps, forwards = accumulated(alone, parts, expire_after)
        assert held == expected
        assert steps == len(STREAM) < forwards or parts == [1]
    assert [found[0] for found in ranks(2, accumulated, [2], expire_after)] == [expected] * 2


def test_steps_go_on_where_a_checkpoint_was_and_where_it_counted_batches():
    head = plsc.DynamicHead(DIM, 20, margin=ARC, **HIGH)
    head.set_extra_state({"forwards": 12, "margin": {}, "steps": 3})
    assert head.get_extra_state() == {"forwards": 12, "margin": {}, "steps": 3}
    head.set_extra_state({"forwards": 12, "margin": {}})
    assert head.steps == 12


def test_a_key_that_a_sample_is_given_twice_counts_once():
    head = plsc.DynamicHead(DIM, 20, margin=ARC, admit_after=2, **HIGH)
    optimizer = plsc.HeadSGD(head, lr=LR)
    x = embeddings(3)
    train_step(head, optimizer, x[:1], torch.tensor([[7, 7, 7, -1]]))
    assert len(head.key_map) == 0
    train_step(head, optimizer, x[1:2], torch.tensor([[7, 8, 7, 8]]))
    assert head.key_map.keys.tolist() == [7]
    first = [plsc.DynamicHead(DIM, 20, margin=ARC, **HIGH) for _ in range(2)]
    for each, labels in zip(first, ([[5, 5], [5, -1]], [[5, -1], [5, -1]]), strict=True):
        each(x[:2], torch.tensor(labels))
    assert torch.equal(first[0].rows_of([5]), first[1].rows_of([5]))  # the mean of both samples


def test_a_class_that_nobody_watched_expires_no_earlier_than_others():
    before = plsc.DynamicHead(DIM, 20, margin=ARC, **HIGH)
    optimizer, x = plsc.HeadSGD(before, lr=LR), embeddings()
    for _ in range(5):
        train_step(before, optimizer, x[:3], torch.tensor([1, 2, 3]))
    head = plsc.DynamicHead(DIM, 20, margin=ARC, expire_after=2, **HIGH)
    optimizer = plsc.HeadSGD(head, lr=LR)
    head.load_key_state(before.key_state())
    head.set_extra_state(before.get_extra_state())
    head.weight.data.copy_(before.weight)
    held = []
    for step in range(4):
        train_step(head, optimizer, x[:2], torch.tensor([1, 2]))
        if step == 0:
            head.rename(2, 4)  # batches bring 2 again, as a new class
        held.append(head.key_map.keys.tolist())
    assert held == [[1, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 4]]
