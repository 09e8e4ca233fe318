"""Atomic writes, which no reader and no restart after kill -9 sees half done; manifests that detect damage."""

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from plsc.errors import DataError, IntegrityError, StorageError, UsageError, first_line
from plsc.progress import note
from plsc.text_files import read_text

MANIFEST = "manifest.json"
SEAL = "seal"  # the key of a manifest's own digest
LARGEST_JSON = 8 << 20  # manifests have some 800 bytes for 32,768 rows; in memory JSON takes up to 20 times its bytes
Manifest = dict[str, Any]
Kind = TypeVar("Kind")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WAITING_RECORDS = 100_000  # that an AppendFile keeps in memory: at 200 bytes each, 20 MB


def make_folder(path: Path) -> Path:
    """Create ``path`` and its parents; a :class:`UsageError` says so when that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".write-test-", dir=path):  # of a name that nobody has put a link to
            pass
    except OSError as error:
        problem = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"cannot write into {path}: {problem}; name another folder") from None
    return path


def make_private_folder(path: Path) -> None:
    """Create ``path`` and its missing parents, open to their owner alone whatever the umask is."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            sync(folder.parent)


def open_private(path: Path) -> int:
    """A descriptor of ``path``, emptied or created for writing, readable by its owner alone whatever the umask is."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # of one that existed
    return descriptor


def restrict(*paths: Path) -> None:
    """Take every right on files and folders, with all in them, from everybody but their owner.

    A line on standard error names what belongs to another user, whose rights only that user can change.
    """
    for path in paths:
        for entry in (path, *(path.rglob("*") if path.is_dir() else ())):
            try:
                if not entry.is_symlink() and entry.stat().st_mode & 0o077:
                    entry.chmod(0o700 if entry.is_dir() else 0o600)
            except FileNotFoundError:  # removed meanwhile
                continue
            except PermissionError:
                message = "other users may open it, and it belongs to one of them: chown it, then chmod go= it"
                note(f"plsc: {entry}: {message}")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """:func:`make_folder`; if the block fails, the folders that were created and are still empty are removed again."""
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield make_folder(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the innermost comes first; one that is not empty ends it
            for folder in created:
                folder.rmdir()
        raise


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file, or a folder that is not empty, with a :class:`UsageError` unless ``overwrite``."""
    try:
        exists = path.is_symlink() or (any(path.iterdir()) if path.is_dir() else path.exists())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another place") from None
    if exists and not overwrite:
        raise UsageError(f"{path} exists already: give --overwrite to replace it")


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while they wrote ``path``, or ``path.*``, have left beside it.

    These are ``.NAME.PID.tmp`` and ``.NAME.….PID.tmp``. One of a process that is running stays.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process = leftover.name.removesuffix(".tmp").rpartition(".")[2]
        # A process of our own number is an earlier one: in a container each has the same.
        if process.isdigit() and (int(process) == os.getpid() or not is_running(int(process))):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """True if there is a process of this number."""
    try:
        with contextlib.suppress(PermissionError):  # of another user
            os.kill(process, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    return True


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Translate an OSError (full disk, lost permission) into a :class:`StorageError` naming its file, or ``path``."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or path}: {error.strerror or error}; nothing was changed: "
            "make room on the disk, or check its permissions"
        ) from None


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of ``path`` to write to; on success it replaces ``path`` atomically."""
    with atomic_write_group([path]) as (tmp_path,):
        yield tmp_path


@contextmanager
def atomic_write_group(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield temporary neighbours of files that belong together, the main one first; on success they replace all.

    No file system replaces several files in one step. A kill in between may leave the new main file without some of
    the others, but never the old main file with new ones, or the other way round: readers have to get by without the
    others. A neighbour that was not written has its file removed.
    """
    main, *others = paths
    tmp_paths = [_of_process(path) for path in paths]
    try:
        yield tmp_paths
        for tmp_path in filter(Path.exists, tmp_paths):
            sync(tmp_path)
        if others:
            for path in others:
                path.unlink(missing_ok=True)
            sync(main.parent)  # before the next step: else a power cut may undo the removals alone
        tmp_paths[0].replace(main)
        sync(main.parent)
        written = [(tmp_path, path) for tmp_path, path in zip(tmp_paths[1:], others, strict=True) if tmp_path.exists()]
        for tmp_path, path in written:
            tmp_path.replace(path)
        if written:
            sync(main.parent)
    except FileNotFoundError as error:
        raise UsageError(f"cannot write {main}: {error.strerror}; make its folder first") from None
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise UsageError(f"cannot write {main}: {error.strerror}; name another place") from None
    finally:
        for tmp_path in filter(Path.is_file, tmp_paths):
            tmp_path.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN has no JSON: callers store null."""
    text = _json_text(value)
    with atomic_write(path) as tmp_path:
        tmp_path.write_text(text, encoding="utf-8")


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """Read a JSON file; a missing or malformed one, or one of more bytes, is a :class:`DataError` that names it."""
    return parse_json(read_json_text(path, largest), path, largest)


def read_json_text(path: Path, largest: int = LARGEST_JSON) -> str:
    """Read a JSON file for :func:`parse_json`; raises as :func:`read_json`."""
    try:
        return read_text(path, largest)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} is not readable as JSON: {first_line(error)}") from None


def parse_json(content: str | bytes, path: Path, largest: int = LARGEST_JSON) -> Any:
    """Parse what was read of the JSON file ``path``; raises as :func:`read_json`."""
    if len(content) > largest:
        raise DataError(f"{path} has more than {largest:,} bytes; it is another kind of file")
    try:
        return json.loads(content)
    except RecursionError:
        raise DataError(f"{path} is not readable as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{path} is not readable as JSON: {first_line(error)}") from None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """``{name: {"bytes", "sha256"}}`` of ``names`` in ``folder``, as manifests hold it."""
    described = {}
    for name in names:
        with (folder / name).open("rb") as file:
            described[name] = describe_open_file(file)
    return described


def describe_open_file(file: BinaryIO) -> dict[str, Any]:
    """``{"bytes", "sha256"}`` of a file, which is read from where it stands to its end."""
    readable: Any = file  # BinaryIO does not tell of readinto
    sha256 = hashlib.file_digest(readable, "sha256").hexdigest()
    return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256}


def describe_content(content: bytes) -> dict[str, Any]:
    """``{"bytes", "sha256"}`` of a file's content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def file_state(file: BinaryIO) -> tuple[int, ...]:
    """Which file is open, and in which state: whoever writes into it moves the time of its last change."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def pinned(file: BinaryIO) -> Path:
    """A path by which others read the open ``file``, whatever its name leads to now; its name but on Linux."""
    link = Path(f"/proc/self/fd/{file.fileno()}")
    return link if link.exists() else Path(file.name)


@contextmanager
def pinned_folder(files: Sequence[BinaryIO]) -> Iterator[Path]:
    """A folder in which the names of open files lead to them, for readers of names."""
    with tempfile.TemporaryDirectory(prefix="plsc-") as folder:
        for file in files:
            (Path(folder) / Path(file.name).name).symlink_to(pinned(file).absolute())
        yield Path(folder)


def open_described(folder: Path, name: str, expected: Any, *, verify: bool = True) -> BinaryIO:
    """Open a file that a manifest describes, once for hashing and reading: nobody exchanges it in between.

    Args:
        folder: of the manifest.
        name: of the file.
        expected: its description.
        verify: hash it; otherwise its length alone is compared.

    Raises:
        IntegrityError: it is missing, or differs.
    """
    check_description(folder, name, expected)
    path = folder / name
    if not path.is_file():
        raise IntegrityError(f"{path} is missing; restore it, or use another copy")
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(path.open("rb"))
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise IntegrityError(f"{path} has {size} bytes instead of {expected['bytes']}; use another copy")
        if verify and describe_open_file(file)["sha256"] != expected["sha256"]:
            raise IntegrityError(f"{path} is corrupt (its SHA-256 is not the manifest's); use another copy")
        file.seek(0)
        on_error.pop_all()
    return file


def verify_files(folder: Path, described: dict[str, dict[str, Any]]) -> None:
    """Check files against :func:`describe_files`' answer; :class:`IntegrityError` names the first that differs."""
    for name, expected in described.items():
        open_described(folder, name, expected).close()


