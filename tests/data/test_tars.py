"""Tars of samples: what webdataset and tar programs write, labels of every kind, hostile bytes, and compressed ones."""

import bz2
import contextlib
import gzip
import importlib.util
import io
import json
import lzma
import pickle
import shlex
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import picture, stored

import plsc.data.shard_index
from plsc.data import open_dataset
from plsc.data.convert import convert
from plsc.data.readers.tars import TarFormat
from plsc.data.sharded import ShardedDataset
from plsc.embedding.sources import open_images
from plsc.errors import DataError, PlscError, UsageError
from plsc.tools.entry import main

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
}
RECORD_FILES = ("rec", "idx", "classes.json", "keys.tsv")
BLOCK = tarfile.BLOCKSIZE


def photo(number: int) -> bytes:
    return stored(Image.new("RGB", (16, 16), (number, 0, 40)), "PNG")


def write_tar(path: Path, members: list[tuple[str, bytes | str | int]], kind: int = tarfile.PAX_FORMAT) -> Path:
    """A tar of the library's; a number stands for the picture of that colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members:
            data = photo(content) if isinstance(content, int) else content
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_samples(path: Path, samples: list[dict[str, Any]]) -> Path:
    """A tar by webdataset's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def pairs(count: int, first: int = 0) -> list[tuple[str, bytes | str | int]]:
    """Members of ``count`` samples s0.png, s0.cls, ... of the classes 0, 1, 0, 1."""
    rows = range(first, first + count)
    return [member for row in rows for member in ((f"s{row}.png", row), (f"s{row}.cls", str(row % 2)))]


def opened(source: Path | str, **options: Any) -> ShardedDataset:
    found = open_dataset(source, image_size=None, **options)
    assert isinstance(found, ShardedDataset)
    return found


def colours(data: ShardedDataset) -> list[int]:
    return [int(data.picture(row)[0, 0, 0]) for row in range(len(data))]


def keys(data: ShardedDataset) -> list[str]:
    return [data.key(row) for row in range(len(data))]


def classes(data: ShardedDataset) -> list[str]:
    return [data.class_names[label] for label in data.labels]


