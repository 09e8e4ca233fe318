"""A service that runs in a thread of the test's own process: a linear model, a real store, real sockets."""

import base64
import io
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from PIL import Image

from plsc.embedding.embedder import EmbeddingModel
from plsc.gallery.backends import open_store
from plsc.models.preprocessing import Preprocessing
from plsc.serve.observability import Metrics
from plsc.serve.server import Server
from plsc.serve.service import Service
from plsc.serve.settings import Settings
from plsc.serve.tokens import add_token

SIZE, DIM = 16, 8
CONTRACT = "linear-model"
NEXT_DIM, NEXT_CONTRACT = 12, "next-model"
JSON = {"Content-Type": "application/json"}


class Linear:
    """An engine: a fixed linear map of the pixels."""

    preprocessing = Preprocessing(SIZE)
    embedding_dim = DIM
    contract_id = CONTRACT
    compatible_with: tuple[str, ...] = ()
    former_ids: tuple[str, ...] = ()
    precision = "fp32"

    def __init__(self) -> None:
        self.weight = torch.randn(3 * SIZE * SIZE, DIM, generator=torch.Generator().manual_seed(0))

    def run(self, images_u8: torch.Tensor) -> torch.Tensor:
        """(B, 3, S, S) uint8 -> (B, D)."""
        return images_u8.flatten(1).float() @ self.weight / 255


class NextLinear(Linear):
    """Another linear map, wider."""

    embedding_dim, contract_id = NEXT_DIM, NEXT_CONTRACT

    def __init__(self) -> None:
        self.weight = torch.randn(3 * SIZE * SIZE, NEXT_DIM, generator=torch.Generator().manual_seed(1))


def next_linear_embedder() -> EmbeddingModel:
    """A model that collections can be moved to."""
    return EmbeddingModel(NextLinear(), "models/next.safetensors")


def linear_embedder(source: str = "models/linear.safetensors") -> EmbeddingModel:
    """The model that live services have by default."""
    return EmbeddingModel(Linear(), source)


@dataclass
class Live:
    """A running service, and a client for its address."""

    server: Server
    service: Service
    http: httpx.Client
    folder: Path
    thread: threading.Thread  # of the event loop
    secrets: dict[str, str]  # of tokens, by their names

    def ask(self, method: str, path: str, body: Any = None, *, by: str = "", **options: Any) -> httpx.Response:
        """A request, with ``body`` as JSON, and the token ``by``."""
        headers = {**(bearer(self.secrets[by]) if by else {}), **options.pop("headers", {})}
        if body is not None:
            options, headers = {"content": json.dumps(body), **options}, {**JSON, **headers}
        return self.http.request(method, path, headers=headers, **options)

    def collection(self, name: str) -> str:
        """Make a collection; returns its path."""
        assert self.ask("POST", "/v1/collections", {"name": name}).status_code == 201
        return f"/v1/collections/{name}"

    def addressed(self, request: bytes) -> bytes:
        """A request with the service's own port in its Host, which callers without tokens have to name."""
        return request.replace(b"Host: 127.0.0.1\r\n", b"Host: %b\r\n" % self.http.base_url.netloc)

    def connect(self) -> socket.socket:
        """A bare connection."""
        place = urlsplit(self.server.address)
        return socket.create_connection((place.hostname, place.port), timeout=10)


@contextmanager
def live_service(
    folder: Path,
    detector: Any = None,
    source: str = "models/linear.safetensors",
    embedder: EmbeddingModel | None = None,
    next_embedder: EmbeddingModel | None = None,
    callers: Mapping[str, Mapping[str, Any]] | None = None,
    store: str | None = None,
    **changes: Any,
) -> Iterator[Live]:
    """Serve a store in ``folder``, or ``store``, on a free port until the block ends; ``changes`` are of the settings.

    The model is ``embedder``, or the linear one; collections may be moved to ``next_embedder``. With ``callers``, what
    each token may do by its name, the client has the token of the first one, unless :meth:`Live.ask` names another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    secrets: dict[str, str] = {}
    if callers is not None:
        changes["tokens"] = folder / "tokens.toml"
        secrets = {name: add_token(changes["tokens"], name, **options) for name, options in callers.items()}
    given = {"port": 0, "snapshots": folder / "snapshots", "audit": folder / "audit.jsonl", **changes}
    settings = Settings(**given)
    server = Server(settings)
    services: Queue[Service | None] = Queue()

    def load(metrics: Metrics) -> Service:
        model = embedder or linear_embedder(source)
        return Service(model, open_store(store or folder / "store"), settings, metrics, detector, next_embedder)

    def serve() -> None:
        try:
            server.run(load, services.put)
        finally:
            services.put(None)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        service = services.get(timeout=120)
        assert service is not None, "the service did not become ready"
        headers = bearer(next(iter(secrets.values()))) if secrets else {}
        with httpx.Client(base_url=server.address, timeout=120, headers=headers) as http:
            yield Live(server, service, http, folder, thread, secrets)
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive(), "the service did not end"


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes, or what has come until it cuts the connection."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received += chunk
    return bytes(received)


def picture(seed: int, size: int = SIZE, kind: str = "PNG") -> bytes:
    """An encoded picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def bearer(secret: str) -> dict[str, str]:
    """The header that carries a token's secret."""
    return {"Authorization": f"Bearer {secret}"}


def image_input(data: bytes) -> dict[str, Any]:
    """An encoded picture as an input."""
    return {"image": base64.b64encode(data).decode()}


def vectors(count: int, seed: int = 0) -> np.ndarray:
    """Random vectors (count, DIM) float64."""
    return np.random.default_rng(seed).standard_normal((count, DIM))
