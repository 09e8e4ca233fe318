"""The training loader: who gets which samples, with which pixels, and where it continues."""

import logging
import os
import signal
import time
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_images import Numbered

from plsc.data import ImageDataset, TrainLoader
from plsc.data.loader import (
    BatchReader,
    BatchRequest,
    global_batches,
    map_in_workers,
    report_killed_workers,
)
from plsc.data.mixture import Mixture
from plsc.data.transforms import augment_batch, sample_keys
from plsc.errors import DataError, UsageError


def loaders(data: ImageDataset, world: int, batch_size: int, **options: Any) -> list[TrainLoader]:
    options = {"seed": 3, "augment": "none"} | options
    return [TrainLoader(data, batch_size=batch_size, rank=r, world_size=world, **options) for r in range(world)]


def numbers(images: torch.Tensor) -> list[int]:
    return (images[:, 0, 0, 0].int() + 256 * images[:, 1, 0, 0].int()).tolist()


def steps(ranks: list[TrainLoader], count: int | None = None) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Up to ``count`` steps of all ranks: by step, each rank's batch."""
    parts = [list(islice(iter(loader), count)) for loader in ranks]
    assert len({len(part) for part in parts}) == 1
    return [list(step) for step in zip(*parts, strict=True)]


@settings(deadline=None, max_examples=150)
@given(
    size=st.integers(1, 300),
    batch=st.integers(1, 9),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    stops=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    seed=st.integers(0, 2**40),
)
def test_each_sample_once_through_any_resumption(
    size: int, batch: int, worlds: list[int], stops: list[int], seed: int
) -> None:
    size = max(size, min(2, batch) * max(worlds))
    order = Mixture((size,)).order(seed=seed, epoch=1, shuffle=True)
    seen: list[int] = []
    consumed = 0
    for number, (world, stop) in enumerate(zip(worlds, stops, strict=False)):
        plan = global_batches(size, consumed=consumed, batch_size=batch, world_size=world)
        assert len(plan) == len(list(plan))
        for step in plan if number == len(worlds) - 1 else islice(plan, stop):
            parts = [order[step.part(rank, world)] for rank in range(world)]
            lengths = [len(part) for part in parts]
            assert max(lengths) - min(lengths) <= 1
            assert min(lengths) >= min(2, batch)
            assert max(lengths) <= batch + 2
            indices = [int(index) for part in parts for index in part]
            borrowed = consumed - step.start  # from what went before, so that no rank gets too few
            assert 0 <= borrowed < min(2, batch) * world
            assert indices[:borrowed] == seen[len(seen) - borrowed :]
            seen += indices[borrowed:]
            consumed = step.stop
    assert sorted(seen) == list(range(size))


