"""Folders of our own formats that were made to harm: embedding sets, indexes, snapshots, copies; their .npy columns."""

import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from plsc.files import describe_content, read_json, write_manifest
from untrusted.samples import MANIFESTS, Change, copied

SHARD = "shard-00000"


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """A .npy file of any header."""
    text = header.encode("latin1")
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def _header(shape: str, descr: str = "'<f4'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


ARRAYS: dict[str, bytes] = {
    "an empty file": b"",
    "an array of objects": npy(_header("(12, 8)", "'|O'"), b"cos\nsystem\n(S'touch SHELL'\ntR."),
    "a pickle": b"cos\nsystem\n(S'touch SHELL'\ntR.",
    "a huge shape": npy(_header("(4611686018427387904, 8)")),
    "a shape that overflows": npy(_header("(4294967296, 4294967296, 8)")),
    "a shape below zero": npy(_header("(-12, 8)"), bytes(384)),
    "a shape of a million digits": npy(_header("(" + "9" * 9000 + ", 8)")),
    "a shape of truth values": npy(_header("(True, 8)"), bytes(384)),
    "a header of Python": npy("__import__('os').system('touch SHELL')\n"),
    "a header of brackets": npy("(" * 9000 + "\n"),
    "a header of minus signs": npy("-" * 9000 + "1\n"),
    "a header of products": npy(_header("(" + "9**" * 2000 + "9, 8)")),
    "a header of sums": npy(_header("(" + "1+" * 4000 + "1, 8)")),
    "a header of 2^32 bytes": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{",
    "a type nested deeply": npy(_header("(12, 8)", "[('a', " * 150 + "'<f4'" + ")]" * 150)),
    "a type of 2^40 bytes": npy(_header("(12, 8)", "'|V1099511627776'")),
    "a version that nobody has": npy(_header("(12, 8)"), bytes(384), version=9),
    "fewer rows than the manifest": npy(_header("(3, 8)"), bytes(96)),
    "Fortran's order": npy(_header("(12, 8)", order="True"), bytes(384)),
}


def _sealed(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """Change a folder's manifest, and seal it again."""
    manifest = read_json(folder / "manifest.json")
    manifest.pop("seal")
    change(manifest)
    write_manifest(folder, manifest)


def _manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    return partial(_sealed, change)


def _set_file(name: str, content: bytes) -> Change:
    """Replace a file of an embedding set's shard, with its hashes."""

    def apply(folder: Path) -> None:
        (folder / SHARD / name).write_bytes(content)
        entry = describe_content(content)
        _sealed(lambda manifest: manifest["files"].update({name: entry}), folder / SHARD)
        _sealed(lambda manifest: manifest["shards"][0]["files"].update({name: entry}), folder)

    return apply


def _file(name: str, content: bytes) -> Change:
    """Replace a file that the folder's own manifest describes."""

    def apply(folder: Path) -> None:
        (folder / name).write_bytes(content)
        _sealed(lambda manifest: manifest["files"].update({name: describe_content(content)}), folder)

    return apply


def _array(shape: tuple[int, ...], dtype: str, value: int) -> bytes:
    return npy(_header(str(shape), f"'{dtype}'"), np.full(shape, value, dtype=dtype).tobytes())


def _naming(name: str, entry: object) -> Change:
    return _manifest(lambda manifest: manifest["files"].update({name: entry}))


def _without(*names: str) -> dict[str, Change]:
    return {f"a manifest without {name}": _manifest(lambda manifest, name=name: manifest.pop(name)) for name in names}


def _of_another_type(*names: str) -> dict[str, Change]:
    cases: dict[str, Change] = {}
    for name in names:
        for value in ([], -1, "x", None, 10**30):
            if (name, value) in (("contract_id", "x"), ("collections", [])):
                continue  # which they may be
            cases[f"a manifest whose {name} is {value!r}"] = _manifest(
                lambda manifest, name=name, value=value: manifest.update({name: value})
            )
    return cases


FAULTS: dict[str, Change] = {
    **MANIFESTS,
    "a name that leads up": _naming("../../x", {"bytes": 0, "sha256": ""}),
    "a name of 5,000 letters": _naming("1" * 5000, {"bytes": 0, "sha256": "0" * 64}),
    "an absolute name": _naming("/etc/passwd", {"bytes": 0, "sha256": ""}),
    "a file described by nothing": _manifest(
        lambda manifest: manifest["files"].update({next(iter(manifest["files"])): None})
    ),
    "files without sizes": _manifest(lambda manifest: [entry.clear() for entry in manifest["files"].values()]),
}
SETS: dict[str, Change] = {
    **FAULTS,
    **{f"embeddings: {name}": _set_file("embeddings.npy", content) for name, content in ARRAYS.items()},
    **_without("complete", "shards", "rows", "dim", "dtype", "classes", "contract_id", "files"),
    **_of_another_type("shards", "rows", "dim", "dtype", "classes", "contract_id", "files"),
    "a shard in another folder": _manifest(lambda manifest: manifest["shards"][0].update(name="../../x")),
    "a shard at another row": _manifest(lambda manifest: manifest["shards"][0].update(start=10**12)),
    "a shard without files": _manifest(lambda manifest: manifest["shards"][0].update(files={})),
    "a shard without a name": _manifest(lambda manifest: manifest["shards"][0].pop("name")),
    "a million shards": _manifest(lambda manifest: manifest.update(shards=manifest["shards"] * 100_000)),
    "more rows than shards hold": _manifest(lambda manifest: manifest.update(rows=10**12)),
    "labels beyond the classes": _set_file("labels.npy", _array((12,), "<i8", 10**9)),
    "offsets below zero": _set_file("keys.offsets.npy", _array((13,), "<i8", -5)),
    "errors nested deeply": _set_file("errors.jsonl", b"[" * 100_000),
    "errors of infinity": _set_file("errors.jsonl", b'{"row": 1e999, "error": ""}\n'),
    "errors beyond the rows": _set_file("errors.jsonl", b'{"row": 1000000000000, "error": ""}\n'),
    "errors of 100 MB without a line end": lambda folder: _set_file("errors.jsonl", b"x" * 100_000_000)(folder),
    "embeddings that are cut off": lambda folder: os.truncate(folder / SHARD / "embeddings.npy", 100),
}
INDEXES: dict[str, Change] = {
    **FAULTS,
    **{f"vectors: {name}": _file("vectors.npy", content) for name, content in ARRAYS.items()},
    **_without("rows", "dim", "kind", "held_out", "classes", "contract_id", "files"),
    **_of_another_type("rows", "dim", "kind", "held_out", "classes", "contract_id", "files"),
    "labels beyond the classes": _file("labels.npy", _array((12,), "<i8", 10**9)),
    "offsets below zero": _file("keys.offsets.npy", _array((13,), "<i8", -5)),
}
SNAPSHOTS: dict[str, Change] = {
    **FAULTS,
    **_without("collections", "created", "files"),
    **_of_another_type("collections", "files"),
    "a database that is none": _file("gallery.sqlite", b"x" * 100_000),
    "a database that is cut off": _file("gallery.sqlite", b"SQLite format 3\0" + bytes(4000)),
}


def _forged_faiss(content: bytes) -> Change:
    """An approximate index whose structure is ``content``."""

    def apply(folder: Path) -> None:
        (folder / "index.faiss").write_bytes(content)

        def change(manifest: dict[str, Any]) -> None:
            manifest.update(kind="hnsw", parameters={"efSearch": 16, "M": 16})
            manifest["files"]["index.faiss"] = describe_content(content)

        _sealed(change, folder)

    return apply


FLAT = b"IxFI" + struct.pack("<iqqqBi", 8, 12, 1 << 20, 1 << 20, 1, 0)
INDEXES |= {
    "a structure of nothing": _forged_faiss(b""),
    "a structure that nobody has": _forged_faiss(b"evil" + bytes(1000)),
    "a structure of 2^38 numbers": _forged_faiss(FLAT + struct.pack("<Q", 1 << 38)),
    "a structure that is cut off": _forged_faiss(FLAT + struct.pack("<Q", 96) + bytes(100)),
    "a structure of another size": _forged_faiss(FLAT + struct.pack("<Q", 8) + bytes(32)),
    "a structure in a structure": _forged_faiss(b"IxMp" * 10_000),
    "a structure in structures": _forged_faiss((b"IxMp" + FLAT[4:]) * 20_000),
}


_imported = partial(copied, "gallery import {out}/out people {file}", "embeddings")
_built = partial(copied, "index build {file} --out {out}/out", "embeddings")
_searched = partial(copied, "index search {file} --query {embeddings}", "index")
_checked = partial(copied, "index check {file}", "index")
_restored = partial(copied, "gallery restore {file} --store {out}/out", "snapshot")
_looked_at = partial(copied, "gallery check {file}", "snapshot")

CASES = {
    **{f"{name}, imported": _imported(change) for name, change in SETS.items()},
    **{
        f"{name}, built": _built(SETS[name])
        for name in ("embeddings: a huge shape", "offsets below zero", "labels beyond the classes")
    },
    **{f"{name}, searched": _searched(change) for name, change in INDEXES.items()},
    **{
        f"{name}, checked": _checked(INDEXES[name])
        for name in ("a structure of 2^38 numbers", "labels beyond the classes")
    },
    **{f"{name}, restored": _restored(change) for name, change in SNAPSHOTS.items()},
    **{f"{name}, looked at": _looked_at(change) for name, change in SNAPSHOTS.items()},
}
