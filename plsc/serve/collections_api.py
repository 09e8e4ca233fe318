"""/v1/collections: make, list, delete and compact collections."""

from dataclasses import asdict

from fastapi import APIRouter
from starlette.responses import Response

from plsc.serve.failures import Refusal
from plsc.serve.routing import CollectionName, JsonRoute, Served, errors
from plsc.serve.schemas import CollectionsView, CollectionView, CompactedView, NewCollection

router = APIRouter(prefix="/v1/collections", route_class=JsonRoute, tags=["collections"])


@router.get("", responses=errors())
async def list_collections(service: Served) -> CollectionsView:
    """All collections, by name."""
    found = await service.in_store(service.store.collections)
    return CollectionsView(collections=[CollectionView(**asdict(one)) for one in found])


@router.post("", status_code=201, responses=errors(409, 413, 415))
async def create_collection(body: NewCollection, service: Served) -> CollectionView:
    """Make a collection for embeddings of the service's model."""
    most = service.settings.limits.collections
    if len(await service.in_store(service.store.collections)) >= most:
        raise Refusal(400, f"there are {most} collections already, as many as this service takes; delete one first")
    service.forget(body.name)
    dim = service.embedder.embedding_dim
    made = await service.in_store(service.store.create_collection, body.name, dim, service.contract_id)
    return CollectionView(**asdict(made))


@router.get("/{collection}", responses=errors(404))
async def get_collection(collection: CollectionName, service: Served) -> CollectionView:
    """One collection."""
    return CollectionView(**asdict(await service.in_store(service.store.collection, collection)))


@router.delete("/{collection}", status_code=204, responses=errors(404), response_class=Response)
async def delete_collection(collection: CollectionName, service: Served) -> Response:
    """Delete a collection with everybody in it."""
    await service.in_store(service.store.delete_collection, collection)
    service.forget(collection)
    return Response(status_code=204)


@router.post("/{collection}/compact", responses=errors(404))
async def compact_collection(collection: CollectionName, service: Served) -> CompactedView:
    """Bring what was added and deleted into the searched files: deleted embeddings are then in none of them."""
    await service.in_store(service.store.compact, collection)
    statistics = await service.in_store(service.store.statistics)
    return CompactedView(collection=collection, statistics=statistics.get(collection, {}))
