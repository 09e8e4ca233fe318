"""Decoded or drawn images of a data set, kept over the epochs and shared by all processes that read them on a machine.

A cache holds the images before their augmentation, which differs in every epoch. It lies in memory without a name
(memfd_create), which the ranks of a machine find through the descriptor of the first of them and which is gone with
its last process, however that ends; or in a file, which later runs read again.

No lock is needed: two processes that read the same image write the same bytes, and an image counts as present where
its bytes have the checksum beside them. So a process that is killed, or a power failure, leaves an image to be read
anew, never a torn one.
"""

import hashlib
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from plsc import __version__
from plsc.data.dataset import ImageDataset
from plsc.errors import DataError, UsageError
from plsc.files import make_folder
from plsc.models.preprocessing import height_and_width
from plsc.progress import warn
from plsc.sizes import available_bytes

_ON_DISK = "disk:"
_SHARE_OF_FREE_MEMORY = 8  # "auto" takes at most one part in so many

Gather = Callable[["_Memory"], Sequence["_Memory"]]


def open_cache(choice: str, dataset: ImageDataset, gather: Gather | None = None) -> "ImageCache | None":
    """Open the cache of a run; every rank calls.

    Args:
        choice: ``"memory"``; ``"disk:PATH"``, a file in the folder PATH that is named by what the data set is;
            ``"auto"``, memory where the images take at most an eighth of what is free; or ``"none"``.
        dataset: images of one size.
        gather: returns the values that the ranks give, in their order; None: there is one rank.

    Returns:
        The cache, which processes forked from this one share; None where none is wanted, or ``"auto"`` finds no room.

    Raises:
        UsageError: the choice is unknown, or there is not that much memory.
        DataError: the file cannot be made or grown.
    """
    if choice == "none":
        return None
    if choice.startswith(_ON_DISK):
        return ImageCache(dataset, _open_file(Path(choice.removeprefix(_ON_DISK)), dataset))
    if choice not in ("auto", "memory"):
        raise UsageError(f'a cache is "auto", "memory", "none" or "disk:PATH", not {choice!r:.80}')
    own = _Memory.reserve(dataset, choice)
    shared = _first_of_machine(own, [own] if gather is None else gather(own))
    if shared is None and choice == "memory":
        raise UsageError(
            f"{cache_bytes(dataset) / 2**30:,.1f} GiB of decoded images of {dataset.source} do not fit in the free "
            'memory; give data.cache = "disk:PATH" or "none"'
        )
    return None if shared is None else ImageCache(dataset, shared)


class ImageCache:
    """Images of a data set in the file ``descriptor``, which stays open with it: their checksums, then their pixels."""

    def __init__(self, dataset: ImageDataset, descriptor: int) -> None:
        count, shape = len(dataset), (len(dataset), *image_shape(dataset))
        weakref.finalize(self, os.close, descriptor)  # other ranks may open it at any time
        memory = mmap.mmap(descriptor, cache_bytes(dataset))
        self._checksums = np.frombuffer(memory, dtype=np.uint32, count=count)
        pixels = torch.frombuffer(memory, dtype=torch.uint8, offset=_pixels_start(count), count=math.prod(shape))
        self._pixels = pixels.view(shape)

    def take(self, indices: NDArray[np.int64], images: torch.Tensor) -> NDArray[np.bool_]:
        """Copy those of ``indices`` (b,) that are cached to their rows of ``images``, uint8 (b, 3, H, W).

        Returns:
            The mask (b,) of the rows that were copied.
        """
        taken: NDArray[np.bool_] = self._checksums[indices] != 0
        for row in np.flatnonzero(taken):
            images[row] = self._pixels[int(indices[row])]
            taken[row] = _checksum(images[row]) == self._checksums[indices[row]]
        return taken

    def put(self, index: int, image: torch.Tensor) -> None:
        """Store ``image``, uint8 (3, H, W), as ``index``."""
        self._pixels[index] = image
        self._checksums[index] = _checksum(self._pixels[index])


def cache_bytes(dataset: ImageDataset) -> int:
    """Bytes of the cache of all images of ``dataset``."""
    return _pixels_start(len(dataset)) + len(dataset) * math.prod(image_shape(dataset))


def _pixels_start(count: int) -> int:
    return -(-4 * count // mmap.PAGESIZE) * mmap.PAGESIZE


def image_shape(dataset: ImageDataset) -> tuple[int, int, int]:
    if dataset.image_size is None:
        raise ValueError("only images of one size make batches: open the data set with an image_size")
    return (3, *height_and_width(dataset.image_size))


def _checksum(image: torch.Tensor) -> int:
    """CRC-32 of the pixels; never 0, which says that there is no image."""
    pixels: NDArray[np.uint8] = image.numpy()
    return zlib.crc32(pixels.data) or 1


# In memory ----------------------------------------------------------------------------------------------------------


class _Memory(NamedTuple):
    """What a rank offers to the others of its ``machine``: a descriptor of the process ``pid``; -1: no memory."""

    machine: str
    pid: int
    descriptor: int

    @staticmethod
    def reserve(dataset: ImageDataset, choice: str) -> "_Memory":
        """Memory for the cache, if it fits; no page of it is taken before an image is stored."""
        free = available_bytes() or 0
        descriptor = -1
        if cache_bytes(dataset) <= (free if choice == "memory" else free // _SHARE_OF_FREE_MEMORY):
            descriptor = os.memfd_create("plsc-images")
            os.ftruncate(descriptor, cache_bytes(dataset))
        return _Memory(_machine(), os.getpid(), descriptor)


def _machine() -> str:
    """Names the machine, and the part of it whose processes see each other."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return f"process {os.getpid()}"


def _first_of_machine(own: _Memory, all_ranks: Sequence[_Memory]) -> int | None:
    """A descriptor of what the first rank of this machine offers; this rank's own where that cannot be opened."""
    first = next(memory for memory in all_ranks if memory.machine == own.machine)
    shared = first.descriptor
    if first != own and shared >= 0:
        try:
            shared = os.open(f"/proc/{first.pid}/fd/{first.descriptor}", os.O_RDWR)
        except OSError as error:
            why = f"it cannot open those of process {first.pid}: {error}"
            warn("plsc.data", f"this rank caches images by itself; {why}")
            shared = own.descriptor
    if own.descriptor not in (shared, -1):
        os.close(own.descriptor)
    return None if shared < 0 else shared


# In a file ----------------------------------------------------------------------------------------------------------


def _open_file(folder: Path, dataset: ImageDataset) -> int:
    """A descriptor of the data set's file in ``folder``, all of whose bytes have their place on the disk."""
    make_folder(folder)
    path, size = folder / f"{_name_of(dataset)}.images", cache_bytes(dataset)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a mapped page that finds the disk full would end the process
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise DataError(
            f"{path} cannot take the {size / 2**30:,.1f} GiB of the decoded images ({error.strerror}); free the disk, "
            "or give data.cache another folder"
        ) from None
    return descriptor


def _name_of(dataset: ImageDataset) -> str:
    """A name that another data set, size or version has not; single pictures that were replaced do not change it."""
    source = Path(dataset.source)
    changed = source.stat().st_mtime_ns if source.exists() else 0
    parts = [__version__, type(dataset).__name__, str(source.absolute()), changed, len(dataset), dataset.image_size]
    digest = hashlib.sha256(repr([*parts, dataset.interpolation, dataset.alignment]).encode("utf-8", "surrogateescape"))
    digest.update(np.ascontiguousarray(dataset.labels, dtype="<i8").data)
    return digest.hexdigest()[:32]
