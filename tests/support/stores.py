"""The stores under test: a kit for each kind, the servers they need, and data and comparisons that the suites share."""

import base64
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from plsc.errors import StorageError
from plsc.gallery.backends import open_store
from plsc.gallery.filters import Filter
from plsc.gallery.sqlite import KEYS
from plsc.gallery.sqlite.backup import restore
from plsc.gallery.sqlite.folder import rotate_key
from plsc.gallery.store import Store
from plsc.gallery.transfer import copy_into
from plsc.gallery.values import NewPerson, Person
from support.gallery_model import Model, Row
from support.hermetic import harness
from support.moved_clock import MovedClock
from support.waiting import free_port

Opened = TypeVar("Opened", bound=Store)
KINDS = ("sqlite", "encrypted", "postgres", "milvus")
DIM, MODEL = 8, "model-1"
CLOSE = 2e-6  # a cosine in float32 against float64
GALLERY = "people"
ODD_NAMES = [
    "", "O'Hara", 'say "hi"', "a\\b", "%s {0} $1 :x ?", "; DROP TABLE persons; --", "Ünïcödé 李小龙 🙂",
    "a\nb\t", "x" * 1024, "\u202eabc", "null", "é" * 1024,
]  # fmt: skip
ODD_METADATA: list[dict[str, Any]] = [
    {},
    {"a": 1, "b": 1.0, "c": True, "d": False, "e": "1", "f": ""},
    {"large": 2**63 - 1, "small": -(2**63), "next": 2**53 + 1, "zero": 0, "minus": -0.0},
    {"tiny": 5e-324, "huge": 1.7976931348623157e308, "third": 1 / 3, "big": 1e18, "bigger": 1234567890123456768.0},
    {"O'Hara": "O'Hara", 'a"b': 'c"d', "a\\b": "c\\d", "a.b[0]": "x", "$": "$", "ключ": "значение", "🙂": "🙂"},
    {"true": "true", "null": "null", "%s": "%s", "{x}": "{x}", "a\nb": "a\nb", " ": " ", "id": 7, "person": "x"},
    {"long": "x" * 1024, "k" * 1024: 1},
    {f"key {n}": n for n in range(63)},
]


# --- data and comparisons ---


def faces(count: int, seed: int = 0, dim: int = DIM) -> npt.NDArray[np.float32]:
    """Random vectors (count, dim) of different lengths."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((count, dim)) * generator.uniform(0.01, 100, (count, 1))).astype(np.float32)


def units(vectors: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """``vectors`` as float64 of unit length."""
    rows = np.asarray(vectors, dtype=np.float64)
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def enrol(store: Store, count: int, seed: int = 0, **metadata: Any) -> list[Person]:
    """Enrol ``count`` persons of a face each, numbered in their metadata."""
    new = [NewPerson(vector[None], f"p{n}", {"n": n, **metadata}) for n, vector in enumerate(faces(count, seed))]
    return store.add_persons(GALLERY, new, MODEL)


def everyone(store: Store, collection: str) -> list[Person]:
    """All persons, page by page."""
    found: list[Person] = []
    while page := store.persons(collection, after=found[-1].id if found else 0, limit=7):
        assert not found or page[0].id > found[-1].id, "pages do not overlap"
        found += page
    return found


def dump(store: Store) -> dict[str, Any]:
    """Everything that a store holds."""
    return {
        info.name: (info, [(one, store.vectors(info.name, one.id).tobytes()) for one in everyone(store, info.name)])
        for info in store.collections()
    }


def content_of(folder: Path) -> dict[str, bytes]:
    """What is in the files below ``folder``, which may be removed meanwhile."""
    found = {}
    for parent, _, names in os.walk(folder):  # which passes over what is removed meanwhile
        for path in (Path(parent) / name for name in names):
            with suppress(FileNotFoundError):
                found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def files_with(folder: Path, *needles: bytes) -> list[str]:
    """The names of the files below ``folder`` that hold one of ``needles``."""
    return [Path(name).name for name, content in content_of(folder).items() if any(one in content for one in needles)]


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip a bit of a file."""
    with path.open("r+b") as file:  # in place: it may be mapped
        file.seek(byte)
        (found,) = file.read(1)
        file.seek(byte)
        file.write(bytes([found ^ 1 << bit]))


