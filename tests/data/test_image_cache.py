"""Decoded images kept over the epochs: read once, by whichever process of a machine, and none of them torn."""

import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.numbered_images import Numbered
from support.pictures import picture

from plsc.data import ImageDataset, TrainLoader, open_dataset
from plsc.data.alignment import AlignedImages
from plsc.data.convert import convert
from plsc.data.image_cache import open_cache
from plsc.data.relabelled import RelabelledDataset
from plsc.data.transforms import RotatedDataset
from plsc.errors import DataError, UsageError
from plsc.features.tables.joined import JoinedDataset
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


def faces(folder: Path) -> Path:
    """Two people with three pictures each, all of them files of one size, of one second."""
    for number in range(6):
        path = picture(folder / "ab"[number % 2] / f"{number // 2}.bmp", seed=number)
        os.utime(path, ns=(0, 10**18 + number))
    return folder


def replace(folder: Path) -> None:
    status = (folder / "a/0.bmp").stat()
    picture(folder / "a/0.bmp", seed=9)
    assert (folder / "a/0.bmp").stat().st_size == status.st_size
    os.utime(folder / "a/0.bmp", ns=(0, status.st_mtime_ns + 1))


def swap(folder: Path) -> None:
    (folder / "a/1.bmp").rename(folder / "kept")
    (folder / "b/1.bmp").rename(folder / "a/1.bmp")
    (folder / "kept").rename(folder / "b/1.bmp")


def rename(folder: Path) -> None:
    (folder / "a/0.bmp").rename(folder / "a/3.bmp")  # 0, 1, 2 are the former 1, 2, 0 from here on


FORMS = {
    "folder": lambda path: open_dataset(path, image_size=8),
    "list": lambda path: open_dataset(write_list(path), image_size=8),
    "rotated": lambda path: RotatedDataset(open_dataset(path, image_size=8)),
    "joined": lambda path: JoinedDataset(
        {"x": Numbered(5), "y": open_dataset(path, image_size=8)}, shares=[1, 1], classes=[5, 2]
    ),
    "relabelled": lambda path: RelabelledDataset(open_dataset(path, image_size=8), write_labels(path)),
    "aligned": lambda path: AlignedImages(open_dataset(path, image_size=None), Landmarks(), 8),
}


def write_list(folder: Path) -> Path:
    lines = [f"{path.relative_to(folder)}\t{path.parent.name}\n" for path in sorted(folder.glob("?/*.bmp"))]
    (folder / "all.txt").write_text("".join(lines))
    os.utime(folder / "all.txt", ns=(0, 0))
    return folder / "all.txt"


def write_labels(folder: Path) -> Path:
    path = folder.with_name("labels.npy")
    np.save(path, np.array([0, 0, -1, 1, 1, 0]))
    return path


class Landmarks:
    """The landmarks of a face that fills the picture."""

    fingerprint = "fixed"

    def __call__(self, index: int, image: torch.Tensor, name: str) -> np.ndarray:
        return np.array([[3.0, 4], [8, 4], [6, 6], [4, 9], [8, 9]])


@pytest.mark.parametrize("change", [replace, swap, rename])
@pytest.mark.parametrize("form", FORMS)
def test_pictures_that_changed_are_read_anew(form: str, change: Any, tmp_path: Path):
    folder, cache = faces(tmp_path / "faces"), f"disk:{tmp_path / 'cache'}"
    former = folder.stat().st_mtime_ns
    before = epoch(FORMS[form](folder), cache)
    change(folder)
    os.utime(folder, ns=(former, former))
    right = epoch(FORMS[form](folder), "none")
    assert not torch.equal(right, before)
    assert torch.equal(epoch(FORMS[form](folder), cache), right)


def test_a_rec_that_was_written_anew_is_read_anew(tmp_path: Path):
    for seed in (0, 50):
        for number in range(6):
            picture(tmp_path / f"{seed}" / "ab"[number % 2] / f"{number}.bmp", seed=seed + number)
        convert(open_dataset(tmp_path / f"{seed}", image_size=None), tmp_path / f"{seed}.rec", quiet=True)
    for number, name in enumerate(("0.rec", "50.rec")):
        for suffix in (".rec", ".idx", ".keys.tsv", ".classes.json"):
            (tmp_path / name).with_suffix(suffix).replace((tmp_path / "set").with_suffix(suffix))
            os.utime((tmp_path / "set").with_suffix(suffix), ns=(0, number))
        data = open_dataset(tmp_path / "set.rec", image_size=8)
        assert torch.equal(epoch(data, f"disk:{tmp_path / 'cache'}"), epoch(data, "none"))


def _named_file(mesh: Mesh, faces: str, folder: str) -> int:
    """How often this rank looked at the pictures' files to open the cache in ``folder``."""
    data, asked = open_dataset(faces, image_size=8), 0

    def stamps(start: int, stop: int) -> bytes:
        nonlocal asked
        asked += 1
        return b"the same"

    data.stamps = stamps  # type: ignore[method-assign]
    open_cache(f"disk:{folder}", data, partial(all_gather_object, mesh=mesh))
    return asked


@pytest.mark.slow
def test_one_rank_of_a_machine_looks_at_the_files(ranks, tmp_path: Path):
    arguments = str(faces(tmp_path / "faces")), str(tmp_path / "cache")
    assert ranks(3, _named_file, *arguments) == [1, 0, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def the_file(tmp_path: Path) -> Path:
    """The cache's file of Numbered(), taken away from its place."""
    open_cache(f"disk:{tmp_path}", Numbered())
    (file,) = tmp_path.glob("*.images")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return file


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe"])
def test_what_somebody_put_in_the_files_place_is_not_written_to(kind: str, tmp_path: Path):
    cache = tmp_path / "cache"
    file, own = the_file(cache), tmp_path / "own"
    file.unlink()
    own.write_bytes(b"precious")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "hard link":
        file.hardlink_to(own)
    else:
        file.symlink_to(own if kind == "link" else tmp_path / "new")
    with pytest.raises(DataError, match=r"\.images is (a link, which plsc does not make|no file that .* made); remove"):
        open_cache(f"disk:{cache}", Numbered())
    assert own.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path):
    for mode in (0o777, 0o775, 0o722):
        tmp_path.chmod(mode)
        with pytest.raises(UsageError, match=r"other users may write to.*chmod go-w"):
            open_cache(f"disk:{tmp_path}", Numbered())
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o1777)  # as /tmp: what is one's own there stays so
    the_file(tmp_path)


def test_a_new_folder_is_for_its_owner_alone_and_a_former_file_becomes_so(tmp_path: Path):
    before = os.umask(0o002)
    try:
        file = the_file(tmp_path / "new")
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
        file.chmod(0o644)
        the_file(tmp_path / "new")
    finally:
        os.umask(before)


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
