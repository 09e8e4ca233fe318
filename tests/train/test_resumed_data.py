"""A run goes on with the classes that its rows were trained for: told by their names, whatever their numbers are."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pictures import picture
from support.tiny_runs import losses, refusal, run

from plsc.files import MANIFEST, SEAL, describe_files, read_json, write_json
from plsc.tools.entry import main

Ranks = Any
PEOPLE = {"ann": 3, "bob": 3, "carl": 3, "dora": 3}
SHORT = {"backbone": "plain", "epochs": None, "steps": 2, "data.batch_size": 6, "checkpoint.every_steps": 2}
FOUR = {**SHORT, "steps": 4}


def write_people(folder: Path, people: dict[str, int] = PEOPLE) -> Path:
    """Write a folder per identity; pictures are of the person's name and their number."""
    for name, count in people.items():
        for number in range(count):
            picture(folder / name / f"{number}.png", seed=sum(name.encode()) * 10 + number)
    return folder


@pytest.fixture
def trained(tmp_path: Path, ranks: Ranks) -> tuple[Path, Path]:
    """(data, run of two steps on it)."""
    data, out = write_people(tmp_path / "people"), tmp_path / "run"
    ranks(1, run, out, {**SHORT, "data.train": str(data)})
    return data, out


def refused(ranks: Ranks, out: Path, data: Path, **more: Any) -> str:
    """The one message by which every rank of worlds 1 and 2 is refused; the run's list of names stays as it is."""
    before, found = (out / "classes.json").read_bytes(), set()
    for world in (1, 2):
        changes = {**FOUR, "data.batch_size": 6 // world, "data.train": str(data), **more}
        found |= set(ranks(world, refusal, out, changes, "auto"))
    assert (out / "classes.json").read_bytes() == before
    (message,) = found
    assert "\n" not in message
    return str(message)


def test_another_person_is_refused_by_name(trained: tuple[Path, Path], ranks: Ranks) -> None:
    data, out = trained
    (data / "bob").rename(data / "zed")  # carl and dora move up, and every count stays
    message = refused(ranks, out, data)
    assert message.startswith(f"UsageError: data.train = {data} is not what the run began with: its class 1 was 'bob' ")
    assert "and is 'carl'; bring that data back, or begin another run (another --out), with --init_weights" in message
    (data / "zed").rename(data / "bob")
    assert sorted(losses_of(ranks, out, data)) == [1, 2, 3, 4]


def losses_of(ranks: Ranks, out: Path, data: Path, **more: Any) -> dict[int, float]:
    ranks(1, run, out, {**FOUR, "data.train": str(data), **more}, "auto")
    return losses(out)


def test_a_name_that_keeps_its_place_is_another_person_too(trained: tuple[Path, Path], ranks: Ranks) -> None:
    data, out = trained
    (data / "bob").rename(data / "bert")
    assert "its class 1 was 'bob' and is 'bert'" in refused(ranks, out, data)
    (data / "bert").rename(data / "carl2")  # ann, carl, carl2, dora
    assert "its class 1 was 'bob' and is 'carl'" in refused(ranks, out, data)


def test_files_that_moved_or_were_touched_are_the_same_people(
    trained: tuple[Path, Path], tmp_path: Path, ranks: Ranks
) -> None:
    data, out = trained
    shutil.copytree(out, tmp_path / "other")
    whole = losses_of(ranks, tmp_path / "other", data)
    moved = data.rename(tmp_path / "elsewhere")
    for path in moved.rglob("*.png"):
        os.utime(path, ns=(0, 0))
    assert losses_of(ranks, out, moved) == whole


def test_the_form_does_not_matter_where_the_order_is_the_same(
    trained: tuple[Path, Path], tmp_path: Path, ranks: Ranks
) -> None:
    data, out = trained
    shutil.copytree(out, tmp_path / "first")
    shutil.copytree(out, tmp_path / "second")
    whole = losses_of(ranks, out, data)
    assert main(["data", "convert", str(data), str(tmp_path / "list")]) == 0
    assert main(["data", "convert", str(data), str(tmp_path / "set.rec")]) == 0
    assert losses_of(ranks, tmp_path / "first", tmp_path / "list/images.tsv") == whole
    assert losses_of(ranks, tmp_path / "second", tmp_path / "set.rec") == whole
    assert "other data" not in (tmp_path / "second/train.log").read_text()


def test_the_same_classes_in_another_order_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    out, listed = tmp_path / "run", tmp_path / "list/images.tsv"
    ranks(1, run, out, {**SHORT, "data.train": "avatars:12x3"})
    assert main(["data", "convert", "avatars:12x3", str(tmp_path / "list")]) == 0
    listed.write_text("".join(sorted(listed.read_text().splitlines(keepends=True))))
    for data in (listed.parent, listed):  # in the order of their names, 10 comes before 2
        assert "its class 2 was 'avatar-2' and is 'avatar-10'" in refused(ranks, out, data)


def write_list(path: Path, people: list[str]) -> Path:
    """A list in which classes are numbers, in the order of ``people``."""
    lines = [f"people/{name}/{number}.png\t{label}\n" for label, name in enumerate(people) for number in range(3)]
    path.write_text("".join(lines))
    return path


def test_numbered_classes_are_told_by_their_pictures(tmp_path: Path, ranks: Ranks) -> None:
    write_people(tmp_path / "people", {**PEOPLE, "zed": 3})
    listed, out = write_list(tmp_path / "faces.txt", ["ann", "bob", "carl", "dora"]), tmp_path / "run"
    ranks(1, run, out, {**SHORT, "data.train": str(listed)})
    write_list(listed, ["ann", "carl", "dora", "zed"])
    assert "its pictures have other names, and those of its classes may be mere numbers" in refused(ranks, out, listed)
    (tmp_path / "mount").mkdir()
    (tmp_path / "people").rename(tmp_path / "mount/people")
    elsewhere = write_list(tmp_path / "faces.txt", ["ann", "bob", "carl", "dora"])
    elsewhere.write_text(elsewhere.read_text().replace("people/", "mount/people/"))
    assert sorted(losses_of(ranks, out, elsewhere)) == [1, 2, 3, 4]


def test_pictures_of_named_people_may_be_renamed(trained: tuple[Path, Path], ranks: Ranks) -> None:
    data, out = trained
    (data / "ann/0.png").rename(data / "ann/00.png")
    assert sorted(losses_of(ranks, out, data)) == [1, 2, 3, 4]
    assert "other data: pictures of the same classes and labels under other names" in (out / "train.log").read_text()


def test_clusters_stand_for_their_pictures(tmp_path: Path, ranks: Ranks) -> None:
    data, out = write_people(tmp_path / "people"), tmp_path / "run"
    np.save(tmp_path / "labels.npy", np.repeat(np.arange(4), 3))
    changes = {"data.labels": str(tmp_path / "labels.npy")}
    ranks(1, run, out, {**SHORT, "data.train": str(data), **changes})
    (data / "ann").rename(data / "zed")
    assert "its pictures have other names" in refused(ranks, out, data, **changes)


def test_records_without_names_are_told_by_their_places(tmp_path: Path, ranks: Ranks) -> None:
    out = tmp_path / "run"
    for name, people in (("first", PEOPLE), ("second", {"ann": 3, "carl": 3, "dora": 3, "zed": 3})):
        write_people(tmp_path / name, people)
        main(["data", "convert", str(tmp_path / name), str(tmp_path / f"{name}.rec")])
        for suffix in ("classes.json", "keys.tsv"):
            (tmp_path / f"{name}.{suffix}").unlink()
    ranks(1, run, out, {**SHORT, "data.train": str(tmp_path / "first.rec")})
    assert "its pictures have other names" in refused(ranks, out, tmp_path / "second.rec")
    shutil.copy(tmp_path / "first.rec", tmp_path / "copy.rec")
    assert sorted(losses_of(ranks, out, tmp_path / "copy.rec")) == [1, 2, 3, 4]


def test_each_of_several_tables_keeps_its_people(tmp_path: Path, ranks: Ranks) -> None:
    data, out = write_people(tmp_path / "people"), tmp_path / "run"
    tables = [{"name": "drawn", "data": {"train": "avatars:5x3"}}, {"name": "faces", "data": {"train": str(data)}}]
    changes = {**SHORT, "table": tables, "stage": [{"from_step": 1, "head": {"m": 0.2}}]}
    ranks(1, run, out, changes)
    before = (out / "classes.json").read_bytes()
    (data / "carl").rename(data / "zed")
    for world in (1, 2):
        for message in ranks(world, refusal, out, {**changes, "steps": 4, "data.batch_size": 6 // world}, "auto"):
            assert "its class 7 was 'faces/carl' and is 'faces/dora'" in message
    assert (out / "classes.json").read_bytes() == before
    (data / "zed").rename(data / "carl")
    ranks(1, run, out, {**changes, "steps": 4}, "auto")
    assert sorted(losses(out)) == [1, 2, 3, 4]


def test_drawn_people_are_told_by_name(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, run, tmp_path, {**SHORT, "data.train": "avatars:4x3"})
    message = ranks(1, refusal, tmp_path, {**FOUR, "data.train": "avatars:4x3@7"}, "auto")[0]
    assert "its class 0 was 'avatar-0' and is 'avatar-7'" in message


@pytest.mark.feature("classes")
def test_a_growing_table_finds_its_rows_by_name(tmp_path: Path, ranks: Ranks) -> None:
    data, out = write_people(tmp_path / "people"), tmp_path / "run"
    changes = {"data.train": str(data), "dynamic.max_classes": 6}
    ranks(1, run, out, {**SHORT, **changes})
    (data / "bob").rename(data / "zed")
    ranks(1, run, out, {**FOUR, **changes}, "auto")
    assert "other data: 12 images of 4 classes" in (out / "train.log").read_text()


def as_written_before(checkpoint: Path) -> None:
    """Leave in a checkpoint what earlier versions knew of the data: numbers, and a hash of the labels."""
    state = read_json(checkpoint / "state.json")
    state["data"] = {name: state["data"][name] for name in ("images", "classes", "labels_sha256")}
    write_json(checkpoint / "state.json", state)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"] |= describe_files(checkpoint, ["state.json"])
    manifest.pop(SEAL)
    write_json(checkpoint / MANIFEST, manifest)


def test_checkpoints_of_earlier_versions_are_told_by_the_list_of_names(
    trained: tuple[Path, Path], tmp_path: Path, ranks: Ranks
) -> None:
    data, out = trained
    as_written_before(out / "checkpoints/step-00000002")
    (data / "bob").rename(data / "zed")
    assert "its class 1 was 'bob' and is 'carl'" in refused(ranks, out, data)
    (data / "zed").rename(data / "bob")
    names = (out / "classes.json").rename(tmp_path / "classes.json")
    message = ranks(1, refusal, out, {**FOUR, "data.train": str(data)}, "auto")[0]
    assert f"copy that to {out / 'classes.json'} to go on" in message
    shutil.copy(names, out)
    assert sorted(losses_of(ranks, out, data)) == [1, 2, 3, 4]