def replace(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize("labels", [[7, 3, 7], [b"ann", "bob é".encode(), b"ann"]])
def test_what_webdataset_writes(tmp_path: Path, labels: list[Any]) -> None:
    jpeg = stored(Image.new("RGB", (16, 16), (90, 90, 90)), "JPEG")
    samples = [{"__key__": f"0/s{row}", "jpg": jpeg, "cls": label} for row, label in enumerate(labels)]
    path = write_samples(tmp_path / "a.tar", samples)
    data = opened(path)
    assert classes(data) == [label.decode() if isinstance(label, bytes) else str(label) for label in labels]
    assert keys(data) == ["0/s0.jpg", "0/s1.jpg", "0/s2.jpg"]
    assert data.encoded(1) == jpeg
    assert data.metadata(0) == {}


def test_webdatasets_texts_and_json_are_columns(tmp_path: Path) -> None:
    extra = {"url": "http://x", "width": 16, "exif": {"f": 2}, "ok": True, "note": None, "key": "k0"}
    sample = {"jpg": photo(5), "cls": 4, "txt": "a caption é", "json": extra}
    path = write_samples(
        tmp_path / "a.tar", [{"__key__": "k0", **sample}, {"__key__": "k1", "jpg": photo(6), "cls": 5}]
    )
    data = opened(path)
    assert data.metadata(0) == {"txt": "a caption é", "url": "http://x", "width": "16", "ok": "true", "note": ""}
    assert data.metadata(1) == dict.fromkeys(data.metadata(0), "")
    assert colours(data) == [5, 6]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_of_every_length_and_alphabet(tmp_path: Path, kind: int) -> None:
    stems = ["a", "d/" * 70 + "b" * 90, "v" * 200, "人/é", "./x/../y", "n.o"]
    members: list[tuple[str, bytes | str | int]] = [(f"{stem}.png", row) for row, stem in enumerate(stems[:5])]
    members += [(f"{stem}.cls", stem[-1]) for stem in stems[:5]]
    members += [
        ("n.o.png", 9),
        ("n.cls", "n"),
        ("N.PNG", 8),
        ("N.CLS", "n"),
    ]  # n's picture is n.o.png: o.png is a field
    data = opened(write_tar(tmp_path / "a.tar", members, kind))
    assert keys(data) == [*(f"{stem}.png".removeprefix("./") for stem in stems[:5]), "n.o.png", "N.PNG"]
    assert classes(data) == ["a", "b", "v", "é", "y", "n", "n"]
    assert colours(data) == [0, 1, 2, 3, 4, 9, 8]


def test_samples_of_one_name_in_several_folders_are_several(tmp_path: Path) -> None:
    data = opened(
        write_tar(tmp_path / "a.tar", [("p/0.png", 1), ("q.r/0.png", 2), ("q.r/0.cls", "y"), ("p/0.cls", "x")])
    )
    assert list(zip(keys(data), classes(data), strict=True)) == [("p/0.png", "x"), ("q.r/0.png", "y")]


def test_a_name_that_is_not_utf8_is_kept(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    members = [(f"{name}.png", 3), (f"{name}.cls", b"\xe9t\xe9")]
    data = opened(write_tar(tmp_path / "a.tar", members, tarfile.GNU_FORMAT))
    assert keys(data) == [f"{name}.png"]
    assert classes(data) == ["\\xe9t\\xe9"]


def test_labels_of_a_text_field(tmp_path: Path) -> None:
    members = [("a.png", 1), ("a.txt", " ann\n"), ("a.cls", "1"), ("b.png", 2), ("b.txt", " \n"), ("c.png", 3)]
    data = opened(f"{write_tar(tmp_path / 'a.tar', members)}?label=txt")
    assert classes(data) == ["ann"]
    assert data.metadata(0) == {}
    assert data.skipped == {
        "b": "it has no label in txt, an integer or a text",
        "c": "it has no label in txt, but png",
    }


@pytest.mark.parametrize(
    ("key", "found", "names"),
    [
        ("id", [[1], [0], [0]], ["5", "70"]),
        ("person.name", [[0], [1], [0]], ["ann", "bob"]),
        ("tags", [[2, 1, -1], [0, -1, -1], [1, 2, 0]], ["1", "5", "30"]),
    ],
)
def test_labels_of_json(tmp_path: Path, key: str, found: list[list[int]], names: list[str]) -> None:
    rows = [
        {"id": 70, "person": {"name": "ann"}, "tags": [30, 5], "site": "s"},
        {"id": 5, "person": {"name": "bob"}, "tags": [1], "site": "t"},
        {"id": 5, "person": {"name": "ann"}, "tags": [5, 30, 1], "site": "u"},
    ]
    samples = [{"__key__": str(row), "jpg": photo(row), "json": content} for row, content in enumerate(rows)]
    source = f"{write_samples(tmp_path / 'a.tar', samples)}?label=json:{key}"
    data = opened(source, label_columns=None)
    assert data.labels.reshape(3, -1).tolist() == found
    assert list(data.class_names) == names
    assert data.metadata(2) == ({"site": "u"} if key == "id" else {"id": "5", "site": "u"})
    assert opened(source).labels.ndim == 1


@pytest.mark.parametrize(
    "value", ["null", "1.5", "true", '""', "[]", "{}", "[1, null]", "[[1]]", json.dumps([1] * 257), "["]
)
def test_json_that_holds_no_label_leaves_its_sample_out(tmp_path: Path, value: str) -> None:
    members = [("a.png", 1), ("a.json", '{"id": 3}'), ("b.png", 2), ("b.json", f'{{"id": {value}}}')]
    data = opened(f"{write_tar(tmp_path / 'a.tar', members)}?label=json:id")
    assert colours(data) == [1]
    why = "but png, json" if value == "[" else "an integer or a text"
    assert data.skipped == {"b": f"it has no label in json:id, {why}"}


def test_labels_of_folders(tmp_path: Path) -> None:
    members = [
        ("set/ann/1.a.png", 1),
        ("set/bob/1.png", 2),
        ("set/ann/1.b.png", 3),
        ("set/ann/1.cls", "9"),
        ("0.png", 4),
    ]
    data = opened(f"{write_tar(tmp_path / 'a.tar', members)}?label=folder")
    assert list(zip(keys(data), classes(data), strict=True)) == [
        *(("set/ann/1.a.png", "ann"), ("set/bob/1.png", "bob"), ("set/ann/1.b.png", "ann"))
    ]
    assert list(data.skipped) == ["0.png"]
    write_tar(tmp_path / "a.tar", [("x/ann/1.png", 1), ("y/ann/1.png", 2)])
    with pytest.raises(DataError, match=r"a\.tar: y/ann has the name of another folder; name labels by \?list=FILE"):
        opened(f"{tmp_path / 'a.tar'}?label=folder")


def test_labels_of_a_list(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [*pairs(2), ("p/x.png", 7), ("none.png", 8)])
    names = tmp_path / "labels.tsv"
    names.write_text("s0\tann\ns1.png\tbob \n./p/x.png\tann\nmore\tx\n", encoding="utf-8")
    data = opened(f"{path}?list={names}")
    assert (colours(data), classes(data)) == ([0, 1, 7], ["ann", "bob", "ann"])
    assert data.skipped == {"none": "it has no label in labels.tsv, an integer or a text"}
    names.write_text("s0\tann\ns1 bob\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"labels\.tsv line 2 is no key<TAB>label"):
        opened(f"{path}?list={names}")
    names.write_bytes(b"s0\t\xff\xfe\n")
    with pytest.raises(PlscError, match=r"labels\.tsv"):
        opened(f"{path}?list={names}")
    names.unlink()
    with pytest.raises(DataError, match=r"cannot read the list .*labels\.tsv: No such file"):
        opened(f"{path}?list={names}")
    with pytest.raises(UsageError, match=r"\?label= and \?list= both name labels"):
        opened(f"{path}?label=cls&list={names}")


def test_tars_without_labels_are_embedded_and_not_trained(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "a.tar", [{"__key__": "k", "jpg": photo(5), "txt": "c"}])
    with pytest.raises(UsageError, match=r"has no labels; name them by \?label= \(.*json:KEY.*\?list= .*data\.labels"):
        open_dataset(path)
    images = open_images(str(path), (16, 16))
    assert (len(images), images.key(0), images.labels.tolist()) == (1, "k.jpg", [-1])


@pytest.mark.parametrize("source", ["", "a-*.tar", "a-{000..002}.tar", "tars:a-00{0,1,2}.tar", "all.list"])
@pytest.mark.parametrize("kept_from", [1, 2**28])
def test_several_tars_pickled_and_with_a_kept_index(
    tmp_path: Path, source: str, kept_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", kept_from)
    for number in range(3):
        write_tar(tmp_path / f"a-00{number}.tar", [*pairs(2, 2 * number), (f"s{2 * number}.txt", f"text {number}")])
    (tmp_path / "all.list").write_text("a-000.tar\na-001.tar\na-002.tar\n", encoding="utf-8")
    kind, colon, name = source.rpartition(":")
    found = [opened(f"{kind}{colon}{tmp_path / name}")]
    if kept_from == 1:
        monkeypatch.setattr(TarFormat, "scan", lambda *_: pytest.fail("it was scanned again"))
        found.append(opened(f"{kind}{colon}{tmp_path / name}"))
        assert (tmp_path / ".plsc-index").is_dir()
    for data in (*found, pickle.loads(pickle.dumps(found[-1]))):
        assert colours(data) == [0, 1, 2, 3, 4, 5]
        assert classes(data) == ["0", "1"] * 3
        assert keys(data) == [f"s{row}.png" for row in range(6)]
        assert data.metadata(2) == {"txt": "text 1"}


@pytest.mark.parametrize("kept_from", [1, 2**28])
def test_a_name_in_two_tars_is_told_apart(tmp_path: Path, kept_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", kept_from)
    write_tar(tmp_path / "in" / "0.tar", pairs(3))
    write_tar(tmp_path / "in" / "1.tar", [*pairs(2, 2), ("s0.png", 9), ("s0.cls", "1")])
    data = opened(tmp_path / "in")
    for each in (data, pickle.loads(pickle.dumps(data)), opened(tmp_path / "in")):
        assert keys(each) == ["s0.png", "s1.png", "s2.png", "1.tar/s2.png", "s3.png", "1.tar/s0.png"]
        assert colours(each) == [0, 1, 2, 2, 3, 9]
    assert data.sample_ids(2, 4) == ["0.tar/s2.png", "1.tar/s2.png"]  # as of runs of before
    convert(data, tmp_path / "x.rec", quiet=True)
    assert sorted(keys(opened(tmp_path / "x.rec"))) == sorted(keys(data))
    cut(tmp_path / "in" / "1.tar", 900)
    with pytest.raises(DataError, match=r"sample 1\.tar/s0\.png of .*1\.tar is damaged"):
        data.encoded(5)


@pytest.mark.parametrize("kept_from", [1, 2**28])
def test_a_label_that_no_sample_has_is_the_users_mistake(
    tmp_path: Path, kept_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", kept_from)
    members = [("a.png", 1), ("a.cls", "1"), ("a.json", '{"id": 3, "site": {"x": 1}}'), ("b.png", 2)]
    path = write_tar(tmp_path / "a.tar", members)
    told = rf"no sample of {path}\?label=.* has a label by \?label=.*; the first, a: it has no label in "
    for label, fields in (("name", "png, cls, json"), ("json:name", "png, cls, json, json:id, json:site")):
        with pytest.raises(UsageError, match=rf"{told}{label}, but {fields}\Z"):
            opened(f"{path}?label={label}")
    assert opened(f"{path}?label=cls").skipped == {"b": "it has no label in cls, but png"}


def cut(path: Path, offset: int) -> None:
    path.write_bytes(path.read_bytes()[:offset])


def _size_past_the_end(path: Path, at: int) -> None:
    info = tarfile.TarInfo("s2.png")
    info.size = 2**40
    replace(path, at, info.tobuf(tarfile.GNU_FORMAT))


def _negative_size(path: Path, at: int) -> None:
    info = tarfile.TarInfo("s2.png")
    info.size = -(2**20)
    replace(path, at, info.tobuf(tarfile.GNU_FORMAT))


def _vast_pax_header(path: Path, at: int) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 2**35
    replace(path, at, info.tobuf(tarfile.GNU_FORMAT))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path, at: cut(path, at + BLOCK + 20), "s2.png: the file ends inside it"),
        (lambda path, at: cut(path, at + 200), "at byte {at:,}: no member begins there; what follows is not read"),
        (
            lambda path, at: replace(path, at, b"\xa5" * 700),
            "at byte {at:,}: no member begins there; what follows is not",
        ),
        (_size_past_the_end, "s2.png: the file ends inside it"),
        (_negative_size, "its size is negative; what follows is not read"),
        (_vast_pax_header, "its header is too long; what follows is not read"),
    ],
)
def test_a_tar_that_breaks_off_gives_what_lies_before(
    tmp_path: Path, damage: Callable[[Path, int], None], fault: str
) -> None:
    path = write_tar(tmp_path / "a.tar", pairs(4))
    with tarfile.open(path) as tar:
        at = tar.getmember("s2.png").offset
    damage(path, at)
    data = opened(path)
    assert colours(data) == [0, 1]
    assert len(data.skipped) == 1
    assert fault.format(at=at) in "".join(f"{key}: {why}" for key, why in data.skipped.items())
    with pytest.raises(DataError, match=r"1 of the 3 samples of .*a\.tar are damaged, the first with key"):
        opened(path, max_bad_records=0)


@given(st.data())
@settings(max_examples=60)
def test_no_byte_ends_in_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    members = [("d/" * 60 + "x.png", b"p"), ("d/" * 60 + "x.cls", "1"), ("é.png", b"q"), ("é.json", '{"id": [1, 2]}')]
    path = write_tar(tmp_path / "a.tar", members, data.draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])))
    for _ in range(data.draw(st.integers(1, 3))):
        replace(path, data.draw(st.integers(0, 14 * BLOCK)), data.draw(st.binary(min_size=1, max_size=12)))
    with contextlib.suppress(PlscError):
        found = opened(f"{path}{data.draw(st.sampled_from(['', '?label=json:id', '?label=folder']))}")
        assert len(found) + len(found.skipped) >= 1
        for row in range(len(found)):
            assert found.encoded(row)


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 90, b"\xa5" * 100, photo(3)])
def test_no_tar_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar is no tar: [^\n]+; use another copy\Z"):
        opened(tmp_path / "a.tar")


