"""Data sets of several files: which ones a source names, the classes that they share, and the index that is kept."""

import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import stored

import plsc.data.readers.records
import plsc.data.recordio
import plsc.data.shard_index
from plsc import config as configuration
from plsc.data import ImageDataset, identity, open_dataset
from plsc.data.convert import convert
from plsc.data.readers.records import RecordFormat
from plsc.data.shard_index import open_index
from plsc.data.shards import Scanned, ShardFormat, find_shards, split_options, text_labels
from plsc.errors import DataError, UsageError
from plsc.files import write_json
from plsc.tools.entry import main
from plsc.train.tables import open_training_data

MAGIC = 0xCED7230A


def picture(number: int) -> bytes:
    return stored(Image.new("RGB", (16, 16), (number % 256, number // 256, 40)), "PNG")


def write_rec(path: Path, rows: list[tuple[float | list[float], int]]) -> Path:
    """A .rec from the format's description alone: every record an image, with one label or an array of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, out = [], b""
    for key, (labels, number) in enumerate(rows):
        array = labels if isinstance(labels, list) else []
        content = struct.pack("<IfQQ", len(array), 0.0 if array else labels, key, 0)
        content += struct.pack(f"<{len(array)}f", *array) + picture(number)
        lines.append(f"{key}\t{len(out)}\n")
        out += struct.pack("<II", MAGIC, len(content)) + content + bytes(-len(content) % 4)
    path.write_bytes(out)
    path.with_suffix(".idx").write_text("".join(lines), encoding="ascii")
    return path


def colours(data, rows=None) -> list[int]:
    pictures = (data.picture(row) for row in (range(len(data)) if rows is None else rows))
    return [int(image[0, 0, 0]) + 256 * int(image[1, 0, 0]) for image in pictures]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    write_rec(tmp_path / "a-000.rec", [(0.0, 1), (2.0, 2)])
    write_rec(tmp_path / "a-001.rec", [(9.0, 3)])
    write_rec(tmp_path / "a-002.rec", [(2.0, 4), (0.0, 5)])
    (tmp_path / "all.txt").write_text("a-000.rec\na-001.rec\n\na-002.rec\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("source", ["", "a-*.rec", "a-{000..002}.rec", "a-00{0,1,2}.rec", "all.txt", "*00?.rec"])
@pytest.mark.parametrize("prefix", ["", "rec:"])
def test_several_files_are_one_data_set_however_they_are_named(three: Path, source: str, prefix: str) -> None:
    data = open_dataset(f"{prefix}{three / source}", image_size=None)
    assert data.labels.tolist() == [0, 1, 2, 1, 0]
    assert data.labels.dtype == np.int64
    assert list(data.class_names) == ["0", "2", "9"]
    assert colours(pickle.loads(pickle.dumps(data))) == [1, 2, 3, 4, 5]
    assert [data.key(row) for row in range(5)] == [
        *("a-000.rec/0", "a-000.rec/1", "a-001.rec/0", "a-002.rec/0", "a-002.rec/1")
    ]
    assert len(set(data.sample_ids(0, 5))) == 5
    assert data.sample_ids(0, 5) == data.sample_ids(0, 2) + data.sample_ids(2, 4) + data.sample_ids(4, 5)


def test_a_folders_train_rec_stands_for_it(three: Path) -> None:
    write_rec(three / "train.rec", [(4.0, 7)])
    assert colours(open_dataset(three, image_size=None)) == [7]


def test_a_file_that_is_named_and_missing_is_told(three: Path) -> None:
    (three / "a-001.rec").unlink()
    with pytest.raises(UsageError, match=r"there is no .*a-001\.rec"):
        open_dataset(three / "a-{000..002}.rec")
    with pytest.raises(UsageError, match=r"there is no .*a-001\.rec"):
        open_dataset(three / "all.txt")
    with pytest.raises(UsageError, match="matches no file"):
        open_dataset(three / "b-*.rec")
    (three / "all.txt").write_text("a-000.rec\nfaces.png\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"all\.txt line 2 names 'faces\.png', which does not end in \.rec"):
        open_dataset(three / "all.txt")
    for vast in ("{0..99999999}", "{0..99999}{0..99999}"):
        with pytest.raises(UsageError, match="1,000,000 are the most"):
            open_dataset(three / f"{vast}.rec")


def test_a_link_in_a_folder_may_not_lead_out_of_it(three: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = write_rec(tmp_path_factory.mktemp("elsewhere") / "own.rec", [(0.0, 1)])
    (three / "z.rec").symlink_to(elsewhere)
    with pytest.raises(DataError, match=r"z\.rec: it lies outside"):
        open_dataset(three)


def test_damaged_records_of_all_files_are_counted_together(three: Path) -> None:
    path = three / "a-002.rec"
    path.write_bytes(path.read_bytes()[:-8])
    data = open_dataset(three, image_size=None)
    assert list(data.skipped) == ["a-002.rec/1"]
    assert colours(data) == [1, 2, 3, 4]
    with pytest.raises(DataError, match=r"1 of the 5 records .* first with key a-002\.rec/1 .*ends inside it"):
        open_dataset(three, max_bad_records=0)


def test_a_file_that_is_replaced_while_it_is_in_use_is_told(three: Path) -> None:
    data = open_dataset(three, image_size=None)
    path = three / "a-001.rec"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + b"?")  # of the same size
    assert colours(data, [0, 1]) == [1, 2]
    with pytest.raises(DataError, match=r"record a-001\.rec/0 of .* its file has changed since"):
        data.encoded(2)


def test_names_of_classes_join_files_that_number_them_by_themselves(three: Path) -> None:
    names = {"a-000": ["eve", "-", "bob"], "a-001": [*"----", *"-----", "ann"][0:10], "a-002": ["bob", "-", "ann"]}
    names["a-001"][9] = "ann"
    for stem, own in names.items():
        write_json(three / f"{stem}.classes.json", {"classes": own})
    data = open_dataset(three, image_size=None)
    assert list(data.class_names) == ["ann", "bob", "eve"]
    assert [data.class_names[label] for label in data.labels] == ["eve", "bob", "ann", "ann", "bob"]
    (three / "a-001.classes.json").unlink()
    with pytest.raises(UsageError, match=r"a-001\.rec has no a-001\.classes\.json, and others have theirs"):
        open_dataset(three)


def test_one_map_of_all_files_keeps_its_order(three: Path) -> None:
    for stem in ("a-000", "a-001", "a-002"):
        write_json(three / f"{stem}.classes.json", {"classes": [f"person-{9 - number}" for number in range(10)]})
    assert list(open_dataset(three).class_names) == ["person-9", "person-7", "person-0"]


def test_all_labels_of_a_record(tmp_path: Path) -> None:
    path = write_rec(tmp_path / "k.rec", [([7.0, 3.0, 900.0], 1), ([3.0], 2), (900.0, 3), ([3.0, -1.0, 7.0], 4)])
    data = open_dataset(path, label_columns=None)
    assert data.labels.tolist() == [[1, 0, 2], [0, -1, -1], [2, -1, -1], [0, -1, 1]]
    assert list(data.class_names) == ["3", "7", "900"]
    first = open_dataset(path)
    assert (first.labels.tolist(), list(first.class_names)) == ([1, 0, 2, 0], ["3", "7", "900"])
    two = open_dataset(path, label_columns=2)
    assert two.labels.tolist() == [[1, 0], [0, -1], [2, -1], [0, 1]]
    both = open_dataset(str(tmp_path / "*.rec"), label_columns=None)
    write_rec(tmp_path / "l.rec", [(5.0, 5)])
    joined = open_dataset(str(tmp_path / "*.rec"), label_columns=None)
    assert both.labels.tolist() == data.labels.tolist()
    assert joined.labels[4].tolist() == [list(joined.class_names).index("5"), -1, -1]


@pytest.mark.parametrize("other", [0.5, -2.0, float("inf")])
def test_numbers_behind_the_label_that_are_none_leave_the_first(tmp_path: Path, other: float) -> None:
    path = write_rec(tmp_path / "k.rec", [([7.0, 3.0], 1), ([3.0, other], 2)])
    assert open_dataset(path, label_columns=None).labels.tolist() == [1, 0]


def test_labels_past_float32_are_refused_in_any_column_and_read_as_integers(tmp_path: Path) -> None:
    path = write_rec(tmp_path / "k.rec", [([7.0, 3.0], 1), ([3.0, float(2**24)], 2)])
    with pytest.raises(DataError, match=r"record 1 of .*k\.rec has the label 16,777,216, .*float32"):
        open_dataset(path, label_columns=None)
    np.save(tmp_path / "k.labels.npy", np.array([[2**24, -1], [2**24 + 1, 5]]))
    data = open_dataset(path, label_columns=None)
    assert data.labels.tolist() == [[1, -1], [2, 0]]
    assert list(data.class_names) == ["5", str(2**24), str(2**24 + 1)]
    np.save(tmp_path / "k.labels.npy", np.array([1, 2, 3]))
    with pytest.raises(DataError, match=r"k\.labels\.npy is no array of integers for 2 images"):
        open_dataset(path)


@given(st.lists(st.lists(st.integers(0, 40) | st.none(), max_size=6).map(tuple), min_size=1, max_size=4))
@settings(max_examples=60)
def test_labels_are_joined_as_numbers_whatever_the_files_hold(rows: list[tuple[int | None, ...]]) -> None:
    """Against the plain reading: the sorted numbers that stand anywhere, and their ranks."""
    stored_rows = [[-1 if label is None else label for label in own] for own in rows]
    scans = {Path(f"{n}.x"): np.array(own, np.int64) for n, own in enumerate(stored_rows)}
    found = joined(Numbers(scans), list(scans))
    flat = [label for own in stored_rows for label in own]
    classes = sorted({label for label in flat if label >= 0})
    assert found.labels.tolist() == [classes.index(label) if label >= 0 else -1 for label in flat]
    assert [int(name) for name in found.class_names] == classes


class Numbers(ShardFormat):
    """Shards whose rows are given."""

    suffixes = (".x",)

    def __init__(self, scans: dict[Path, np.ndarray], keys: dict[Path, list[str]] | None = None) -> None:
        super().__init__({})
        self.scans, self.keys, self.scanned = scans, keys or {}, []

    def scan(self, shard: Path) -> Scanned:
        self.scanned.append(shard.name)
        rows = len(self.scans[shard])
        keys = self.keys.get(shard)
        columns = {} if keys is None else {"caption": [f"of {key}" for key in keys]}
        return Scanned(np.arange(rows)[:, None] + 100, self.scans[shard], keys, columns=columns)

    def read(self, shard: Path, row: int, place: np.ndarray) -> bytes:
        return b""


def joined(shard_format: ShardFormat, shards: list[Path]):
    return plsc.data.shard_index._index(*in_memory([shard_format.scan(shard) for shard in shards]), None)


def in_memory(scans: list[Scanned]):
    arrays: dict = {}

    def new(name, shape, dtype):
        return arrays.setdefault(name, np.empty(shape, dtype))

    return plsc.data.shard_index._join(scans, new), arrays


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Numbers:
    """A format of three shards, whose index is kept however small they are."""
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
    shards = [tmp_path / f"{name}.x" for name in "abc"]
    for shard in shards:
        shard.write_bytes(b"content")
    labels = dict(zip(shards, map(np.array, ([5, 400], [7], [5, 5])), strict=True))
    keys = {shard: [f"{shard.stem}{row}é" for row in range(len(labels[shard]))] for shard in shards}
    return Numbers(labels, keys)


def test_a_kept_index_is_mapped_with_the_smallest_integers(kept: Numbers) -> None:
    shards = list(kept.scans)
    for _ in range(2):
        index = open_index("s", shards, kept)
        assert kept.scanned == ["a.x", "b.x", "c.x"]
        assert isinstance(index.labels, np.memmap)
        assert index.labels.dtype == np.int8
        assert index.labels.tolist() == [0, 2, 1, 0, 0]
        assert list(index.names) == ["a0é", "a1é", "b0é", "c0é", "c1é"]
        assert list(index.columns["caption"])[1] == "of a1é"
        assert index.starts.tolist() == [0, 2, 3, 5]
        assert index.places[:, 0].tolist() == [100, 101, 100, 100, 101]
        assert index.labels_sha256 == identity.labels_digest([np.array([0, 2, 1, 0, 0])])
    assert not list(shards[0].parent.glob(".plsc-index/*.parts"))


def test_a_scan_goes_on_where_it_was_cut_off(kept: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = list(kept.scans)
    scan = Numbers.scan

    def dying(self: Numbers, shard: Path) -> Scanned:
        if shard == shards[2]:
            raise KeyboardInterrupt
        return scan(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(Numbers, "scan", dying)
        with pytest.raises(KeyboardInterrupt):
            open_index("s", shards, kept)
    assert open_index("s", shards, kept).labels.tolist() == [0, 2, 1, 0, 0]
    assert kept.scanned == ["a.x", "b.x", "c.x"]


def test_a_shard_that_changes_leads_to_another_index_and_the_former_goes(kept: Numbers) -> None:
    shards = list(kept.scans)
    first = open_index("s", shards, kept).folder
    shards[1].write_bytes(b"other content")
    kept.scans[shards[1]] = np.array([6])
    second = open_index("s", shards, kept)
    assert list(second.class_names) == ["5", "6", "400"]
    assert first is not None
    assert not first.exists()


def test_a_file_without_labels_beside_others_is_told(tmp_path: Path) -> None:
    for name, fields in (("a", ("jpg", "cls")), ("b", ("jpg",))):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for field in fields:
                content = b"7" if field == "cls" else picture(1)
                member = tarfile.TarInfo(f"{name}.{field}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    with pytest.raises(UsageError, match=r"b\.tar has no labels, and other files of .* have: leave it out"):
        open_dataset(tmp_path)


def test_where_nothing_may_be_written_the_index_lies_in_the_users_cache(
    kept: Numbers, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    shards = list(kept.scans)
    (shards[0].parent / ".plsc-index").write_text("a file is in the way")
    folder = open_index("s", shards, kept).folder
    assert folder is not None
    assert folder.is_relative_to(cache)


def test_what_a_data_set_is_is_computed_once(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = identity.samples(open_dataset(three))
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
    assert identity.samples(open_dataset(three)) == plain
    monkeypatch.setattr(RecordFormat, "read", lambda *_: pytest.fail("images were read again"))
    assert identity.samples(open_dataset(three)) == plain


def test_options_and_paths(tmp_path: Path) -> None:
    assert split_options("s3://b/x.tar?label=id&image=jpg") == ("s3://b/x.tar", {"label": "id", "image": "jpg"})
    assert split_options("shard-0?.tar") == ("shard-0?.tar", {})
    named = tmp_path / "x?label=id"
    named.touch()
    assert split_options(str(named)) == (str(named), {})
    with pytest.raises(UsageError, match=r"\?label= is no option of \.rec files"):
        open_dataset(f"{write_rec(tmp_path / 'a.rec', [(0.0, 1)])}?label=id")
    assert find_shards(str(named), (".rec",)) is None


def test_texts_are_numbers_where_all_are() -> None:
    assert text_labels(["7", "10", "7"])[0].tolist() == [7, 10, 7]
    labels, names = text_labels(["7", "007"])
    assert [names[label] for label in labels] == ["7", "007"]


def test_a_run_of_several_files(three: Path) -> None:
    config = ["[data]", "image_size = 32", "batch_size = 4", "workers = 0"]
    config = ['backbone = "mobilefacenet"', "embedding_dim = 8", "steps = 2", *config]
    (three / "run.toml").write_text("\n".join(config))
    out = three / "run"
    assert main(["train", str(three / "run.toml"), "--out", str(out), "--data.train", str(three / "a-*.rec")]) == 0
    assert json.loads((out / "classes.json").read_text())["classes"] == ["0", "2", "9"]


def test_the_key_of_label_columns(tmp_path: Path) -> None:
    path = write_rec(tmp_path / "k.rec", [([7.0, 3.0], 1), ([3.0, 9.0], 2)])
    both = configuration.load(None, {"data.train": str(path)})
    assert open_training_data(both).labels.tolist() == [[1, 0], [0, 2]]
    first = configuration.load(None, {"data.train": str(path), "data.label_columns": 1})
    assert open_training_data(first).labels.tolist() == [1, 0]


@pytest.mark.parametrize("most", [2**24, 800])
def test_conversion_keeps_all_labels(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As arrays of float32, or where these hold too few, as integers."""
    rows = [([7.0, 3.0, 900.0], 1), ([3.0], 2), ([5.0, -1.0, 7.0], 3), (3.0, 4)]
    source = open_dataset(write_rec(tmp_path / "k.rec", rows), image_size=None, label_columns=None)
    for module in (plsc.data.recordio, plsc.data.readers.records):
        monkeypatch.setattr(module, "LARGEST_FLOAT", most if most > 2**20 else source.num_classes - 1)
    convert(source, tmp_path / "out.rec", quiet=True)
    assert (tmp_path / "out.labels.npy").exists() == (most == 800)
    again = open_dataset(tmp_path / "out.rec", image_size=None, label_columns=None)
    assert labels_by_picture(again) == labels_by_picture(source)
    if most == 800:
        (tmp_path / "out.labels.npy").unlink()  # as a kill may leave it
        with pytest.raises(DataError, match=r"has the label 3, .*float32"):
            open_dataset(tmp_path / "out.rec", label_columns=None)
    with pytest.raises(UsageError, match="several labels an image, which a folder has no place for"):
        convert(source, tmp_path / "out", quiet=True)


def labels_by_picture(data: ImageDataset) -> dict[bytes, list[str]]:
    return {
        data.encoded(row): [data.class_names[label] for label in data.labels[row] if label >= 0]
        for row in range(len(data))
    }


def test_a_conversion_never_replaces_what_it_reads(three: Path) -> None:
    before = (three / "a-001.rec").read_bytes()
    assert main(["data", "convert", str(three / "a-*.rec"), str(three / "a-001.rec"), "--overwrite"]) == 2
    assert (three / "a-001.rec").read_bytes() == before


@pytest.mark.parametrize("source", ["a-*.rec", "", "all.txt"])
def test_every_command_of_data_takes_several_files(
    three: Path, source: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path_factory.mktemp("out")
    given = str(three / source)
    assert main(["data", "convert", given, str(out / "x.rec")]) == 0
    assert main(["data", "check", given]) == 0
    assert main(["data", "stats", given]) == 0
    assert main(["data", "pairs", given, str(out / "x.bin"), "--pairs", "2"]) == 0
    data = open_dataset(given)
    keys = [data.key(row) for row in range(len(data))]
    (out / "points.csv").write_text("".join(f"{key},2,4,13,4,8,8,4,12,12,12\n" for key in keys))
    assert main(["data", "align", given, "--landmarks", str(out / "points.csv"), "--out", str(out / "faces.rec")]) == 0
    assert "5 images of 3 classes" in capsys.readouterr().out
