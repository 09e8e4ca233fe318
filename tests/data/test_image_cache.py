"""Decoded images kept over the epochs: read once, by whichever process of a machine, and none of them torn."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.numbered_images import Numbered

from plsc.data import ImageDataset, TrainLoader
from plsc.data.image_cache import open_cache
from plsc.errors import DataError, UsageError
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, barrier


def epoch(dataset: ImageDataset, cache: str) -> torch.Tensor:
    """The images of an epoch, in their own order."""
    loader = TrainLoader(
        dataset, batch_size=10, rank=0, world_size=1, seed=0, augment="none", shuffle=False, cache=cache
    )
    return torch.cat([images for images, _ in loader])


def test_memory_reads_each_image_once():
    data = Numbered()
    loader = TrainLoader(data, batch_size=10, rank=0, world_size=1, seed=3, cache="memory")
    assert [sum(len(images) for images, _ in loader) for _ in range(3)] == [30, 30, 30]
    assert data.reads == 30
    epoch(data, "none")
    assert data.reads == 60


def test_more_than_the_memory_is_refused_or_not_cached():
    data = Numbered()
    data.image_size = 10**7
    with pytest.raises(UsageError, match=r'do not fit in the free memory; give data.cache = "disk:PATH"'):
        open_cache("memory", data)
    assert open_cache("auto", data) is None
    with pytest.raises(UsageError, match="not 'disc:x'"):
        open_cache("disc:x", data)


def test_a_file_serves_later_runs_and_damaged_images_are_read_anew(tmp_path: Path):
    folder, reference = tmp_path / "new" / "cache", epoch(Numbered(), "none")
    cache, later = f"disk:{folder}", Numbered()
    assert torch.equal(epoch(Numbered(), cache), reference)
    assert torch.equal(epoch(later, cache), reference)
    assert later.reads == 0
    (file,) = folder.iterdir()
    with file.open("r+b") as pixels:  # one image loses a byte; the last two are cut off
        pixels.seek(-(30 - 4) * 192, os.SEEK_END)
        byte = pixels.read(1)
        pixels.seek(-1, os.SEEK_CUR)
        pixels.write(bytes([byte[0] ^ 1]))
    os.truncate(file, file.stat().st_size - 2 * 192)
    assert torch.equal(epoch(later, cache), reference)
    assert later.reads == 3
    other = Numbered(29)
    epoch(other, cache)
    assert other.reads == 29
    assert len(list(folder.iterdir())) == 2


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot take the 0.0 GiB of the decoded images \(No space left on device\)"):
        open_cache(f"disk:{tmp_path}", Numbered())


def _share(mesh: Mesh) -> tuple[int, bool]:
    """Images that this rank reads where the ranks before it have read theirs; and whether all pixels are right."""
    data, whole = Numbered(), epoch(Numbered(), "none")
    cache = open_cache("memory", data, partial(all_gather_object, mesh=mesh))
    assert cache is not None
    images, read = torch.zeros(30, 3, 8, 8, dtype=torch.uint8), 0
    for rank in range(mesh.world_size):
        if rank == mesh.rank:
            for index in np.flatnonzero(~cache.take(np.arange(10 * (rank + 1)), images[: 10 * (rank + 1)])):
                cache.put(int(index), whole[index])
                read += 1
        barrier(mesh)
    cache.take(np.arange(30), images)
    return read, torch.equal(images, whole)


def test_the_ranks_of_a_machine_share_what_one_of_them_read(ranks):
    assert ranks(3, _share) == [(10, True), (10, True), (10, True)]
