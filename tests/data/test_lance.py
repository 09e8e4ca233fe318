"""Tables that pylance wrote are data sets: their images, labels and names, versions, and what is wrong with them."""

import io
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from plsc.data import ShardedDataset, helper_process, open_dataset
from plsc.data.convert import convert
from plsc.data.loader import map_in_workers
from plsc.data.readers import lance_rows
from plsc.errors import DataError, UsageError
from plsc.tools.entry import main

lance = pytest.importorskip("lance")
pa = pytest.importorskip("pyarrow")


def image_bytes(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number, 40, 90)).save(file, "PNG")
    return file.getvalue()


IMAGES = [image_bytes(number) for number in range(12)]


def write(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    lance.write_dataset(pa.table(columns), str(folder), **options)
    return folder


def faces(folder: Path, labels: Sequence[Any] = (0, 1) * 6, **columns: Any) -> Path:
    """A table of twelve images in three fragments."""
    return write(folder, {"image": IMAGES, "label": labels, **columns}, max_rows_per_file=5)


def opened(source: object, **options: Any) -> ShardedDataset:
    dataset = open_dataset(str(source), image_size=None, **options)
    assert isinstance(dataset, ShardedDataset)
    return dataset


def stored(dataset: ShardedDataset) -> list[bytes]:
    return [dataset.encoded(index) for index in range(len(dataset))]


class FirstBytes:
    """Reads an image in a loader's process."""

    def __init__(self, dataset: ShardedDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> bytes:
        return self.dataset.encoded(index)


class TestColumns:
    def test_images_labels_keys_and_further_columns(self, tmp_path: Path) -> None:
        names = [f"p/{number}.png" for number in range(12)]
        dataset = opened(faces(tmp_path / "a.lance", path=names, age=range(12), vector=[[0.5]] * 12))
        assert stored(dataset) == IMAGES
        assert dataset.labels.tolist() == [0, 1] * 6
        assert [dataset.key(index) for index in range(12)] == names
        assert dataset.metadata(3) == {"age": "3"}

    def test_text_labels_are_classes_by_name(self, tmp_path: Path) -> None:
        texts = pa.array(["bob", "ann", "bob", "cy"] * 3).dictionary_encode()
        dataset = opened(faces(tmp_path / "a.lance", texts))
        assert list(dataset.class_names) == ["ann", "bob", "cy"]
        assert dataset.labels.tolist() == [1, 0, 1, 2] * 3

    @pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.string())])
    def test_a_row_may_have_several_labels(self, tmp_path: Path, kind: Any) -> None:
        rows = [[4], [7, 4], [9], [7]] * 3
        labels = [[(kind.value_type.id == pa.string().id and str(label)) or label for label in row] for row in rows]
        table = faces(tmp_path / "a.lance", pa.array(labels, kind))
        assert opened(table, label_columns=None).labels.tolist() == [[0, -1], [1, 0], [2, -1], [1, -1]] * 3
        assert opened(table).labels.tolist() == [0, 1, 2, 1] * 3

    def test_options_name_the_columns(self, tmp_path: Path) -> None:
        table = write(
            tmp_path / "a.lance",
            {"left": IMAGES, "right": IMAGES[::-1], "person": ["x", "y"] * 6, "serial": range(100, 112)},
        )
        dataset = opened(f"{table}?image=right&label=person&key=serial")
        assert (stored(dataset), dataset.key(2)) == (IMAGES[::-1], "102")
        with pytest.raises(UsageError, match=r"several columns that can be pictures; name it by \?image=: left"):
            opened(table)
        with pytest.raises(UsageError, match=r"has no column 'name' for \?label=, but left .*, person"):
            opened(f"{table}?image=left&label=name")
        with pytest.raises(UsageError, match=r"'person' of .*a\.lance is string, and \?image= takes one of binary"):
            opened(f"{table}?image=person")
        with pytest.raises(UsageError, match=r"'left' of .*a\.lance is binary, and \?label= takes one of texts"):
            opened(f"{table}?image=right&label=left")
        with pytest.raises(UsageError, match=r"\?label= \(the column of labels.*give data.labels"):
            opened(f"{table}?image=right")
        assert open_dataset(f"{table}?image=right", own_labels=False).labels.tolist() == [-1] * 12

    def test_structs_of_bytes_and_path_are_images(self, tmp_path: Path) -> None:
        structs = pa.array([{"bytes": image, "path": f"{number % 9}.png"} for number, image in enumerate(IMAGES)])
        dataset = opened(write(tmp_path / "a.lance", {"image": structs, "label": [0, 1] * 6}))
        assert stored(dataset) == IMAGES
        assert [dataset.key(row) for row in (0, 8, 9)] == ["0.png", "8.png", "a.lance/9/0.png"]

    def test_a_table_without_images_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no column that is known for pictures.*pixels \(list<.*label \(int64\)"):
            opened(write(tmp_path / "a.lance", {"pixels": [[1, 2]], "label": [0]}))

    @pytest.mark.parametrize("version", ["2.0", "2.2"])
    def test_blobs_are_images(self, tmp_path: Path, version: str) -> None:
        if version == "2.2":
            field, images = lance.blob_field("image"), lance.blob_array(IMAGES)
        else:
            field = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
            images = pa.array(IMAGES, pa.large_binary())
        table = pa.table([images, pa.array([0, 1] * 6)], schema=pa.schema([field, pa.field("label", pa.int64())]))
        lance.write_dataset(table, str(tmp_path / "a.lance"), data_storage_version=version)
        assert stored(opened(tmp_path / "a.lance")) == IMAGES


class TestVersions:
    def test_deleted_rows_are_left_out_and_rows_keep_their_images(self, tmp_path: Path) -> None:
        table = faces(tmp_path / "a.lance", id=range(12))
        lance.dataset(str(table)).delete("id IN (0, 1, 6)")
        dataset = opened(table)
        assert stored(dataset) == [image for row, image in enumerate(IMAGES) if row not in (0, 1, 6)]
        assert dataset.key(0) == "2"

    def test_an_open_data_set_stays_at_its_version(self, tmp_path: Path) -> None:
        table = faces(tmp_path / "a.lance")
        dataset = opened(table)
        lance.write_dataset(pa.table({"image": [IMAGES[0]], "label": [5]}), str(table), mode="overwrite")
        assert stored(pickle.loads(pickle.dumps(dataset))) == IMAGES
        assert len(opened(table)) == 1
        assert stored(opened(f"{table}?version=1")) == IMAGES
        with pytest.raises(UsageError, match=r"a.lance has no version 7; its newest one is 2"):
            opened(f"{table}?version=7")
        with pytest.raises(UsageError, match=r"\?version=new is no number"):
            opened(f"{table}?version=new")

    def test_a_column_that_came_later_names_the_labels(self, tmp_path: Path) -> None:
        table = write(tmp_path / "a.lance", {"image": IMAGES}, max_rows_per_file=5)
        lance.dataset(str(table)).add_columns({"identity": "'anybody'"})
        assert list(opened(table).class_names) == ["anybody"]

    def test_another_version_has_another_index_and_a_touched_folder_has_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("plsc.data.shard_index.KEPT_FROM", 0)
        table = faces(tmp_path / "a.lance")
        first = opened(table)
        state = first.stamps(0, 12)
        (table / "left-by-somebody").mkdir()
        again = opened(table)
        assert (again.index.folder, again.stamps(0, 12)) == (first.index.folder, state)
        lance.dataset(str(table)).delete("label = 1")
        later = opened(table)
        assert later.index.folder != first.index.folder
        assert (stored(later), later.stamps(0, 6) == state) == (IMAGES[::2], False)


class TestSources:
    def test_several_tables_by_glob_folder_braces_and_list(self, tmp_path: Path) -> None:
        write(tmp_path / "0.lance", {"image": IMAGES[:5], "label": ["a", "b", "a", "b", "c"]})
        write(tmp_path / "1.lance", {"image": IMAGES[5:], "label": ["c", "a"] * 3 + ["d"]})
        (tmp_path / "all.txt").write_text("0.lance\n1.lance\n", encoding="utf-8")
        for source in (tmp_path, tmp_path / "*.lance", tmp_path / "{0..1}.lance", tmp_path / "all.txt"):
            dataset = opened(source)
            assert stored(dataset) == IMAGES
            assert [dataset.class_names[label] for label in dataset.labels] == [*"ababc", *"cacacad"]
        assert stored(opened(f"lance:{tmp_path / '1.lance'}/")) == IMAGES[5:]

    def test_a_table_that_is_none_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"there is no .*a\.lance$"):
            opened(tmp_path / "a.lance")
        (tmp_path / "a.lance").mkdir()
        with pytest.raises(DataError, match=r"a\.lance cannot be read as a table in Lance: .* was not found"):
            opened(tmp_path / "a.lance")

    def test_bits_go_to_a_rec_and_a_folder_and_back(self, tmp_path: Path) -> None:
        names = [f"{'ab'[number % 2]}/{number:02}.png" for number in range(12)]
        dataset = opened(faces(tmp_path / "a.lance", ["a", "b"] * 6, path=names))
        convert(dataset, tmp_path / "a.rec", quiet=True)
        convert(opened(tmp_path / "a.rec"), tmp_path / "folder", quiet=True)
        back = open_dataset(tmp_path / "folder", image_size=None)
        pictures = {(tmp_path / "folder" / back.key(index)).read_bytes() for index in range(12)}
        assert pictures == set(IMAGES)
        assert sorted(back.key(index) for index in range(12)) == sorted(names)

    def test_a_model_is_evaluated_on_a_table(self, tmp_path: Path) -> None:
        table = faces(tmp_path / "a.lance")
        assert main(["eval", "raw-pixels", "--data", str(table), "--image-size", "16"]) == 0


