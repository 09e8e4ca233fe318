"""RecordIO files written here from the format's description alone are read; damaged ones are reported by key."""

import contextlib
import errno
import io
import logging
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import stored

import plsc.data.shard_index
from plsc import config as configuration
from plsc.data import open_dataset
from plsc.data.recordio import MAGIC, RecordFile, record_writer, write_record
from plsc.errors import DataError, UsageError
from plsc.train.tables import open_training_data

SMALL = settings(max_examples=40)
PIECES = st.lists(
    st.one_of(st.binary(max_size=9), st.just(struct.pack("<I", MAGIC)), st.just(b"\0\0" + struct.pack("<I", MAGIC))),
    max_size=8,
).map(b"".join)


def image_bytes(number: int, size: int = 16) -> bytes:
    return stored(Image.new("RGB", (size, size), (number % 256, number // 256, 40)), "PNG")


def foreign_record(content: bytes) -> bytes:
    """A record as MXNet writes it: cut at every aligned magic word, which is left out."""
    magic = struct.pack("<I", 0xCED7230A)
    words = [content[start : start + 4] for start in range(0, len(content), 4)]
    pieces = [b""]
    for word in words:
        if word == magic:
            pieces.append(b"")
        else:
            pieces[-1] += word
    flags = [0] if len(pieces) == 1 else [1] + [2] * (len(pieces) - 2) + [3]
    out = b""
    for flag, piece in zip(flags, pieces, strict=True):
        out += magic + struct.pack("<I", (flag << 29) + len(piece)) + piece
        while len(out) % 4:
            out += b"\0"
    return out


def foreign_content(labels: float | list[float], image: bytes, key: int = 0) -> bytes:
    if isinstance(labels, list):
        return struct.pack("<IfQQ", len(labels), 0.0, key, 0) + struct.pack(f"<{len(labels)}f", *labels) + image
    return struct.pack("<IfQQ", 0, labels, key, 0) + image


def write_foreign(folder: Path, records: dict[int, bytes], *, index: bool = True) -> Path:
    lines, out = [], b""
    for key, content in records.items():
        lines.append(f"{key}\t{len(out)}\n")
        out += foreign_record(content)
    (folder / "train.rec").write_bytes(out)
    if index:
        (folder / "train.idx").write_text("".join(lines), encoding="ascii")
    return folder / "train.rec"


def with_header(labels: list[int], classes: int = 2) -> dict[int, bytes]:
    """The convention with a header: images have keys 1 … N, and a record per identity follows."""
    count = len(labels)
    records = {0: foreign_content([count + 1.0, count + 1.0 + classes], b"")}
    records |= {key: foreign_content(float(label), image_bytes(key), key) for key, label in enumerate(labels, 1)}
    return records | {count + 1 + c: foreign_content([1.0, 2.0], b"") for c in range(classes)}


def without_header(labels: list[int]) -> dict[int, bytes]:
    return {key: foreign_content(float(label), image_bytes(key), key) for key, label in enumerate(labels)}


def offset_of(path: Path, key: int) -> int:
    lines = path.with_suffix(".idx").read_text(encoding="ascii").splitlines()
    return {int(a): int(b) for a, b in (line.split("\t") for line in lines)}[key]


def colour(image: torch.Tensor) -> int:
    return int(image[0, 0, 0]) + 256 * int(image[1, 0, 0])


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("header", [True, False])
def test_both_conventions(tmp_path: Path, index: bool, header: bool) -> None:
    labels = [0, 0, 1, 0, 1]
    path = write_foreign(tmp_path, with_header(labels) if header else without_header(labels), index=index)
    for source in (path, tmp_path):  # the folder of a .rec opens it
        data = open_dataset(source, image_size=16)
        assert [data.key(i) for i in range(len(data))] == [str(key + header) for key in range(5)]
        assert (data.labels.tolist(), data.labels.dtype, data.skipped) == (labels, np.int64, {})
        copy = pickle.loads(pickle.dumps(data))  # as it goes into other processes
        assert [colour(copy.image(i)) for i in range(5)] == [key + header for key in range(5)]


def test_keys_come_in_order_whatever_the_index_says(tmp_path: Path) -> None:
    path = write_foreign(tmp_path, dict(reversed(without_header([0, 1, 2]).items())))
    data = open_dataset(path)
    assert [data.key(i) for i in range(3)] == ["0", "1", "2"]
    assert [colour(data.image(i)) for i in range(3)] == [0, 1, 2]


def test_labels_from_arrays_and_gaps(tmp_path: Path) -> None:
    records = {
        0: foreign_content(7.0, image_bytes(0)),
        1: foreign_content([900_000.0, 3.0, 4.0], image_bytes(1)),
        2: foreign_content([7.0], image_bytes(2)),
    }
    data = open_dataset(write_foreign(tmp_path, records))
    assert data.labels.tolist() == [0, 1, 0]
    assert list(data.class_names) == ["7", "900000"]
    data.save_label_map(tmp_path / "map.json")
    assert '"7"' in (tmp_path / "map.json").read_text(encoding="utf-8")
    assert [colour(data.image(i)) for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("as_array", [False, True])
def test_labels_that_float32_has_rounded_are_refused_by_name(tmp_path: Path, as_array: bool) -> None:
    def records(*labels: int) -> dict[int, bytes]:
        return {
            key: foreign_content([float(label), 1.0] if as_array else float(label), image_bytes(key), key)
            for key, label in enumerate(labels)
        }

    data = open_dataset(write_foreign(tmp_path, records(2**24 - 1, 2**24 - 2, 5)))
    assert data.labels.tolist() == [2, 1, 0]
    for label in (2**24, 2**24 + 1, 2**30):
        path = write_foreign(tmp_path, records(4, label, 5))
        with pytest.raises(
            DataError, match=r"record 1 of .*train.rec has the label 1[\d,]+, .* data.labels = FILE.npy"
        ):
            open_dataset(path)
    assert open_dataset(path, own_labels=False).num_classes == 3


def test_people_past_float32_train_by_labels_of_a_file(tmp_path: Path) -> None:
    path = write_foreign(tmp_path, without_header([2**24, 2**24 + 1, 7]))
    np.save(tmp_path / "labels.npy", np.array([2**24, 2**24 + 1, 7]))
    config = configuration.load(None, {"data.train": str(path), "data.labels": str(tmp_path / "labels.npy")})
    assert open_training_data(config).labels.tolist() == [1, 2, 0]


def test_a_first_image_with_a_label_array_is_no_header(tmp_path: Path) -> None:
    records = {key: foreign_content([float(key), 0.5], image_bytes(key)) for key in range(3)}
    assert open_dataset(write_foreign(tmp_path, records)).labels.tolist() == [0, 1, 2]


@SMALL
@given(pieces=PIECES)
def test_magic_words_inside_records(tmp_path: Path, pieces: bytes) -> None:
    ours = io.BytesIO()
    write_record(ours, pieces)
    assert ours.getvalue() == foreign_record(pieces)
    (tmp_path / "x.rec").write_bytes(foreign_record(b"before") + ours.getvalue() + foreign_record(b"after"))
    file = RecordFile(tmp_path / "x.rec")
    first, second, third = file.record_offsets().tolist()
    assert (file.read(first), file.read(second), file.read(third)) == (b"before", pieces, b"after")


def test_a_label_in_a_record_of_parts(tmp_path: Path) -> None:
    magic_id = MAGIC  # the id field holds the magic word: the header itself is cut in two
    content = struct.pack("<IfQQ", 2, 0.0, magic_id, 0) + struct.pack("<2f", 5.0, 6.0) + image_bytes(3)
    data = open_dataset(write_foreign(tmp_path, {0: foreign_content(4.0, image_bytes(1)), 1: content}))
    assert list(data.class_names) == ["4", "5"]
    assert colour(data.image(1)) == 3


def test_truncated_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_foreign(tmp_path, without_header([0, 1, 2, 3, 4]))
    path.write_bytes(path.read_bytes()[: offset_of(path, 3) + 40])
    with caplog.at_level(logging.WARNING, logger="plsc.data"):
        data = open_dataset(path)
    assert data.labels.tolist() == [0, 1, 2]
    assert set(data.skipped) == {"3", "4"}
    assert "record 3" in caplog.text
    assert "record 4" in caplog.text
    with pytest.raises(DataError, match=r"2 of the 5 records .* first with key 3 .*ends inside it"):
        open_dataset(path, max_bad_records=1)


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (0, b"\0", "no record begins"),
        (7, b"\x40", "out of order"),
        (6, b"\xff", "ends inside"),
        (8, b"\xff\xff\xff\x7f", "too short"),
        (12, struct.pack("<f", float("nan")), "label is nan"),
        (12, struct.pack("<f", 1.5), "label is 1.5"),
        (12, struct.pack("<f", -1.0), "label is -1.0"),
    ],
)
def test_damaged_record_is_left_out_by_key(tmp_path: Path, where: int, value: bytes, why: str) -> None:
    path = write_foreign(tmp_path, without_header([0, 1, 2, 3]))
    content = bytearray(path.read_bytes())
    start = offset_of(path, 2) + where
    content[start : start + len(value)] = value
    path.write_bytes(content)
    data = open_dataset(path)
    assert [data.key(i) for i in range(len(data))] == ["0", "1", "3"]
    assert list(data.skipped) == ["2"]
    assert why in data.skipped["2"]
    assert data.labels.tolist() == [0, 1, 2]


def test_lost_mark_without_index(tmp_path: Path) -> None:
    path = write_foreign(tmp_path, without_header([0, 1, 2]))
    content = bytearray(path.read_bytes())
    content[offset_of(path, 1)] ^= 1
    path.write_bytes(content)
    path.with_suffix(".idx").unlink()
    assert len(open_dataset(path)) == 2


def test_keys_that_the_header_announces_and_the_index_lacks(tmp_path: Path) -> None:
    records = with_header([0, 1, 1])
    del records[2]
    data = open_dataset(write_foreign(tmp_path, records))
    assert data.skipped == {"2": "it is not in the index"}
    assert data.labels.tolist() == [0, 1]


def test_damaged_header_record(tmp_path: Path) -> None:
    path = write_foreign(tmp_path, with_header([0, 1, 1], classes=2))
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    data = open_dataset(path)  # the identities' own records hold no image, and never pass for one
    assert data.labels.tolist() == [0, 1, 1]
    assert set(data.skipped) == {"0", "4", "5"}
    struct.pack_into("<I", content, 0, MAGIC)
    struct.pack_into("<f", content, 8 + 24, 1e30)
    path.write_bytes(content)
    with pytest.raises(DataError, match="record 0"):
        open_dataset(path)


def test_damaged_or_absurd_indices(tmp_path: Path) -> None:
    path = write_foreign(tmp_path, without_header([0, 1, 2]))
    index = path.with_suffix(".idx")
    index.write_text("0\t0\n1\t-8\n2\t99999999\n", encoding="ascii")
    assert set(open_dataset(path).skipped) == {"1", "2"}
    for text in ("", "0\t0\nx\ty\n", "0\t0\n1\n", "1 2 3\n"):
        index.write_text(text, encoding="ascii")
        with pytest.raises(DataError, match=r"train\.idx"):
            open_dataset(path)
    index.write_text("0\t4\n", encoding="ascii")
    with pytest.raises(DataError, match="1 of the 1 records"):
        open_dataset(path)


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.rec"):
        open_dataset(tmp_path / "no.rec")
    (tmp_path / "empty.rec").touch()
    with pytest.raises(DataError, match="empty"):
        open_dataset(tmp_path / "empty.rec")
    (tmp_path / "text.rec").write_text("hello, I am no record file")
    with pytest.raises(DataError, match="no image record"):
        open_dataset(tmp_path / "text.rec")


def test_a_large_index_is_kept_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
    path = write_foreign(tmp_path, without_header([5, 6, 7]))
    fresh = open_dataset(path)
    (kept,) = (tmp_path / ".plsc-index").glob("*-*[!k]")
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "labels_at", lambda *_: pytest.fail("the kept index was not used"))
        again = pickle.loads(pickle.dumps(open_dataset(path)))
    assert again.labels.tolist() == fresh.labels.tolist() == [0, 1, 2]
    assert list(again.class_names) == ["5", "6", "7"]
    assert colour(again.image(2)) == 2
    (kept / "labels.npy").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"is damaged .*delete it, and it is made anew"):
        open_dataset(path)
    write_foreign(tmp_path, without_header([5, 6, 8, 9]))  # another file has an index of its own
    assert list(open_dataset(path).class_names) == ["5", "6", "8", "9"]
    assert not kept.exists()


