"""Data sets that train together: every batch has its share of each, and each is passed through in order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_images import Numbered

from plsc.data import TrainLoader
from plsc.data.mixture import Mixture
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
    orders = [mixture.order(seed=seed, epoch=epoch, shuffle=True) for epoch in range(epochs)]
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
