"""Object stores as sources: what a folder or a .rec of the disk gives, s3:// gives, whatever happens to the cache."""

import ast
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.object_server import SECRET, object_server
from support.pictures import picture
from torch.utils.data import DataLoader

import plsc.data.shard_index
from plsc import models
from plsc.data import block_cache, helper_process, object_requests, open_dataset
from plsc.data.block_cache import BLOCK, BlockCache
from plsc.data.convert import convert
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.sources import open_images
from plsc.errors import DataError, UsageError
from plsc.tools.entry import main

lance = pytest.importorskip("lance")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PEOPLE = ("ann", "bob", "cy")


class Stores:
    """Stores in memory by their URLs, in the place of those of the network; ``reads`` counts requests for bytes."""

    def __init__(self) -> None:
        from obstore.store import MemoryStore

        self.memory = MemoryStore()
        self.reads: list[str] = []

    def __call__(self, bucket: str) -> Any:
        if bucket != "s3://bucket":
            raise ValueError(f"no such store; its key is {SECRET}\nDebug source: {SECRET}")
        return self

    def put(self, name: str, content: bytes) -> None:
        self.memory.put(name, content)

    def list(self, *args: Any, **options: Any) -> Any:
        return self.memory.list(*args, **options)

    def list_with_delimiter(self, *args: Any) -> Any:
        return self.memory.list_with_delimiter(*args)

    def get(self, name: str, *, options: Any) -> Any:
        self.reads.append(name)
        return self.memory.get(name, options=options)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stores:
    found = Stores()
    monkeypatch.setattr(object_requests, "open_store", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures, and the same as x.rec beside it."""
    folder = tmp_path_factory.mktemp("local")
    for number in range(12):
        picture(folder / "faces" / PEOPLE[number % 3] / f"{number} é.png", number)
    convert(open_dataset(folder / "faces", image_size=None), folder / "x.rec", quiet=True)
    return folder


def upload(put: Any, folder: Path, prefix: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(f"{prefix}{path.relative_to(folder).as_posix()}", path.read_bytes())


def contents(data: Any) -> list[tuple[str, str, bytes]]:
    names = [data.class_names[label] for label in data.labels.tolist()]
    return [(data.key(row), name, data.encoded(row)) for row, name in enumerate(names)]


def test_pictures_and_records_are_those_of_the_disk(local: Path, stores: Stores, tmp_path: Path) -> None:
    upload(stores.put, local, "data/")
    faces = open_dataset(local / "faces", image_size=None)
    for source in ("s3://bucket/data/faces/", "s3://bucket/data/faces", "s3://bucket/data/x.rec"):
        data = open_dataset(source, image_size=None)
        assert contents(data) == contents(faces)
        assert data.sample_ids(0, 12) == faces.sample_ids(0, 12)
        before = len(stores.reads)
        assert contents(pickle.loads(pickle.dumps(data))) == contents(faces)
        assert len(stores.reads) == before  # by the cache
    (tmp_path / "user").rename(tmp_path / "moved")
    for out in (tmp_path / "out.rec", tmp_path / "out"):
        assert main(["data", "convert", "s3://bucket/data/faces/", str(out)]) == 0
    assert (tmp_path / "out.rec").read_bytes() == (local / "x.rec").read_bytes()
    assert (tmp_path / "out/ann/0 é.png").read_bytes() == (local / "faces/ann/0 é.png").read_bytes()


def test_shards_by_braces_and_prefix(local: Path, stores: Stores, tmp_path: Path) -> None:
    for number in range(2):
        for suffix in (".rec", ".idx", ".classes.json", ".keys.tsv"):
            stores.put(f"r/{number}{suffix}", local.joinpath(f"x{suffix}").read_bytes())
            (tmp_path / f"{number}{suffix}").write_bytes(local.joinpath(f"x{suffix}").read_bytes())
    expected = contents(open_dataset(f"{tmp_path}/{{0..1}}.rec", image_size=None))
    assert len(expected) == 24
    for source in ("s3://bucket/r/{0..1}.rec", "s3://bucket/r/", "rec:s3://bucket/r/"):
        assert contents(open_dataset(source, image_size=None)) == expected
    stores.put("r/2.classes.json", b"{}")
    with pytest.raises(UsageError, match=r"there is no s3://bucket/r/2\.rec"):
        open_dataset("s3://bucket/r/{0..2}.rec")
    with pytest.raises(UsageError, match=r"\?label= is no option of \.rec files"):
        open_dataset("s3://bucket/r/0.rec?label=id")
    stores.put("r/1.classes.json", b"torn")
    with pytest.raises(DataError, match=r"s3://bucket/r/1\.classes\.json is not readable as JSON"):
        open_dataset("s3://bucket/r/")
    assert not list((tmp_path / "user").rglob(".whole*"))


def tables(local: Path, folder: Path, suffix: str, compression: str | None) -> None:
    """The pictures as two tables, which have blocks of several rows."""
    faces = open_dataset(local / "faces", image_size=None)
    rows = [{"image": {"bytes": content, "path": key}, "label": name} for key, name, content in contents(faces)]
    folder.mkdir()
    for number in range(2):
        half = pa.Table.from_pylist(rows[6 * number : 6 * number + 6])
        path = folder / f"train-{number:05d}-of-00002.{suffix}"
        if suffix == "parquet":
            pq.write_table(half, path, row_group_size=4, compression=compression)
        elif suffix == "arrow":
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, half.schema, options=options) as writer:
                writer.write_table(half, max_chunksize=4)
        else:
            lance.write_dataset(half, path, max_rows_per_file=4)


@pytest.mark.parametrize(
    ("suffix", "compression"), [("parquet", "snappy"), ("parquet", None), ("arrow", None), ("arrow", "lz4")]
)
def test_tables_are_those_of_the_disk(
    local: Path, stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, compression: str | None
) -> None:
    tables(local, tmp_path / f"t.{suffix}", suffix, compression)
    upload(stores.put, tmp_path / f"t.{suffix}", f"t.{suffix}/")
    stores.put(f"t.{suffix}/_SUCCESS", b"")
    disk = open_dataset(tmp_path / f"t.{suffix}", image_size=None)
    caplog.clear()
    braces = f"s3://bucket/t.{suffix}/train-0000{{0..1}}-of-00002.{suffix}"
    for source in (braces, f"s3://bucket/t.{suffix}/", f"{suffix}:s3://bucket/t.{suffix}/"):
        data = open_dataset(source, image_size=None)
        assert contents(data) == contents(disk) == contents(open_dataset(local / "faces", image_size=None))
        before = len(stores.reads)
        assert contents(pickle.loads(pickle.dumps(data))) == contents(disk)
        assert len(stores.reads) == before
    unpacked = [path.name for path in (tmp_path / "user").rglob("*.images")]
    assert len(unpacked) == (0 if (suffix, compression) == ("arrow", None) else 2)
    size = sum(path.stat().st_size for path in (tmp_path / f"t.{suffix}").glob("train*"))
    told = f"unpacked into {tmp_path}/user/plsc/index, once; they take some {size:,} bytes of disk"
    assert (told in caplog.text) == (suffix == "parquet")
    assert not list((tmp_path / "user").rglob(".whole*"))
    with pytest.raises(UsageError, match=rf"there is no s3://bucket/t\.{suffix}/none\.{suffix}"):
        open_dataset(f"s3://bucket/t.{suffix}/none.{suffix}")
    stores.put(f"half/train-00001-of-00002.{suffix}", b"")
    with pytest.raises(UsageError, match=r"s3://bucket/half/ holds 1 of 2 parts: train-00000-of-00002 is missing"):
        open_dataset("s3://bucket/half/")
    with pytest.raises(DataError, match=r"s3://bucket/half/train-00001\S* cannot be read as \w+: .*; use another copy"):
        open_dataset(f"s3://bucket/half/train-00001-of-00002.{suffix}")


@pytest.mark.parametrize("kept_from", [1, 2**28])
def test_a_list_of_the_disk_labels_tars_of_a_store(
    stores: Stores, local: Path, tmp_path: Path, kept_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", kept_from)
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(local / "faces", ".")
    stores.put("t/x.tar", (tmp_path / "x.tar").read_bytes())
    monkeypatch.chdir(tmp_path)
    lines = [f"{path.relative_to(local / 'faces')}\tperson {path.parent.name}\n" for path in local.rglob("*.png")]
    Path("labels.tsv").write_text("".join(lines), encoding="utf-8")
    for source in ("s3://bucket/t/x.tar?list=labels.tsv", f"s3://bucket/t/?list={tmp_path}/labels.tsv"):
        data = open_dataset(source, image_size=None)
        expected = [(key, f"person {name}", image) for key, name, image in contents(open_dataset(local / "faces"))]
        assert sorted(contents(data)) == sorted(expected)
    before = data.stamps(0, 12)
    Path("labels.tsv").write_text("".join(lines[:6]), encoding="utf-8")
    fewer = open_dataset(source)
    assert (len(fewer), fewer.stamps(0, 6) == before) == (6, False)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_that_changes_is_told_by_name(local: Path, stores: Stores, tmp_path: Path, suffix: str) -> None:
    tables(local, tmp_path / "t", suffix, None)
    upload(stores.put, tmp_path / "t", "t/")
    data, other = open_dataset("s3://bucket/t/", image_size=None), open_dataset("s3://bucket/t/", image_size=None)
    expected = contents(data)
    shutil.rmtree(tmp_path / "user")
    assert contents(other) == expected  # fetched and unpacked anew
    shutil.rmtree(tmp_path / "user")
    stores.put(f"t/train-00001-of-00002.{suffix}", b"other")
    fresh = pickle.loads(pickle.dumps(data))  # which has no file open
    with pytest.raises(DataError, match=rf"cannot read s3://bucket/t/train-00001\S+{suffix}: it has changed since"):
        fresh.encoded(11)


def test_a_large_prefix_keeps_its_index(local: Path, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
    upload(stores.put, local, "data/")
    for source in ("s3://bucket/data/faces/", "s3://bucket/data/x.rec"):
        data = open_dataset(source, image_size=None)
        assert data.index.folder is not None
        copy = pickle.loads(pickle.dumps(data))
        assert contents(copy) == contents(data) == contents(open_dataset(local / "faces", image_size=None))
        stamps = data.stamps(0, 12)
        assert open_dataset(source).stamps(0, 12) == stamps
    stores.put("data/faces/ann/0 é.png", local.joinpath("faces/bob/1 é.png").read_bytes())
    assert open_dataset("s3://bucket/data/faces/").stamps(0, 12) != stamps


def test_what_is_no_picture_is_left_out(local: Path, stores: Stores, caplog: pytest.LogCaptureFixture) -> None:
    upload(stores.put, local / "faces", "faces/")
    for name in ("list.csv", "ann/.hidden.png", "ann/@eaDir/1.png", "ann/film.mov", "loose.png", ".x/y.png"):
        stores.put(f"faces/{name}", b"something")
    data = open_dataset("s3://bucket/faces/")
    assert len(data) == 12
    assert "1 picture left out beside the identities' folders" in caplog.text
    assert "1 .mov (not a picture)" in caplog.text
    stores.put("loose/b.png", local.joinpath("faces/bob/1 é.png").read_bytes())
    stores.put("loose/a.png", local.joinpath("faces/ann/0 é.png").read_bytes())
    images = open_images("s3://bucket/loose/", 12)
    assert [images.key(row) for row in range(2)] == ["a.png", "b.png"]
    assert images.labels.tolist() == [-1, -1]
    assert torch.equal(images.image(0), data.picture(0))
    with pytest.raises(UsageError, match="has no labels"):
        open_dataset("s3://bucket/loose/")
    with pytest.raises(UsageError, match="no picture and no shard below s3://bucket/none/"):
        open_dataset("s3://bucket/none")


def test_changed_and_missing_objects_are_told_by_name(local: Path, stores: Stores) -> None:
    upload(stores.put, local, "")
    faces, records = open_dataset("s3://bucket/faces/"), open_dataset("s3://bucket/x.rec")
    stores.put("faces/ann/0 é.png", b"other")
    stores.put("x.rec", b"other")
    stores.memory.delete("faces/ann/3 é.png")
    for data, row, why in (
        (faces, 0, r"cannot read s3://bucket/faces/ann/0 é\.png: it has changed since it was listed"),
        (faces, 1, r"cannot read s3://bucket/faces/ann/3 é\.png: there is no such object"),
        (records, 0, r"cannot read s3://bucket/x\.rec: it has changed since"),
    ):
        with pytest.raises(DataError, match=why):
            data.image(row)
    with pytest.raises(DataError, match=r"cannot list s3://other/x/: no such store") as error:
        open_dataset("s3://other/x/")
    assert "\n" not in str(error.value)
    for wrong in ("s3://", "s3:///x/"):
        with pytest.raises(UsageError, match=r"names no bucket; write s3://BUCKET/PREFIX/"):
            open_dataset(wrong)
    with pytest.raises(UsageError, match=r"\?cache_gb=much is no size"):
        open_dataset("s3://bucket/faces/?cache_gb=much")


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content[:-1],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"",
    ],
    ids=["torn", "sum", "flipped", "empty"],
)
def test_harmed_blocks_are_fetched_anew(tmp_path: Path, harm: Any) -> None:
    cache, content, fetched = BlockCache(tmp_path / "cache", 1e9), os.urandom(200_000), []

    def fetch() -> bytes:
        fetched.append(1)
        return content

    for start, stop in ((0, 5), (65_530, 65_540), (131_072, 200_000), (0, 200_000), (199_999, 200_000)):
        assert cache.read("ab-0", len(content), fetch, start, stop) == content[start:stop]
    assert len(fetched) == 1
    (path,) = (tmp_path / "cache").rglob("ab-0")
    assert path.stat().st_mode & 0o077 == (tmp_path / "cache").stat().st_mode & 0o077 == 0
    path.write_bytes(harm(path.read_bytes()))
    for _ in range(2):
        assert cache.read("ab-0", len(content), fetch, 0, 200_000) == content
    assert len(fetched) == 2


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_LEAST_SHARE", 0)
    monkeypatch.setattr(block_cache, "_USED", -1)
    cache = BlockCache(tmp_path, 16 * 1000 * 10)  # 10 blocks of 1000 bytes in each folder
    fetched: list[int] = []

    def read(number: int) -> None:
        def fetch() -> bytes:
            fetched.append(number)
            return bytes(1000)

        assert cache.read(f"a{number}", 1000, fetch, 0, 1000) == bytes(1000)

    for number in range(9):
        read(number)
        os.utime(tmp_path / f"a/a{number}", ns=(number, number))
    read(0)  # used again
    for number in range(9, 30):
        read(number)
        os.utime(tmp_path / f"a/a{number}", ns=(10**15 + number, 10**15 + number))
        if number == 9:
            assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["a0", *(f"a{n}" for n in range(2, 10))]
    kept = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert kept <= 10_000
    assert "a0" in {path.name for path in (tmp_path / "a").iterdir()}
    assert fetched == list(range(30))


def test_a_cache_that_cannot_be_written(local: Path, stores: Stores, caplog: pytest.LogCaptureFixture) -> None:
    upload(stores.put, local, "")
    (local.parent / "file").write_bytes(b"")
    data = open_dataset(f"s3://bucket/faces/?cache={local.parent}/file", image_size=None)
    assert contents(data) == contents(open_dataset(local / "faces", image_size=None))
    assert f"{local.parent}/file keeps no blocks (" in caplog.text
    with pytest.raises(UsageError, match=r"cannot write into .*/file: .*; name a folder by \?cache="):
        open_dataset(f"s3://bucket/x.rec?cache={local.parent}/file")


def test_ranges_over_several_blocks(stores: Stores, tmp_path: Path) -> None:
    from plsc.data.objects import ObjectFile, ObjectFolder

    content = os.urandom(2 * BLOCK + 5)
    stores.put("x/y.bin", content)
    file = ObjectFile(ObjectFolder("s3://bucket/x/", BlockCache(tmp_path), whole=False), "y.bin")
    for start, size in ((0, 10), (BLOCK - 3, 6), (0, len(content)), (2 * BLOCK, 99), (len(content), 1), (5, 0)):
        assert file.read(start, size) == content[start : start + size]
    assert file.with_suffix(".idx") == file.with_name("y.idx")
    assert not file.with_suffix(".idx").is_file()
    assert file.local().read_bytes() == content


def test_embeddings_are_those_of_the_disk(local: Path, stores: Stores, tmp_path: Path) -> None:
    models.save_model(models.create("mobilefacenet", embedding_dim=16, image_size=48), tmp_path / "m.safetensors")
    upload(stores.put, local, "")
    made = []
    for number, source in enumerate((local / "faces", local / "x.rec", "s3://bucket/faces/", "s3://bucket/x.rec")):
        out = tmp_path / f"{number}.emb"
        argv = ["embed", str(tmp_path / "m.safetensors"), "--data", str(source), "--out", str(out), "--workers", "0"]
        assert main(argv) == 0
        made.append(EmbeddingSet(out))
    assert not made[0].errors
    for each in made[1:]:
        assert list(each.keys) == list(made[0].keys)
        assert np.array_equal(each.rows(0, 12), made[0].rows(0, 12))


def test_the_service_opens_no_data_set() -> None:
    """A path or a URL in a request would be read for whoever sends it."""
    serve = Path(plsc.__file__).parent / "serve"
    imported = {
        alias.name
        for path in serve.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not imported & {
        "open_dataset",
        "open_images",
        "open_pictures",
        "read",
        "read_shards",
        "find_shards",
        "objects",
    }
    assert "read_bytes" not in imported


class _Pictures:
    """A data set's stored pictures, for a loader."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> bytes:
        return self.data.encoded(row)  # type: ignore[no-any-return]


@pytest.mark.live
def test_the_process_that_makes_requests_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_requests, "_user", os.getpid() + 1)  # as in a process that was forked from a user
    monkeypatch.setattr(helper_process, "_helpers", {})
    with object_server() as server:
        server.client.put_object(Bucket="bucket", Key="a/b", Body=b"content")
        (entry,) = object_requests.call(object_requests.entries, "s3://bucket", "a", True)
        read = ("s3://bucket", "a/b", 0, 7, entry[2])
        assert object_requests.call(object_requests.read, *read) == b"content"
        (helper,) = helper_process._helpers.values()
        helper._process.kill()
        helper._process.wait()
        with pytest.raises(object_requests.RequestError, match="has ended"):
            object_requests.call(object_requests.read, *read)
        assert object_requests.call(object_requests.read, *read) == b"content"
        with pytest.raises(object_requests.RequestError, match="missing"):
            object_requests.call(object_requests.read, "s3://bucket", "a/c", 0, 7, entry[2])
        helper_process.end_helper(object_requests.__file__)


