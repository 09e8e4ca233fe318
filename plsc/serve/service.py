"""What the routes share: the model, the store, the device's worker and the threads for decoding and storing."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from plsc.embed.embedder import Embedder, contract_of, embed_images
from plsc.errors import ConflictError
from plsc.gallery.store import Collection, Store
from plsc.serve.audit import Audit
from plsc.serve.device_worker import DeviceWorker, Kind
from plsc.serve.failures import Refusal
from plsc.serve.inputs import Float32, check_direction, decode, given_vector, image_bytes
from plsc.serve.metrics import Metrics
from plsc.serve.schemas import Input
from plsc.serve.searching import Answer, Search, Searcher
from plsc.serve.settings import Settings
from plsc.serve.snapshots import Snapshots

Result = TypeVar("Result")
STORE_THREADS = 8
_VALUES_BESIDE = 256  # landmarks, name, metadata of an input
_REMEMBERED_SECONDS = 1.0  # what is known of a collection may be so old: other processes may share a remote store


class Service:
    """A model and a gallery at work. ``detector`` finds faces in pictures without landmarks, or is None."""

    def __init__(
        self, embedder: Embedder, store: Store, settings: Settings, metrics: Metrics, detector: Any = None
    ) -> None:
        self.embedder, self.store, self.settings, self.metrics = embedder, store, settings, metrics
        self.detector = detector
        self.contract_id = contract_of(embedder, settings.flip)
        self.model_name = Path(embedder.source).stem  # callers learn no paths
        # What a JSON body may hold: vectors as numbers, and for each the rest of what is said of it.
        self.most_values = settings.limits.inputs * (embedder.embedding_dim + _VALUES_BESIDE)
        self.snapshots = Snapshots(store, settings.snapshots)
        self.audit = Audit(settings.audit)
        self._decoders = ThreadPoolExecutor(settings.decode_threads, "plsc-decode")
        self._storers = ThreadPoolExecutor(STORE_THREADS, "plsc-store")
        self._remembered: dict[str, tuple[float, asyncio.Future[Any]]] = {}
        searcher = Searcher(store, settings.limits.answer_bytes)
        self.worker = DeviceWorker(
            {"embed": Kind(self._embed), "search": Kind(searcher.run, searcher.name)},
            max_batch=settings.max_batch,
            max_wait=settings.max_wait_ms / 1000,
            capacity=settings.limits.queue,
            observer=metrics,
        )
        for kind in ("embed", "search"):
            metrics.watch_queue(kind, partial(self.worker.waiting, kind))
        metrics.watch_store(store.statistics)

    async def in_store(self, function: Callable[..., Result], *args: Any, **keywords: Any) -> Result:
        """``function(*args)``, which may block on the store, in a thread."""
        begun = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._storers, lambda: function(*args, **keywords))
        finally:
            self.metrics.stage("store", time.monotonic() - begun)

    async def vectors(self, inputs: Sequence[Input], names: Sequence[str], deadline: float) -> Float32:
        """(n, D) float32 of inputs, pictures embedded; :class:`Refusal` names the first input that is unfit."""
        dim = self.embedder.embedding_dim
        vectors = [
            None if given.image is not None else given_vector(given, name, dim)
            for given, name in zip(inputs, names, strict=True)
        ]
        pictures = [place for place, vector in enumerate(vectors) if vector is None]
        if pictures:
            chosen = [(image_bytes(inputs[place], names[place]), inputs[place].landmarks) for place in pictures]
            embedded = await self.embed(chosen, [names[place] for place in pictures], deadline)
            for place, vector in zip(pictures, embedded, strict=True):
                vectors[place] = vector
        return np.array(vectors, dtype=np.float32).reshape(len(inputs), dim)

    async def embed(self, pictures: Sequence[tuple[bytes, Any]], names: Sequence[str], deadline: float) -> Float32:
        """(n, D) float32 of encoded pictures with landmarks or None; :class:`Refusal` names the first unfit."""
        loop = asyncio.get_running_loop()
        decoding = [
            loop.run_in_executor(self._decoders, self._decode, data, name, landmarks, deadline)
            for (data, landmarks), name in zip(pictures, names, strict=True)
        ]
        try:
            images = torch.stack(await asyncio.gather(*decoding))
        finally:
            for image in decoding:
                image.cancel()
        vectors = await self.worker.submit("embed", images, len(images), deadline)
        for vector, name in zip(vectors, names, strict=True):
            check_direction(vector, name)
        return np.asarray(vectors)

    async def embed_images(self, images: torch.Tensor, deadline: float) -> Float32:
        """(n, D) float32 of uint8 (n, 3, S, S)."""
        return np.asarray(await self.worker.submit("embed", images, len(images), deadline))

    def search(self, search: Search, deadline: float) -> Awaitable[Answer]:
        """Each query's matches with their persons."""
        return self.worker.submit("search", search, len(search.queries), deadline)

    async def comparable(self, name: str) -> Collection:
        """A collection whose vectors are of this service's model; :class:`PlscError` if there is none."""
        collection: Collection = await self._remember(name, self.store.collection, name)
        if collection.contract_id != self.contract_id:
            raise ConflictError(
                f"collection {name} holds embeddings of the contract {collection.contract_id}, and this service's "
                f"model makes {self.contract_id}; serve it with its own model, or use another collection"
            )
        return collection

    async def figures(self, collection: str) -> Mapping[str, float]:
        """The store's statistics of a collection, at most a second old."""
        statistics = await self._remember("", self.store.statistics)
        figures: Mapping[str, float] = statistics.get(collection, {})
        return figures

    def forget(self, collection: str) -> None:
        """A collection was made or deleted: what is remembered of it is void."""
        self._remembered.pop(collection, None)

    def deadline(self, milliseconds: int | None) -> float:
        """When to give up, by the caller's wish or the service's limit, in ``time.monotonic()``."""
        limit = self.settings.limits.deadline_seconds
        return time.monotonic() + (limit if milliseconds is None else min(milliseconds / 1000, limit))

    def judged(self, score: float, threshold: float | None) -> bool | None:
        """Whether a score reaches the threshold; None without one."""
        return None if threshold is None else score >= threshold

    def close(self) -> None:
        """Finish what runs, then let go of threads and store."""
        self._decoders.shutdown(cancel_futures=True)
        self.worker.close()
        self._storers.shutdown()
        self.store.close()
        self.audit.close()

    def _remember(self, key: str, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        now = time.monotonic()
        asked, asking = self._remembered.get(key, (-math.inf, None))
        if asking is None or now - asked >= _REMEMBERED_SECONDS:
            asking = asyncio.ensure_future(self.in_store(function, *args))
            asking.add_done_callback(partial(self._drop_failed, key))
            if len(self._remembered) > self.settings.limits.collections:
                self._remembered.clear()
            self._remembered[key] = now, asking
        return asking if asking.done() else asyncio.shield(asking)  # one asks for all

    def _drop_failed(self, key: str, asked: "asyncio.Future[Any]") -> None:
        failed = asked.cancelled() or asked.exception() is not None  # asyncio complains of one that nobody looks at
        if failed and self._remembered.get(key, (0.0, None))[1] is asked:
            del self._remembered[key]

    def _decode(self, data: bytes, name: str, landmarks: Any, deadline: float) -> torch.Tensor:
        begun = time.monotonic()
        if begun > deadline:
            raise Refusal(504, f"the deadline passed before {name} was decoded; allow more time, or ask for less")
        pixels = self.settings.limits.image_pixels
        image = decode(data, name, self.embedder.image_size, pixels, landmarks, self.detector)
        self.metrics.stage("decode", time.monotonic() - begun)
        return image

    def _embed(self, batches: list[torch.Tensor]) -> list[Any]:
        images = torch.cat(batches)
        chunks = torch.split(images, self.settings.max_batch)
        vectors = torch.cat([embed_images(self.embedder, chunk, self.settings.flip) for chunk in chunks])
        return [rows.numpy() for rows in torch.split(vectors, [len(batch) for batch in batches])]