def check_description(folder: Path, name: str, expected: Any) -> None:
    """Raise :class:`IntegrityError` unless ``name`` is that of a file in ``folder``, described as it has to be.

    A manifest may come from elsewhere: its digest tells damage, not who wrote it.
    """
    is_plain = Path(name).name == name not in ("", "..") and name.isprintable() and len(name.encode()) < 256
    if not is_plain or not isinstance(expected, dict) or not _describes_a_file(expected):
        raise IntegrityError(f"{folder / MANIFEST} describes {name[:80]!r} wrongly; use another copy")


def _describes_a_file(expected: dict[str, Any]) -> bool:
    size, digest = expected.get("bytes"), expected.get("sha256")
    is_size = type(size) is int and 0 <= size < 1 << 63
    return is_size and isinstance(digest, str) and _SHA256.fullmatch(digest) is not None


def manifest_value(folder: Path, content: Manifest, name: str, kind: type[Kind]) -> Kind:
    """Return a value of a manifest; :class:`IntegrityError` if it is missing, of another type or a negative number."""
    value = content.get(name)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise IntegrityError(f"{folder / MANIFEST} is no sound manifest: it has no {name}; use another copy")
    return value


def digest(content: Manifest) -> str:
    """The SHA-256 of ``content`` in its canonical JSON form (sorted keys, no spaces), in hexadecimal."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def canonical_json(content: Any) -> str:
    """``content`` as JSON with sorted keys and without spaces; ValueError for NaN and infinities, which JSON lacks."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_manifest(folder: Path, content: Manifest) -> None:
    """Write ``folder/manifest.json`` atomically, with the digest of its content under the key ``seal``."""
    write_json(folder / MANIFEST, {**content, SEAL: digest(content)})


