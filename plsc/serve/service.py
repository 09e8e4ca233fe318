"""Shared state of the routes: model, store, device worker, threads for decoding and storing; and its lifecycle."""

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
import torch

from plsc.embedding.contracts import is_of, models_in
from plsc.embedding.embedder import EmbeddingModel, contract_of, embed_images, own_contracts
from plsc.errors import ConflictError, quoted
from plsc.gallery.filters import Filter, UnfinishedFilter
from plsc.gallery.retention import Retention
from plsc.gallery.store import Store, take_changes
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import Collection, Migration
from plsc.models.preprocessing import Preprocessing
from plsc.serve.access import NOBODY, Owner, current_caller, current_owner, includes
from plsc.serve.audit import AuditLog
from plsc.serve.changes import IdempotencyKeys, Quotas
from plsc.serve.decoding import DecodedImage, DecodeProcess, Decoders, FaceChoice, decode
from plsc.serve.errors import ApiError
from plsc.serve.migrations import Migrations
from plsc.serve.models import Models, Unsearched
from plsc.serve.observability import Metrics
from plsc.serve.schemas import Float32, Input, check_direction
from plsc.serve.searching import UNEXPLAINED, Search, SearchAnswer, Searcher, filter_warnings
from plsc.serve.settings import PEOPLE, Settings
from plsc.serve.snapshots import Snapshots
from plsc.serve.workers import PIECE_ROWS, DeviceWorker, Kind, Workers

Result = TypeVar("Result")
_UNSEARCHED = "\0unsearched"  # where that is remembered: no collection has the name
_REMEMBERED_SECONDS = 1.0  # other processes may share a remote store: what is known of a collection may be so old
_VALUES_BESIDE_VECTOR = 256  # landmarks, name and metadata of an input


class Embedded(NamedTuple):
    """Vectors (n, D) float32 of inputs, warnings about their images, and the images as they were decoded.

    ``others`` are vectors by further models, by contract id, where all inputs are images. Of an input that is a vector,
    the picture is None.
    """

    vectors: Float32
    warnings: list[str]
    others: dict[str, Float32]
    pictures: list[DecodedImage | None]

    @property
    def crops(self) -> list[torch.Tensor | None]:
        """What was embedded of each input: uint8 (3, S, S), or None."""
        return [None if picture is None else picture.pixels[0] for picture in self.pictures]


class Spaces(NamedTuple):
    """A collection, and its migration if it is being moved to another model."""

    info: Collection
    migration: Migration | None

    @property
    def contracts(self) -> list[str]:
        """The contract ids of the searched space, and of the second one if there is any."""
        return [self.info.contract_id, *([] if self.migration is None else [self.migration.contract_id])]


