"""One set of pictures in every kind of source: the same bytes, labels and names, and every picture once an epoch."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.linear_embedder import SIZE, stand_in
from support.source_kinds import IMAGES, KINDS, PEOPLE, PICTURES, ROWS

from plsc.data import ImageDataset, TrainLoader, open_dataset
from plsc.data.convert import convert
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.extract import extract
from plsc.embedding.sources import open_images
from plsc.parallel import Mesh

ONE = Mesh(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: write(tmp_path_factory.mktemp(kind)) for kind, write in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_pictures_under_the_same_names(sources: dict[str, str], kind: str) -> None:
    data = open_dataset(sources[kind], image_size=None)
    assert list(data.class_names) == sorted(PEOPLE)
    found = {data.key(row): (data.class_names[data.labels[row]], data.encoded(row)) for row in range(len(data))}
    assert found == {name: (label, content) for label, name, content in ROWS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", ["x.rec", "folder"])
def test_conversion_keeps_bytes_labels_and_names(sources: dict[str, str], kind: str, out: str, tmp_path: Path) -> None:
    convert(open_dataset(sources[kind], image_size=None), tmp_path / out, quiet=True)
    data = open_dataset(tmp_path / out, image_size=None)
    found = {data.key(row): (data.class_names[data.labels[row]], data.encoded(row)) for row in range(len(data))}
    assert found == {name: (label, content) for label, name, content in ROWS}


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6), st.integers(0, 3))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_picture_is_seen_once_an_epoch_however_often_and_at_what_ranks_a_run_goes_on(
    sources: dict[str, str], kind: str, stops: list[tuple[int, int]], seed: int
) -> None:
    """Of a run that stops after some steps, again and again, and goes on at other numbers of ranks.

    Where fewer pictures are left than ranks, images from before fill a step up, as docs/data.md says: not tried here.
    """
    data = open_dataset(sources[kind], image_size=32)
    seen: Counter[tuple[int, str]] = Counter()
    state: dict = {"epoch": 0, "consumed": 0, "order": 2}
    for world, steps in [*stops, (1, IMAGES)]:
        if state["epoch"] == 0 and world <= IMAGES - state["consumed"]:
            ranks = [rank_of(data, rank, world, seed, state) for rank in range(world)]
            state = advance(data, ranks, steps, seen)
    assert seen == Counter({(0, name): 1 for name in PICTURES})


def rank_of(data: ImageDataset, rank: int, world: int, seed: int, state: dict) -> TrainLoader:
    loader = TrainLoader(data, batch_size=1, rank=rank, world_size=world, seed=seed, augment="none", cache=None)
    loader.load_state_dict(state)
    return loader


def advance(data: ImageDataset, ranks: list[TrainLoader], steps: int, seen: Counter) -> dict:
    """Take so many steps of the first epoch on all ranks, count what they see, and return what is saved."""
    for _, *batches in zip(range(steps), *ranks, strict=False):
        for loader, (images, labels) in zip(ranks, batches, strict=True):
            for index, image, label in zip(loader.indices, images, labels, strict=True):
                assert torch.equal(image, data.image(index))
                assert data.class_names[int(label)] == data.key(index).partition("/")[0]
                seen[loader.epoch, data.key(index)] += 1
    return ranks[0].state_dict()


def test_embeddings_are_the_same_bits_from_every_kind(sources: dict[str, str], tmp_path: Path) -> None:
    found = {}
    for kind, source in sources.items():
        made = extract(stand_in(), open_images(source, SIZE), tmp_path / kind, ONE, quiet=True)
        assert made["errors"] == 0
        rows = EmbeddingSet(tmp_path / kind)
        found[kind] = {key: row.tobytes() for key, row in zip(rows.keys, rows.rows(0, IMAGES), strict=True)}
    assert found["folder"].keys() == PICTURES.keys()
    assert all(vectors == found["folder"] for vectors in found.values())
