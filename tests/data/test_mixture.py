"""Data sets that train together: every batch has its share of each, and each is passed through in order."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_images import Numbered

from plsc.data import TrainLoader
from plsc.data.mixture import Mixture
from plsc.data.permutation import permuted, round_keys
from plsc.errors import DataError, UsageError
from plsc.features.tables.joined import JoinedDataset


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(st.tuples(st.integers(1, 90), st.floats(0.05, 9.0)), min_size=1, max_size=4),
    epochs=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_runs_of_samples_have_their_shares_and_parts_their_permutations(parts, epochs, seed):
    sizes, shares = zip(*parts, strict=True)
    mixture = Mixture(sizes, shares)
    orders = [mixture.order(seed=seed, epoch=epoch, shuffle=True)[:] for epoch in range(epochs)]
    assert all(len(order) == mixture.epoch_length for order in orders)
    assert sorted(orders[0][orders[0] < sizes[0]]) == list(range(sizes[0]))  # an epoch is one pass over the first
    of_part = mixture.parts_of(orders[-1])
    for part, (size, count) in enumerate(zip(sizes, mixture.counts, strict=True)):
        first = sum(sizes[:part])
        drawn = [index for order in orders for index in order if first <= index < first + size]
        passes = [drawn[start : start + size] for start in range(0, len(drawn), size)]
        assert all(len(set(each)) == len(each) for each in passes)  # each image once before any comes again
        before = np.concatenate([[0], np.cumsum(of_part == part)])
        expected = np.arange(len(before)) * count / mixture.epoch_length
        assert np.abs(before - expected).max() <= len(sizes) / 2 + 0.5


def listed(mixture, seed, epoch, permute):
    """An epoch's indices from places and permutations of whole parts."""
    order, first = np.zeros(mixture.epoch_length, np.int64), 0
    for part, (size, count) in enumerate(zip(mixture.sizes, mixture.counts, strict=True)):
        own = np.arange(count)
        places = own.copy()
        for other, others in enumerate(mixture.counts):
            if other != part:
                ahead = (2 * own + 1) * others - count
                places += ahead // (2 * count) + 1 if other < part else -(-ahead // (2 * count))
        start, stop = epoch * count, (epoch + 1) * count
        numbers = range(start // size, -(-stop // size))
        passes = np.concatenate([permute(size, [seed, n, part] if part else [seed, n]) for n in numbers])
        order[places] = first + passes[start - numbers[0] * size :][:count]
        first += size
    return order


def shuffled(size, key):
    order = np.arange(size, dtype=np.uint32)
    np.random.default_rng(key).shuffle(order)
    return order


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0.3, 0.7, 1.0, 2.0, 2.4])), min_size=1, max_size=6),
    epoch=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_places_and_lists_are_those_of_runs_that_began_with_them(parts, epoch, seed):
    mixture = Mixture(*zip(*parts, strict=True))
    plain = mixture.order(seed=seed, epoch=epoch, shuffle=False)
    assert (plain[:] == listed(mixture, seed, epoch, lambda size, _: np.arange(size))).all()
    former = mixture.order(seed=seed, epoch=epoch, shuffle=True, kind=1)
    assert (former[:] == listed(mixture, seed, epoch, shuffled)).all()
    computed = mixture.order(seed=seed, epoch=epoch, shuffle=True)
    keyed = listed(mixture, seed, epoch, lambda size, key: permuted(np.arange(size), size, round_keys(key)[:, None]))
    assert (computed[:] == keyed).all()
    some = np.random.default_rng(seed).integers(0, len(computed), 7)
    for order in (plain, former, computed):
        assert (order[some] == order[:][some]).all()
        assert (order[3:9] == order[:][3:9]).all()


def test_the_former_order_is_numpys():
    assert Mixture((11,)).order(seed=3, epoch=1, shuffle=True, kind=1)[:].tolist() == [7, 4, 10, 1, 2, 5, 9, 0, 8, 6, 3]
    three = Mixture((7, 4, 3), (3.0, 1.2, 2.0)).order(seed=5, epoch=2, shuffle=True, kind=1)
    assert three[:].tolist() == [0, 12, 10, 4, 13, 5, 3, 9, 12, 1, 11, 2, 9, 13, 6]


