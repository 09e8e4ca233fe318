"""Columns of a data set beside its pictures: in the embedding set, the index, what searching finds, and persons."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from support.linear_embedder import SIZE, stand_in
from support.pictures import stored

from plsc.data import open_dataset
from plsc.data.alignment import AlignedImages
from plsc.data.relabelled import RelabelledDataset
from plsc.embedding.columns import save_strings
from plsc.embedding.embedding_set import SHARD_FILES, SHARD_FORMAT, EmbeddingSet
from plsc.embedding.extract import extract
from plsc.embedding.metadata import METADATA_FILES
from plsc.embedding.set_writer import SetWriter, ShardRows
from plsc.embedding.sources import open_images
from plsc.errors import IntegrityError
from plsc.files import MANIFEST, SEAL, describe_files, read_json, read_manifest, write_manifest
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.transfer import import_set
from plsc.index import Index
from plsc.index.query import answer, open_queries
from plsc.parallel import Mesh

ONE = Mesh(0, 1, 0, torch.device("cpu"))
PEOPLE = ["ann", "bo", "ann", "cy", "bo", "ann"]
SITES = ["Åre", "Åre", "Åre", "Lo", "Lo", "Lo"]


def table(path: Path, columns: Mapping[str, Sequence[str | int]], first: int = 0) -> Path:
    """Pictures that differ, one for each value of ``columns``."""
    drawn = [np.random.default_rng(first + row).integers(0, 256, (SIZE, SIZE, 3), np.uint8) for row in range(6)]
    pictures = [stored(Image.fromarray(pixels), "PNG") for pixels in drawn]
    parquet.write_table(pa.table({"image": pa.array(pictures, pa.binary()), **columns}), path)
    return path


def embedded(folder: Path, source: Path | str) -> EmbeddingSet:
    extract(stand_in(), open_images(source, SIZE), folder, ONE, shard_rows=4, quiet=True)
    return EmbeddingSet(folder, verify=True)


@pytest.fixture
def sites(tmp_path: Path) -> EmbeddingSet:
    path = table(tmp_path / "a.parquet", {"label": PEOPLE, "site": SITES, "age": [31, 40, 32, 7, 41, 33]})
    return embedded(tmp_path / "a.emb", path)


def test_columns_go_with_a_picture_to_what_is_found(sites: EmbeddingSet, tmp_path: Path) -> None:
    assert [len(shard) for shard in sites] == [4, 2]
    assert [sites.metadata(row) for row in (0, 3, 5)] == [
        {"site": "Åre", "age": "31"},
        {"site": "Lo", "age": "7"},
        {"site": "Lo", "age": "33"},
    ]
    plain = embedded(tmp_path / "b.emb", table(tmp_path / "b.parquet", {"label": PEOPLE}, first=6))
    assert not plain.has_metadata
    assert plain.metadata(5) == {}
    assert {path.name for path in plain.shards[0].folder.iterdir()} == {*SHARD_FILES, MANIFEST}
    index = Index.build([plain, sites], tmp_path / "both.idx", quiet=True)
    found = answer(index, open_queries(index, sites.folder), 12)
    assert [query["matches"][0]["metadata"] for query in found] == [sites.metadata(row) for row in range(6)]
    without = [match["key"] for match in found[0]["matches"] if "metadata" not in match]
    assert sorted(without) == sorted(plain.keys)
    alone = Index.build(plain, tmp_path / "plain.idx", quiet=True)
    assert alone.metadata(0) == {}
    assert not METADATA_FILES & alone.manifest["files"].keys()


def test_an_approximate_index_keeps_rows_and_columns_together(tmp_path: Path) -> None:
    """Its rows are in another order than the sets'."""
    rows = np.random.default_rng(0).standard_normal((2000, 8)).astype(np.float32)
    about = {"contract_id": "m", "dim": 8, "dtype": "float32", "rows": 2000, "shard_rows": 2000}
    writer, numbers = SetWriter(tmp_path / "set", about), np.arange(2000)
    writer.begin()
    metadata = [{"row": f"{row}"} for row in range(2000)]
    writer.publish(0, ShardRows(0, rows, numbers, np.full(2000, -1), [f"k{n}" for n in numbers], metadata=metadata))
    index = Index.build(writer.finish([]), tmp_path / "ivf.idx", kind="ivf", quiet=True)
    assert index.held_out
    assert all(index.metadata(row) == {"row": index.keys[row][1:]} for row in range(0, 2000, 37))


def test_what_all_pictures_of_a_person_share_is_the_persons(sites: EmbeddingSet, tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "store")) as store:
        import_set(store, "people", sites, quiet=True)
        persons = {one.name: dict(one.metadata) for one in store.persons("people")}
        assert persons == {"ann": {}, "bo": {}, "cy": {"site": "Lo", "age": "7"}}
        values = {"label": PEOPLE, "site": ["x", "y", "x", "z", "y", "x"], "note": ["n" * 2000] * 6, "nul": ["\0"] * 6}
        other = embedded(tmp_path / "c.emb", table(tmp_path / "c.parquet", values))
        import_set(store, "others", other, quiet=True)
        persons = {one.name: dict(one.metadata) for one in store.persons("others")}
        assert persons == {"ann": {"site": "x"}, "bo": {"site": "y"}, "cy": {"site": "z"}}
        nameless = embedded(tmp_path / "d.emb", table(tmp_path / "d.parquet", {"key": list("abcdef"), "site": SITES}))
        import_set(store, "rows", nameless, quiet=True)
        (first, *_) = store.persons("rows")
        assert dict(first.metadata) == {"site": "Åre", "key": "a"}


def test_other_labels_and_aligned_faces_keep_them(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", {"label": PEOPLE, "site": SITES})
    dataset = open_dataset(path, image_size=SIZE)
    np.save(tmp_path / "labels.npy", np.array([-1, 0, 1, 0, 1, 0]))
    relabelled = RelabelledDataset(dataset, tmp_path / "labels.npy")
    assert [relabelled.metadata(row)["site"] for row in (0, 4)] == ["Åre", "Lo"]
    located = type("Located", (), {"fingerprint": "f"})()
    assert AlignedImages(open_dataset(path, image_size=None), located, 112).metadata(4) == {"site": "Lo"}


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_a_wrong_column_is_named(sites: EmbeddingSet, tmp_path: Path, text: str) -> None:
    """Whoever writes a file can write its hash, too."""
    shard = sites.shards[1].folder
    save_strings(shard, "metadata", [text, "{}"])
    manifest = {**read_manifest(shard, SHARD_FORMAT, 1)}
    manifest["files"] = describe_files(shard, [*SHARD_FILES, *METADATA_FILES])
    write_manifest(shard, manifest)
    whole = read_json(sites.folder / MANIFEST)
    whole["shards"][1]["files"] = manifest["files"]
    whole.pop(SEAL, None)
    write_manifest(sites.folder, whole)
    changed = EmbeddingSet(sites.folder, verify=True)
    assert changed.metadata(5) == {}
    with pytest.raises(IntegrityError, match="the metadata of row 4 is corrupt; use another copy"):
        changed.metadata(4)
    with pytest.raises(IntegrityError, match="is corrupt"):
        Index.build(changed, tmp_path / "x.idx", quiet=True)