def twin(store: Store) -> Model:
    """A model that holds what ``store`` holds."""
    model = Model()
    for info in store.collections():
        model.collections[info.name] = {
            one.id: Row(one.name, dict(one.metadata), one.external_id, one.expires, _faces_of(store, info.name, one))
            for one in everyone(store, info.name)
        }
    return model


def _faces_of(store: Store, name: str, one: Person) -> dict[int, npt.NDArray[np.float64]]:
    return dict(zip(one.faces, units(store.vectors(name, one.id)), strict=True))


def agree(
    store: Store, model: Model, name: str, queries: Any, k: int = 10, threshold: float = -1.0, test: Any = None
) -> None:
    """Assert that the store's answers are the model's, but for rounding and the order of ties; ``test`` is a filter."""
    where = None if test is None else Filter.parse(test)
    if where is not None:
        where = store.prepare_filter(name, where)
    found = store.search(name, queries, k=k, threshold=threshold, filter=where)
    for matches, query in zip(found, units(queries), strict=True):
        truth = model.scores(name, query, test)
        scores = [match.score for match in matches]
        assert scores == sorted(scores, reverse=True)
        assert all(-1 <= score <= 1 and score >= threshold for score in scores)
        assert len({match.person for match in matches}) == len(matches)
        for match in matches:
            own = model.collections[name][match.person].faces[match.face] @ query
            assert match.score == pytest.approx(own, abs=CLOSE)
            assert match.score == pytest.approx(truth[match.person], abs=CLOSE), "the best face"
        surely, perhaps = (sum(score >= threshold + off for score in truth.values()) for off in (CLOSE, -CLOSE))
        assert min(k, surely) <= len(matches) <= min(k, perhaps)
        np.testing.assert_allclose(scores, sorted(truth.values(), reverse=True)[: len(matches)], atol=CLOSE)


# --- kits and servers ---


class Kit:
    """Opens one kind of store: ``fresh()`` an empty one, ``again(store)`` the same after closing it."""

    def __init__(
        self, kind: str, new_spec: Callable[[], str], open_store: Callable[..., Store], key_file: Path | None = None
    ) -> None:
        self.kind, self._new_spec, self._open, self._key_file = kind, new_spec, open_store, key_file
        self.clock = MovedClock()
        self._spec = ""
        self._opened: list[Store] = []

    def fresh(self) -> Store:
        """An empty store."""
        self._spec = self._new_spec()
        return self._keep(self._open_patiently())

    def again(self, store: Store) -> Store:
        """Close ``store``, the latest fresh one, and open it again."""
        self._shut(store)
        return self._keep(self._open_patiently())

    def restored(self, store: Store, snapshot: Path) -> Store:
        """A new store made of a snapshot of ``store``, the latest fresh one, which is closed."""
        former = Path(self._spec)
        self._shut(store)
        if self.kind not in ("sqlite", "encrypted"):
            store = self.fresh()
            copy_into(store, snapshot)
            return store
        self._spec = self._new_spec()
        restore(snapshot, self._spec, key_file=self._key_file, keys=self._key_file and former / KEYS)
        return self._keep(self._open_patiently())

    def rotate(self, store: Store) -> Store:
        """Put ``store`` under another key file and back, where it has one; returns it opened again."""
        if self._key_file is None:
            return store
        self._shut(store)
        other = new_key_file(Path(f"{self._spec}.key"))
        rotate_key(Path(self._spec), self._key_file, other)
        rotate_key(Path(self._spec), other, self._key_file)
        return self._keep(self._open_patiently())

    def _open_patiently(self) -> Store:
        if self.kind == "milvus":
            return open_patiently(partial(self._open, clock=self.clock), self._spec)
        return self._open(self._spec, clock=self.clock)

    def close(self) -> None:
        """Close every store."""
        for store in self._opened:
            store.close()
        self._opened.clear()

    def _shut(self, store: Store) -> None:
        store.close()
        self._opened.remove(store)

    def _keep(self, store: Store) -> Store:
        self._opened.append(store)
        return store