def test_orders_differ_by_epoch_and_seed() -> None:
    hundred, five = Mixture((100,)), Mixture((5,))
    orders = [tuple(hundred.order(seed=seed, epoch=epoch, shuffle=True)[:]) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert tuple(hundred.order(seed=1, epoch=1, shuffle=True)[:]) == orders[4]
    assert five.order(seed=1, epoch=2, shuffle=False)[:].tolist() == [0, 1, 2, 3, 4]
    assert five.order(seed=1, epoch=2, shuffle=True)[:].dtype == np.int64


def test_a_step_of_many_is_computed_by_its_number() -> None:
    plan = global_batches(700_000_003, consumed=5, batch_size=128, world_size=8)
    assert len(plan) == 683_594  # 1,022 samples remain for the last
    assert plan[1] == (5 + 1024, 5 + 2048)
    assert plan[683_593] == plan[-1] == (5 + 683_593 * 1024, 700_000_003)
    with pytest.raises(IndexError):
        plan[683_594]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_labels_are_int64_whatever_they_are_stored_as(dtype: type) -> None:
    data = Numbered(20)
    data.labels = data.labels.astype(dtype)
    (loader,), (expected,) = loaders(data, 1, 8), loaders(Numbered(20), 1, 8)
    for (_, labels), (_, theirs) in zip(loader, expected, strict=True):
        assert labels.dtype == torch.int64
        assert torch.equal(labels, theirs)
        assert loader.next_labels is None or loader.next_labels.dtype == torch.int64


def test_a_run_of_shuffled_lists_goes_on_with_them() -> None:
    """So a state is without a number, which no earlier version wrote; the order is that of numpy's shuffles."""
    data, lists = Numbered(40), []
    for epoch in range(3):
        lists.append(np.arange(40))
        np.random.default_rng([3, epoch]).shuffle(lists[-1])
    (loader,) = loaders(data, 1, 10)
    loader.load_state_dict({"epoch": 0, "consumed": 20})
    assert [number for images, _ in loader for number in numbers(images)] == lists[0][20:].tolist()
    (again,) = loaders(data, 1, 10)
    again.load_state_dict(loader.state_dict())
    for one in (loader, again):
        for epoch in (1, 2):
            assert [number for images, _ in one for number in numbers(images)] == lists[epoch].tolist()
        assert one.state_dict() == {"epoch": 3, "consumed": 0, "order": 1}


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("augment", ["none", "flip", "affine", "elastic", "standard"])
def test_worlds_processes_and_caches_see_the_same_pixels(augment: str) -> None:
    data = Numbered(55, size=24)
    settings_of = [(1, 0, "none"), (2, 0, "memory"), (3, 0, "auto"), (1, 2, "memory"), (2, 1, "none")]
    runs = []
    for world, workers, cache in settings_of:
        ranks = loaders(data, world, 12 // world, augment=augment, workers=workers, cache=cache)
        runs.append([steps(ranks), steps(ranks)])  # two epochs, the second from the cache
    for run in runs:
        for epoch, reference in zip(run, runs[0], strict=True):
            assert len(epoch) == len(reference)
            for step, whole in zip(epoch, reference, strict=True):
                assert torch.equal(torch.cat([images for images, _ in step]), whole[0][0])
                assert torch.equal(torch.cat([labels for _, labels in step]), whole[0][1])
    assert not torch.equal(runs[0][0][0][0][0], runs[0][1][0][0][0])


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
def test_position_counts_what_the_loop_was_given(workers: int) -> None:
    data = Numbered(100)
    whole = [numbers(images) for images, _ in loaders(data, 1, 10)[0]]
    (loader,) = loaders(data, 1, 10, workers=workers)
    assert loader.state_dict() == {"epoch": 0, "consumed": 0, "order": 2}
    for step, (images, _) in enumerate(loader):
        assert numbers(images) == whole[step]
        assert loader.state_dict() == {"epoch": 0, "consumed": 10 * (step + 1), "order": 2}
        if step == 3:
            break
    state = loader.state_dict()
    rest = [numbers(images) for images, _ in loader]  # the same loader goes on where it was left
    assert rest == whole[4:]
    (other,) = loaders(data, 1, 10)
    other.load_state_dict(state)
    assert [numbers(images) for images, _ in other] == whole[4:]
    assert other.state_dict() == loader.state_dict() == {"epoch": 1, "consumed": 0, "order": 2}


@pytest.mark.parametrize("worlds", [(4, 3), (1, 2), (3, 1)])
def test_resume_on_another_number_of_ranks(worlds: tuple[int, int]) -> None:
    data = Numbered(103)
    before, after = loaders(data, worlds[0], 7, augment="flip"), loaders(data, worlds[1], 5, augment="flip")
    seen = [images for step in steps(before, 2) for images, _ in step]
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states)
    for loader in after:
        loader.load_state_dict(states[0])
    seen += [images for step in steps(after) for images, _ in step]
    got = torch.cat(seen)
    assert sorted(numbers(got)) == list(range(103))
    straight = torch.cat([images for images, _ in loaders(data, 1, 50, augment="flip")[0]])
    assert torch.equal(got, straight)


def test_a_loop_left_at_its_last_batch_goes_on_with_the_next_epoch() -> None:
    (loader,) = loaders(Numbered(20), 1, 10)
    next(iter(islice(loader, 1, None)))
    assert loader.state_dict() == {"epoch": 0, "consumed": 20, "order": 2}
    (other,) = loaders(Numbered(20), 1, 10)
    other.load_state_dict(loader.state_dict())
    for one in (loader, other):
        assert len(list(one)) == 2
        assert one.epoch == 2


def test_states_that_do_not_fit() -> None:
    (loader,) = loaders(Numbered(20), 1, 10)
    for state in ({"epoch": 0, "consumed": 21}, {"epoch": -1, "consumed": 0}, {"epoch": 0, "consumed": -5}):
        with pytest.raises(DataError, match="numbered"):
            loader.load_state_dict(state)
    for kind in (0, 3, "2", [], None):
        with pytest.raises(DataError, match=r"order of samples is .*, not 1 or 2: go on with"):
            loader.load_state_dict({"epoch": 0, "consumed": 0, "order": kind})


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 1])
def test_broken_images_give_their_places_to_the_next_and_are_told_once(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = Numbered(40, bad=frozenset({3, 17}))
    (loader,) = loaders(data, 1, 10, workers=workers, max_bad_records=2)
    with caplog.at_level(logging.WARNING, logger="plsc.data"):
        for _ in range(2):
            seen = []
            for images, labels in loader:
                assert [number % 5 for number in numbers(images)] == labels.tolist()
                assert [len(images)] == loader.sizes
                seen += numbers(images)
            assert len(seen) == 40
            assert set(seen) == set(range(40)) - {3, 17}
    assert caplog.text.count("n3 is broken") == 1
    assert caplog.text.count("n17 is broken") == 1
    (strict,) = loaders(data, 1, 10, workers=workers, max_bad_records=1)
    with pytest.raises(DataError, match="more than 1 images of numbered"):
        list(strict)


def test_data_without_a_readable_image_is_named(caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = loaders(Numbered(40, bad=frozenset(range(40))), 1, 10)
    with pytest.raises(
        DataError, match=r"no image of numbered can be read: \d+ images tried, the first: n\d+ is broken"
    ):
        list(loader)
    assert caplog.text == ""


def test_batches_keep_their_size_whatever_is_broken() -> None:
    data = Numbered(8, bad=frozenset({2, 4, 5}))
    (loader,) = loaders(data, 1, 2, shuffle=False)
    assert [numbers(images) for images, _ in loader] == [[0, 1], [3, 3], [6, 7], [6, 7]]
    (again,) = loaders(data, 1, 2, shuffle=False)
    assert [labels.tolist() for _, labels in again] == [[0, 1], [3, 3], [1, 2], [1, 2]]
    (hopeless,) = loaders(Numbered(200, bad=frozenset(range(2, 200))), 1, 2, shuffle=False, max_bad_records=200)
    assert [numbers(images) for images, _ in islice(hopeless, 3)] == [[0, 1]] * 3  # around the data set
    (few,) = loaders(Numbered(4, bad=frozenset({0, 2, 3})), 1, 4, shuffle=False)
    assert [numbers(images) for images, _ in few] == [[1, 1, 1, 1]]
    (strict,) = loaders(Numbered(200, bad=frozenset(range(2, 200))), 1, 2, shuffle=False, max_bad_records=50)
    with pytest.raises(DataError, match="more than 50 images of numbered could not be read"):
        list(strict)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_knows_the_sizes_of_all(world: int) -> None:
    data = Numbered(32, bad=frozenset({1, 2, 3, 30}))
    ranks = [list(loader) for loader in loaders(data, world, 5)]
    for loader in loaders(data, world, 5):
        announced: list[int] | None = None
        for step, _ in enumerate(loader):
            assert loader.sizes == [len(batches[step][0]) for batches in ranks]
            assert announced in (None, loader.sizes)
            announced = loader.next_sizes
        assert announced is None


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_another_augmentation_holds_from_the_next_loop_on(workers: int) -> None:
    """The processes that read ahead are kept; the position goes on where the loop was left."""
    data = Numbered(30, size=16)
    (loader,), (flipped,), (cropped,) = (
        loaders(data, 1, 4, augment=augment, workers=workers, cache=None) for augment in ("flip", "flip", "standard")
    )
    found = [images.clone() for images, _ in islice(loader, 3)]
    loader.augment = "standard"
    found += [images.clone() for images, _ in loader]
    found += [images.clone() for images, _ in loader]
    expected = [images.clone() for images, _ in flipped][:3]
    whole = [images.clone() for images, _ in cropped]
    expected += whole[3:] + [images.clone() for images, _ in cropped]
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[3], list(flipped)[3][0])
    with pytest.raises(UsageError, match="no augmentation 'crop'"):
        loader.augment = "crop"


def test_pinned_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning needs a GPU: here it is recorded."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.dtype) or tensor.clone())
    batch = BatchReader(Numbered(8), 0, None, 0)[BatchRequest(0, np.arange(3), "none")]
    assert torch.equal(batch.pin_memory().images, batch.images)
    assert pinned == [torch.uint8]


@pytest.mark.live
def test_torchs_own_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(loaders(Numbered(12, size=24), 1, 6, augment="standard", workers=workers)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"augment": "strong"}, "no augmentation 'strong'"),
        ({"rank": 2}, "rank 2"),
        ({"world_size": 6}, "too few"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], why: str) -> None:
    right = {"batch_size": 2, "rank": 0, "world_size": 1, "seed": 0}
    with pytest.raises(UsageError, match=why):
        TrainLoader(Numbered(10), **(right | wrong))


