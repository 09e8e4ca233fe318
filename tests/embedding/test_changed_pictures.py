"""A set, and an index of it, are of the pictures as they are: what was replaced since is embedded anew."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.linear_embedder import SIZE, stand_in
from support.pictures import picture

from plsc.data import ImageDataset
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.extract import _former_data_id, extract
from plsc.embedding.set_writer import SetWriter
from plsc.embedding.sources import open_images
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import MANIFEST, SEAL, digest, read_json, write_manifest
from plsc.index.build import build
from plsc.index.tuning import BuildOptions
from plsc.parallel import Mesh

ONE = Mesh(0, 1, 0, torch.device("cpu"))


def run(mesh: Mesh, folder: Path, pictures: ImageDataset, **more: Any) -> dict[str, Any]:
    return extract(stand_in(), pictures, folder, mesh, **{"batch_size": 7, "shard_rows": 16, "quiet": True, **more})


def photos(folder: Path, count: int = 40) -> ImageDataset:
    """The pictures below ``folder``, which are written if there are none: BMPs, of one size all."""
    if not folder.exists():
        for number in range(count):
            picture(folder / f"{number:02d}.bmp", seed=number)
            os.utime(folder / f"{number:02d}.bmp", ns=(0, number))
    return open_images(folder, SIZE)


def embedded(mesh: Mesh, folder: Path, data: Path, **more: Any) -> dict[str, Any]:
    return run(mesh, folder, photos(data), **more)


def fresh(tmp_path: Path, data: Path) -> Any:
    shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
    run(ONE, tmp_path / "fresh", photos(data))
    return EmbeddingSet(tmp_path / "fresh").rows(0, 40)


@pytest.mark.parametrize("world", [1, 2])
def test_pictures_that_were_replaced_are_embedded_anew(world: int, tmp_path: Path, ranks: Any) -> None:
    folder, data = tmp_path / "emb", tmp_path / "data"
    photos(data)  # written once, before the ranks look
    ranks(world, embedded, folder, data)
    before = EmbeddingSet(folder).rows(0, 40)
    status, top = (data / "20.bmp").stat(), data.stat()
    picture(data / "20.bmp", seed=77)
    assert (data / "20.bmp").stat().st_size == status.st_size
    (data / "33.bmp").rename(data / "x")
    (data / "34.bmp").rename(data / "33.bmp")
    (data / "x").rename(data / "34.bmp")
    os.utime(data, ns=(top.st_atime_ns, top.st_mtime_ns))
    result = ranks(world, embedded, folder, data)[0]
    assert result["embedded"] == 16 + 8  # of the shards 16 … 31 and 32 … 39
    found = EmbeddingSet(folder, verify=True).rows(0, 40)
    assert np.array_equal(found, fresh(tmp_path, data))
    assert np.flatnonzero((found != before).any(1)).tolist() == [20, 33, 34]
    assert ranks(world, embedded, folder, data)[0]["embedded"] == 0


def test_a_set_whose_pictures_changed_is_no_whole_one_until_it_is_embedded_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = tmp_path / "emb", tmp_path / "data"
    run(ONE, folder, photos(data))
    picture(data / "20.bmp", seed=77)
    picture(data / "35.bmp", seed=78)
    broken = photos(data)
    good = broken.picture

    def dies_at_35(index: int) -> torch.Tensor:
        if index == 35:
            raise RuntimeError("the process ends")
        return good(index)

    broken.picture = dies_at_35  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the process ends"):
        run(ONE, folder, broken)
    assert f"{folder}/shard-00001 is of pictures that have changed since; making it again" in capsys.readouterr().err
    with pytest.raises(DataError, match="is not finished; run plsc embed again"):
        EmbeddingSet(folder)
    assert run(ONE, folder, photos(data))["embedded"] < 40
    assert np.array_equal(EmbeddingSet(folder, verify=True).rows(0, 40), fresh(tmp_path, data))


def test_an_index_is_of_the_set_as_it_is(tmp_path: Path) -> None:
    folder, data = tmp_path / "emb", tmp_path / "data"
    run(ONE, folder, photos(data))
    opened = EmbeddingSet(folder)
    build([folder], tmp_path / "index", BuildOptions())
    picture(data / "20.bmp", seed=77)
    run(ONE, folder, photos(data))
    (tmp_path / ".index.building").mkdir()  # of an interrupted build
    (tmp_path / ".index.building/vectors.npy").write_bytes(b"former")
    build([folder], tmp_path / "index", BuildOptions(), overwrite=True)
    rows = fresh(tmp_path, data).astype(np.float64)
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    assert np.array_equal(np.load(tmp_path / "index/vectors.npy"), unit)
    with pytest.raises(IntegrityError):  # one that was opened before it changed
        build([opened], tmp_path / "other", BuildOptions())


def test_other_names_and_pictures_in_memory_are_other_data(tmp_path: Path) -> None:
    images = [np.full((SIZE, SIZE, 3), grey, np.uint8) for grey in (10, 20, 30)]
    run(ONE, tmp_path / "emb", open_images(images, SIZE))
    images[1] = np.full((SIZE, SIZE, 3), 99, np.uint8)
    assert run(ONE, tmp_path / "emb", open_images(images, SIZE))["embedded"] == 3
    data = tmp_path / "data"
    run(ONE, tmp_path / "photos", photos(data))
    (data / "20.bmp").rename(data / "20b.bmp")
    with pytest.raises(UsageError, match=r"begun with the data \(data_id\).*give --overwrite"):
        run(ONE, tmp_path / "photos", photos(data))


def as_written_before(folder: Path, data: ImageDataset) -> None:
    """Make of a set what earlier versions wrote: another id of the data, and shards that do not tell the pictures."""
    settings = {"data_id": _former_data_id(data)}
    head = {name: value for name, value in read_json(folder / MANIFEST).items() if name != SEAL} | settings
    begun = SetWriter(folder, {name: head[name] for name in WRITTEN}, {})
    for shard in folder.glob("shard-*"):
        manifest = {
            name: value for name, value in read_json(shard / MANIFEST).items() if name not in (SEAL, "contents")
        }
        write_manifest(shard, manifest | {"set": digest(begun.settings)})
    write_manifest(folder, head)


WRITTEN = (
    *("contract_id", "data_id", "rows", "dim", "image_size", "flip", "precision", "dtype"),
    "shard_rows",
)


def test_sets_of_earlier_versions_stay_and_say_what_they_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = tmp_path / "emb", tmp_path / "data"
    run(ONE, folder, photos(data))
    as_written_before(folder, photos(data))
    shutil.rmtree(folder / "shard-00001")
    assert run(ONE, folder, photos(data))["embedded"] == 16
    assert "which did not note sizes and times of pictures: if some were replaced since" in capsys.readouterr().err
    assert run(ONE, folder, photos(data))["embedded"] == 0
    picture(data / "20.bmp", seed=77)
    assert run(ONE, folder, photos(data))["embedded"] == 16  # of the shard that was made since
    assert run(ONE, folder, photos(data), overwrite=True)["embedded"] == 40
    assert np.array_equal(EmbeddingSet(folder).rows(0, 40), fresh(tmp_path, data))
    (data / "20.bmp").rename(data / "20b.bmp")
    as_written_before(folder, photos(data.with_name("none"), 40))
    with pytest.raises(UsageError, match=r"begun with the data \(data_id\)"):
        run(ONE, folder, photos(data))