class Service:
    """A model and a gallery at work; its methods run in the event loop.

    Args:
        detector: finds faces in images without landmarks; None takes such images as aligned.
        next_embedder: the model to which collections may be moved.
    """

    def __init__(
        self,
        embedder: EmbeddingModel,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        detector: Any = None,
        next_embedder: EmbeddingModel | None = None,
    ) -> None:
        self.embedder, self.store, self.settings, self.metrics = embedder, store, settings, metrics
        self.detector, self.quotas = detector, Quotas(store, settings.limits)
        self.contract_id = contract_of(embedder, settings.flip)
        self.next_contract_id = None if next_embedder is None else contract_of(next_embedder, settings.flip)
        self.own_contracts = own_contracts(embedder, settings.flip)
        self.embedders = dict.fromkeys(self.own_contracts, embedder)  # by contract id
        self.thresholds: dict[str, float] = {}  # of models that collections were moved to, by contract id
        if next_embedder is not None:
            following = own_contracts(next_embedder, settings.flip)
            self.embedders |= {each: next_embedder for each in following if each not in self.embedders}
            if settings.next_threshold is not None:
                self.thresholds |= dict.fromkeys(following, settings.next_threshold)
        self.models = Models(self.embedders, settings.flip)
        self.model_name = Path(embedder.source).stem  # callers learn no paths
        self.max_json_values = settings.limits.inputs * (embedder.embedding_dim + _VALUES_BESIDE_VECTOR)
        kept = {"keep": settings.keep_thumbnails, "lossless": settings.keep_pictures}
        self.thumbnails = ThumbnailStore(store, settings.thumbnails, **kept)
        self.snapshots = Snapshots(store, settings.snapshots)
        self.audit = AuditLog(settings.audit, rotated_bytes=settings.audit_rotated_bytes, keep=settings.audit_keep)
        if "write" in settings.audit_events and (last_change := store.last_change()) is not None:
            self.audit.account_for(last_change)
        metrics.watch("audit_sequence", "Newest line of the audit log", lambda: self.audit.head.sequence)
        self.decoders = Decoders(settings.decode_processes, settings.limits, settings.clock)
        self.idempotency = IdempotencyKeys(store, self.in_store)
        self.retention = Retention(store, self.thumbnails, self._audit_expiry, settings.compact_within)
        self.migrations: Migrations | None = None
        if next_embedder is not None:
            self.migrations = Migrations(
                store, self.thumbnails, self.embedders, flip=settings.flip, stored=self._audit_filling
            )
        limits = settings.limits
        self._storers = self._workers(limits.store_threads, limits.store_share, "plsc-store")
        self._changers = self._workers(limits.change_threads, limits.change_share, "plsc-change")
        self._movers = self._workers(1, 1, "plsc-move")
        self._filterers = self._workers(limits.filter_threads, limits.filter_share, "plsc-filter")
        self._filtering = asyncio.Semaphore(limits.filtered)
        self._own_filtered = max(int(limits.filtered * settings.share), 1)
        self._filtering_of: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()  # by group
        self.creating = asyncio.Lock()  # of collections
        self.enrolling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by collection
        self._remembered: dict[str, tuple[float, asyncio.Future[Any]]] = {}
        searcher = Searcher(store, settings.limits.answer_bytes)
        self.worker = DeviceWorker(
            {"embed": Kind(self._embed_batch), "search": Kind(searcher.run, searcher.name)},
            max_batch=settings.max_batch,
            max_wait=settings.max_wait_ms / 1000,
            limits=limits,
            share=settings.share,
            observer=metrics,
            clock=settings.clock,
        )
        self.private_paths = _written(
            store.folder, settings.snapshots, settings.thumbnails, settings.audit, settings.tokens
        )
        for kind in ("embed", "search"):
            metrics.watch(f"{kind}_queue_rows", f"Rows that wait to {kind}", partial(self.worker.waiting, kind))
        metrics.watch_store(self._measured)

    async def in_store(self, function: Callable[..., Result], *args: Any, **keywords: Any) -> Result:
        """Call ``function``, which may block on the store, in a thread, and in the request's context."""
        return await self._in_thread(self._storers, current_owner(), function, *args, **keywords)

    async def change(self, function: Callable[..., Result], *args: Any, **keywords: Any) -> Result:
        """Call ``function``, which changes the store, as :meth:`in_store` does.

        One caller's changes wait here, where another's passes them: at the store's lock it would stand behind them all.
        """
        return await self._in_thread(self._changers, current_owner(), function, *args, **keywords)

    async def move(self, function: Callable[..., Result], *args: Any, **keywords: Any) -> Result:
        """Call ``function``, a step of a collection's move that computes for long, one at a time beside all changes."""
        return await self._in_thread(self._movers, current_owner(), function, *args, **keywords)

    async def add(self, change: Callable[..., Result], *args: Any, **keywords: Any) -> Result:
        """Call ``change``, which adds to the store, in a thread and within quotas; see :meth:`Quotas.add`."""
        return await self.change(self.quotas.add, change, *args, **keywords)

    async def vectors(
        self, inputs: Sequence[Input], names: Sequence[str], deadline: float, contracts: Sequence[str] = ()
    ) -> Embedded:
        """Vectors of inputs, images embedded.

        Args:
            inputs: images and vectors.
            names: of the inputs in errors.
            deadline: of ``time.monotonic()``.
            contracts: of the space that the vectors are for, and of further ones for which images are embedded, too;
                without any, of the service's own model.

        Raises:
            ApiError: an input that cannot be used, by its name; 403 for vectors of a caller who may send none.
            ConflictError: a vector of another model.
        """
        space, *further = contracts or [self.contract_id]
        model = self.model_for(space)
        images = [index for index, item in enumerate(inputs) if item.image is not None]
        if len(images) < len(inputs):
            current_caller().require("vectors")
        vectors = [
            None if item.image is not None else self._numbers(item, name, space, model)
            for item, name in zip(inputs, names, strict=True)
        ]
        warnings: list[str] = []
        pictures: list[DecodedImage | None] = [None] * len(inputs)
        others: dict[str, Float32] = {}
        if images:
            about = [inputs[index] for index in images], [names[index] for index in images], deadline
            decoded = await self.decode_all(*about, model)
            embedded = await self.embed_pixels(torch.cat([image.pixels for image in decoded]), deadline, model)
            if len(images) == len(inputs):
                others = {
                    other: await self._embed_too(*about, decoded, model, self.model_for(other)) for other in further
                }
            elif further and self.migrations is not None:  # kept pictures are embedded again, once they are stored
                cast("asyncio.Task[Any]", asyncio.current_task()).add_done_callback(self.migrations.wake)
            for index, vector, image in zip(images, embedded, decoded, strict=True):
                check_direction(vector, names[index])
                vectors[index], pictures[index] = vector, image
            if self.settings.items == PEOPLE:  # only pictures of faces have to be aligned crops
                warnings = [warning for image in decoded for warning in image.warnings]
            warnings += [
                f"{names[index]} shows {image.found} faces, and the largest was taken; face=2 takes the next"
                for index, image in zip(images, decoded, strict=True)
                if image.found > 1 and not isinstance(inputs[index].face, int)
            ]
        dim = self.embedders[model].embedding_dim
        rows = np.array(vectors, dtype=np.float32).reshape(len(inputs), dim)
        return Embedded(rows, warnings, others, pictures)

    def _numbers(self, item: Input, name: str, space: str, model: str) -> Float32:
        """The vector of an input; :class:`ConflictError` where it is, or may be, of no model of those in ``space``."""
        stated = item.contract_id
        if stated is None and model not in self.own_contracts:
            raise ConflictError(
                f"{name}: the collection is searched by the model {model}, which is not the service's own; send "
                "pictures, or state contract_id with the vector"
            )
        is_own = {stated, model} <= {*self.own_contracts}  # by whichever of its ids
        if stated is not None and stated != model and not is_own and not is_of(stated, space):
            raise ConflictError(
                f"{name} is a vector of the model {quoted(stated)}, and those that it is for are of {space}; send the "
                "picture, or a vector of that model"
            )
        return item.numbers(name, self.embedders[model].embedding_dim)

    def model_for(self, space: str) -> str:
        """The contract id of the model that embeds for a collection that :meth:`require_collection` returned."""
        return space if space in self.embedders else self.models.searching(space) or self.contract_id

    async def _embed_too(
        self,
        inputs: Sequence[Input],
        names: Sequence[str],
        deadline: float,
        decoded: Sequence[DecodedImage],
        model: str,
        other: str,
    ) -> Float32:
        """Vectors of images by the model ``other``, which were decoded for ``model``."""
        if self.embedders[other].preprocessing != self.embedders[model].preprocessing:
            decoded = await self.decode_all(inputs, names, deadline, other)
        return await self.embed_pixels(torch.cat([image.pixels for image in decoded]), deadline, other)

    async def embed_pixels(self, images: torch.Tensor, deadline: float, contract_id: str | None = None) -> Float32:
        """Embed uint8 (n, 3, S, S), by the service's own model unless another is named; returns (n, D) float32."""
        model = self.contract_id if contract_id is None else contract_id
        pieces = torch.split(images, PIECE_ROWS)  # between which others have their turn
        return np.concatenate(
            await asyncio.gather(*[self._in_batch("embed", (model, each), len(each), deadline) for each in pieces])
        )

    def search(self, search: Search, deadline: float) -> Awaitable[SearchAnswer]:
        """Matches of each query, with their persons."""
        if search.filter is not None:
            return self._search_filtered(search, search.filter, deadline)
        return self._in_batch("search", search, len(search.queries), deadline)

    async def in_filter(self, deadline: float, function: Callable[..., Result], *args: Any, **keywords: Any) -> Result:
        """Call ``function``, which looks persons up by a filter, in one of few threads, in turn with other callers'.

        Raises:
            DeadlineError, ApiError: the deadline passed, and the store looks no further.
        """
        is_gone = False

        def call() -> Result:
            if time.monotonic() > deadline:
                raise ApiError(504, "the deadline passed before the filter's turn came; allow more time")
            with self.store.stopping_when(lambda: is_gone or time.monotonic() > deadline):
                return function(*args, **keywords)

        try:
            return await self._in_thread(self._filterers, current_owner(), call)
        except asyncio.CancelledError:
            is_gone = True
            raise

    async def require_collection(self, name: str) -> Spaces:
        """A collection whose vectors are of a model of this service; :class:`PlscError` if there is none."""
        found: Spaces = await self._remember(name, self._spaces, name)
        collection, migration = found
        if self._searching(found) is None:
            raise self.models.refusal(collection)
        if migration is not None and self.models.member(migration.contract_id) is None:
            return Spaces(collection, None)  # who is enrolled has no second vector, and is missing
        return found

    def _searching(self, spaces: Spaces) -> str | None:
        return self.models.queried_by(spaces.info.contract_id, is_moving=spaces.migration is not None)

    async def enrol(self, change: Callable[..., Result], spaces: Spaces, *args: Any, **keywords: Any) -> Result:
        """Call ``change``, which adds vectors to a collection, by :meth:`add`, with the id of the model that made them.

        Where they come beside another model's, the collection's contract id names theirs from then on.
        """
        name, space = spaces.info.name, spaces.info.contract_id
        if (model := self.model_for(space)) == space or is_of(model, space):
            added = await self.add(change, name, *args, contract_id=space, **keywords)
            if self.settings.search_thresholds is not None:  # the next search is among more
                self.forget(name)
            return added
        beside = {"contract_id": model, "compatible_with": self.models.compatible_with(model)}
        added = await self.add(change, name, *args, **beside, **keywords)
        self.forget(name)
        return added

    def _spaces(self, name: str) -> Spaces:
        return Spaces(*self.store.spaces(name))

    async def with_collection(self, name: str, work: Callable[[Spaces], Awaitable[Result]]) -> Result:
        """Do what needs vectors for a collection; again from the start if it is moved to another model meanwhile."""
        spaces = await self.require_collection(name)
        try:
            return await work(spaces)
        except ConflictError:
            self.forget(name)
            now = await self.require_collection(name)
            if now.info.contract_id == spaces.info.contract_id:
                raise
            return await work(now)

    def settings_of(self, spaces: Spaces) -> Settings:
        """The settings with the threshold of a collection's model and size, None where that is not known."""
        contract_id, migration = spaces.info.contract_id, spaces.migration
        if contract_id in self.own_contracts:
            return self._sized(spaces.info)
        measured = self.settings.false_match_rate is not None  # among vectors of the model alone
        is_own = set(models_in(contract_id)) <= {*self.own_contracts}
        if is_own:
            return self._sized(spaces.info)
        if self._searching(spaces) == self.contract_id and not measured:
            return self.settings
        threshold = self.thresholds.get(contract_id)  # of a move that is finished
        if migration is not None:
            threshold = migration.details.get("thresholds", {}).get(contract_id)
        return replace(self.settings, threshold=threshold, false_match_rate=None)

    def _sized(self, info: Collection) -> Settings:
        """The settings with the threshold of searches among as many as ``info`` has."""
        by_size = self.settings.search_thresholds
        if by_size is None:
            return self.settings
        threshold = by_size.threshold(info.persons, info.faces)
        return replace(self.settings, threshold=threshold, false_match_rate=None)

    async def statistics(self, collection: str) -> Mapping[str, float]:
        """The store's statistics of a collection, at most a second old."""
        statistics = await self._remember("", self.store.statistics)
        found: Mapping[str, float] = statistics.get(collection, {})
        return found

    async def unsearched(self) -> Unsearched:
        """The collections that no model of this service searches, as of at most a second ago."""
        found: Unsearched = await self._remember(_UNSEARCHED, self.models.unsearched, self.store)
        return found

    def _measured(self) -> dict[str, dict[str, float]]:
        """The store's statistics, and of each collection whether a model of this service searches it."""
        statistics, lost = self.store.statistics(), self.models.unsearched(self.store).refusals
        return {name: {**figures, "has_model": name not in lost} for name, figures in statistics.items()}

    async def filter_warnings(self, collection: str, filter: Filter | None) -> list[str]:
        """Warnings about a filter that found nobody; see :func:`plsc.serve.searching.filter_warnings`.

        Whoever may not list persons learns of no field whether anybody has it.
        """
        if filter is None:
            return []
        if not includes(current_caller().role, "read"):
            return [UNEXPLAINED]
        return await self.in_filter(self.deadline(None), filter_warnings, self.store, collection, filter)

    def forget(self, collection: str) -> None:
        """Drop what is remembered of a collection, which was created or deleted, and of all together."""
        for name in (collection, "", _UNSEARCHED):
            self._remembered.pop(name, None)

    def deadline(self, milliseconds: int | None) -> float:
        """Deadline in ``time.monotonic()``: the caller's, or the service's limit where that is earlier."""
        limit = self.settings.limits.deadline_seconds
        return time.monotonic() + (limit if milliseconds is None else min(milliseconds / 1000, limit))

    def check_inputs(self, count: int) -> None:
        """:class:`ApiError` 413 if a request has more inputs than allowed."""
        limit = self.settings.limits.inputs
        if count > limit:
            raise ApiError(413, f"{count} inputs; at most {limit} are allowed in a request")

    def close(self) -> None:
        """Finish what runs, then release threads and store."""
        self.decoders.close()
        self.worker.close()
        self._storers.close()
        self._changers.close()
        self._movers.close()
        self._filterers.close()
        self.retention.close()
        if self.migrations is not None:
            self.migrations.close()
        self.store.close()
        self.audit.close()

    def _workers(self, count: int, share: int, name: str) -> Workers[int]:
        return Workers(range(count), share, name, self.settings.limits, self.settings.clock)

    async def _in_thread(
        self, threads: Workers[int], owner: Owner, function: Callable[..., Result], *args: Any, **keywords: Any
    ) -> Result:
        call = partial(contextvars.copy_context().run, function, *args, **keywords)
        begun = time.monotonic()
        (future,) = threads.submit(owner, [lambda _: call()])
        try:
            result: Result = await future
            return result
        finally:
            self.metrics.stage("store", time.monotonic() - begun)

    def _audit_expiry(self, collection: str, persons: Sequence[int]) -> None:
        changes = take_changes()
        if "write" in self.settings.audit_events:
            expired = {"operation": "delete_expired", "collection": collection, "ids": list(persons), "status": 204}
            self.audit.write("write", token=None, **expired, changes=changes)

    def _audit_filling(self, collection: str) -> None:
        changes = take_changes()
        if changes and "write" in self.settings.audit_events:
            filled = {"operation": "fill_migration", "collection": collection, "status": 200}
            self.audit.write("write", token=None, **filled, changes=changes)

    def _remember(self, key: str, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        now = time.monotonic()
        asked_at, asking = self._remembered.get(key, (-math.inf, None))
        if asking is None or now - asked_at >= _REMEMBERED_SECONDS:
            # Nobody's: others wait for it as well, and not behind the work of the one who asks first.
            asking = asyncio.ensure_future(self._in_thread(self._storers, NOBODY, function, *args))
            asking.add_done_callback(partial(self._drop_failed, key))
            if len(self._remembered) > self.settings.limits.collections:
                self._remembered.clear()
            self._remembered[key] = now, asking
        # One question serves all who ask meanwhile: the cancellation of one must not cancel it for the others.
        return asking if asking.done() else asyncio.shield(asking)

    def _drop_failed(self, key: str, asking: "asyncio.Future[Any]") -> None:
        failed = asking.cancelled() or asking.exception() is not None  # asyncio logs exceptions that nobody reads
        if failed and self._remembered.get(key, (0.0, None))[1] is asking:
            del self._remembered[key]

    async def decode_all(
        self, inputs: Sequence[Input], names: Sequence[str], deadline: float, model: str, *, every_face: bool = False
    ) -> Sequence[DecodedImage]:
        """Images as a model expects them; ``every_face`` in place of the one that an input means."""
        for item, name in zip(inputs, names, strict=True):
            if self.detector is None and (every_face or isinstance(item.face, int)):
                raise ApiError(422, f"{name}: this service looks for no faces; start it with --detector, or send crops")
        decode_one = partial(self._decode, preprocessing=self.embedders[model].preprocessing, deadline=deadline)
        works = [
            partial(
                decode_one,
                data=item.picture(name),
                name=name,
                landmarks=item.landmarks,
                choice="all" if every_face else item.face,
            )
            for item, name in zip(inputs, names, strict=True)
        ]
        decoding = self.decoders.submit(current_owner(), works)
        try:
            decoded: list[DecodedImage] = await asyncio.gather(*decoding)
            return decoded
        finally:
            for future in decoding:
                future.cancel()  # those that wait or run, where one failed or the caller disconnected

    def _decode(
        self,
        process: DecodeProcess,
        data: bytes,
        name: str,
        landmarks: Any,
        choice: FaceChoice,
        preprocessing: Preprocessing,
        deadline: float,
    ) -> DecodedImage:
        begun = time.monotonic()
        if begun > deadline:
            raise ApiError(504, f"the deadline passed before {name} was decoded; allow more time, or ask for less")
        image = decode(process, data, name, preprocessing, landmarks, self.detector, choice)
        self.metrics.stage("decode", time.monotonic() - begun)
        return image

    async def _search_filtered(self, search: Search, filter: Filter, deadline: float) -> SearchAnswer:
        """Search with a filter whose matches are looked up before the device's turn."""
        group, own = current_owner().group, asyncio.Semaphore(self._own_filtered)
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout_at(deadline):  # the loop's clock is time.monotonic
                    await held.enter_async_context(self._filtering_of.setdefault(group, own))
                    await held.enter_async_context(self._filtering)
            except TimeoutError:
                raise ApiError(504, "the deadline passed before the filter's turn came; allow more time") from None
            prepared = await self.in_filter(deadline, self.store.prepare_filter, search.collection, filter)
            while isinstance(prepared, UnfinishedFilter):  # each piece at the token's turn
                prepared = await self.in_filter(deadline, self.store.prepare_filter, search.collection, prepared)
            ready = search._replace(filter=prepared)
            answer: SearchAnswer = await self._in_batch("search", ready, len(search.queries), deadline)
            return answer

    async def _in_batch(self, kind: str, payload: Any, rows: int, deadline: float) -> Any:
        return await self.worker.submit(kind, payload, rows, deadline, current_owner().group)

    def _embed_batch(self, batches: list[tuple[str, torch.Tensor]]) -> list[Any]:
        results: list[Any] = [None] * len(batches)
        for model, embedder in self.embedders.items():
            own = [index for index, (name, _) in enumerate(batches) if name == model]
            if own:
                images = [batches[index][1] for index in own]
                chunks = torch.split(torch.cat(images), self.settings.max_batch)
                vectors = torch.cat([embed_images(embedder, chunk, self.settings.flip) for chunk in chunks])
                for index, rows in zip(own, torch.split(vectors, [len(each) for each in images]), strict=True):
                    results[index] = rows.numpy()
        return results


def _written(*paths: Path | None) -> tuple[str, ...]:
    """The forms in which messages may name files; a single word would be found in messages about other things."""
    given = [path for path in paths if path is not None]
    return tuple({*(str(path.absolute()) for path in given), *(f"{path}/" for path in given)})