class TestFaults:
    def test_rows_without_a_label_are_left_out_and_names_are_told_apart(self, tmp_path: Path) -> None:
        names = ["x", "y", "x", *(f"n{number}" for number in range(9))]
        table = faces(tmp_path / "a.lance", [0, None, 0, -3, *range(8)], key=names)
        dataset = opened(table)
        assert dataset.skipped == {"y": "it has no label", "n0": "its label is -3"}
        assert (stored(dataset), dataset.key(1)) == ([IMAGES[0], IMAGES[2], *IMAGES[4:]], "a.lance/2/x")
        assert opened(f"{table}?key=key").skipped["a.lance/2/x"] == "its key is that of a row before it"

    def test_tables_of_one_set_have_labels_of_one_kind(self, tmp_path: Path) -> None:
        write(tmp_path / "0.lance", {"image": IMAGES, "label": ["a"] * 12})
        write(tmp_path / "1.lance", {"image": IMAGES, "label": [0] * 12})
        with pytest.raises(UsageError, match=r"'label' of .*1\.lance is a label, a number, and that of 0\."):
            opened(tmp_path)

    def test_a_label_past_all_numbers_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"a\.lance cannot be read as a table in Lance: .* not in range"):
            opened(faces(tmp_path / "a.lance", pa.array([2**63] * 12, pa.uint64())))

    def test_a_row_without_an_image_is_told_where_it_is_read(self, tmp_path: Path) -> None:
        dataset = opened(write(tmp_path / "a.lance", {"image": [None, IMAGES[1]], "label": [0, 1]}))
        with pytest.raises(DataError, match=r"row 0 of .*a\.lance is damaged: it holds no image"):
            dataset.encoded(0)
        assert dataset.encoded(1) == IMAGES[1]

    def test_a_blob_of_another_place_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "private.png").write_bytes(IMAGES[3])
        blobs = lance.blob_array([IMAGES[0], lance.Blob.from_uri(f"file://{tmp_path}/private.png"), None])
        schema = pa.schema([lance.blob_field("image"), pa.field("label", pa.int64())])
        table = tmp_path / "tables" / "a.lance"
        lance.write_dataset(
            pa.table([blobs, pa.array([0, 1, 1])], schema=schema),
            str(table),
            data_storage_version="2.2",
            allow_external_blob_outside_bases=True,
        )
        dataset = opened(table)
        assert dataset.skipped["1"].startswith("it lies outside of the table; --allow-outside")
        assert (stored(dataset), dataset.skipped["2"]) == ([IMAGES[0]], "it holds no image")
        monkeypatch.setenv("PLSC_ALLOW_OUTSIDE", "1")
        assert stored(opened(table)) == [IMAGES[0], IMAGES[3]]

    def test_links_out_of_a_table_are_refused(self, tmp_path: Path) -> None:
        table = faces(tmp_path / "in" / "a.lance")
        (tmp_path / "out").mkdir()
        shutil.move(table / "data", tmp_path / "out" / "data")
        (table / "data").symlink_to(tmp_path / "out" / "data")
        for source in (table, tmp_path / "in"):
            with pytest.raises(DataError, match=r"data: it lies outside of .*; --allow-outside"):
                opened(source)

    @pytest.mark.parametrize("folder", ["data", "_versions"])
    def test_damaged_files_are_told_in_a_line(self, tmp_path: Path, folder: str) -> None:
        table = faces(tmp_path / "a.lance")
        for path in (table / folder).iterdir():
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=r"\A[^\n]*a\.lance cannot be read[^\n]*\Z"):
            opened(table)

    def test_a_fragment_that_is_gone_is_told_by_its_rows(self, tmp_path: Path) -> None:
        table = faces(tmp_path / "a.lance")
        dataset = opened(table)
        for path in (table / "data").iterdir():
            path.unlink()
        with pytest.raises(DataError, match=r"row 7 of .*a\.lance is damaged: [^\n]*ot found[^\n/]*"):
            dataset.encoded(7)


