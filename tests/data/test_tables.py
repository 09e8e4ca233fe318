"""Parquet and Arrow files written by pyarrow and by datasets are read; hostile ones are told by name."""

import errno
import io
import json
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.pictures import stored

import plsc.data.readers.parquet
import plsc.data.readers.table_columns
import plsc.data.shard_index
import plsc.files
from plsc.data import open_dataset
from plsc.data.convert import convert
from plsc.data.readers.arrow import ArrowFormat
from plsc.data.readers.parquet import ParquetFormat
from plsc.data.shard_index import index_folder
from plsc.errors import DataError, StorageError, UsageError
from plsc.tools.entry import main

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def picture(number: int) -> bytes:
    return stored(Image.new("RGB", (16, 16), (number, 0, 40)), "PNG")


PICTURES = [picture(number) for number in range(6)]
LABELS = ["bob", "ann", "bob", "eve", "ann", "bob"]
NUMBERS = [1, 0, 1, 2, 0, 1]  # of the names in their order


def table(**columns: Any) -> Any:
    return pa.table({"image": pa.array(PICTURES, pa.binary()), "label": LABELS} | columns)


def write(path: Path, content: Any, **options: Any) -> Path:
    """Write a table by pyarrow: two rows in a row group or a batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(content, path, row_group_size=2, **options)
        return path
    ipc = pa.ipc.IpcWriteOptions(compression=options.get("compression"))
    new = pa.ipc.new_stream if options.get("stream") else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, content.schema, options=ipc) as writer:
        for batch in content.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return path


def stored_pictures(data: Any) -> list[bytes]:
    return [data.encoded(row) for row in range(len(data))]


def unpacked(folder: Path) -> list[Path]:
    return sorted((folder / ".plsc-index").glob("*.images"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.parquet", {"compression": "snappy"}),
        ("x.parquet", {"compression": "zstd"}),
        ("x.parquet", {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"}),
        ("x.arrow", {}),
        ("x.arrow", {"stream": True}),
        ("x.arrow", {"compression": "lz4"}),
        ("x.arrow", {"compression": "zstd", "stream": True}),
    ],
)
@pytest.mark.parametrize(
    "image",
    [
        pa.array(PICTURES, pa.binary()),
        pa.array(PICTURES, pa.large_binary()),
        pa.array(PICTURES, pa.binary()).dictionary_encode(),
        pa.array([{"bytes": each, "path": None} for each in PICTURES]),
    ],
    ids=["binary", "large_binary", "dictionary", "struct"],
)
def test_pictures_come_bit_for_bit(
    tmp_path: Path, name: str, options: dict[str, Any], image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plsc.data.readers.parquet, "_MOST_ROWS", 2)  # several batches
    path = write(tmp_path / name, table(image=image, label=pa.array(LABELS).dictionary_encode()), **options)
    for source in (path, tmp_path, tmp_path / f"*{path.suffix}", f"{path.suffix[1:]}:{path}"):
        data = open_dataset(source, image_size=None)
        assert stored_pictures(data) == PICTURES
        assert data.labels.tolist() == NUMBERS
        assert list(data.class_names) == ["ann", "bob", "eve"]
    assert stored_pictures(pickle.loads(pickle.dumps(data))) == PICTURES
    in_place = path.suffix == ".arrow" and "compression" not in options and not pa.types.is_dictionary(image.type)
    assert len(unpacked(tmp_path)) == (0 if in_place else 1)


@pytest.mark.parametrize(
    ("labels", "found", "names"),
    [
        (pa.array([7, 3, 7, 200, 3, 7], pa.uint8()), NUMBERS, ["3", "7", "200"]),
        (pa.array([7, 3, 7, 2**62, 3, 7], pa.int64()), NUMBERS, ["3", "7", str(2**62)]),
        (pa.array(LABELS, pa.large_string()), NUMBERS, ["ann", "bob", "eve"]),
        (pa.array(LABELS, pa.string_view()), NUMBERS, ["ann", "bob", "eve"]),
        (pa.array(["7", "3", "7", "20", "3", "7"]), NUMBERS, ["3", "7", "20"]),
        (
            pa.array([[1], [0, 2], [1], [2], [5, 0], [1]], pa.list_(pa.int16())),
            [[1, -1], [0, 2], [1, -1], [2, -1], [3, 0], [1, -1]],
            ["0", "1", "2", "5"],
        ),
        (
            pa.array([["b"], ["a", "c"], ["b"], ["c"], ["a", None], ["b"]], pa.large_list(pa.string())),
            [[1, -1], [0, 2], [1, -1], [2, -1], [0, -1], [1, -1]],
            ["a", "b", "c"],
        ),
        (
            pa.array([[1, None], [0, 2], [1, -1], [2, -1], [5, 0], [1, -1]], pa.list_(pa.int32(), 2)),
            [[1, -1], [0, 2], [1, -1], [2, -1], [3, 0], [1, -1]],
            ["0", "1", "2", "5"],
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_labels_of_each_type(tmp_path: Path, suffix: str, labels: Any, found: Any, names: list[str]) -> None:
    data = open_dataset(write(tmp_path / f"x.{suffix}", table(label=labels)), label_columns=None)
    assert data.labels.tolist() == found
    assert list(data.class_names) == names


def test_columns_by_their_names_and_further_ones(tmp_path: Path) -> None:
    content = table(
        person=["p", "q", "p", "p", "q", "q"],
        photo=PICTURES[::-1],
        id=[5, 6, 7, 8, 9, 10],
        note=["a", None, "é", "d", "e", "f"],
        age=pa.array([1, 2, 3, 4, 5, None], pa.float32()),
        box=[[1, 2]] * 6,
    )
    path = write(tmp_path / "x.parquet", content)
    data = open_dataset(path, image_size=None)
    assert [data.key(row) for row in range(6)] == ["5", "6", "7", "8", "9", "10"]
    assert data.metadata(2) == {"person": "p", "note": "é", "age": "3"}
    assert data.metadata(1)["note"] == data.metadata(5)["age"] == ""
    other = open_dataset(f"{path}?image=photo&label=person&key=note", image_size=None)
    assert stored_pictures(other) == PICTURES[::-1]
    assert (other.labels.tolist(), list(other.class_names)) == ([0, 1, 0, 0, 1, 1], ["p", "q"])
    assert [other.key(row) for row in range(3)] == ["a", "x.parquet/1", "é"]
    assert stored_pictures(open_dataset(path, image_size=None)) == PICTURES  # each has its unpacked file
    assert len(unpacked(tmp_path)) == 2
    bare = open_dataset(f"{path}?label=&key=", image_size=None, own_labels=False)
    assert (bare.num_classes, bare.key(3)) == (0, "3")
    with pytest.raises(UsageError, match=r"has no labels; name them by .*\?label="):
        open_dataset(f"{path}?label=")


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"image": [1] * 6}, "", r"no column that is known for pictures; name it by \?image=: image \(int64\), label"),
        ({"img": PICTURES}, "", r"several columns that can be pictures; name it by \?image=: image \(binary\)"),
        ({}, "?image=photo", r"has no column 'photo' for \?image=, but image \(binary\), label \(string\)"),
        ({}, "?image=label", r"the column 'label' of .* is string, and \?image= takes one of binary values"),
        ({"label": [0.5] * 6}, "", r"the column 'label' of .* is double, and \?label= takes one of texts, whole"),
        ({"label": [[0.5]] * 6}, "", r"the column 'label' of .* is list<\w+: double>, and \?label= takes"),
        ({"label": [True] * 6}, "", r"the column 'label' of .* is bool, and \?label= takes"),
        ({"box": [[1]] * 6}, "?key=box", r"the column 'box' of .*, and \?key= takes one of texts or numbers"),
        ({}, "?lable=x", r"\?lable= is no option of \.\w+ files, which have: image \(the column"),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_that_do_not_fit(
    tmp_path: Path, suffix: str, columns: dict[str, Any], options: str, words: str
) -> None:
    path = write(tmp_path / f"x.{suffix}", table(**columns))
    with pytest.raises(UsageError, match=words) as error:
        open_dataset(f"{path}{options}")
    assert "\n" not in str(error.value)
    assert not unpacked(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_rows_with_a_fault_are_left_out_by_key(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plsc.data.readers.table_columns, "LARGEST_PICTURE", 1000)
    image = [None, {"bytes": None, "path": "/etc/passwd"}, {"bytes": b"", "path": None}]
    image += [{"bytes": b"x" * 1001, "path": "vast"}, {"bytes": PICTURES[4], "path": "4.png"}]
    image += [{"bytes": PICTURES[5], "path": "5.png"}, {"bytes": PICTURES[0], "path": "4.png"}]
    labels = ["ann"] * 5 + [None, "bob"]
    data = open_dataset(write(tmp_path / f"x.{suffix}", pa.table({"image": image, "label": labels})), image_size=None)
    assert stored_pictures(data) == [PICTURES[4], PICTURES[0]]
    assert [data.key(row) for row in range(2)] == ["4.png", f"x.{suffix}/6/4.png"]  # a name, not what a row is
    assert (data.labels.tolist(), list(data.class_names)) == ([0, 1], ["ann", "bob"])
    assert data.skipped == {
        f"x.{suffix}/0": "it holds no image",
        "/etc/passwd": "it holds a path and no bytes",
        f"x.{suffix}/2": "it holds no image",
        "vast": "its image has 1,001 bytes, where 1,000 are the most",
        "5.png": "it has no label",
    }


def test_numbers_that_are_no_labels_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", table(label=pa.array([0, -1, -5, None, 1, 1])))
    assert open_dataset(path).skipped == {"1": "it has no label", "2": "its label is -5", "3": "it has no label"}
    path = write(tmp_path / "x.parquet", table(label=[[0], [], None, [3, -7], [-1], list(range(300))]))
    assert open_dataset(path, label_columns=None).skipped == {
        **dict.fromkeys(("1", "2", "4"), "it has no label"),
        "3": "its label is -7",
        "5": "it has 300 labels, where 256 are the most",
    }
    path = write(tmp_path / "x.parquet", table(label=pa.array([0, 1, 2, 3, 4, 2**64 - 1], pa.uint64())))
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as Parquet: .*18446744073709551615"):
        open_dataset(path)


def test_a_key_that_is_asked_for_is_there_once(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", table(key=["a", "b", "a", "d", "e", "f"]))
    data = open_dataset(f"{path}?key=key")
    assert data.skipped == {"x.parquet/2/a": "its key is that of a row before it"}
    assert [data.key(row) for row in range(5)] == ["a", "b", "d", "e", "f"]
    assert open_dataset(path).key(2) == "x.parquet/2/a"
    write(path, table(key=["a", "a", "a", "d", "e", "f"], label=["ann", "bob", "bob", "ann", "bob", None]))
    assert [*open_dataset(f"{path}?key=key").skipped] == ["x.parquet/1/a", "x.parquet/2/a", "f"]


def test_several_files_are_one_set_and_fit_together(tmp_path: Path) -> None:
    halves = [table().slice(0, 2), table().slice(2)]
    for number, half in enumerate(halves):
        write(tmp_path / f"train-{number:05d}-of-00002.parquet", half)
    data = open_dataset(tmp_path, image_size=None)
    assert stored_pictures(data) == PICTURES
    assert data.labels.tolist() == NUMBERS
    assert data.key(2) == "train-00001-of-00002.parquet/0"
    assert len(unpacked(tmp_path)) == 2
    second = tmp_path / "train-00001-of-00002.parquet"
    write(second, halves[1].rename_columns(["image", "person"]))
    with pytest.raises(
        UsageError, match=r"the column 'label' of .*00001-of-00002\.parquet is missing, and that of tra"
    ):
        open_dataset(tmp_path)
    write(second, halves[1].set_column(1, "label", pa.array([0, 1, 2, 3])))
    with pytest.raises(UsageError, match=r"'label' of .*00001.* is a label, a number, and that of .* a label, a text"):
        open_dataset(tmp_path)
    second.unlink()
    with pytest.raises(UsageError, match=r"holds 1 of 2 parts: train-00001-of-00002 is missing; fetch it, or name"):
        open_dataset(tmp_path)
    assert len(open_dataset(tmp_path / "train-*.parquet")) == 2
    write(second, halves[1])
    write(tmp_path / "test-00000-of-00001.parquet", table())
    with pytest.raises(UsageError, match=r"holds several sets: test-\*-of-00001\*, train-\*-of-00002\*; name one"):
        open_dataset(tmp_path)


def test_a_name_in_two_files_is_told_apart(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.parquet", table(id=[3 * number + row for row in (0, 1, 2, 3, 3, 4)]))
    data = open_dataset(tmp_path)
    found = ["0", "1", "2", "3", "0.parquet/4/3", "4", "1.parquet/3", "1.parquet/4", "5", "6", "1.parquet/4/6", "7"]
    assert [data.key(row) for row in range(12)] == found


def test_a_wrong_column_of_a_large_set_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
    path = write(tmp_path / "x.parquet", table())
    with pytest.raises(UsageError, match=r"has no column 'nope' for \?label=, but image \(binary\), label"):
        open_dataset(f"{path}?label=nope")


def test_unpacked_pictures_are_used_again_and_renewed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "x.parquet", table())
    with caplog.at_level(logging.WARNING, logger="plsc.data"):
        open_dataset(path)
    size = path.stat().st_size
    line = (
        f"the pictures of 1 Parquet file are unpacked into {tmp_path}/.plsc-index, once; they take some {size:,} bytes"
    )
    assert line in caplog.text
    (first,) = unpacked(tmp_path)
    written = first.stat()
    assert first.read_bytes() == b"".join(PICTURES)
    leftover = first.with_name(f".{first.name}.00000000.{os.getpid()}.tmp")  # of one that was killed
    leftover.write_bytes(b"half")
    open_dataset(path)
    assert first.stat().st_mtime_ns == written.st_mtime_ns
    held = open_dataset(path, image_size=None)
    other = open_dataset(path, image_size=None)
    assert held.encoded(0) == PICTURES[0]
    write(path, table(image=PICTURES[::-1]))
    os.utime(path, ns=(1, 1))
    fresh = open_dataset(path, image_size=None)
    assert stored_pictures(fresh) == PICTURES[::-1]
    assert unpacked(tmp_path) != [first]
    assert len(unpacked(tmp_path)) == 1
    assert not leftover.exists()
    assert held.encoded(1) == PICTURES[1]  # who has the former file open reads on
    with pytest.raises(DataError, match=r"x\.parquet is damaged: its file has changed since it was indexed"):
        other.encoded(0)
    (second,) = unpacked(tmp_path)
    second.unlink()
    assert stored_pictures(open_dataset(path, image_size=None)) == PICTURES[::-1]


def test_a_kept_index_unpacks_what_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
    path = write(tmp_path / "x.parquet", table())
    assert stored_pictures(open_dataset(path, image_size=None)) == PICTURES
    (images,) = unpacked(tmp_path)
    images.unlink()
    data = pickle.loads(pickle.dumps(open_dataset(path, image_size=None)))
    assert stored_pictures(data) == PICTURES
    with images.open("r+b") as file:
        file.truncate(len(PICTURES[0]))
    data = open_dataset(path, image_size=None)
    assert data.encoded(0) == PICTURES[0]
    with pytest.raises(DataError, match=r"row 1 of .*x\.parquet is damaged: the file has become shorter"):
        data.encoded(1)


def test_a_scan_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
    for number in range(2):
        write(tmp_path / f"{number}.parquet", table().slice(3 * number, 3))
    scan, scanned = ParquetFormat.scan, []

    def failing(self: ParquetFormat, shard: Path) -> Any:
        scanned.append(shard.name)
        if len(scanned) == 2:
            raise KeyboardInterrupt
        return scan(self, shard)

    monkeypatch.setattr(ParquetFormat, "scan", failing)
    with pytest.raises(KeyboardInterrupt):
        open_dataset(tmp_path)
    assert stored_pictures(open_dataset(tmp_path, image_size=None)) == PICTURES
    assert scanned == ["0.parquet", "1.parquet", "1.parquet"]


def test_a_folder_that_may_not_be_written_has_its_pictures_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    for name in ("a", "b"):  # files of one name, size and time
        path = write(tmp_path / name / "x.parquet", table(image=PICTURES if name == "a" else PICTURES[::-1]), **plain)
        os.utime(path, ns=(1, 1))
        (tmp_path / name / ".plsc-index").touch()  # no folder, even for root
    assert path.stat().st_size == (tmp_path / "a/x.parquet").stat().st_size
    first, second = (open_dataset(tmp_path / name / "x.parquet", image_size=None) for name in ("a", "b"))
    assert stored_pictures(first) == PICTURES
    assert stored_pictures(second) == PICTURES[::-1]
    assert index_folder(tmp_path / "a/x.parquet") == tmp_path / "cache/plsc/index"


def read_all(path: Path) -> tuple[list[bytes], str]:
    """The pictures of a file, or what is said about it."""
    try:
        return stored_pictures(open_dataset(path, image_size=None)), ""
    except (DataError, UsageError) as error:
        return [], str(error)


@pytest.mark.parametrize(("suffix", "stream"), [("parquet", False), ("arrow", False), ("arrow", True)])
def test_damaged_files_are_one_line(tmp_path: Path, suffix: str, stream: bool) -> None:
    path = write(tmp_path / f"x.{suffix}", table(), **({"stream": True} if stream else {}))
    whole = path.read_bytes()
    torn = (whole[:-9], whole[: len(whole) // 2], whole[9:], whole[:8])
    for content in (b"", b"hello", *torn, b"PAR1" * 20, b"ARROW1\0\0"):
        path.write_bytes(content)
        found, told = read_all(path)
        if told:
            assert told.startswith(f"{path} ")
            assert told.endswith("; use another copy")
        else:  # a stream may end at the end of any batch
            assert stream
            assert found == PICTURES[: len(found)]
    rng = np.random.default_rng(0)
    for _ in range(150):  # none ends the process, or raises another exception
        content = bytearray(whole)
        for place in rng.integers(0, len(whole), 4):
            content[place] = rng.integers(0, 256)
        path.write_bytes(content)
        assert "\n" not in read_all(path)[1]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_page_that_is_damaged_is_the_files_fault_and_a_full_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plsc.data.readers.parquet, "_MOST_ROWS", 2)
    path = write(tmp_path / "x.parquet", table(), compression="zstd", use_dictionary=False)
    whole = path.read_bytes()
    pages = pq.ParquetFile(path).metadata.row_group(2).column(0)
    content = bytearray(whole)
    end = pages.data_page_offset + pages.total_compressed_size
    content[end - 40 : end] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as Parquet: .*; use another copy"):
        open_dataset(path)
    assert not unpacked(tmp_path)  # two row groups of three were written
    path.write_bytes(whole)

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(plsc.files, "sync", full)
        with pytest.raises(StorageError, match=r"cannot write .*\.images: No space left on device; .*make room"):
            open_dataset(path)
    assert not list(tmp_path.rglob("*.tmp")) + unpacked(tmp_path)
    assert stored_pictures(open_dataset(path, image_size=None)) == PICTURES


def test_sizes_that_a_file_cannot_have(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    same = pa.array([b"x" * 100_000] * 500, pa.binary())  # once in the dictionary
    pq.write_table(pa.table({"image": same, "label": [0] * 500}), path)
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match=r"the pictures of .*x\.parquet have over 100 times its bytes"):
        open_dataset(path)
    assert not unpacked(tmp_path)
    many = pa.table({"image": pa.nulls(1_000_000, pa.binary()), "label": np.zeros(1_000_000, np.int8)})
    pq.write_table(many, path, compression="zstd")
    with pytest.raises(DataError, match=r"claims 1,000,000 rows, which its [\d,]+ bytes cannot hold"):
        open_dataset(path)


def test_buffers_that_lie_outside_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", table(), stream=True)
    content = bytearray(path.read_bytes())
    ends = np.array([0, len(PICTURES[0]), len(PICTURES[0] + PICTURES[1])], "<i4").tobytes()
    start = content.index(ends)
    content[start : start + 12] = np.array([0, len(PICTURES[0]), 2**30], "<i4").tobytes()
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.arrow cannot be read as Arrow: .*; use another copy"):
        open_dataset(path)


def test_a_file_that_changes_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", table())
    data, other = open_dataset(path, image_size=None), open_dataset(path, image_size=None)
    assert data.encoded(0) == PICTURES[0]
    with path.open("r+b") as file:
        file.truncate(600)
    with pytest.raises(DataError, match=r"row 5 of .*x\.arrow is damaged: the file has become shorter"):
        data.encoded(5)
    with pytest.raises(DataError, match="has changed since it was indexed"):
        other.encoded(0)


def test_links_of_a_folder_do_not_lead_out_of_it(tmp_path: Path) -> None:
    write(tmp_path / "private.parquet", table())
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.parquet").symlink_to(tmp_path / "private.parquet")
    with pytest.raises(DataError, match="lies outside of"):
        open_dataset(tmp_path / "data")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package ``datasets`` without a network or progress bars, whose caches are the test's."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf/datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", tmp_path / "hf/modules")
    datasets.disable_progress_bars()
    yield datasets
    datasets.enable_progress_bars()


def of_datasets(datasets: Any) -> Any:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["zoe", "ann", "bob"]),
            "age": datasets.Value("int32"),
        }
    )
    images = [Image.open(io.BytesIO(content)) for content in PICTURES]
    rows = {"image": images, "label": [2, 0, 1, 1, 0, 2], "age": list(range(6))}
    return datasets.Dataset.from_dict(rows, features=features)


def check_of_datasets(data: Any) -> None:
    assert [int(data.picture(row)[0, 0, 0]) for row in range(6)] == list(range(6))
    assert (data.labels.tolist(), list(data.class_names)) == ([2, 0, 1, 1, 0, 2], ["zoe", "ann", "bob"])
    assert data.metadata(5) == {"age": "5"}


def test_what_datasets_saves(tmp_path: Path, hub: Any) -> None:
    found = of_datasets(hub)
    found.to_parquet(tmp_path / "x.parquet")
    check_of_datasets(open_dataset(tmp_path / "x.parquet", image_size=None))
    found.save_to_disk(tmp_path / "saved", num_shards=3)
    data = open_dataset(tmp_path / "saved", image_size=None)
    check_of_datasets(data)
    assert data.key(5) == "data-00002-of-00003.arrow/1"
    assert not (tmp_path / "saved/.plsc-index").exists()  # pictures are read where they lie
    found.save_to_disk(tmp_path / "saved", num_shards=2)  # which leaves the former ones
    with pytest.raises(UsageError, match=r"holds several sets: data-\*-of-00002\*, data-\*-of-00003\*; name one"):
        open_dataset(tmp_path / "saved")
    check_of_datasets(open_dataset(tmp_path / "saved/data-*-of-00002.arrow", image_size=None))
    hub.DatasetDict({"train": found, "test": found}).save_to_disk(tmp_path / "both")
    with pytest.raises(UsageError, match=r"holds several splits; name one: (.*)/both/train, \1/both/test"):
        open_dataset(tmp_path / "both")
    check_of_datasets(open_dataset(tmp_path / "both/train", image_size=None))
    (tmp_path / "both/dataset_dict.json").write_text("[")
    with pytest.raises(DataError, match=r"dataset_dict\.json is not readable as JSON"):
        open_dataset(tmp_path / "both")


def test_names_that_a_file_gives_wrongly(tmp_path: Path) -> None:
    numbers = pa.array([1, 0, 1, 2, 0, 1])
    for names in ([["x", "y"]], {"names": "xy"}, {"feature": 7}, 3):
        told = json.dumps({"info": {"features": {"label": names}}})
        content = table(label=numbers).replace_schema_metadata({"huggingface": told})
        assert list(open_dataset(write(tmp_path / "x.parquet", content)).class_names) == ["0", "1", "2"]
    content = content.replace_schema_metadata({"huggingface": "[" * 100_000})
    assert list(open_dataset(write(tmp_path / "x.parquet", content)).class_names) == ["0", "1", "2"]
    told = json.dumps({"info": {"features": {"label": {"names": ["x", "y"], "_type": "ClassLabel"}}}})
    content = content.replace_schema_metadata({"huggingface": told})
    data = open_dataset(write(tmp_path / "x.parquet", content))
    assert data.skipped == {"3": "its label is 2, and 2 classes have names"}
    told = json.dumps({"info": {"features": {"label": {"feature": {"names": ["x", "y", "z"]}, "_type": "List"}}}})
    content = table(label=[[1, 2], [0], [1], [2], [0], [1]]).replace_schema_metadata({"huggingface": told})
    assert list(open_dataset(write(tmp_path / "x.arrow", content), label_columns=None).class_names) == ["x", "y", "z"]


def test_sets_of_the_hub(tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a folder that is laid out as a repository of the hub, which datasets takes in its place."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        of_datasets(hub).to_parquet(tmp_path / f"org/faces/data/{split}-00000-of-00001.parquet")
    data = open_dataset("hub:org/faces?split=train", image_size=None)
    check_of_datasets(data)
    check_of_datasets(pickle.loads(pickle.dumps(data)))
    check_of_datasets(open_dataset("hub:org/faces?split=test&config=default&label=label", image_size=None))
    for source, words in (
        ("hub:org/faces", r"hub:org/faces has splits; name one by \?split=: train, test"),
        ("hub:org/faces?split=val", r"hub:org/faces cannot be fetched: .*val"),
        ("hub:org/faces?split=train&config=other", r"hub:org/faces cannot be fetched: .*other"),
        ("hub:org/nothing?split=train", r"hub:org/nothing cannot be fetched: "),
        ("hub:org/faces?split=train[:3]", r"no whole split"),
        ("hub:/etc?split=train", r"no set of the hub"),
    ):
        with pytest.raises(UsageError, match=words):
            open_dataset(source)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_to_records_and_to_a_folder(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x.{suffix}", table(key=[f"{label}/{n}.png" for n, label in enumerate(LABELS)]))
    for out in (tmp_path / "x.rec", tmp_path / "folder"):
        convert(open_dataset(path, image_size=None), out, quiet=True)
        back = open_dataset(out, image_size=None)
        assert sorted(zip(stored_pictures(back), back.labels.tolist(), strict=True)) == sorted(
            zip(PICTURES, NUMBERS, strict=True)
        )
        assert list(back.class_names) == ["ann", "bob", "eve"]
    assert (tmp_path / "folder/ann/1.png").read_bytes() == PICTURES[1]


def test_a_run_and_its_embeddings(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"data/{number}.parquet", table().slice(3 * number, 3))
    config = ["[data]", "image_size = 32", "batch_size = 4", "workers = 0"]
    config = ['backbone = "mobilefacenet"', "embedding_dim = 8", "steps = 2", *config]
    (tmp_path / "run.toml").write_text("\n".join(config))
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(out), "--data.train", str(tmp_path / "data")]) == 0
    assert json.loads((out / "classes.json").read_text())["classes"] == ["ann", "bob", "eve"]
    arrow = write(tmp_path / "x.arrow", table())
    assert main(["embed", str(out), "--data", str(arrow), "--out", str(tmp_path / "found.emb"), "--workers", "0"]) == 0
    bare = f"{arrow}?label="
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "2"), "--data.train", bare]) == 2


def test_formats_are_told_of_what_is_missing(tmp_path: Path) -> None:
    for each in (ParquetFormat, ArrowFormat):
        with pytest.raises(DataError, match=r"none\.\w+ cannot be read as \w+: .*No such file"):
            each({}).scan(tmp_path / f"none{each.suffixes[0]}")
