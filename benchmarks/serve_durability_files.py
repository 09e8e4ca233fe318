"""What benchmarks/serve_durability.py looks for in the files of a store: deleted people, whole rows, a whole log."""

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_durability_people import Person, stored_vector

from plsc.gallery.sqlite.store import SqliteStore
from plsc.serve.audit import parse_line, read_lines
from plsc.serve.audit_chain import log_files, verify

_TEXT = re.compile(rb"text-(\d+)-(\d+)-")
_NEEDLE = slice(8, 40)  # the bytes of a vector that are looked for
_LAST = 400  # people, and as many who are gone, whose vectors are looked for
_GIVE_UP_SECONDS = 120.0  # on a busy machine


def await_forgotten(store: Path, people: Sequence[Person], encrypted: bool, vectors: Sequence[bytes]) -> float:
    """Return how many seconds it took until no file held anything of who is not there; snapshots keep their moment.

    Args:
        store: the folder.
        people: everybody.
        encrypted: no file holds a vector, of whomever.
        vectors: parts of further ones that no file may hold.
    """
    gone = [*vectors]
    gone += [stored_vector(one.number, face)[_NEEDLE] for one in people[-_LAST:] for face in gone_faces(one)]
    begun = time.monotonic()
    while True:
        allowed = {text for person in people for text in person.allowed_texts}
        texts, left = content_of(store, gone)
        if texts == allowed and not left:
            break
        assert time.monotonic() - begun < _GIVE_UP_SECONDS, (
            f"files hold {sorted(texts - allowed)[:5]} and {len(left)} vectors of people who are not there, and "
            f"lack {sorted(allowed - texts)[:5]}"
        )
        time.sleep(0.1)
    seconds = time.monotonic() - begun
    living = [one for one in people if one.is_settled and not one.has_picture][-50:]
    needles = [stored_vector(one.number, state.face)[_NEEDLE] for one in living for state in one.states if state]
    found = content_of(store, needles)[1]
    assert len(found) == (0 if encrypted else len(needles)), "the vectors of the living are the control"
    return seconds


def gone_faces(person: Person) -> Iterable[int]:
    """The versions of a person's face that no file may hold."""
    if person.has_picture:
        return []
    return set(range(person.faces)) - {state.face for state in person.states if state is not None}


def content_of(store: Path, vectors: Iterable[bytes]) -> tuple[set[tuple[int, int]], set[bytes]]:
    """The texts in the store's files but its snapshots, and those of ``vectors`` that are in one."""
    texts, found = set[tuple[int, int]](), set[bytes]()
    for parent, folders, names in os.walk(store):  # which passes over what is removed meanwhile
        folders[:] = [folder for folder in folders if folder != "snapshots"]
        for name in names:
            with suppress(FileNotFoundError):
                content = (Path(parent) / name).read_bytes()
                texts |= {(int(number), int(version)) for number, version in _TEXT.findall(content)}
                found |= {vector for vector in vectors if vector in content}
    return texts, found


def verify_audit(store: Path) -> None:
    """The chain holds, and each change of the store has one line, or is named by a gap."""
    path = store / "audit.jsonl"
    verify(path)
    named: list[int] = []
    for _, _, line in read_lines(log_files(path)):
        entry = parse_line(line.rstrip(b"\n"))
        assert entry is not None
        if entry["event"] == "write":
            named += entry.get("changes", [])
        if entry["event"] == "gap":
            assert "undone" not in entry, entry
            named += [number for first, last in entry["missing"] for number in range(first, last + 1)]
    assert sorted(named) == list(range(1, len(named) + 1)), "changes without a line, or with two"


def verify_thumbnails(store: Path, views: Callable[[], Iterable[dict[str, Any]]]) -> None:
    """Every picture is of a face that is there; soon: one of who expired goes with its person."""
    begun = time.monotonic()
    while True:
        faces = {f"{view['id']}-{face['id']}" for view in views() for face in view["faces"]}
        left = {path.stem for path in (store / "thumbnails").glob("*/*/*")} - faces
        if not left:
            return
        assert time.monotonic() - begun < _GIVE_UP_SECONDS, f"pictures of nobody: {sorted(left)[:5]}"
        time.sleep(0.1)


def verify_store(folder: Path, key: Path | None) -> None:
    """The store passes its own check, and its snapshots are whole."""
    store = SqliteStore(folder, key_file=key)
    try:
        assert store.check()["unfinished_snapshots"] == 0
    finally:
        store.close()
