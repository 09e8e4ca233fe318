"""``plsc gallery`` as it is typed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import UsageError
from plsc.gallery.backends import open_store
from plsc.gallery.sqlite.schema import VERSION
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.transfer import write_copy
from plsc.gallery.values import Collection, NewPerson, Person
from plsc.tools.entry import main


def gallery(*words: object) -> int:
    return main(["gallery", *map(str, words)])


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """An embedding set of three persons and a row without one."""
    vectors = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    labels = np.array([0, 1, 2, 0, 1, 2, 0, -1])
    write_embedding_set(tmp_path / "people.emb", vectors, contract_id="m", labels=labels, class_names=["A", "B", "C"])
    return tmp_path / "people.emb"


def test_a_gallery_goes_round(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, report = tmp_path / "store", tmp_path / "report.json"
    assert gallery("import", store, "people", people) == 0
    assert "8 faces of 4 persons enrolled, 0 rows left out" in capsys.readouterr().out
    opened = SqliteStore(store)
    opened.delete_person("people", opened.persons("people")[0].id)
    opened.close()
    assert gallery("check", store, "--json", report, "--overwrite") == 0
    assert json.loads(report.read_text())["tombstones"] == 3
    told = capsys.readouterr().out
    assert (
        "1 collection, 3 persons, 5 faces, 0 persons expired, 3 deleted faces still in the store's files until the next"
        in told
    )
    assert gallery("compact", store, "--collection", "people") == 0
    assert gallery("compact", store) == 0
    assert gallery("check", store, "--json", report, "--overwrite") == 0
    assert json.loads(report.read_text()) == {
        "store": str(store),
        "version": VERSION,
        "collections": 1,
        "persons": 3,
        "faces": 5,
        "expired": 0,
        "tombstones": 0,
        "snapshots": 0,
        "deleted_in_snapshots": 0,
        "unfinished_snapshots": 0,
    }
    capsys.readouterr()
    assert gallery("snapshot", store, "--out", tmp_path / "copy") == 0
    assert gallery("check", tmp_path / "copy") == 0
    assert f"a sound snapshot; version {VERSION}; people: 3 persons, 5 faces" in capsys.readouterr().out
    assert gallery("restore", tmp_path / "copy", "--store", tmp_path / "new") == 0
    assert (
        gallery("export", tmp_path / "new", "people", "--out", tmp_path / "new.emb", "--json", report, "--overwrite")
        == 0
    )
    assert json.loads(report.read_text()) == {"out": str(tmp_path / "new.emb"), "faces": 5, "persons": 3}
    assert list(EmbeddingSet(tmp_path / "new.emb", verify=True).class_names)[:2] == ["B", "C"]


def test_external_ids_and_expiry_go_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SqliteStore(tmp_path / "store")
    store.create_collection("people", 3, "m")
    new = [
        NewPerson(np.eye(3)[:1], "Ada", {}, "E-1", "2990-01-01"),
        NewPerson(np.eye(3)[1:], "Gone", {}, "E-2", "2001-01-01"),
        NewPerson(np.eye(3)[2:], "Eve"),
    ]
    pictures, crop = tmp_path / "pictures", torch.zeros(3, 16, 16, dtype=torch.uint8)
    ThumbnailStore(store, pictures, keep=True).add_persons("people", new, "m", [[None], [crop, crop], [crop]])
    store.close()
    assert gallery("check", tmp_path / "store") == 0
    assert "3 persons, 4 faces, 1 person expired" in capsys.readouterr().out
    assert gallery("export", tmp_path / "store", "people", "--out", tmp_path / "people.emb") == 0
    assert gallery("import", tmp_path / "new", "people", tmp_path / "people.emb") == 0
    again = SqliteStore(tmp_path / "new")
    about = [(one.name, one.external_id, one.expires, len(one.faces)) for one in again.persons("people")]
    assert about == [("Ada", "E-1", "2990-01-01T00:00:00.000Z", 1), ("Eve", None, None, 1)]
    again.close()
    capsys.readouterr()
    assert gallery("import", tmp_path / "new", "people", tmp_path / "people.emb") == 2
    assert "people has a person with the external id 'E-1' already" in capsys.readouterr().err
    assert gallery("compact", tmp_path / "store", "--thumbnails", pictures) == 0
    assert len(list(pictures.rglob("*.jpg"))) == 1, "Eve's"
    assert gallery("snapshot", tmp_path / "store", "--out", tmp_path / "copy") == 0
    assert gallery("restore", tmp_path / "copy", "--store", tmp_path / "restored") == 0
    capsys.readouterr()
    assert gallery("check", tmp_path / "restored") == 0
    assert "2 persons, 2 faces, 0 persons expired, 0 deleted faces" in capsys.readouterr().out
    restored = SqliteStore(tmp_path / "restored")
    assert restored.find_person("people", "E-1").name == "Ada"
    restored.close()


def test_a_servers_copy_goes_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ann = Person(7, "Ann", {"n": 1}, faces=(3, 4), created="2026-01-01T00:00:00.000Z")
    about = Collection("people", 3, "m", "2026-01-01T00:00:00.000Z", 1, 2)
    write_copy(tmp_path / "copy", [(about, [(ann, np.eye(3, dtype=np.float32)[:2])])])
    assert gallery("check", tmp_path / "copy") == 0
    assert "a sound copy; people: 1 person, 2 faces" in capsys.readouterr().out
    assert gallery("restore", tmp_path / "copy", "--store", tmp_path / "new") == 0
    store = SqliteStore(tmp_path / "new")
    (one,) = store.persons("people")
    assert (one.name, one.metadata, len(one.faces)) == ("Ann", {"n": 1}, 2)
    store.close()


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["check", "nowhere"], 2, "there is no store nowhere"),
        (["check", "."], 2, ". holds no gallery: name the folder that plsc serve --store was given"),
        (["compact", "store", "--collection", "others"], 2, "no collection 'others'"),
        (["snapshot", "store", "--out", "people.emb"], 2, "people.emb exists already"),
        (["restore", "people.emb", "--store", "new"], 1, "no plsc gallery snapshot"),
        (["restore", "nowhere", "--store", "new"], 2, "there is no snapshot nowhere"),
        (["restore", "nowhere", "--store", "postgres:x"], 2, "becomes a folder"),
        (["export", "store", "others", "--out", "new"], 2, "no collection 'others'"),
        (["export", "store", "people", "--out", "people.emb"], 2, "people.emb exists already"),
        (["import", "store", "people", "nowhere"], 2, "there is no folder nowhere"),
        (["import", "store", "1 a", "people.emb"], 2, "no collection can be named"),
        (["import", "people.emb", "people", "people.emb"], 2, "people.emb is no store"),
    ],
)
def test_a_wrong_request_gets_one_line(
    words: list[str],
    code: int,
    line: str,
    tmp_path: Path,
    people: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("store")
    store.create_collection("people", 12, "m")
    store.add_persons("people", [NewPerson(np.eye(12))], "m")
    store.close()
    assert gallery(*words) == code
    message = capsys.readouterr().err.strip()
    assert line in message
    assert message.startswith("plsc gallery: error:")
    assert message.count("\n") == 0
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("store", "line"),
    [
        (
            "postgresql://ada:geheim@db/gallery",
            "postgresql: is no kind of store; did you mean postgres:postgresql://…?",
        ),
        ("Postgres:host=db password=geheim", "did you mean postgres:…?"),
        ("redis://ada:geheim@db", "redis: is no kind of store: give a folder, milvus:URI or postgres:DSN"),
        ("pg:password='geheim x'", "there is no store pg:password=***"),
        ("postgres:host=db password=my geheim", "no DSN (not shown: it may hold a password)"),
        ("postgres:host=db\tpassword=x pasword=geheim" + " " * 300, "no DSN (not shown: it may hold a password)"),
        ("postgres:postgresql://ada:%zzgeheim@db/gallery", "no DSN (not shown: it may hold a password)"),
        (
            "postgres:postgresql://ada:p@geheim@db/gallery",
            "more than one @; write those of a password as %40, and / as %2F",
        ),
        ("milvus:tcp://ada:geheim@db", "'tcp://***@db' is no address of a Milvus server"),
        ("milvus:http://ada:geheim@db:port", "'http://***@db:port' is no address of a Milvus server"),
    ],
)
def test_no_error_shows_a_password(
    store: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg")
    pytest.importorskip("pymilvus")
    monkeypatch.chdir(tmp_path)
    assert gallery("check", store) in (1, 2)
    told = capsys.readouterr()
    assert line in told.err
    for words in (
        ["import", store, "people", "nowhere"],
        ["audit", store],
        ["restore", "nowhere", "--store", store],
        ["check", "postgres:host=db", "password=geheim"],
        ["rotate-key", store, "--encrypt", "a", "--new-key", "b"],
    ):
        assert gallery(*words) in (1, 2)
        told = capsys.readouterr()
        assert "geheim" not in told.out + told.err, words
    assert list(tmp_path.iterdir()) == [], "no folder of the name"


def test_an_address_of_a_server_is_no_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spec in ("postgresql://ada:geheim@db/gallery", "Postgres:host=db"):
        with pytest.raises(UsageError, match="did you mean postgres:"):
            open_store(spec)
    Path("postgre:1").mkdir()
    open_store("postgre:1").close()  # a folder that is there
    open_store("people:2026").close()
