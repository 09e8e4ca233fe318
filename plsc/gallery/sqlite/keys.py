"""The keys of an encrypted store: one for each person, in the file STORE/keys, wrapped by the master key of a key file.

STORE/keys
  header    4,096 bytes, most of them zeros: magic, version, store id, a value that only the master key decrypts, CRC-32
  slots     64 bytes each: nonce (12), a key encrypted by AES-256-GCM under the master key (32 + 16), zeros (4);
            64 zeros where a key was erased

A slot is overwritten in place to erase its key, which a database with a log could not promise; so the keys are in no
log, no snapshot and no export. Slots are made ahead of use in blocks: an enrolment waits for no second sync.
"""

import base64
import binascii
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plsc.errors import DataError, IntegrityError, StorageError, UsageError
from plsc.files import storage_errors, sync
from plsc.index.rows import Int64, Mask
from plsc.progress import note

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
_MAGIC, _VERSION = b"plsckeys", 1
_HEADER_BYTES, _SLOT_BYTES = 4096, 64
_HEADER = struct.Struct("<8sI16s12s16sI")  # magic, version, store id, nonce, tag of an empty text, CRC of what precedes
_WRAPPED_BYTES = NONCE_BYTES + KEY_BYTES + TAG_BYTES
_ERASED = bytes(_SLOT_BYTES)
_MAX_OFFSET = 1 << 60  # behind the end of any file
_BLOCK_SLOTS = 1024  # made at once, so that one sync serves so many enrolments


def cipher(key: bytes) -> "AESGCM":
    """AES-GCM under ``key``; :class:`UsageError` where the package ``cryptography`` is missing."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise UsageError("encryption needs the package cryptography: pip install plsc-torch[encryption]") from None
    return AESGCM(key)


def read_key_file(path: Path) -> bytes:
    """Return the 32 bytes of a key file: one line of base64, as ``openssl rand -base64 32`` writes it.

    A line on standard error says so where others than its owner may read it.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    try:
        text, mode = path.read_bytes()[:4096], path.stat().st_mode
    except OSError as error:
        raise UsageError(
            f"the key file {path} cannot be read: {error.strerror}; make one: openssl rand -base64 32 > {path}"
        ) from None
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{path} is no key file: it holds 32 bytes in base64, as openssl rand -base64 32 writes them")
    if mode & 0o077:
        note(f"plsc: the key file {path} can be read by others than its owner: chmod 600 it")
    return key