def read_manifest(folder: Path, format_name: str, version: int, *, oldest: int | None = None) -> Manifest:
    """Read ``folder/manifest.json`` and verify its digest; the result is without it.

    Versions from ``oldest`` (None: ``version``) to ``version`` are read.

    Raises:
        DataError: it is missing, of another format or of another version.
        IntegrityError: it is not, byte for byte, what :func:`write_manifest` wrote.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} is no {format_name}: it has no {MANIFEST}")
    try:
        text = read_text(path, LARGEST_JSON)
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is corrupt: {first_line(error)}; use another copy") from None
    if not isinstance(content, dict) or SEAL not in content or "format" not in content:
        raise DataError(f"{folder} is no {format_name}: its {MANIFEST} describes something else")
    unsealed = check_seal(path, content, text)
    if unsealed["format"] != format_name:
        raise DataError(f"{folder} is no {format_name}: it is a {unsealed['format']}")
    found = manifest_value(folder, unsealed, "version", int)
    if found not in range(version if oldest is None else oldest, version + 1):
        raise DataError(f"{folder} is of version {found}; this plsc reads a {format_name} of {version}")
    return unsealed


def holds_manifest(folder: Path, format_name: str) -> bool:
    """True if ``folder`` has a manifest that names ``format_name``, valid or not."""
    try:
        content = read_json(folder / MANIFEST)
    except DataError:
        return False
    return isinstance(content, dict) and content.get("format") == format_name


def check_seal(path: Path, content: Manifest, text: str) -> Manifest:
    """Return the content of a manifest without its digest.

    Args:
        path: of the manifest.
        content: its JSON.
        text: what that was parsed from. JSON that means the same can still differ in a byte, and then somebody edited
            the file.

    Raises:
        IntegrityError: it is not, byte for byte, what :func:`write_manifest` wrote.
    """
    unsealed = {name: value for name, value in content.items() if name != SEAL}
    try:
        is_whole = content.get(SEAL) == digest(unsealed) and text == _json_text(content)
    except (ValueError, RecursionError):  # NaN, which JSON does not have and Python reads
        is_whole = False
    if not is_whole:
        raise IntegrityError(f"{path} is corrupt (its content does not match its digest); use another copy")
    return unsealed


def atomic_replace_dir(tmp_path: Path, final: Path) -> None:
    """Publish a finished folder under its final name: from then on it exists whole, and survives a power cut.

    A folder that has this name already is replaced: by an exchange of the two where the system has one (Linux), so that
    the name always stands for a whole folder; elsewhere the former is moved to ``.NAME.former`` before.
    """
    for path in tmp_path.rglob("*"):
        if path.is_file():
            sync(path)
    sync(tmp_path)
    former = final.with_name(f".{final.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if not final.exists():
        tmp_path.replace(final)
    elif _exchange(tmp_path, final):
        tmp_path.replace(former)
    else:
        final.replace(former)
        tmp_path.replace(final)
    sync(final.parent)
    shutil.rmtree(former, ignore_errors=True)


@contextmanager
def replacing_folder(target: Path, tmp_path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Yield ``tmp_path``, made by ``make``; it becomes ``target`` by :func:`atomic_replace_dir`, or is removed."""
    try:
        shutil.rmtree(tmp_path, ignore_errors=True)
        make(tmp_path)
        yield tmp_path
        atomic_replace_dir(tmp_path, target)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


