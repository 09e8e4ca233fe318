"""Decoded or drawn images of a data set, kept over the epochs and shared by all processes that read them on a machine.

A cache holds the images before their augmentation, which differs in every epoch. It lies in memory without a name
(memfd_create), which the ranks of a machine find through the descriptor of the first of them and which is gone with
its last process, however that ends; or in a file, which later runs read again.

No lock is needed: two processes that read the same image write the same bytes, and an image counts as present where
its bytes have the checksum beside them. So a process that is killed, or a power failure, leaves an image to be read
anew, never a torn one.
"""

import errno
import hashlib
import math
import mmap
import os
import stat
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from plsc import __version__
from plsc.data.dataset import ImageDataset
from plsc.data.identity import contents_id, samples_id
from plsc.errors import DataError, PlscError, UsageError
from plsc.files import make_folder, make_private_folder
from plsc.models.preprocessing import height_and_width
from plsc.progress import warn
from plsc.sizes import available_bytes

_ON_DISK = "disk:"
_ANOTHER = "give data.cache another folder"
_SHARE_OF_FREE_MEMORY = 8  # "auto" takes at most one part in so many

Gather = Callable[[Any], Sequence[Any]]


def open_cache(choice: str, dataset: ImageDataset, gather: Gather | None = None) -> "ImageCache | None":
    """Open the cache of a run; every rank calls.

    Args:
        choice: ``"memory"``; ``"disk:PATH"``, a file in the folder PATH that is named by what the data set is, down to
            the sizes and times of its files;
            ``"auto"``, memory where the images take at most an eighth of what is free; or ``"none"``.
        dataset: images of one size.
        gather: returns the values that the ranks give, in their order; None: there is one rank.

    Returns:
        The cache, which processes forked from this one share; None where none is wanted, or ``"auto"`` finds no room.

    Raises:
        UsageError: the choice is unknown, there is not that much memory, or others may write to the folder.
        DataError: the file cannot be made or grown, or is not this user's alone; the images' names cannot be read.
    """
    if choice == "none":
        return None
    if choice.startswith(_ON_DISK):
        name = _name_of(dataset, (lambda value: [value]) if gather is None else gather)
        return ImageCache(dataset, _open_file(Path(choice.removeprefix(_ON_DISK)), name, cache_bytes(dataset)))
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


def _open_file(folder: Path, name: str, size: int) -> int:
    """A descriptor of the file ``name`` in ``folder``, all of whose ``size`` bytes have their place on the disk.

    The name can be predicted: nobody else may have put a link, or a file of their own, in its place.
    """
    path = folder / name
    with suppress(OSError):  # of which make_folder says more
        make_private_folder(folder)
    make_folder(folder)
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _refuse_if_shared(folder, os.fstat(parent))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for a reader
        descriptor = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            _refuse_if_not_own(path, os.fstat(descriptor))
            os.fchmod(descriptor, 0o600)  # earlier versions let others read
            os.posix_fallocate(descriptor, 0, size)  # a mapped page that finds the disk full would end the process
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{path} is a link, which plsc does not make; remove it, or {_ANOTHER}") from None
        raise DataError(
            f"{path} cannot take the {size / 2**30:,.1f} GiB of the decoded images ({error.strerror}); free the disk, "
            f"or {_ANOTHER}"
        ) from None
    finally:
        os.close(parent)
    return descriptor


def _refuse_if_shared(folder: Path, status: os.stat_result) -> None:
    """Raise UsageError where others may put files into ``folder``, or exchange those in it."""
    is_open = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX  # as /tmp: nobody renames others' files
    if is_open or status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"data.cache = {_ON_DISK}{folder} is a folder that other users may write to, and so change what is trained "
            f"on; make it yours alone (chown, chmod go-w), or {_ANOTHER}: a new one is made so"
        )


def _refuse_if_not_own(path: Path, status: os.stat_result) -> None:
    """Raise DataError unless a file in the cache's place is a regular one of this user, under this name alone."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        raise DataError(f"{path} is no file that this user's plsc made; remove it, or {_ANOTHER}")


def _name_of(dataset: ImageDataset, gather: Gather) -> str:
    """The name of the file, which another data set, size, version or contents has not; every rank calls.

    The first rank of each machine finds it, for asking after millions of files takes a while.
    """
    own = (_machine(), os.getpid())
    is_first = next(rank for rank in gather(own) if rank[0] == own[0]) == own
    named: str | PlscError = ""
    if is_first:
        try:
            named = _digest_of(dataset)
        except PlscError as error:  # the others wait to hear of it
            named = error
    found = next(name for machine, name in gather((own[0], named)) if machine == own[0])
    if isinstance(found, PlscError):
        raise found
    return f"{found}.images"


def _digest_of(dataset: ImageDataset) -> str:
    source = Path(dataset.source).absolute()
    parts = [__version__, type(dataset).__name__, str(source), dataset.image_size, dataset.interpolation]
    parts += [samples_id(dataset), contents_id(dataset)]
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]