class KeyTable:
    """The open file of a store's keys. One process has it, by the store's lock.

    Args:
        path: the file.
        master: the 32 bytes of the key file.
        writable: False reads alone, for snapshots.

    Raises:
        UsageError: it was made under another master key.
        DataError, IntegrityError: it is no file of keys, or damaged.
    """

    def __init__(self, path: Path, master: bytes, *, writable: bool = True) -> None:
        self.path, self._cipher = path, cipher(master)
        try:
            self._file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise IntegrityError(
                f"{path} is missing: without it nobody in this store can be read; bring back its newest copy"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}; check its permissions") from None
        try:
            self.store_id = self._read_header()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        return max((os.fstat(self._file).st_size - _HEADER_BYTES) // _SLOT_BYTES, 0)

    def _read_header(self) -> bytes:
        header = os.pread(self._file, _HEADER.size, 0)
        if header[:8] != _MAGIC:
            raise DataError(f"{self.path} is no file of keys; bring back its newest copy")
        if len(header) < _HEADER.size or zlib.crc32(header[:-4]) != _HEADER.unpack(header)[5]:
            raise IntegrityError(f"{self.path} is corrupt: its header is not what was written; bring back a copy")
        _, version, store_id, nonce, tag, _ = _HEADER.unpack(header)
        if version != _VERSION:
            raise DataError(f"{self.path} is of version {version}; this plsc reads version {_VERSION}: update it")
        if decrypted(self._cipher, nonce + tag, store_id) is None:
            raise UsageError(f"{self.path} was made under another key: name the key file that the store was made with")
        return bytes(store_id)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    # --- reading ---

    def erased(self) -> Mask:
        """Return which slots are erased, (len,)."""
        content = _read_all(self._file, len(self) * _SLOT_BYTES, _HEADER_BYTES)
        words = np.frombuffer(content, dtype=np.uint64).reshape(-1, _SLOT_BYTES // 8)
        found: Mask = np.logical_not(words.any(axis=1))
        return found

    def key(self, slot: int) -> bytes | None:
        """Return the key in a slot; None if it is erased.

        Raises:
            IntegrityError: the slot is damaged, or the file does not reach that far.
        """
        for _ in range(2):  # an erasure may have come between the halves of the first reading
            offset = _HEADER_BYTES + slot * _SLOT_BYTES
            content = os.pread(self._file, _SLOT_BYTES, offset) if offset < _MAX_OFFSET else b""
            if len(content) < _SLOT_BYTES:
                raise IntegrityError(
                    f"{self.path} is too short: it ends before key {slot}, which is in use; bring back its newest copy"
                )
            if content == _ERASED:
                return None
            key = decrypted(self._cipher, content[:_WRAPPED_BYTES], self._associated(slot))
            if key is not None and content[_WRAPPED_BYTES:] == _ERASED[_WRAPPED_BYTES:]:
                return key
        raise IntegrityError(f"{self.path} is corrupt: key {slot} is not what was written; bring back its newest copy")

    # --- writing ---

    def extend(self, count: int) -> list[tuple[int, bytes]]:
        """Append at least ``count`` slots with new keys, durably; returns their numbers and keys."""
        first, count = len(self), -(-count // _BLOCK_SLOTS) * _BLOCK_SLOTS
        made = list(enumerate(random_parts(count, KEY_BYTES), first))
        content = b"".join(_wrapped(self._cipher, key, self._associated(slot)) for slot, key in made)
        size = _HEADER_BYTES + first * _SLOT_BYTES
        with storage_errors(self.path):
            try:
                _write_all(self._file, content, size)
                os.fdatasync(self._file)
            except OSError:
                os.ftruncate(self._file, size)
                raise
        return made

    def erase(self, slots: Iterable[int]) -> None:
        """Overwrite ``slots`` with zeros, to be followed by :meth:`sync`; raises OSError."""
        for slot in slots:
            _write_all(self._file, _ERASED, _HEADER_BYTES + slot * _SLOT_BYTES)

    def sync(self) -> None:
        """Return when what was erased is on the disk.

        Raises:
            OSError: some of it may not be. It is to be erased again first: the kernel may take for written what it
                failed to write, and another sync succeed.
        """
        os.fdatasync(self._file)

    def copy(self, target: Path, kept: Int64) -> None:
        """Write a file with the keys in the slots ``kept`` alone, the others erased."""
        count = int(kept.max(initial=-1)) + 1
        content = _read_all(self._file, _HEADER_BYTES + count * _SLOT_BYTES, 0)
        slots = np.frombuffer(content[_HEADER_BYTES:], dtype=np.uint8).reshape(-1, _SLOT_BYTES)
        copied = np.zeros_like(slots)
        copied[kept] = slots[kept]
        _write_new(target, content[:_HEADER_BYTES] + copied.tobytes())

    def rewrap(self, master: bytes) -> int:
        """Put every key under another master key: the file is replaced in one step, and the former overwritten.

        Returns how many keys are not erased. Afterwards nothing but :meth:`close` is called.
        """
        new = cipher(master)
        keys = [self.key(slot) for slot in range(len(self))]
        slots = (_ERASED if k is None else _wrapped(new, k, self._associated(slot)) for slot, k in enumerate(keys))
        content = _header(self.store_id, new) + b"".join(slots)
        with storage_errors(self.path):
            _write_new(self.path, content)
        try:  # What the former master key opens leaves the disk as well, as far as its file system writes in place.
            _write_all(self._file, bytes(os.fstat(self._file).st_size), 0)
            os.fsync(self._file)
        except OSError as error:
            raise StorageError(
                f"{self.path} is under the new key file now, but what the former one opens could not be overwritten "
                f"({error.strerror}) and may be left on the disk: destroy the former key file"
            ) from None
        return sum(key is not None for key in keys)

    def _associated(self, slot: int) -> bytes:
        return self.store_id + struct.pack("<Q", slot)


def decrypted(key: "AESGCM", content: bytes, associated: bytes) -> bytes | None:
    """Return the plain text of a nonce and a cipher text; None if it is not what was encrypted."""
    from cryptography.exceptions import InvalidTag

    try:
        return key.decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], associated)
    except InvalidTag:
        return None


def random_parts(count: int, size: int) -> list[bytes]:
    """Return ``count`` random texts of ``size`` bytes, which the system is asked for once."""
    content = os.urandom(count * size)
    return [content[start : start + size] for start in range(0, len(content), size)]


def create_keys(path: Path, master: bytes) -> None:
    """Make the file of keys of a new store."""
    with storage_errors(path):
        _write_new(path, _header(os.urandom(16), cipher(master)))


def remove_leftovers(path: Path) -> None:
    """Remove what a process that was killed while it wrote the file has left: it may hold keys erased since."""
    for leftover in path.parent.glob(f".{path.name}.tmp"):
        leftover.unlink()


def _wrapped(master: "AESGCM", key: bytes, associated: bytes) -> bytes:
    nonce = os.urandom(NONCE_BYTES)
    return (nonce + master.encrypt(nonce, key, associated)).ljust(_SLOT_BYTES, b"\0")


def _header(store_id: bytes, master: "AESGCM") -> bytes:
    nonce = os.urandom(NONCE_BYTES)
    fields = (_MAGIC, _VERSION, store_id, nonce, master.encrypt(nonce, b"", store_id))
    packed = _HEADER.pack(*fields, 0)[:-4]
    return (packed + struct.pack("<I", zlib.crc32(packed))).ljust(_HEADER_BYTES, b"\0")


def _write_new(path: Path, content: bytes) -> None:
    """Write a whole file under its name in one step, readable by its owner alone."""
    tmp_path = path.with_name(f".{path.name}.tmp")
    file = os.open(tmp_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(file, content, 0)
        os.fsync(file)
        tmp_path.replace(path)
    finally:
        os.close(file)
        tmp_path.unlink(missing_ok=True)
    sync(path.parent)


def _write_all(file: int, content: bytes, offset: int) -> None:
    """Write all of ``content``: on a full disk pwrite may write a part of it first."""
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _read_all(file: int, count: int, offset: int) -> bytes:
    """Return ``count`` bytes, or what there is of them: one pread ends after 2 GiB."""
    parts = list[bytes]()
    while count and (part := os.pread(file, count, offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)