@pytest.mark.live
@pytest.mark.parametrize("used_before", [False, True])
def test_forked_loaders_read_a_table(tmp_path: Path, used_before: bool) -> None:
    dataset = opened(faces(tmp_path / "a.lance"))
    if used_before:  # the parent's table is open, and has threads that a fork leaves behind
        assert stored(dataset) == IMAGES
    reader: Any = FirstBytes(dataset)
    rows = [row for _ in range(20) for row in range(12)]
    assert list(map_in_workers(reader, rows, 2)) == [IMAGES[row] for row in rows]
    assert os.getpid() in {int(path.name) for path in dataset.format._opened} or not used_before


@pytest.mark.live
def test_a_forked_process_lets_another_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance crashes in a fork of a process that has used it, or waits for ever: seldom, so the fork is feigned."""
    dataset = opened(faces(tmp_path / "a.lance"))
    monkeypatch.setattr(lance_rows, "_user", os.getpid() + 1)
    monkeypatch.setattr(helper_process, "_helpers", {})
    assert stored(dataset) == IMAGES
    assert not dataset.format._opened
    (first,) = helper_process._helpers.values()
    first._process.kill()
    first._process.wait()
    with pytest.raises(DataError, match="the process that reads the table has ended"):
        dataset.encoded(7)
    assert dataset.encoded(7) == IMAGES[7]
    helper_process.end_helper(lance_rows.__file__)
    for path in (tmp_path / "a.lance" / "data").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"row 8 of .*a\.lance is damaged: [^\n]*ot found[^\n/]*"):
        dataset.encoded(8)
    helper_process.end_helper(lance_rows.__file__)
