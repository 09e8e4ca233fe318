"""Fuzz targets of what keys and chains protect: signed folders, encrypted stores, tokens, the audit log.

Here a refusal is not enough: what is not refused has to be what was written.
"""

import asyncio
import base64
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from support.live_service import CONTRACT, DIM, vectors
from untrusted.samples import Samples

from fuzz.driver import Target, Violation, damaged, damaged_member, files_below
from fuzz.mutations import mutated_bytes
from fuzz.readers import copied, describe_again, read_checkpoint, read_index, read_set
from plsc.errors import IntegrityError, PlscError
from plsc.files import canonical_json, read_json, verify_files
from plsc.gallery.backends import open_store
from plsc.gallery.sqlite.backup import check_readers, restore
from plsc.gallery.sqlite.keys import KeyTable, read_key_file
from plsc.gallery.values import NewPerson
from plsc.models import load_model
from plsc.serve.audit import AuditLog, Head
from plsc.serve.audit_chain import verify
from plsc.serve.tokens import add_token, read_tokens
from plsc.signing import VERIFY_KEY, sign

FILE_END = b"\0"  # between the files of a log; JSON lines hold none
LOG_FILES = 3


def targets(samples: Samples, folder: Path) -> list[Target]:
    """Every target; they write into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = _snapshot("snapshot", samples.snapshot, folder / "plain/snapshot")
    return [*_signed(samples, folder), *_encrypted(folder), snapshot, _tokens(folder), _log(folder)]


# --- signatures ---


def _signed(samples: Samples, folder: Path) -> list[Target]:
    key = Ed25519PrivateKey.generate()
    public = folder / "public.pem"
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    found = []
    for name, source, read in (
        ("signed checkpoint", samples.checkpoint, read_checkpoint),
        ("signed embedding set", samples.embeddings, read_set),
        ("signed index", samples.index, read_index),
    ):
        original = copied(source, folder / "signed" / source.name)
        sign(original, key)
        found.append(_signed_folder(name, original, folder / "changed" / source.name, public, read))
    model = Path(shutil.copy(samples.model, folder / "signed"))
    sign(model, key)
    return [*found, _signed_file(model, folder / "changed", public)]


def _signed_folder(name: str, original: Path, changed: Path, public: Path, read: Callable[[Path], object]) -> Target:
    files = files_below(original)
    signed = canonical_json(read_json(original / "manifest.json"))

    def run(file: str, content: bytes) -> None:
        place = copied(original, changed) / file
        place.write_bytes(content)
        is_manifest = place.name in ("manifest.json", "manifest.json.sig")
        if len(content) % 2 and not is_manifest:
            describe_again(changed, place)  # the forger writes the hashes anew
        with _asking_for(public):
            read(changed)
            verify_files(changed, read_json(changed / "manifest.json")["files"])
        if canonical_json(read_json(changed / "manifest.json")) != signed:
            raise Violation(f"a manifest that was not signed is taken: {file} was changed")
        if not is_manifest and content != files[file]:
            raise Violation(f"a file that was not signed is taken: {file}")

    return damaged_member(name, files, run)


def _signed_file(original: Path, changed: Path, public: Path) -> Target:
    names = (original.name, f"{original.name}.sig")
    files = {name: original.with_name(name).read_bytes() for name in names}

    def run(file: str, content: bytes) -> None:
        changed.mkdir(exist_ok=True)
        for name in names:
            (changed / name).write_bytes(content if name == file else files[name])
        with _asking_for(public):
            load_model(changed / original.name)
        if file == original.name and content != files[file]:
            raise Violation("a model that was not signed is taken")

    return damaged_member("signed model", files, run)


@contextmanager
def _asking_for(public: Path) -> Iterator[None]:
    os.environ[VERIFY_KEY] = str(public)
    try:
        yield
    finally:
        del os.environ[VERIFY_KEY]


# --- encrypted stores ---


def _encrypted(folder: Path) -> list[Target]:
    key_file, store = folder / "gallery.key", folder / "encrypted"
    master = bytes(range(32))
    key_file.write_bytes(base64.b64encode(master))
    key_file.chmod(0o600)
    with closing(open_store(store, key_file=key_file)) as opened:
        opened.create_collection("people", DIM, CONTRACT)
        persons = [NewPerson(row[None].astype(np.float32), f"person {n}") for n, row in enumerate(vectors(6))]
        opened.add_persons("people", persons, CONTRACT)
        opened.delete_person("people", 2)
        opened.snapshot(store / "snapshots/20260101T000000000000Z")
    keys, snapshot = (store / "keys").read_bytes(), store / "snapshots/20260101T000000000000Z"
    with closing(KeyTable(store / "keys", master, writable=False)) as table:
        known = [table.key(slot) for slot in range(8)]
    return [
        _key_table(keys, folder / "x.keys", master, known),
        _key_file(key_file.read_bytes(), folder / "x.key", master),
        _snapshot("encrypted snapshot", snapshot, folder / "x.encrypted" / snapshot.name, key_file, store / "keys"),
    ]


def _key_table(valid: bytes, path: Path, master: bytes, known: list[bytes | None]) -> Target:
    short = valid[: 4096 + 64 * 8]  # the other keys are of nobody yet

    def make(rng: random.Random) -> bytes:
        content = bytearray(mutated_bytes(short, [short], rng))
        if rng.random() < 0.5 and len(content) > 4096:  # most of the header is zeros that nobody reads
            content[rng.randrange(4096, len(content))] ^= 1 << rng.randrange(8)
        return bytes(content)

    def run(content: bytes) -> None:
        path.write_bytes(content)
        with closing(KeyTable(path, master, writable=False)) as table:
            erased = table.erased()
            for slot in range(len(table)):
                with suppress(IntegrityError):
                    key = table.key(slot)
                    if (key is None) != bool(erased[slot]) or (key is not None and key != known[slot]):
                        raise Violation(f"key {slot} is none that was written")
            table.copy(path.with_name("y.keys"), np.arange(len(table)))
        path.with_name("y.keys").unlink()

    return Target("keys", make, run)


def _key_file(valid: bytes, path: Path, master: bytes) -> Target:
    def run(content: bytes) -> None:
        path.write_bytes(content)
        path.chmod(0o600)
        if len(read_key_file(path)) != len(master):
            raise Violation("a key of another length")

    return damaged("key file", [valid], run, also=[b"\n", b"==", b"-----BEGIN"])


def _snapshot(
    name: str, original: Path, changed: Path, key_file: Path | None = None, keys: Path | None = None
) -> Target:
    """A snapshot whose database is damaged, encrypted with ``keys``, restored."""

    def run(content: bytes) -> None:
        copied(original, changed)
        (changed / "gallery.sqlite").write_bytes(content)
        describe_again(changed, changed / "gallery.sqlite")
        if key_file is not None:
            with suppress(PlscError):
                check_readers(changed, key_file, keys)
        restored = changed.parent / "restored"
        shutil.rmtree(restored, ignore_errors=True)
        restore(changed, restored, key_file=key_file, keys=keys)
        with closing(open_store(restored, key_file=key_file)) as store:
            store.check()

    return damaged(name, [(original / "gallery.sqlite").read_bytes()], run)


# --- tokens and the audit log ---


def _tokens(folder: Path) -> Target:
    path = folder / "tokens.toml"
    add_token(path, "camera", "search", allow=["vectors"], collections=["staff"], rates=["searches=5/m"])
    add_token(path, "desk", "write", expires="2030-01-31")

    def run(content: bytes) -> None:
        path.write_bytes(content)
        for token in read_tokens(path):
            _ = token.expiry  # neither of them fails at the first request
            if token.caller.role not in ("search", "read", "write", "admin"):
                raise Violation(f"a role of {token.caller.role!r}")

    return damaged("tokens", [path.read_bytes()], run, also=[b'role = "admin"\n', b"[[token]]\n"])


def _log(folder: Path) -> Target:
    """A log of several files: every byte of it is told, whoever noted the last line's hash."""
    path = folder / "log/audit.jsonl"
    files, head = _write_log(path)
    lines = [line for file in files for line in file.splitlines()]

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return mutated_bytes(FILE_END.join(files), files, rng)
        changed = [file.splitlines(keepends=True) for file in files]
        first, second = (rng.choice(changed) for _ in range(2))
        one, other = rng.randrange(len(first)), rng.randrange(len(second))
        match rng.randrange(4):
            case 0:
                first[one], second[other] = second[other], first[one]
            case 1:
                del first[one]
            case 2:
                first.insert(one, second[other])
            case _:
                changed.remove(first)
        return FILE_END.join(b"".join(file) for file in changed)

    def run(content: bytes) -> None:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        *rotated, newest = content.split(FILE_END)
        for number, file in enumerate(rotated, 1):
            path.with_name(f"{path.name}.{number}").write_bytes(file)
        path.write_bytes(newest)
        whole = [line for file in content.split(FILE_END) for line in file.split(b"\n")[:-1]]
        with suppress(PlscError):
            _check_log(path, None, whole[:-1], lines)
        _check_log(path, head, whole, lines)
        if whole[: len(lines)] != lines:
            raise Violation("a changed log is taken, though its head was noted")

    return Target("audit log", make, run)


def _check_log(path: Path, head: Head | None, whole: list[bytes], lines: list[bytes]) -> None:
    verify(path, head)
    if whole[: len(lines)] != lines[: len(whole)]:
        raise Violation("a line that was changed is taken")


def _write_log(path: Path) -> tuple[list[bytes], Head]:
    path.parent.mkdir(parents=True)
    log = AuditLog(path, rotated_bytes=1024)
    for number in range(20):
        asyncio.run(log.write_durably("write", token="desk", operation="add_persons", ids=[number], status=201))
    log.close()
    head = log.head
    files = sorted(path.parent.iterdir(), key=lambda file: int(file.suffix[1:]) if file.suffix[1:].isdigit() else 10**6)
    if len(files) < LOG_FILES:
        raise AssertionError(f"a log of {len(files)} files")
    return [file.read_bytes() for file in files], head
