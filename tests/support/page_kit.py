"""What the page's tests stand on: the real service with a model whose cosines numpy can tell, and pictures for it."""

import io
import threading
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from plsc.embedding.detector import Detector
from plsc.embedding.embedder import EmbeddingModel
from plsc.gallery.backends import open_store
from plsc.gallery.values import NewPerson
from plsc.models.preprocessing import Preprocessing
from plsc.serve.observability import Metrics
from plsc.serve.server import Server
from plsc.serve.service import Service
from plsc.serve.settings import Settings

SIZE = 16
CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class PixelEngine:
    """A model whose embedding is the picture itself, around grey: every cosine is known without it."""

    preprocessing = Preprocessing(SIZE)
    embedding_dim = 3 * SIZE * SIZE
    contract_id = "pixels"
    compatible_with = former_ids = ()
    precision = "fp32"

    def run(self, images_u8: Tensor) -> Tensor:
        """(B, 3, S, S) uint8 -> (B, 3 S S) float32."""
        return images_u8.flatten(1).float() - 127.5


class ProjectedEngine(PixelEngine):
    """Another model: a random projection of the same picture, which keeps cosines about."""

    embedding_dim = 64
    contract_id = "projected"

    def __init__(self) -> None:
        self._weight = torch.randn(3 * SIZE * SIZE, self.embedding_dim, generator=torch.Generator().manual_seed(0))

    def run(self, images_u8: Tensor) -> Tensor:
        """(B, 3, S, S) uint8 -> (B, 64) float32."""
        return super().run(images_u8) @ self._weight


class PageService:
    """A service in a thread over a store of its own; it can be stopped, and started again at its address."""

    def __init__(
        self, folder: Path, *, next_engine: PixelEngine | None = None, detector: Detector | None = None, **changes: Any
    ) -> None:
        given = {"port": 0, "threshold": 0.5, "false_match_rate": 1e-3, "decode_processes": 1, "drain_seconds": 1.0}
        self._folder, self._next, self._detector = folder, next_engine, detector
        self._settings = Settings(audit=folder / "audit.jsonl", **{**given, **changes})
        self.start()
        self.url = f"{self._server.address}/"

    def start(self) -> None:
        """Open the store and answer."""
        self._server = Server(self._settings)
        self._settings = replace(self._settings, port=int(self._server.address.rpartition(":")[2]))
        ready: Queue[Service | None] = Queue()
        self._thread = threading.Thread(target=self._serve, args=(ready,))
        self._thread.start()
        service = ready.get(timeout=120)
        assert service is not None, "the service did not become ready"
        self.store = service.store

    def stop(self) -> None:
        """Answer no more, and close the store."""
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join(30)

    def _serve(self, ready: "Queue[Service | None]") -> None:
        try:
            self._server.run(self._load, ready.put)
        finally:
            ready.put(None)

    def _load(self, metrics: Metrics) -> Service:
        embedder = EmbeddingModel(PixelEngine(), "models/pixels.safetensors")
        following = None if self._next is None else EmbeddingModel(self._next, "models/projected.safetensors")
        store = open_store(self._folder / "store")
        return Service(embedder, store, self._settings, metrics, self._detector, following)

    def collection(self, name: str) -> str:
        """Make an empty collection; returns its name."""
        self.store.create_collection(name, PixelEngine.embedding_dim, PixelEngine.contract_id)
        return name

    def enrol(self, collection: str, name: str | None, pictures: list[npt.NDArray[np.uint8]], **metadata: Any) -> int:
        """Enrol a person past HTTP; returns the id."""
        vectors = np.stack([embedding(picture) for picture in pictures]).astype(np.float32)
        return self.store.add_persons(collection, [NewPerson(vectors, name, metadata)], PixelEngine.contract_id)[0].id


def embedding(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """(S, S, 3) uint8 -> what the model makes of it, float64."""
    return picture.transpose(2, 0, 1).reshape(-1).astype(np.float64) - 127.5


def cosine(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
    """The score that the service has to give to two pictures."""
    a, b = embedding(one), embedding(other)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def draw(seed: int, *, like: npt.NDArray[np.uint8] | None = None, share: float = 0.8) -> npt.NDArray[np.uint8]:
    """A picture (S, S, 3) of noise; with ``like`` a mixture with that picture, which gets ``share``."""
    noise = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)
    return noise if like is None else (share * like + (1 - share) * noise).astype(np.uint8)


def png(picture: npt.NDArray[np.uint8]) -> bytes:
    """The picture as a PNG file, which loses nothing."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def chosen(picture: npt.NDArray[np.uint8], name: str = "face.png") -> dict[str, Any]:
    """The picture as Playwright gives it to a file input."""
    return {"name": name, "mimeType": "image/png", "buffer": png(picture)}


# Drops what [[path, bytes]] describes, with folders as a browser hands them over, readers that give one at a time.
DROP = """([files, place]) => {
    const entry = (name, found) => {
        if (found.length === 1 && found[0][0] === "") {
            const file = new File([new Uint8Array(found[0][1])], name);
            return { name, isFile: true, isDirectory: false, file: (done) => done(file) };
        }
        const names = [...new Set(found.map(([path]) => path.split("/")[0]))];
        const below = (one) => found.filter(([path]) => path.split("/")[0] === one)
            .map(([path, bytes]) => [path.split("/").slice(1).join("/"), bytes]);
        const entries = names.map((one) => entry(one, below(one)));
        return { name, isFile: false, isDirectory: true,
            createReader: () => ({ readEntries: (done) => done(entries.splice(0, 1)) }) };
    };
    const roots = entry("", files).createReader();
    const items = [];
    for (let more = true; more;) roots.readEntries((some) => {
        more = some.length > 0;
        items.push(...some.map((one) => ({ webkitGetAsEntry: () => one })));
    });
    const event = new Event("drop", { bubbles: true, cancelable: true });
    event.dataTransfer = { items, files: items };
    document.querySelector(place).dispatchEvent(event);
}"""


def drop(page: Any, files: dict[str, bytes], place: str = "#enrol-pictures .pictures") -> None:
    """Drop files by their paths, as {"folder/file.png": content}, on a place of the page."""
    page.evaluate(DROP, [[[path, list(content)] for path, content in files.items()], place])
