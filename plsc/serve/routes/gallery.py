"""/v1/collections: collections of persons."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from plsc.gallery.validation import COLLECTION_NAME
from plsc.gallery.values import Collection
from plsc.serve.access import current_caller
from plsc.serve.changes import KEY_DESCRIBED
from plsc.serve.errors import ApiError, error_responses
from plsc.serve.routing import DELETED, BodyRoute, CollectionName, Served, requires
from plsc.serve.schemas import Body, body_like
from plsc.serve.service import Service, Spaces

router = APIRouter(prefix="/v1/collections", route_class=BodyRoute, tags=["collections"])


class NewCollection(Body):
    """A collection to make, for embeddings of the service's model."""

    name: str = Field(pattern=COLLECTION_NAME, examples=["staff"])


class CollectionView(BaseModel):
    """A collection; ``threshold`` is that of its model (and with an FPIR its size), null where the service has none.

    ``contract_id`` names the models of its vectors, with commas between where compatible ones have enrolled.
    """

    name: str
    dim: int
    contract_id: str
    persons: int
    faces: int
    created: str
    threshold: float | None = None


class CollectionsView(BaseModel):
    """All collections, by name."""

    collections: list[CollectionView]


class CompactedView(BaseModel):
    """The collection after what was added and deleted has been brought into the searched files."""

    collection: str
    statistics: dict[str, float]


@router.get("", responses=error_responses())
@requires("search")
async def list_collections(service: Served) -> CollectionsView:
    """All collections that the caller may know of, by name."""
    caller = current_caller()
    collections = await service.in_store(service.store.collections)
    seen = [one for one in collections if caller.sees(one.name)]
    return CollectionsView(collections=[await _view(service, one) for one in seen])


@router.post("", status_code=201, responses=error_responses(409, 413, 415, 422, 507), openapi_extra=KEY_DESCRIBED)
@requires("write", all_collections=True)
async def create_collection(
    body: Annotated[NewCollection, body_like(a_collection={"name": "visitors"})],
    service: Served,
    request: Request,
    response: Response,
) -> CollectionView:
    """Make a collection for embeddings of the service's model."""
    async with service.idempotency.claim(request) as claim:
        if claim.stored is not None:
            return CollectionView(**claim.replay(response))
        async with service.creating:  # so that several at once keep to the limit too
            limit = service.settings.limits.collections
            if len(await service.in_store(service.store.collections)) >= limit:
                raise ApiError(
                    400, f"there are {limit} collections already, as many as this service takes; delete one first"
                )
            service.forget(body.name)
            about = (body.name, service.embedder.embedding_dim, service.contract_id)
            shown = claim.request(lambda made: asdict(made) | {"threshold": _threshold(service, Spaces(made, None))})
            created = await service.add(service.store.create_collection, *about, idempotent=shown)
        return await _view(service, created)


@router.get("/{collection}", responses=error_responses(404))
@requires("search")
async def get_collection(collection: CollectionName, service: Served) -> CollectionView:
    """One collection."""
    return await _view(service, await service.in_store(service.store.collection, collection))


async def _view(service: Service, info: Collection) -> CollectionView:
    migration = None
    if info.contract_id != service.contract_id:  # moved to the next model
        migration = await service.in_store(service.store.migration, info.name)
    return CollectionView(**asdict(info), threshold=_threshold(service, Spaces(info, migration)))


def _threshold(service: Service, spaces: Spaces) -> float | None:
    return service.settings_of(spaces).threshold


@router.delete("/{collection}", **DELETED, responses=error_responses(404))
@requires("admin")
async def delete_collection(collection: CollectionName, service: Served) -> None:
    """Delete a collection with everybody in it."""
    await service.change(service.thumbnails.delete_collection, collection)
    service.forget(collection)


@router.post("/{collection}/compact", responses=error_responses(404, 409, 422), openapi_extra=KEY_DESCRIBED)
@requires("write")
async def compact_collection(
    collection: CollectionName, service: Served, request: Request, response: Response
) -> CompactedView:
    """Bring what was added and deleted into the searched files: what was deleted is then in no file."""
    async with service.idempotency.claim(request) as claim:
        if claim.stored is not None:
            return CompactedView(**claim.replay(response))
        await service.in_store(service.thumbnails.compact, collection)
        statistics = await service.in_store(service.store.statistics)
        view = CompactedView(collection=collection, statistics=statistics.get(collection, {}))
        done = claim.request(CompactedView.model_dump, 200)
        if done is not None:
            await service.in_store(service.store.store_answer, done, view)
        return view
