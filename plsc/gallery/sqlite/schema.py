"""The tables of a gallery's SQLite file, by version, and the migration of a former version's file.

The column names belong to the file format. Of ``collections``, ``base`` is the number of the current sealed segment
(0: none), ``seal`` its manifest's digest, ``covered`` its watermark (the largest face id that it accounts for).
``forgotten`` holds the tombstones. ``space`` is what is added to the id of a face to give the key (``face``) of its
searched vector in ``vectors`` and ``forgotten``: a multiple of :data:`SPACE`, 0 until the collection was first moved to
another model. ``migrations`` has the collections whose faces have vectors in a second space (plsc.gallery.migration).

A migration rewrites at most the few rows of ``unfinished``: a gallery of ten million persons opens as fast as before.
Rows that a former version wrote keep their checksums, because columns with their default values do not enter them
(plsc.gallery.sqlite.records).
"""

import sqlite3
from collections.abc import Iterable, Mapping

VERSION = 5
SPACE = 2**48  # ids of faces are smaller

_PERSONS_1 = """CREATE TABLE persons (
        id INTEGER PRIMARY KEY AUTOINCREMENT, collection INTEGER NOT NULL REFERENCES collections (number),
        name TEXT, metadata TEXT NOT NULL, created TEXT NOT NULL, checksum INTEGER NOT NULL)"""
SCHEMA_1 = (
    """CREATE TABLE collections (
        number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, dim INTEGER NOT NULL,
        contract_id TEXT NOT NULL, created TEXT NOT NULL, checksum INTEGER NOT NULL,
        persons INTEGER NOT NULL DEFAULT 0, faces INTEGER NOT NULL DEFAULT 0,
        base INTEGER NOT NULL DEFAULT 0, seal TEXT NOT NULL DEFAULT '', covered INTEGER NOT NULL DEFAULT 0)""",
    _PERSONS_1,
    "CREATE INDEX persons_of_collection ON persons (collection)",
    """CREATE TABLE faces (
        id INTEGER PRIMARY KEY AUTOINCREMENT, collection INTEGER NOT NULL REFERENCES collections (number),
        person INTEGER NOT NULL REFERENCES persons (id), checksum INTEGER NOT NULL)""",
    "CREATE INDEX faces_of_collection ON faces (collection)",
    "CREATE INDEX faces_of_person ON faces (person)",
    # face is no foreign key: the row outlives the face until it is erased, and keeps its space after that
    "CREATE TABLE vectors (face INTEGER PRIMARY KEY, checksum BLOB NOT NULL, vector BLOB NOT NULL)",
    "CREATE INDEX erased ON vectors (face) WHERE checksum = x'0000000000'",
    # tombstones: deleted faces whose vectors are still in a sealed segment or in this file
    "CREATE TABLE forgotten (face INTEGER PRIMARY KEY, collection INTEGER NOT NULL)",
    "CREATE INDEX forgotten_of_collection ON forgotten (collection)",
    # metadata as filters compare it; kind is a plsc.gallery.validation.Kind
    """CREATE TABLE attributes (
        collection INTEGER NOT NULL, key TEXT NOT NULL, kind INTEGER NOT NULL, value NOT NULL, person INTEGER NOT NULL,
        PRIMARY KEY (collection, key, kind, value, person)) WITHOUT ROWID""",
    "CREATE TABLE unfinished (work TEXT PRIMARY KEY) WITHOUT ROWID",
)

