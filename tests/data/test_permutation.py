"""Computed permutations: each number once, by any key, and like chance."""

import numpy as np
import pytest

from plsc.data.permutation import permuted, round_keys

ALL_SIZES = [*range(1, 301), 997, 1000, 1001, 4096, 4097, 65_537, 99_991]


def whole(size: int, *key: int) -> np.ndarray:
    return permuted(np.arange(size), size, round_keys(key)[:, None])


def many(size: int, count: int) -> np.ndarray:
    """The permutations (count, size) of as many keys."""
    keys = np.stack([round_keys([key, 0]) for key in range(count)], 1)
    return permuted(np.tile(np.arange(size), count), size, np.repeat(keys, size, 1)).reshape(count, size)


def deviation(counts: np.ndarray) -> float:
    """By how many of its standard deviations the chi-square of ``counts``, expected to be equal, is off its mean."""
    expected, freedom = counts.mean(), counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def test_every_number_once_at_every_size() -> None:
    for size in ALL_SIZES:
        for key in ((0, 0), (7, 3), (2**40, 5, 1)):
            assert (np.sort(whole(size, *key)) == np.arange(size)).all()


def test_single_positions_and_columns_of_keys_are_those_of_the_whole() -> None:
    size, keys = 700_000_000, np.stack([round_keys([1, number]) for number in range(3)], 1)
    positions = np.array([0, 5, 699_999_999, 5, 123_456_789, 5])
    which = np.array([0, 1, 2, 0, 1, 2])
    found = permuted(positions, size, keys[:, which])
    assert ((found >= 0) & (found < size)).all()
    for position, number, index in zip(positions, which, found, strict=True):
        assert permuted(np.array([position]), size, keys[:, [number]]).tolist() == [index]
    assert len(set(found[positions == 5].tolist())) == 3
    assert (many(5, 3) == [whole(5, key, 0) for key in range(3)]).all()
    assert len(permuted(positions[:0], size, keys[:, :1])) == 0


def test_the_permutations_are_those_of_saved_runs() -> None:
    """Runs go on in the middle of one, with any version."""
    assert whole(11, 3, 1).tolist() == [1, 7, 6, 2, 4, 0, 8, 9, 10, 3, 5]
    assert permuted(np.arange(4), 700_000_000, round_keys([3, 1])[:, None]).tolist() == [
        575_696_432,
        526_022_799,
        107_705_138,
        500_442_561,
    ]


def test_keys_choose_different_permutations() -> None:
    found = {tuple(whole(100, seed, number, *part)) for seed in range(5) for number in range(5) for part in ((), (1,))}
    assert len(found) == 50


@pytest.mark.parametrize(("size", "keys"), [(7, 20_000), (30, 4000), (100, 1000), (2000, 100)])
def test_positions_meet_all_indices_and_neighbours_part(size: int, keys: int) -> None:
    """The keys are the same in every run, so that a bound holds for ever or never."""
    orders = many(size, keys)
    if size <= 100:
        met = np.stack([np.bincount(column, minlength=size) for column in orders.T])
        assert abs(deviation(met)) < 4
    column = int(np.ceil(size**0.5))  # positions of one row, or of one column, of the rectangle
    for distance in (1, 2, column):
        apart = (orders[:, distance:] - orders[:, :-distance]) % size
        assert abs(deviation(np.bincount(apart.ravel(), minlength=size)[1:])) < 4


def test_neighbours_of_many_images_are_far_from_each_other() -> None:
    size = 700_000_000
    order = permuted(np.arange(20_000), size, round_keys([0, 0])[:, None])
    assert (np.abs(np.diff(order)) > 1).all()
    assert abs(deviation(np.bincount(order * 100 // size, minlength=100))) < 4
    assert abs(deviation(np.bincount(np.diff(order) % size * 100 // size, minlength=100))) < 4


def test_few_numbers_come_in_all_their_orders() -> None:
    found, counts = np.unique(many(5, 6000), axis=0, return_counts=True)
    assert len(found) == 120
    assert abs(deviation(counts)) < 4
