"""Where the contract's suite gets its stores from: each kind, empty, and opened again."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from plsc.gallery.store import Store, open_store
from support.memory_store import MemoryStore

KINDS = ("memory", "sqlite", "postgres", "milvus")


class Kit:
    """Opens one kind of store: ``fresh()`` an empty one, ``again(store)`` the same after closing it."""

    def __init__(self, kind: str, place: Callable[[], str], open_store: Callable[[str], Store]) -> None:
        self.kind, self._place, self._open = kind, place, open_store
        self._spec = ""
        self._opened: list[Store] = []

    @property
    def lasts(self) -> bool:
        """Whether what it stores outlives the process."""
        return self.kind != "memory"

    def fresh(self) -> Store:
        """An empty store."""
        self._spec = self._place()
        return self._keep(self._open(self._spec))

    def again(self, store: Store) -> Store:
        """Close ``store``, the latest fresh one, and open it again."""
        if not self.lasts:
            return store
        store.close()
        self._opened.remove(store)
        return self._keep(self._open(self._spec))

    def close(self) -> None:
        """Close every store."""
        for store in self._opened:
            store.close()
        self._opened.clear()

    def _keep(self, store: Store) -> Store:
        self._opened.append(store)
        return store


class Servers:
    """The servers of a test session: each is started when a test needs it, and stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._exits, self._found = folder, ExitStack(), dict[str, str]()
        self._count = 0

    def close(self) -> None:
        """Stop them."""
        self._exits.close()

    def kit(self, kind: str) -> Kit:
        """The kit of ``kind``; skips the test, saying why, where it cannot be had."""
        if kind == "memory":
            return Kit(kind, lambda: "", lambda _: MemoryStore())
        address = "" if kind == "sqlite" else f"{kind}:"
        return Kit(kind, lambda: address + self.place(kind), open_store)

    def place(self, kind: str) -> str:
        """Where a new store of ``kind`` may be; skips the test, saying why, where none can be had."""
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

    def _server(self, kind: str, variable: str, own: Callable[[], str]) -> str:
        if kind not in self._found:
            self._found[kind] = os.environ.get(variable) or own()
        return self._found[kind]

    def _own_postgres(self) -> str:
        if not importlib.util.find_spec("pgserver"):
            pytest.skip("needs a Postgres with pgvector: pip install pgserver, or its DSN in PLSC_TEST_POSTGRES")
        return self._exits.enter_context(postgres_server(self._folder / "pg"))

    def _own_milvus(self) -> str:
        if not importlib.util.find_spec("milvus_lite"):
            pytest.skip("needs Milvus: pip install --no-deps milvus-lite, or its URI in PLSC_TEST_MILVUS")
        return self._exits.enter_context(milvus_server(self._folder / "milvus"))


@contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """A Postgres of its own in ``folder``, reached by a socket there; gives the DSN of its administrator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains where no XDG_RUNTIME_DIR is set, which it does not need here
        import pgserver

    server = pgserver.get_server(folder, cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@contextmanager
def milvus_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """milvus-lite's server over ``folder`` on ``port`` (a free one without); gives its URI."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = port or int(probe.getsockname()[1])
    start = "from milvus_lite.cmdline import main; main()"
    command = [sys.executable, "-c", start, "server", "--data-dir", str(folder), "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
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