def test_written_files_follow_the_convention(tmp_path: Path) -> None:
    path = tmp_path / "mine.rec"
    images = [image_bytes(n) + struct.pack("<I", MAGIC) * 3 for n in range(5)]
    with record_writer(path, expected=5) as writer:
        for number, image in enumerate(images):
            if number in (0, 3):
                writer.begin_class(("ann", "bob")[number // 3])
            writer.add(image, f"{number}.png")
    content = path.read_bytes()
    assert struct.unpack_from("<II", content) == (MAGIC, 32)
    assert struct.unpack_from("<IfQQ2f", content, 8) == (2, 0.0, 0, 0, 6.0, 8.0)
    file, lines = RecordFile(path), path.with_suffix(".idx").read_text(encoding="ascii").splitlines()
    assert [line.split("\t")[0] for line in lines] == [str(key) for key in range(8)]
    last = file.read_image(int(lines[-1].split("\t")[1]))
    assert (last.flag, last.labels, last.image) == (2, (4.0, 6.0), b"")
    assert (tmp_path / "property").read_text(encoding="ascii").startswith("2,")
    data = open_dataset(path)
    assert [data.encoded(i) for i in range(5)] == images
    assert list(data.class_names) == ["ann", "bob"]


def test_an_interrupted_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.rec"
    with record_writer(path, expected=1) as writer:
        writer.begin_class("a")
        writer.add(image_bytes(1), "1.png")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"), record_writer(path, expected=9):
        pass
    with contextlib.suppress(RuntimeError), record_writer(path, expected=9, overwrite=True) as writer:
        writer.begin_class("a")
        writer.add(image_bytes(2), "2.png")
        raise RuntimeError("cut off")
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("mine.classes.json", "mine.idx", "mine.keys.tsv", "mine.rec", "property")
    ]


def test_numbers_past_float32_use_the_other_convention(tmp_path: Path) -> None:
    path = tmp_path / "mine.rec"
    with record_writer(path, expected=50_000_000) as writer:
        for number, name in enumerate("ab"):
            writer.begin_class(name)
            writer.add(image_bytes(number), f"{name}.png")
    data = open_dataset(path)
    assert [data.record_key(i) for i in range(2)] == ["0", "1"]
    assert data.labels.tolist() == [0, 1]


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    """What is no longer there would end the process by SIGBUS if it were read through the map."""
    path = write_foreign(tmp_path, {1: b"x" * 8000, 2: b"y" * 8000})
    file = RecordFile(path)
    offsets = file.record_offsets()
    assert file.read(int(offsets[-1])) == b"y" * 8000
    with path.open("r+b") as shortened:
        shortened.truncate(int(offsets[-1]) + 100)
    assert file.read(int(offsets[0])) == b"x" * 8000
    with pytest.raises(ValueError, match="the file has become shorter"):
        file.read(int(offsets[-1]))


def test_storage_that_fails_is_a_damaged_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(write_foreign(tmp_path, {1: b"x" * 64}))
    (offset,) = file.record_offsets()

    def failing(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(ValueError, match="it cannot be read: Input/output error"):
        file.read(int(offset))