@pytest.mark.live
def test_forked_and_spawned_loaders_and_failing_requests(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    object_requests.open_store.cache_clear()
    with object_server() as server:
        upload(lambda name, body: server.client.put_object(Bucket="bucket", Key=name, Body=body), local, "d e/")
        expected = [image for _, _, image in contents(open_dataset(local / "faces", image_size=None))]
        for method, fault in (("fork", "503"), ("fork", "cut"), ("spawn", "cut")):
            for source in ("s3://bucket/d e/faces/", "s3://bucket/d e/x.rec"):
                server.fail(("listing", fault), ("listing", fault))
                data = open_dataset(f"{source}?cache={tmp_path}/{method}-{fault}", image_size=None)
                assert not server.left
                server.fail(("read", fault))  # the process has made requests: it forks with obstore's threads
                loader = DataLoader(_Pictures(data), batch_size=None, num_workers=2, multiprocessing_context=method)
                assert list(loader) == expected
                assert not server.left
        with pytest.raises(DataError, match="cannot list s3://other/: there is no such bucket"):
            open_dataset("s3://other/")
        server.refuses = True
        data = open_dataset(local / "faces")
        with pytest.raises(DataError, match="cannot list s3://bucket/d e/: no permission, 403") as error:
            open_dataset("s3://bucket/d e/")
        assert SECRET not in str(error.value)
    object_requests.open_store.cache_clear()


@pytest.mark.live
def test_tables_of_a_store_that_fails(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lance's, too, which pylance reads without our requests and cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    object_requests.open_store.cache_clear()
    with object_server() as server:
        for suffix in ("parquet", "arrow", "lance"):
            tables(local, tmp_path / suffix, suffix, None)
            upload(lambda name, body: server.client.put_object(Bucket="bucket", Key=name, Body=body), tmp_path, "")
            expected = contents(open_dataset(tmp_path / suffix, image_size=None))
            for method, fault in (("fork", "503"), ("spawn", "cut")):
                server.fail(("listing", fault), ("read", "none"), ("read", fault), ("listing", fault))
                data = open_dataset(f"s3://bucket/{suffix}/?cache={tmp_path}/cache-{fault}", image_size=None)
                assert contents(data) == expected
                assert not server.left
                server.fail(*[("read", fault)] * (suffix == "lance"))  # the others read from the cache
                loader = DataLoader(_Pictures(data), batch_size=None, num_workers=1, multiprocessing_context=method)
                assert list(loader) == [image for _, _, image in expected]
                assert not server.left
            shutil.rmtree(tmp_path / suffix)
        one = "s3://bucket/lance/train-00000-of-00002.lance"
        for source in (one, f"{one}/", one.replace("000-", "0{00..00}-"), f"lance:{one}?version=1"):
            assert contents(open_dataset(source, image_size=None)) == expected[:6]
        with pytest.raises(UsageError, match=rf"{one} has no version 2; its newest one is 1"):
            open_dataset(f"{one}?version=2")
        monkeypatch.setattr(plsc.data.shard_index, "KEPT_FROM", 1)
        assert open_dataset(one).index.folder is not None
        with pytest.raises(DataError, match=r"s3://bucket/lance/none\.lance cannot be read as a table in .* not found"):
            open_dataset("s3://bucket/lance/none.lance")
        server.refuses = True
        with pytest.raises(DataError, match=r"\Arow .* of s3://bucket/lance/\S+ is damaged: no permission") as error:
            pickle.loads(pickle.dumps(data)).encoded(0)
        assert SECRET not in str(error.value)
    object_requests.open_store.cache_clear()