@contextmanager
def atomic_private_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, open to its owner alone, which becomes ``target`` by :func:`atomic_replace_dir`.

    If the block fails, nothing is left of it. Missing parents are made open to their owner alone as well.
    """
    target = target.absolute()
    make_private_folder(target.parent)
    with replacing_folder(target, _of_process(target), make_private_folder) as tmp_path:
        yield tmp_path
        restrict(tmp_path)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes ``target`` by :func:`atomic_replace_dir` unless the block fails."""
    target = target.absolute()
    with new_folder(target.parent), replacing_folder(target, _of_process(target), Path.mkdir) as tmp_path:
        yield tmp_path


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield ``path``, for folders that are removed in the end, as are those that a killed process left there."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _of_process(path: Path) -> Path:
    """A temporary neighbour of ``path``, which :func:`remove_leftovers` knows, and to which nobody has put a link."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.{os.getpid()}.tmp")


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths of one file system in a single step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2  # Linux with glibc 2.28 or musl 1.2.4; Python has no function for it
    except (AttributeError, OSError):
        return False
    names = [os.fsencode(path.absolute()) for path in (first, second)]
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed and removed in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendFile:
    """A file to which whole records are appended. A full disk ends nothing: records wait until there is space again.

    Args:
        path: appended to; made where it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._waiting: deque[bytes] = deque(maxlen=_WAITING_RECORDS)

    def write_line(self, line: str) -> None:
        """Append ``line``, which has no end of line, after the records that wait."""
        self.write(line.encode() + b"\n")

    def write(self, record: bytes) -> None:
        """Append ``record`` after those that wait."""
        self._waiting.append(record)
        with contextlib.suppress(OSError):  # it will be tried again with the next record
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()

    def close(self) -> None:
        """Close the file; what waits is lost."""
        os.close(self._file)

    def _append(self, record: bytes) -> None:
        size = os.fstat(self._file).st_size
        written = os.write(self._file, record)
        if written < len(record):
            os.ftruncate(self._file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