class Servers:
    """The servers of a test session: each is started when a test needs it, and stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._exits, self._addresses = folder, ExitStack(), dict[str, str]()
        self._count = 0

    def close(self) -> None:
        """Stop them."""
        self._exits.close()

    def kit(self, kind: str) -> Kit:
        """The kit of ``kind``; skips the test, saying why, if it cannot be had."""
        if kind == "encrypted":
            key_file = new_key_file(self._folder / "store.key")
            return Kit(kind, self._sqlite, partial(open_store, key_file=key_file), key_file)
        if kind == "sqlite":  # every other one scans the mapped files
            return Kit(
                kind,
                self._sqlite,
                lambda spec, clock: open_store(spec, precision=("bf16", "fp32")[int(spec[-1]) % 2], clock=clock),
            )
        return Kit(kind, lambda: f"{kind}:{self.address(kind)}", open_store)

    @harness()
    def address(self, kind: str) -> str:
        """The address of a new, empty store of ``kind``; skips the test, saying why, if none can be had."""
        return {"sqlite": self._sqlite, "postgres": self._postgres, "milvus": self._milvus}[kind]()

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _sqlite(self) -> str:
        return str(self._folder / f"store-{self._number()}")

    def _postgres(self) -> str:
        _need("psycopg", "psycopg_pool", "pgvector")
        server = self._server("postgres", "PLSC_TEST_POSTGRES", self._own_postgres)
        import psycopg

        name = f"plsc_test_{os.getpid()}_{self._number()}"  # a schema: making a database takes long
        with psycopg.connect(server) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
            connection.execute(f"CREATE SCHEMA {name}".encode())
        return str(psycopg.conninfo.make_conninfo(server, options=f"-csearch_path={name},public"))

    def _milvus(self) -> str:
        _need("pymilvus")
        server = self._server("milvus", "PLSC_TEST_MILVUS", self._own_milvus)
        return f"{server}/plsc_test_{os.getpid()}_{self._number()}"

    def _server(self, kind: str, variable: str, start: Callable[[], str]) -> str:
        if kind not in self._addresses:
            self._addresses[kind] = os.environ.get(variable) or start()
        return self._addresses[kind]

    def _own_postgres(self) -> str:
        if not importlib.util.find_spec("pgserver"):
            pytest.skip("needs a Postgres with pgvector: pip install pgserver, or its DSN in PLSC_TEST_POSTGRES")
        return self._exits.enter_context(postgres_server())

    def _own_milvus(self) -> str:
        if not importlib.util.find_spec("milvus_lite"):
            pytest.skip("needs Milvus: pip install --no-deps milvus-lite, or its URI in PLSC_TEST_MILVUS")
        return self._exits.enter_context(milvus_server(self._folder / "milvus"))


def new_key_file(path: Path) -> Path:
    """A key file as ``openssl rand -base64 32 > path`` with a umask of 077 makes it."""
    path.write_text(base64.b64encode(os.urandom(32)).decode() + "\n", encoding="ascii")
    path.chmod(0o600)
    return path


def open_patiently(open_milvus: Callable[[str], Opened], spec: str) -> Opened:
    """Open a store in milvus-lite, whose server ends the idle connections of a process, and a new one with them."""
    for _ in range(3):
        with suppress(StorageError):
            return open_milvus(spec)
    return open_milvus(spec)


@contextmanager
def postgres_server() -> Iterator[str]:
    """A Postgres of its own, reached by a socket; gives the DSN of its administrator.

    It runs as another user, from whom each start of pytest closes the folder of pytest's temporary files.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains where no XDG_RUNTIME_DIR is set, which it does not need here
        import pgserver
        from pgserver import postgres_server as module
    pg_ctl = module.pg_ctl
    module.pg_ctl = lambda *args, **options: pg_ctl(*args, **{**options, "timeout": 120})  # 10 s are few on a slow disk

    with tempfile.TemporaryDirectory(prefix="plsc-postgres-") as folder:
        server = pgserver.get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@contextmanager
def milvus_server(folder: Path, port: int | None = None, *, kills: bool = False) -> Iterator[str]:
    """milvus-lite's server over ``folder`` on ``port`` (else a free one), which ``kills`` ends by -9; gives its URI."""
    port = port or free_port()
    start = "from milvus_lite.cmdline import main; main()"
    command = [sys.executable, "-c", start, "server", "--data-dir", str(folder), "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill() if kills else process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1500):
        assert process.poll() is None, "milvus-lite's server ended by itself"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("milvus-lite's server does not answer")


def _need(*modules: str) -> None:
    for module in modules:
        if not importlib.util.find_spec(module):
            pytest.skip(f"needs {module}")
