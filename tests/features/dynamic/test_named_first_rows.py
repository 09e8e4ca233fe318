"""Tables whose classes come and go that begin with rows of another, by name, and keep some of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_runs import Killable, losses, register_tiny, run

import plsc
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import DataError, PlscError, UsageError
from plsc.features.dynamic.named_first_rows import insert_first_rows
from plsc.files import read_json, write_json
from plsc.parallel import Mesh
from plsc.tools.entry import main

Ranks = Any
ONE = Mesh(0, 1, 0, torch.device("cpu"))
DIM = 16
COMING = {"backbone": "plain", "epochs": None, "steps": 3, "data.batch_size": 8, "dynamic.max_classes": 14}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six classes by name, what it exports, and one of fixed classes."""
    folder = tmp_path_factory.mktemp("source")
    run(ONE, folder / "run", {**COMING, "data.train": "avatars:6x4"})
    run(ONE, folder / "fixed", {**COMING, "data.train": "avatars:6x4", "dynamic.max_classes": None, "head.centers": 2})
    weights = str(folder / "weights.safetensors")
    assert main(["table", "export", str(folder / "run"), str(folder / "rows.safetensors")]) == 0
    centres = ["--centres", str(folder / "rows.npy")]
    register_tiny()
    assert main(["checkpoint", "export", str(folder / "run"), weights, *centres]) == 0
    return folder


def names_of(count: int, first: int = 0) -> list[str]:
    return [f"avatar-{number}" for number in range(first, first + count)]


def directions(source: Path) -> dict[str, torch.Tensor]:
    """Unit rows by name, as the exported table has them."""
    rows, names = load_file(source / "rows.safetensors")["weight"], read_json(source / "rows.json")["classes"]
    return {name: row.double() / row.double().norm() for row, (name,) in zip(rows, names, strict=True)}


def begun(mesh: Mesh, source: Path, names: list[str], centers: int = 1) -> dict[str, torch.Tensor]:
    """Rows (K, D) by name that a head begins with."""
    head = plsc.DynamicHead(DIM, 20, mesh, centers=centers)
    head.use_names(names)
    assert insert_first_rows(head, str(source)) == head.num_classes
    keys = head.key_map.keys.tolist()
    return {head.key_map.names[key]: row for key, row in zip(keys, head.rows_of(keys), strict=True)}


@pytest.mark.parametrize("kind", ["run", "run/checkpoints", "rows.safetensors", "rows.npy"])
def test_classes_of_the_data_begin_with_the_rows_of_their_names(source: Path, ranks: Ranks, kind: str) -> None:
    expected = directions(source)
    for found in ranks(2, begun, source / kind, names_of(7, first=2)):
        assert found.keys() == set(names_of(4, first=2))  # the source has no others, and the data not the first two
        for name, (row,) in found.items():
            assert torch.allclose(row.double(), expected[name] * 0.01 * DIM**0.5, rtol=1e-5)


def test_sub_centres_begin_each_at_its_own_or_near_the_one(source: Path) -> None:
    near = begun(ONE, source / "rows.npy", names_of(3), centers=2)
    for name, direction in directions(source).items():
        if name in near:
            assert torch.allclose(near[name][0].double(), direction * 0.01 * DIM**0.5, rtol=1e-5)
            assert 0.005 < (near[name][1] - near[name][0]).std() < 0.02
    assert main(["table", "export", str(source / "fixed"), str(source / "fixed.safetensors"), "--overwrite"]) == 0
    rows = load_file(source / "fixed.safetensors")["weight"].view(6, 2, DIM).double()
    own = begun(ONE, source / "fixed", names_of(6), centers=2)  # by the names in RUN/classes.json
    for number, name in enumerate(names_of(6)):
        unit = rows[number] / rows[number].norm(dim=1, keepdim=True)
        assert torch.allclose(own[name].double(), unit * 0.01 * DIM**0.5, rtol=1e-5)


def test_pictures_of_an_embedding_set_are_averaged_by_name(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows, labels = generator.normal(size=(40, DIM)).astype(np.float32), generator.integers(-1, 4, 40)
    write_embedding_set(tmp_path / "set.emb", rows, contract_id="c", labels=labels, class_names=names_of(4))
    found = begun(ONE, tmp_path / "set.emb", names_of(2, first=2))
    unit = rows.astype(np.float64) / np.linalg.norm(rows, axis=1, keepdims=True)
    for label in (2, 3):
        mean = unit[labels == label].sum(0)
        expected = torch.from_numpy(mean / np.linalg.norm(mean) * 0.01 * DIM**0.5)
        assert torch.allclose(found[f"avatar-{label}"][0].double(), expected, rtol=1e-5)


@pytest.mark.feature("frozen")
@pytest.mark.live
def test_a_killed_run_keeps_frozen_names_at_the_rows_of_another_run(source: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("avatar-1\navatar-4\nnobody\n")
    changes = {**COMING, "steps": 6, "head.init_rows": str(source / "run"), "checkpoint.every_steps": 4}
    changes |= {"frozen.rows": str(tmp_path / "names.txt")}
    run(ONE, tmp_path / "whole", changes)
    changes |= {"head.placement": f"mmap:{tmp_path / 'table'}", "journal.enabled": True}
    killed = Killable(1, tmp_path / "killed", changes)
    killed.wait_for_step(2)  # before the first checkpoint: the files have rows, and nothing has their keys
    killed.kill([0])
    killed.wait()
    run(ONE, tmp_path / "killed", changes, resume="auto")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert "class table from head.init_rows" in (tmp_path / "whole" / "train.log").read_text()
    expected = directions(source)
    for name in ("killed", "whole"):
        out = tmp_path / f"{name}.safetensors"
        assert main(["table", "export", str(tmp_path / name), str(out)]) == 0
        rows, names = load_file(out)["weight"], read_json(out.with_suffix(".json"))["classes"]
        assert len(names) == 10
        for row, (own,) in zip(rows, names, strict=True):
            first = expected.get(own, torch.zeros(DIM)).float() * 0.01 * DIM**0.5
            assert torch.allclose(row, first, rtol=1e-5) == (own in ("avatar-1", "avatar-4"))


@pytest.mark.parametrize(
    ("content", "names", "error", "message"),
    [
        ((3, DIM), None, UsageError, "has no names of its classes beside it"),
        ((3, DIM), [["a"], ["b"]], DataError, "holds 3 classes, and names of 2 lie beside it"),
        ((3, DIM), [["a"], ["b"], "c"], DataError, "holds no names of classes"),
        ((3, DIM + 1), [["a"], ["b"], ["c"]], UsageError, "has 1 x 17 numbers for each class"),
        ((3, DIM), [["a"], ["b"], ["c"]], UsageError, "has a row of none of the data's classes"),
        (None, None, UsageError, "there is no head.init_rows"),
    ],
)
def test_what_has_no_such_rows_is_refused(
    tmp_path: Path, content: tuple[int, int] | None, names: Any, error: type[PlscError], message: str
) -> None:
    if content is not None:
        save_file({"weight": torch.ones(content)}, tmp_path / "rows.safetensors")
    if names is not None:
        write_json(tmp_path / "rows.json", {"classes": names})
    head = plsc.DynamicHead(DIM, 20)
    head.use_names(names_of(3))
    with pytest.raises(error, match=message):
        insert_first_rows(head, str(tmp_path / "rows.safetensors"))