def test_images_of_any_size_cannot_be_trained_on() -> None:
    data = Numbered(10)
    data.image_size = None
    with pytest.raises(UsageError, match="image_size"):
        loaders(data, 1, 2)


@pytest.mark.parametrize("name", ["none", "flip", "affine", "elastic", "standard"])
def test_augmentation_depends_on_seed_epoch_and_index_alone(name: str) -> None:
    images = torch.stack([Numbered(64, size=32).image(index) for index in range(64)])
    indices = np.arange(64)
    whole = augment_batch(images, indices, name, seed=1, epoch=2)
    assert (whole.shape, whole.dtype) == (images.shape, images.dtype)
    turned = np.arange(64)[::-1].copy()
    assert torch.equal(augment_batch(images[turned], turned, name, seed=1, epoch=2), whole[turned])
    assert torch.equal(augment_batch(images[5:6], indices[5:6], name, seed=1, epoch=2), whole[5:6])
    for seed, epoch in ((2, 2), (1, 3)):
        other = augment_batch(images, indices, name, seed=seed, epoch=epoch)
        assert torch.equal(whole, other) == (name == "none")
    if name == "flip":
        for image, result in zip(images, whole, strict=True):
            assert torch.equal(result, image) != torch.equal(result, image.flip(-1))
    assert augment_batch(images[:0], indices[:0], name, seed=1, epoch=2).shape == (0, 3, 32, 32)


