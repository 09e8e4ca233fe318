"""Records (.rec, .idx and their companions) that were made to harm."""

import json
import shutil
import struct
from pathlib import Path

from plsc.data.recordio import MAGIC
from untrusted.samples import Case, Content, Samples, arguments, content_of, crafted

WHOLE, FIRST, MIDDLE, LAST = range(4)


def part(flag: int, content: bytes, length: int | None = None) -> bytes:
    """A part of a record, which may announce another length than its content has."""
    announced = len(content) if length is None else length
    return struct.pack("<II", MAGIC, flag << 29 | announced) + content + bytes(-len(content) % 4)


def image(label: float, content: bytes = b"\xff\xd8\xff", flag: int = 0) -> bytes:
    """An image record's content."""
    return struct.pack("<IfQQ", flag, label, 0, 0) + content


def _written(records: Content, index: Content | None = None) -> Case:
    def make(folder: Path, samples: Samples) -> list[str]:
        if index is not None:
            (folder / "crafted.idx").write_bytes(content_of(index, samples))
        return crafted("data check {file}", "crafted.rec", records)(folder, samples)

    return make


def _beside(name: str, content: Content) -> Case:
    """A sound .rec with a crafted companion."""

    def make(folder: Path, samples: Samples) -> list[str]:
        for path in samples.records.parent.glob("pictures.*"):
            shutil.copy(path, folder / path.name.replace("pictures", "crafted"))
        (folder / f"crafted.{name}").write_bytes(content_of(content, samples))
        return arguments("data convert {file} {out}/out", folder, samples, folder / "crafted.rec")

    return make


def _nested_records(_: Samples) -> bytes:
    """50,000 records, each of which reaches to the end of the file: together they hold 10 GB."""
    count, header = 50_000, struct.pack("<IfQQ", 0, 1.0, 0, 0)
    size = count * 32
    return b"".join(struct.pack("<II", MAGIC, size - 32 * row - 8) + header for row in range(count))


def _shared_parts(_: Samples) -> bytes:
    """20,000 records in parts, whose first parts all end where 20,000 middle parts begin."""
    count = 20_000
    heads = [struct.pack("<II", MAGIC, FIRST << 29 | 8 * (count - row - 1)) for row in range(count)]
    return b"".join(heads) + part(MIDDLE, b"") * count + part(LAST, b"")


def _numbered(count: int, step: int) -> bytes:
    return b"".join(b"%d\t%d\n" % (row, row * step) for row in range(count))


ONE = part(WHOLE, image(1))

CASES: dict[str, Case] = {
    "an empty file": _written(b""),
    "text": _written(b"x" * 1_000_000),
    "a length beyond the file": _written(part(WHOLE, image(1), length=2**29 - 1), b"0\t0\n"),
    "a label array of 2^32 items": _written(part(WHOLE, image(1, flag=2**32 - 1)), b"0\t0\n"),
    "parts without an end": _written(part(FIRST, image(1)) + part(MIDDLE, b"x" * 100) * 100_000, b"0\t0\n"),
    "parts out of order": _written(part(LAST, image(1)) * 1000, b"0\t0\n"),
    "records that overlap": _written(_nested_records, lambda _: _numbered(50_000, 32)),
    "records that overlap, without an index": _written(_nested_records),
    "records that share their parts": _written(_shared_parts, lambda _: _numbered(20_000, 8)),
    "records that share their parts, without an index": _written(_shared_parts),
    "a record a hundred thousand times": _written(
        part(WHOLE, image(1, b"\xff\xd8\xff" + b"x" * 60_000)), b"".join(b"%d\t0\n" % row for row in range(100_000))
    ),
    "a record in parts a hundred thousand times": _written(
        part(FIRST, image(1)) + part(MIDDLE, b"") * 10_000 + part(LAST, b"x"),
        b"".join(b"%d\t0\n" % row for row in range(100_000)),
    ),
    "3 million index lines": _written(ONE, lambda _: b"7\t123456\n" * 3_000_000),
    "3 million index lines of the largest numbers": _written(
        ONE, lambda _: b"9223372036854775807\t9223372036854775807\n" * 10**6
    ),
    "offsets below zero": _written(ONE, b"0\t-8\n1\t-9223372036854775808\n"),
    "offsets beyond 64 bits": _written(ONE, b"0\t99999999999999999999\n"),
    "an offset of a million digits": _written(ONE, b"0\t" + b"9" * 1_000_000 + b"\n"),
    "an index of 100 MB without a line end": _written(ONE, lambda _: b"1" * 100_000_000),
    "an index of 30 MB of columns": _written(ONE, lambda _: b"1\t" * 15_000_000),
    "an index of zeros": _written(ONE, lambda _: bytes(100_000_000)),
    "labels that are no numbers": _written(part(WHOLE, image(float("nan"))) * 100, _numbered(100, 36)),
    "labels of 10^38": _written(part(WHOLE, image(1e38)) * 100, _numbered(100, 36)),
    "a header of 10^9 images": _written(
        part(WHOLE, image(0, struct.pack("<2f", 1e9, 1e9), flag=2)) + ONE, b"0\t0\n1\t44\n"
    ),
    "class names nested deeply": _beside("classes.json", b"[" * 100_000),
    "class names of 100 MB": _beside("classes.json", lambda _: b'"' + b"x" * 100_000_000),
    "class names of 100 MB and one of four bytes": _beside(
        "classes.json", lambda _: b'"' + b"x" * 100_000_000 + "🙂".encode()
    ),
    "class names of a million digits": _beside("classes.json", b'{"classes": ' + b"9" * 1_000_000 + b"}"),
    "too few class names": _beside("classes.json", json.dumps({"classes": ["one"]}).encode()),
    "keys of 100 MB without a line end": _beside("keys.tsv", lambda _: b"1" * 100_000_000),
}