def test_the_order_of_many_images_takes_no_memory():
    order = Mixture((700_000_000, 40_000_000, 90), (5.0, 1.0, 0.2)).order(seed=1, epoch=2, shuffle=True)
    assert len(order) == 868_000_000
    assert len(pickle.dumps(order)) < 1000
    last = order[len(order) - 868 :]
    assert np.bincount(order.mixture.parts_of(last)).tolist() == [700, 140, 28]
    assert (pickle.loads(pickle.dumps(order))[np.array([867_999_999])] == last[-1]).all()
    for wrong in (-1, 868_000_000):
        with pytest.raises(IndexError, match="positions 0 to 867,999,999"):
            order[np.array([wrong])]


def joined(bad=frozenset(), shares=(3.0, 1.2)):
    return JoinedDataset({"big": Numbered(30), "small": Numbered(12, bad)}, shares, [10, 5])


def test_classes_follow_one_another_with_their_names():
    big, small = Numbered(30), Numbered(12)
    small.labels = np.stack([small.labels, np.full(12, -1)], 1)
    both = JoinedDataset({"big": big, "small": small}, [1, 1], [big.num_classes, small.num_classes + 3])
    assert both.labels.shape == (42, 2)
    assert both.labels[:30, 0].tolist() == big.labels.tolist()
    assert (both.labels[30:, 0] == small.labels[:, 0] + big.num_classes).all()
    assert (both.labels[:, 1] == -1).all()
    assert both.num_classes == big.num_classes + small.num_classes + 3
    assert both.class_names[big.num_classes] == f"small/{small.class_names[0]}"
    assert both.class_names[-1] == f"small/{small.num_classes + 2}"
    assert both.key(31) == f"small: {small.key(1)}"
    assert torch.equal(both.image(31), small.image(1))
    with pytest.raises(UsageError, match="images of one size"):
        JoinedDataset({"a": Numbered(3), "b": Numbered(3, size=16)}, [1, 1], [1, 1])


def test_ranks_know_each_others_parts_and_batches_do_not_depend_on_their_number():
    batches = {}
    for world in (1, 2, 3):
        loaders = [
            TrainLoader(joined(), batch_size=6 // world, rank=rank, world_size=world, seed=5) for rank in range(world)
        ]
        seen = []
        for step in zip(*loaders, strict=True):
            labels = torch.cat([labels for _, labels in step])
            sizes = [part.sizes for part in loaders[0].parts]
            assert all([part.sizes for part in loader.parts] == sizes for loader in loaders)
            for loader, (_, own) in zip(loaders, step, strict=True):
                big, small = loader.parts
                assert (own[big.rows] < 10).all()
                assert (own[small.rows] >= 10).all()
            counted = [[int((own < 10).sum()), int((own >= 10).sum())] for _, own in step]
            assert [list(of_rank) for of_rank in zip(*sizes, strict=True)] == counted
            seen.append(labels.tolist())
        batches[world] = seen
        assert loaders[0].next_parts is None
    assert batches[1] == batches[2] == batches[3]
    assert {sum(label < 10 for label in batch) for batch in batches[1][:-1]} <= {4, 5}


def test_an_unreadable_image_gives_way_to_one_of_its_own_part():
    loader = TrainLoader(joined(frozenset({3, 4, 5, 6})), batch_size=15, rank=0, world_size=1, seed=1, cache=None)
    for _, labels in loader:
        assert [int((labels < 10).sum()), int((labels >= 10).sum())] == [part.sizes[0] for part in loader.parts]
    nothing = joined(frozenset(range(12)))
    with pytest.raises(DataError, match="can be read"):
        list(TrainLoader(nothing, batch_size=15, rank=0, world_size=1, seed=1, cache=None))