# Columns that version 2 adds to persons. A person's revision counts its changes; expires is a time as `created` is.
_PERSONS_2 = ("external_id TEXT", "revision INTEGER NOT NULL DEFAULT 1", "expires TEXT")
_ADDED_2 = (
    "CREATE UNIQUE INDEX persons_by_external_id ON persons (collection, external_id) WHERE external_id IS NOT NULL",
    "CREATE INDEX persons_by_expiry ON persons (collection, expires) WHERE expires IS NOT NULL",
    # answers to requests with an Idempotency-Key; token is '' where the service has none, fingerprint of the request
    """CREATE TABLE idempotency (
        token TEXT NOT NULL, key TEXT NOT NULL, fingerprint BLOB NOT NULL, status INTEGER NOT NULL, body BLOB NOT NULL,
        created TEXT NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (token, key))""",
    "CREATE INDEX idempotency_by_age ON idempotency (token, created)",
    # what decides how the other tables are read, such as "encryption": a store with one not in SETTINGS is refused
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
SCHEMA_2 = (
    *(statement for statement in SCHEMA_1 if statement != _PERSONS_1),
    _PERSONS_1.removesuffix(")") + "".join(f", {column}" for column in _PERSONS_2) + ")",  # as ALTER TABLE leaves it
    *_ADDED_2,
)
# What version 3 adds. Of a migration, details is JSON; dim, contract_id and space are those of the second space, filled
# is how many faces have a vector in it, and estimated for how many of them it is an estimate.
_COLLECTIONS_3 = ("space INTEGER NOT NULL DEFAULT 0",)
_ADDED_3 = (
    """CREATE TABLE migrations (
        collection INTEGER PRIMARY KEY REFERENCES collections (number), space INTEGER NOT NULL, dim INTEGER NOT NULL,
        contract_id TEXT NOT NULL, began TEXT NOT NULL, is_cut_over INTEGER NOT NULL, details TEXT NOT NULL,
        checksum INTEGER NOT NULL, filled INTEGER NOT NULL DEFAULT 0, estimated INTEGER NOT NULL DEFAULT 0)""",
)
_COLLECTIONS_1 = SCHEMA_1[0]
SCHEMA_3 = (
    *(statement for statement in SCHEMA_2 if statement != _COLLECTIONS_1),
    _COLLECTIONS_1.removesuffix(")") + "".join(f", {column}" for column in _COLLECTIONS_3) + ")",
    *_ADDED_3,
)
# What version 4 adds: the callers' names of faces.
_ADDED_4 = (
    """CREATE TABLE face_keys (
        person INTEGER NOT NULL, key TEXT NOT NULL, face INTEGER NOT NULL, checksum INTEGER NOT NULL,
        PRIMARY KEY (person, key)) WITHOUT ROWID""",
)
SCHEMA_4 = (*SCHEMA_3, *_ADDED_4)
# What version 5 adds: since when something is unfinished, which followed its name before.
_UNFINISHED_1 = SCHEMA_1[-1]
_UNFINISHED_5 = "since TEXT"
_SPLIT_5 = (
    "UPDATE unfinished SET work = substr(work, 1, instr(work, ' since ') - 1), "
    "since = substr(work, instr(work, ' since ') + 7) WHERE work LIKE '% since %'",
)
SCHEMA_5 = (
    *(statement for statement in SCHEMA_4 if statement != _UNFINISHED_1),
    _UNFINISHED_1.replace(")", f", {_UNFINISHED_5})"),
)
WRITTEN_ANEW = "written anew"  # a row of unfinished, see plsc.gallery.sqlite.unfinished
SETTINGS = frozenset(("encryption", "store_id"))  # "1", and the id in hexadecimal that its file of keys has

SCHEMAS: Mapping[int, Iterable[str]] = {1: SCHEMA_1, 2: SCHEMA_2, 3: SCHEMA_3, 4: SCHEMA_4, 5: SCHEMA_5}


def create(connection: sqlite3.Connection, application_id: int, settings: Mapping[str, str]) -> None:
    """Create the tables in one transaction: a process killed here leaves an empty file, which is created again."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in sorted(SCHEMAS[VERSION], key=lambda one: "CREATE TABLE" not in one):  # then the indexes
        connection.execute(statement)
    connection.executemany("INSERT INTO settings VALUES (?, ?)", settings.items())
    connection.execute("INSERT INTO unfinished VALUES (?, NULL)", (WRITTEN_ANEW,))
    connection.execute(f"PRAGMA application_id = {application_id}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a file of a former ``version`` to the present one, in one transaction."""
    changes = [
        (1, "persons", _PERSONS_2, _ADDED_2),
        (2, "collections", _COLLECTIONS_3, _ADDED_3),
        (3, "", (), _ADDED_4),
        (4, "unfinished", (_UNFINISHED_5,), _SPLIT_5),
    ]
    connection.execute("BEGIN IMMEDIATE")
    try:
        for former, table, columns, added in changes:
            if version <= former:
                for column in columns:
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
                for statement in added:
                    connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def statements(connection: sqlite3.Connection) -> list[str]:
    """Return the statements that made the file's tables and indexes."""
    rows = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'")
    return [row[0] for row in rows]


def read_settings(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the settings by name; version 1 had none."""
    if not connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'settings'").fetchone()[0]:
        return {}
    return dict(connection.execute("SELECT name, value FROM settings ORDER BY name").fetchall())
