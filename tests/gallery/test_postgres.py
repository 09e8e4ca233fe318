"""Postgres alone: several services on one store, lost connections, nothing of a value in the SQL."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import Servers

from plsc.errors import ConflictError, IntegrityError, NotFoundError, StorageError, UsageError
from plsc.gallery.backends import open_store
from plsc.gallery.filters import Filter
from plsc.gallery.postgres import PostgresStore, open_postgres
from plsc.gallery.postgres_rows import _metadata_json, filter_clause, find_collection
from plsc.gallery.transfer import read_copy
from plsc.gallery.values import NewPerson
from plsc.tools.entry import main


@pytest.fixture
def dsn(servers: Servers) -> str:
    """The DSN of an empty store."""
    return servers.address("postgres")


@pytest.fixture
def opened() -> Iterator[list[PostgresStore]]:
    """Stores that are closed at the end, however the test ends."""
    stores: list[PostgresStore] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def store(dsn: str, opened: list[PostgresStore]) -> PostgresStore:
    """Four persons of two faces each."""
    store = open_postgres(dsn)
    opened.append(store)
    store.create_collection("people", 4, "m")
    store.add_persons("people", [NewPerson(vectors(2, n), f"p{n}", {"n": n}) for n in range(4)], "m")
    return store


def vectors(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)


@pytest.mark.slow
def test_several_services_share_one_store(dsn: str, store: PostgresStore, opened: list[PostgresStore]) -> None:
    """Each has its own connections, as processes have; ids are given once all the same."""
    opened += [open_postgres(dsn) for _ in range(3)]
    stores = opened

    def work(number: int) -> list[int]:
        store, ids = stores[number], list[int]()
        for turn in range(10):
            (one,) = store.add_persons("people", [NewPerson(vectors(1, 1000 + 100 * number + turn))], "m")
            ids += [one.id, *one.faces]
            other = stores[(number + 1) % len(stores)]
            assert other.search("people", vectors(1, 1000 + 100 * number + turn), k=1)[0][0].person == one.id
            if turn % 2:
                other.delete_person("people", one.id)
                with pytest.raises(NotFoundError):
                    store.person("people", one.id)
        return ids

    with ThreadPoolExecutor(4) as pool:
        ids = [id for part in pool.map(work, range(4)) for id in part]
    assert len(set(ids)) == len(ids) == 80
    assert stores[2].check()["persons"] == stores[0].collection("people").persons == 4 + 20
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda store: outcome(store), stores))
    assert sorted(made) == ["exists", "exists", "exists", "made"], "one of those that make it at once has made it"


def outcome(store: PostgresStore) -> str:
    try:
        store.create_collection("once", 4, "m")
    except ConflictError:
        return "exists"
    return "made"


def test_opening_at_once_makes_the_tables_once(dsn: str, opened: list[PostgresStore]) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened += pool.map(open_postgres, [dsn] * 4)
    assert [store.collections() for store in opened] == [[]] * 4


def test_connections_that_were_cut(dsn: str, store: PostgresStore) -> None:
    """A server that was started again, or a firewall: the next call connects anew, and a call cut short did nothing."""
    import psycopg

    before = store.persons("people")

    def cut() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            )

    cut()
    assert store.persons("people") == before
    with pytest.raises(StorageError, match="the Postgres store failed") as caught:
        cut_short(store, cut)
    assert "\n" not in str(caught.value)
    assert store.persons("people") == before
    store.check()


def cut_short(store: PostgresStore, cut: Callable[[], None]) -> None:
    with store._transaction() as connection:
        connection.execute("DELETE FROM plsc_persons")
        cut()
        connection.execute("SELECT 1")


def test_a_store_that_may_not_write(dsn: str, store: PostgresStore, opened: list[PostgresStore]) -> None:
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    options = conninfo_to_dict(dsn)["options"]
    reader = PostgresStore(make_conninfo(dsn, options=f"{options} -cdefault_transaction_read_only=on"))
    opened.append(reader)
    assert len(reader.persons("people")) == 4
    for change in (
        lambda: reader.add_faces("people", 1, vectors(1), "m"),
        lambda: reader.delete_person("people", 1),
        lambda: reader.create_collection("other", 4, "m"),
        lambda: reader.delete_collection("people"),
    ):
        with pytest.raises(StorageError, match="read-only transaction"):
            change()
    assert store.collection("people").faces == 8


def test_places_where_no_store_can_be(servers: Servers, tmp_path: Path) -> None:
    servers.address("postgres")
    for dsn in ("host=/nowhere dbname=x", f"host={tmp_path}", "port=none", "x y z"):
        with pytest.raises(StorageError, match="the Postgres store cannot be opened") as caught:
            open_postgres(dsn)
        assert "\n" not in str(caught.value)


def test_dims_beyond_pgvector(store: PostgresStore) -> None:
    with pytest.raises(UsageError, match="up to 16000"):
        store.create_collection("wide", 16_001, "m")
    store.create_collection("wide", 16_000, "m")
    row = np.random.default_rng(0).standard_normal((1, 16_000))
    (one,) = store.add_persons("wide", [NewPerson(row)], "m")
    assert store.search("wide", row)[0][0].score == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(store.vectors("wide", one.id), row / np.linalg.norm(row), atol=1e-6)


def test_damage_is_named(store: PostgresStore) -> None:
    assert store.check() == {"collections": 1, "persons": 4, "faces": 8, "expired": 0, "checksums": False}
    for statement, message in (
        ("UPDATE plsc_faces SET embedding = '[1,2,3,4]' WHERE id = 3", "face 3 of collection people"),
        ("UPDATE plsc_faces SET embedding = '[1,0,0]' WHERE id = 5", "face 5 of collection people"),
        ("UPDATE plsc_faces SET id = 1000 WHERE id = 2", "face 1000 of collection people"),
        ("DELETE FROM plsc_faces WHERE id = 2", "4 people and 7 faces instead of 4 and 8"),
        ("DELETE FROM plsc_persons WHERE id = 4", "3 people and 6 faces instead of 4 and 8"),
    ):
        with pytest.raises(IntegrityError, match=message):
            checked_after(store, statement)
    assert store.check()["faces"] == 8


def checked_after(store: PostgresStore, statement: str) -> None:
    """Check what ``statement`` makes of the rows; the error takes it back."""
    with store._transaction() as connection:
        connection.execute(statement)
        find_collection(connection, "people", time).check()


def test_deleted_vectors_leave_the_tables_files(store: PostgresStore) -> None:
    """After compacting, the file of the faces' table is another one, in which a deleted vector is not."""
    marked = np.array([[0.125, 0.25, 0.5, 0.8197561]], np.float32)
    (one,) = store.add_persons("people", [NewPerson(marked)], "m")
    pattern = store.vectors("people", one.id).astype("<f4").tobytes()
    assert pattern in table_bytes(store)
    store.delete_person("people", one.id)
    assert pattern in table_bytes(store), "Postgres leaves dead rows where they are"
    store.compact("people")
    assert pattern not in table_bytes(store)
    assert store.check()["faces"] == 8