def test_a_tar_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.tar holds no image sample"):
        opened(write_tar(tmp_path / "a.tar", []))


def test_a_vast_first_header_is_no_tar(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", pairs(1))
    _vast_pax_header(path, 0)
    with pytest.raises(DataError, match=r"a\.tar is no tar: its header is too long"):
        opened(path)


def test_names_are_text_and_junk_is_passed_over(tmp_path: Path) -> None:
    junk = ["._s0.png", "d/._s0.png", "PaxHeader/s0.png", "./PaxHeaders.12/s0.png", "__MACOSX/s0.png", ".DS_Store"]
    members: list[tuple[str, bytes | str | int]] = [(name, "junk") for name in junk]
    members += [("../../x.png", 4), ("../../x.cls", "1"), *pairs(1), ("README", "a"), ("__names__", "x")]
    members += [("__a.b__", "x"), ("__c__/y.png", 6), ("__c__/y.cls", "1")]
    data = opened(write_tar(tmp_path / "d" / "e" / "a.tar", members))
    assert list(zip(keys(data), colours(data), strict=True)) == [("../../x.png", 4), ("s0.png", 0), ("__c__/y.png", 6)]
    assert data.skipped == {}
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "e", "a.tar"]


def test_links_devices_and_sparse_files_are_left_out(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", pairs(1))
    kinds = {"l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "c": tarfile.CHRTYPE, "f": tarfile.FIFOTYPE}
    with tarfile.open(path, "a") as tar:
        for name, kind in kinds.items():
            info = tarfile.TarInfo(f"{name}.png")
            info.type, info.linkname = kind, "s0.png"
            tar.addfile(info)
        sparse = tarfile.TarInfo("s.png")
        sparse.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "90", "GNU.sparse.name": "s.png"}
        tar.addfile(sparse)
        folder = tarfile.TarInfo("folder.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    data = opened(path)
    assert colours(data) == [0]
    assert data.skipped == {f"{name}.png": "it is a link, a device or sparse, and no plain file" for name in "lhcfs"}


def test_faults_of_single_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.data.readers.tars.LARGEST_PICTURE", 2000)
    members = [*pairs(1), ("e.png", b""), ("e.cls", "1"), ("p.cls", "1"), ("l.png", 5), ("b.png", bytes(2001))]
    data = opened(
        write_tar(tmp_path / "a.tar", [*members, ("b.cls", "1"), ("s0.png", 7), ("t.cls", "\n"), ("t.png", 8)])
    )
    assert colours(data) == [0]
    [(second, why)] = [item for item in data.skipped.items() if item[0].startswith("s0.png")]
    assert second.startswith("s0.png (at byte ")
    assert why == "the sample has a .png before it"
    assert {key: fault for key, fault in data.skipped.items() if key != second} == {
        "e": "its png has 0 bytes, where 1 to 2,000 may be",
        "p": "it has no picture, but cls",
        "l": "it has no label in cls, but png",
        "b": "its png has 2,001 bytes, where 1 to 2,000 may be",
        "t": "it has no label in cls, an integer or a text",
    }


def test_two_pictures_of_a_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.png", 1), ("a.mask.png", 2), ("a.jpg", 3), ("a.cls", "0")])
    with pytest.raises(
        DataError, match=r"sample a of .*a\.tar has several pictures: choose one by \?image=png or \?ima"
    ):
        opened(path)
    assert [colours(opened(f"{path}?image={field}")) for field in ("png", ".PNG", "jpg", "mask.png")] == [
        [1],
        [1],
        [3],
        [2],
    ]
    with pytest.raises(DataError, match="it has no webp, but png, mask"):
        opened(f"{path}?image=webp")


def test_a_file_that_was_shortened_since(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", pairs(2))
    data, other = opened(path), opened(path)
    assert data.encoded(0)  # which opens it
    cut(path, BLOCK + 20)
    with pytest.raises(DataError, match=r"sample s0\.png of .*a\.tar is damaged: .*ends inside"):
        data.encoded(0)
    with pytest.raises(DataError, match=r"sample s0\.png of .*a\.tar is damaged: its file has changed since"):
        other.encoded(0)
    path.unlink()
    with pytest.raises(DataError, match=r"sample s0\.png of .*a\.tar is damaged: its file has changed since"):
        pickle.loads(pickle.dumps(other)).encoded(0)


def jpegs(folder: Path, count: int = 4) -> dict[str, bytes]:
    """Pictures by their names, and a label beside each."""
    found = {f"k{row}.jpg": picture(folder / f"k{row}.jpg", row).read_bytes() for row in range(count)}
    return found | {f"k{row}.cls": str(row % 2).encode() for row in range(count)}


def packed(path: Path, members: Mapping[str, bytes], suffix: str) -> Path:
    plain = write_tar(path.with_name("plain"), list(members.items()))
    path.write_bytes(PACKERS[suffix](plain.read_bytes()))
    plain.unlink()
    return path


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_tars_are_converted(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    members = jpegs(tmp_path / "pictures")
    path, out = packed(tmp_path / f"x.y{suffix}", members, suffix), tmp_path / "out" / "x.rec"
    with pytest.raises(DataError) as refusal:
        open_dataset(path)
    assert str(refusal.value).endswith(f"of its own: plsc data convert {path} {tmp_path / 'x.y.rec'}")
    assert main(["data", "convert", str(path), str(out)]) == 0
    assert "4 images of 2 classes" in capsys.readouterr().out
    data = open_dataset(out, image_size=None)
    assert {data.key(row): data.encoded(row) for row in range(4)} == {
        f"k{n}.jpg": members[f"k{n}.jpg"] for n in range(4)
    }
    assert {entry.name for entry in out.parent.iterdir()} - {"property"} == {f"x.{end}" for end in RECORD_FILES}


def test_the_hint_for_a_compressed_tar_keeps_its_options(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.tar.gz", jpegs(tmp_path / "pictures") | {"k0.id": b"7", "k1.id": b"9"}, ".tar.gz")
    with pytest.raises(DataError) as refusal:
        opened(f"{path}?label=id&image=jpg")
    _, _, command = str(refusal.value).partition(": plsc ")
    assert main(shlex.split(command)) == 0
    assert classes(opened(tmp_path / "x.rec")) == ["7", "9"]


def test_compressed_and_plain_tars_of_a_folder_with_options(tmp_path: Path) -> None:
    members = {f"p{row}/a.jpg": picture(tmp_path / "a.jpg", row).read_bytes() for row in range(2)}
    write_tar(tmp_path / "in" / "b.tar", [("p1/b.jpg", members["p1/a.jpg"])])
    packed(tmp_path / "in" / "a.tar", members, ".tgz")
    assert main(["data", "convert", f"{tmp_path / 'in'}?label=folder", str(tmp_path / "out.rec")]) == 0
    assert classes(opened(tmp_path / "out.rec")) == ["p0", "p1", "p1"]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_compressed_tar_leaves_nothing(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = packed(tmp_path / f"x{suffix}", jpegs(tmp_path / "pictures"), suffix)
    cut(path, path.stat().st_size // 2)
    assert main(["data", "convert", str(path), str(tmp_path / "out" / "x.rec")]) != 0
    error = capsys.readouterr().err
    assert f"{path} cannot be unpacked: " in error
    assert "use another copy" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("compression") is not None, reason="this Python unpacks zstd")
def test_zstd_needs_a_newer_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(90))
    assert main(["data", "convert", str(tmp_path / "x.tar.zst"), str(tmp_path / "x.rec")]) == 2
    assert "this Python has no compression.zstd, 3.14 does; unpack it yourself" in capsys.readouterr().err


def test_a_training_of_two_steps(tmp_path: Path) -> None:
    for number in range(2):
        write_tar(tmp_path / f"a-{number}.tar", list(jpegs(tmp_path / f"{number}").items()))
    config = ["[data]", "image_size = 32", "batch_size = 4", "workers = 0"]
    config = ['backbone = "mobilefacenet"', "embedding_dim = 8", "steps = 2", *config]
    (tmp_path / "run.toml").write_text("\n".join(config), encoding="utf-8")
    out, source = tmp_path / "run", str(tmp_path / "a-{0..1}.tar")
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(out), "--data.train", source]) == 0
    assert json.loads((out / "classes.json").read_text(encoding="utf-8"))["classes"] == ["0", "1"]
