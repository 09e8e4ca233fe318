"""plsc embed --out X.parquet and X.lance: resumed wherever it was stopped, and whole or absent."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_command

from plsc import models
from plsc.embedding import arrow_tables
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import SetWriter
from plsc.tools import embed
from plsc.tools.entry import main

pq = pytest.importorskip("pyarrow.parquet")

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

of_both = pytest.mark.parametrize("name", ["x.parquet", "x.lance"])
IMAGES = 260  # two shards


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    models.save_model(models.create("resnet8", embedding_dim=8, image_size=32), path)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """The rows that a folder gets."""
    assert run(model, model.with_name("set.emb")) == 0
    return EmbeddingSet(model.with_name("set.emb")).to_arrow()


def run(model: Path, out: Path, *more: str) -> int:
    return main(["embed", str(model), "--data", f"avatars:{IMAGES}x1", "--workers", "0", "--out", str(out), *more])


def read(path: Path) -> Any:
    """A table as others read it, but for the name that Lance gives to a list's elements."""
    found = pq.read_table(path) if path.is_file() else lance.dataset(path).to_table()
    place = found.schema.get_field_index("embedding")
    kind = pa.list_(pa.field("element", found.schema.field(place).type.value_type), 8)
    return found.set_column(place, pa.field("embedding", kind), found.column(place).cast(kind))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Stop:
    """A function in the place of ``former`` that interrupts the process in call ``number``."""

    def __init__(self, former: Any, number: int) -> None:
        self._former, self._left = former, number

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._former(*args, **options)


# What is interrupted, and the rows that the next call still has to embed.
STOPS = {
    "the second shard": (SetWriter, "publish", 1, IMAGES - 256),
    "the end of the set": (SetWriter, "finish", 0, 0),
    "the table": (arrow_tables, "batches_of", 0, 0),
    "the removal of the folder": (shutil, "rmtree", 0, 0),
}


@of_both
@pytest.mark.parametrize(("where", "overwrite"), [*((where, False) for where in STOPS), ("the second shard", True)])
def test_the_same_command_goes_on(
    model: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, overwrite: bool, name: str
) -> None:
    path, more = tmp_path / name, ["--overwrite"] if overwrite else []
    owner, function, number, left = STOPS[where]
    if owner is shutil:
        owner = type("shutil", (), {"rmtree": shutil.rmtree})
        monkeypatch.setattr(embed, "shutil", owner)
    former = getattr(owner, function)
    stop = Stop(former, number)
    monkeypatch.setattr(owner, function, lambda *args, **options: stop(*args, **options))
    assert run(model, path, *more) == 130
    assert names(tmp_path) == [f".{name}.emb", *([name] if where == "the removal of the folder" else [])]
    monkeypatch.setattr(owner, function, former)
    assert run(model, path, *more, "--json", str(tmp_path / "result.json")) == 0
    assert f'"embedded": {left},' in (tmp_path / "result.json").read_text()
    assert names(tmp_path) == ["result.json", name]
    assert read(path).equals(expected)
    assert name == "x.lance" or pq.ParquetFile(path).metadata.num_row_groups == 2


def test_a_file_that_is_there_is_replaced_on_request(model: Path, expected: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"precious")
    assert run(model, path) == 2
    assert (path.read_bytes(), names(tmp_path)) == (b"precious", ["x.parquet"])
    assert run(model, path, "--overwrite") == 0
    assert read(path).equals(expected)


def test_a_table_in_lance_is_replaced_on_request_and_nothing_else(model: Path, expected: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "x.lance", tmp_path / "y.lance"
    lance.write_dataset(pa.table({"n": [1]}), path)
    other.mkdir()
    (other / "precious").touch()
    assert (run(model, path), run(model, other, "--overwrite")) == (2, 2)
    assert (lance.dataset(path).to_table().to_pydict(), names(other)) == ({"n": [1]}, ["precious"])
    assert run(model, path, "--overwrite") == 0
    assert read(path).equals(expected)
    assert names(tmp_path) == ["x.lance", "y.lance"]


@of_both
def test_other_settings_are_refused_or_start_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    with monkeypatch.context() as patch:
        patch.setattr(SetWriter, "finish", Stop(SetWriter.finish, 0))
        assert run(model, path) == 130
    assert run(model, path, "--dtype", "float16") == 2
    assert "was begun with dtype float32, and now it is float16" in capsys.readouterr().err
    assert run(model, path, "--dtype", "float16", "--overwrite") == 0
    assert EmbeddingSet(path).manifest["dtype"] == "float16"
    assert names(tmp_path) == [".plsc-index", name]


@of_both
def test_a_signature_has_no_place(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = tmp_path / "key.pem"
    key.touch(mode=0o600)
    key.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert run(model, tmp_path / name, "--sign", str(key)) == 2
    assert "has no place for it" in capsys.readouterr().err
    assert names(tmp_path) == ["key.pem"]


@of_both
@pytest.mark.live
def test_of_two_processes_it_has_the_same_rows(model: Path, expected: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    words = ["embed", str(model), "--data", f"avatars:{IMAGES}x1", "--workers", "0", "--nproc", "2"]
    assert run_command(*words, "--out", str(path)).returncode == 0
    assert names(tmp_path) == [name]
    assert read(path).equals(expected)