def table_bytes(store: PostgresStore) -> bytes:
    with store._connection() as connection:
        connection.autocommit = True
        connection.execute("CHECKPOINT")
        path = connection.execute("SELECT pg_relation_filepath('plsc_faces')").fetchone()[0]
        content: bytes = connection.execute("SELECT pg_read_binary_file(%s)", [path]).fetchone()[0]
        connection.autocommit = False
    return content


def test_a_snapshot_is_of_one_moment(store: PostgresStore, tmp_path: Path) -> None:
    store.create_collection("empty", 3, "other")
    store.snapshot(tmp_path / "copy")
    copied = read_copy(tmp_path / "copy")
    assert [about for about, _ in copied] == store.collections()
    found = {about.name: list(part) for about, part in copied}
    assert [person for person, _ in found["people"]] == store.persons("people")
    for person, part in found["people"]:
        np.testing.assert_array_equal(part, store.vectors("people", person.id))
    with pytest.raises(UsageError, match="cannot write into /proc"):
        store.snapshot(Path("/proc/copy"))


def test_values_are_parameters() -> None:
    evil = "'); DROP TABLE plsc_faces; --%s"
    where = Filter.parse({evil: {"eq": evil, "in": [evil], "gt": evil, "exists": True, "ne": 5, "lt": 3.5}})
    text, values = filter_clause(where, "p.metadata")
    assert "DROP" not in text
    assert text.count("%s") == len(values)
    assert _metadata_json({"a": 2.0**60 + 2**10, "b": 0.1, "c": True}) == (
        '{"a": 1152921504606848000.0, "b": 0.1, "c": true}'
    )


def test_no_command_shows_the_password(
    dsn: str, store: PostgresStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from psycopg.conninfo import make_conninfo

    spec = f"postgres:{make_conninfo(dsn, password='geheim')}"
    report = tmp_path / "report.json"
    for words in (
        ["check", spec],
        ["compact", spec],
        ["snapshot", spec, "--out", str(tmp_path / "copy")],
        ["export", spec, "people", "--out", str(tmp_path / "people.emb")],
        ["import", spec, "others", str(tmp_path / "people.emb")],
        ["migrate", spec, "--status"],
    ):
        main(["gallery", *words, "--json", str(report), "--overwrite"])
        told = capsys.readouterr()
        assert told.out + told.err
        assert "geheim" not in told.out + told.err + (report.read_text() if report.exists() else ""), words
    assert main(["gallery", "check", spec]) == 0
    assert capsys.readouterr().out.startswith("postgres: sound; ")
    assert main(["gallery", "check", f"{spec} port=geheim host=127.0.0.1"]) == 1
    assert 'cannot be opened: connection is bad: invalid integer value "***"' in capsys.readouterr().err


def test_what_a_dsn_leaves_out_comes_from_the_environment(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from psycopg.conninfo import conninfo_to_dict

    for name, value in conninfo_to_dict(dsn).items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))
    open_store("postgres:").close()