def test_affine_moves_a_shape_a_little_and_fills_from_the_edges() -> None:
    """A dark square on white stays about where and as large as it was, and no other grey comes in."""
    images = torch.full((200, 3, 48, 48), 255, dtype=torch.uint8)
    images[:, :, 12:28, 8:24] = 0  # off the middle: a mirror image would have it elsewhere
    bent = augment_batch(images, np.arange(200), "affine", seed=0, epoch=0)
    dark = 1 - bent[:, 0].float() / 255
    area = dark.sum((1, 2))
    assert (bent[:, :, 0, 0] == 255).all()
    assert ((area > 0.6 * 256) & (area < 1.6 * 256)).all()
    columns = (dark.sum(1) * torch.arange(48)).sum(1) / area
    assert ((columns - 15.5).abs() < 9).all()
    assert columns.std() > 1
    assert torch.unique(bent, dim=0).shape[0] == 200


def test_elastic_bends_what_affine_keeps_straight() -> None:
    """Of three dots on a line the middle one leaves the line between the others, by more than rounding of pixels."""
    images = torch.full((200, 3, 64, 64), 255, dtype=torch.uint8)
    for column in (16, 32, 48):
        images[:, :, 30:34, column - 2 : column + 2] = 0

    def sag(name: str) -> torch.Tensor:
        """How far the middle dot is from the line, in pixels."""
        dark = 1 - augment_batch(images, np.arange(200), name, seed=0, epoch=0)[:, 0].float() / 255
        heights = []
        for columns in (slice(0, 24), slice(24, 40), slice(40, 64)):
            part = dark[:, :, columns]
            heights.append((part.sum(2) * torch.arange(64)).sum(1) / part.sum((1, 2)))
        return heights[1] - (heights[0] + heights[2]) / 2

    assert sag("affine").abs().median() < 0.1 < 0.3 < sag("elastic").abs().median() < 2


def test_half_of_all_images_are_mirrored() -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        keys = sample_keys(np.arange(100_000), seed=seed, epoch=epoch)
        assert len(np.unique(keys)) == 100_000
        assert abs(int((keys >> np.uint64(63)).sum()) - 50_000) < 800


class ProcessIds(torch.utils.data.Dataset[int]):
    """Every item is the process that read it."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_process_is_reported_wherever_the_loop_is() -> None:
    @report_killed_workers()
    def kill_first() -> None:
        for process in map_in_workers(ProcessIds(), range(100), 1):
            os.kill(process, signal.SIGKILL)
            time.sleep(60)  # not in the loader: torch's handler of SIGCHLD interrupts this

    with pytest.raises(DataError, match="a decoding process was killed"):
        kill_first()
    with pytest.raises(RuntimeError, match="else"), report_killed_workers():
        raise RuntimeError("something else")


@pytest.mark.live
@pytest.mark.parametrize("error", [ConnectionResetError, EOFError])
def test_a_process_is_reported_whose_pipe_ends_before_it(error: type[Exception]) -> None:
    images: Any = iter(map_in_workers(ProcessIds(), range(100), 1))
    pipe = patch.object(images._data_queue, "get", side_effect=error)
    with pytest.raises(DataError, match="a decoding process was killed"), pipe, report_killed_workers():
        next(images)
    with pytest.raises(error, match="else"), report_killed_workers():
        raise error("somebody else's")
