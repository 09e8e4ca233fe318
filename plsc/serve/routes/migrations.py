"""/v1/migrations: collections that are being moved to the service's next model."""

from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from plsc.errors import ConflictError, NotFoundError, UsageError
from plsc.gallery.migration import MAX_LOSS, filling, moving
from plsc.gallery.validation import COLLECTION_NAME
from plsc.gallery.values import Person
from plsc.serve import schemas
from plsc.serve.access import current_caller
from plsc.serve.changes import KEY_DESCRIBED
from plsc.serve.enrolment import embed_groups
from plsc.serve.errors import ApiError, error_responses
from plsc.serve.limits import charge
from plsc.serve.routing import (
    LARGEST_ID,
    CollectionName,
    Id,
    KeyedRoute,
    Served,
    Upload,
    accepts,
    record_collection,
    record_ids,
    requires,
)
from plsc.serve.schemas import Body, body_like
from plsc.serve.service import Service, Spaces

router = APIRouter(prefix="/v1/migrations", route_class=KeyedRoute, tags=["migrations"])
_FACES = Upload("faces")


class NewMigration(Body):
    """A collection to move to the service's next model."""

    collection: str = Field(pattern=COLLECTION_NAME, examples=["staff"])


class CutOver(Body):
    """What a cut-over may cost."""

    max_loss: float = Field(
        MAX_LOSS, ge=0, le=1, description="Of the true accept rate; 1 cuts over what cannot be judged, too"
    )
    threshold: float | None = Field(
        None, ge=-1, le=1, description="Of the new model, in place of the one that the judgement finds"
    )


class MigrationView(BaseModel):
    """How far a collection's move is.

    ``lacking`` faces have no vector of the other model, ``estimated`` ones an adapter's estimate. ``thresholds`` are
    cosines of one false-match rate by contract id, and ``judgement`` is what the move costs, once it was judged.
    """

    collection: str
    contract_id: str
    second_contract_id: str
    began: str
    is_cut_over: bool
    is_paused: bool
    faces: int
    lacking: int
    estimated: int
    thresholds: dict[str, float]
    judgement: dict[str, Any] | None


class BegunView(MigrationView):
    """A move that has begun.

    ``needed_bytes`` of disk are what the new model's vectors will take at the most, and ``free_bytes`` were free: null
    where the store is on a server.
    """

    needed_bytes: int
    free_bytes: int | None


class MigrationsView(BaseModel):
    """All collections that are being moved, by name."""

    migrations: list[MigrationView]


class MissingPerson(BaseModel):
    """A person, and those of the faces that have no vector of their own by the other model."""

    id: int
    external_id: str | None
    name: str | None
    faces: list[int]


class MissingView(BaseModel):
    """Persons by ascending id; ``next`` is the ``after`` of the next page, null on the last one."""

    persons: list[MissingPerson]
    next: int | None


class AssignedView(BaseModel):
    """The faces that pictures were known to be of, and got vectors of the other model."""

    faces: list[int]


class FinishedView(BaseModel):
    """The thresholds that the move found, by contract id: start the service with the new model and its own.

    So many ``snapshots`` were taken before, and may hold the former model's vectors: delete those.
    """

    collection: str
    contract_id: str
    thresholds: dict[str, float]
    snapshots: int


@router.get("", responses=error_responses())
@requires("admin")
async def list_migrations(service: Served) -> MigrationsView:
    """All collections that are being moved, by name."""
    caller = current_caller()
    return MigrationsView(migrations=await service.in_store(_all, service, caller.sees))


def _all(service: Service, sees: Any) -> list[MigrationView]:
    views = []
    for name in [one.name for one in service.store.collections() if sees(one.name)]:
        with suppress(NotFoundError):  # it is not being moved, or not any more
            views.append(_view(service, name))
    return views


def _view(service: Service, collection: str) -> MigrationView:
    return MigrationView(**asdict(moving.status(service.store, collection)))


@router.post("", status_code=201, responses=error_responses(404, 409, 413, 415, 422, 507), openapi_extra=KEY_DESCRIBED)
@requires("admin", all_collections=True)
async def begin_migration(
    body: Annotated[NewMigration, body_like(a_collection={"collection": "staff"})], service: Served, request: Request
) -> BegunView:
    """Begin to move a collection to the service's next model (plsc serve --next-model).

    From now on pictures that are enrolled are embedded by both models, and those that were kept are embedded again.
    Searches answer as before. Without room on the disk for a second vector of every face the answer is 503, and nothing
    is begun.
    """
    record_collection(request, body.collection)
    if service.next_contract_id is None:
        raise UsageError("this service has no next model; start it with --next-model FILE")
    embedder, store = service.embedders[service.next_contract_id], service.store

    def begin() -> filling.Room:
        info = store.collection(body.collection)
        if service.models.searching(info.contract_id) and service.models.member(info.contract_id) is None:
            raise ConflictError(
                f"{info.name} holds vectors of {info.contract_id}, which a compatible model searches here but not "
                "while they are moved; to move them, serve them with their own model, or use plsc gallery migrate"
            )
        room = filling.room_of(store, body.collection, embedder.embedding_dim)
        if room.shortage is not None:
            raise ApiError(503, room.shortage)
        store.begin_migration(body.collection, embedder.embedding_dim, str(service.next_contract_id))
        return room

    room = await service.change(begin)
    view = await _told(service, body.collection)
    return BegunView(**view.model_dump(), needed_bytes=room.needed, free_bytes=room.free)


@router.get("/{collection}", responses=error_responses(404))
@requires("admin")
async def get_migration(collection: CollectionName, service: Served) -> MigrationView:
    """How far a collection's move is."""
    return await service.in_store(_view, service, collection)


@router.get("/{collection}/missing", responses=error_responses(404))
@requires("admin")
async def list_missing(
    collection: CollectionName,
    service: Served,
    after: Annotated[int, Query(ge=0, le=LARGEST_ID, description="Persons with ids above this")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> MissingView:
    """Persons with faces that have no vector of their own by the other model: send their pictures again."""
    found = await service.in_store(service.store.lacking, collection, after=after, limit=limit + 1, estimated=True)
    shown = [
        MissingPerson(id=one.id, external_id=one.external_id, name=one.name, faces=list(faces))
        for one, faces in found[:limit]
    ]
    return MissingView(persons=shown, next=shown[-1].id if len(found) > limit else None)


@router.post(
    "/{collection}/persons/{person}/pictures",
    responses=error_responses(404, 409, 413, 415, 422, 504, 507),
    openapi_extra=_FACES.described(KEY_DESCRIBED),
)
@requires("admin")
@accepts(_FACES)
async def send_pictures(
    collection: CollectionName,
    person: Id,
    body: Annotated[schemas.FacesBody, body_like(a_picture={"faces": [{"image": schemas.IMAGE}]})],
    service: Served,
    request: Request,
) -> AssignedView:
    """Send a person's pictures again: each is known by its embedding, which one of the person's faces has, too."""
    record_ids(request, [person])
    charge(len(body.faces))

    async def assign(spaces: Spaces) -> list[int]:
        found: Person = await service.in_store(service.store.person, collection, person)
        embedded = await embed_groups(service, spaces, [("faces", body.faces)])
        other = None if spaces.migration is None else spaces.migration.contract_id
        if other is None or other not in embedded.others:
            raise ApiError(409, f"{collection} takes no pictures again: it is not being moved, or vectors were sent")
        both = embedded.vectors, embedded.others[other], spaces.contracts
        return await service.change(filling.assign_pictures, service.store, collection, found, *both)

    faces = await service.with_collection(collection, assign)
    if not faces:
        raise ApiError(422, f"none of the pictures is one that a face of person {person} was enrolled from")
    return AssignedView(faces=faces)


@router.post("/{collection}/estimate", responses=error_responses(404, 409, 422), openapi_extra=KEY_DESCRIBED)
@requires("admin")
async def estimate(collection: CollectionName, service: Served) -> MigrationView:
    """Give faces without a vector of the new model an estimate, by an adapter learned from those that have both.

    An estimate gives way to the vector of a picture that is sent later.
    """
    await service.move(filling.fill_by_adapter, service.store, collection, quiet=True)
    return await _told(service, collection)


@router.post("/{collection}/judge", responses=error_responses(404, 409, 422), openapi_extra=KEY_DESCRIBED)
@requires("admin")
async def judge(collection: CollectionName, service: Served) -> MigrationView:
    """Judge the move by persons with vectors of both models, at the false-match rate of the present threshold."""
    await service.move(moving.judge_move, service.store, collection, **await _searched(service, collection))
    return await _told(service, collection)


@router.post("/{collection}/pause", responses=error_responses(404, 409, 422), openapi_extra=KEY_DESCRIBED)
@requires("admin")
async def pause(collection: CollectionName, service: Served) -> MigrationView:
    """Embed no kept pictures for the moment. Enrolled pictures are embedded by both models all the same."""
    return await _changed(service, collection, lambda: moving.set_paused(service.store, collection, True))


@router.post("/{collection}/resume", responses=error_responses(404, 409, 422), openapi_extra=KEY_DESCRIBED)
@requires("admin")
async def resume(collection: CollectionName, service: Served) -> MigrationView:
    """Go on embedding kept pictures."""
    return await _changed(service, collection, lambda: moving.set_paused(service.store, collection, False))


@router.post(
    "/{collection}/cut-over",
    responses=error_responses(404, 409, 413, 415, 422, 507),
    openapi_extra=KEY_DESCRIBED,
)
@requires("admin")
async def cut_over(
    collection: CollectionName,
    body: Annotated[CutOver, body_like(unjudged={"max_loss": 1})],
    service: Served,
) -> MigrationView:
    """Judge the move, and search the new model's vectors from now on: model and threshold change together.

    Searches that are under way end with the vectors that they began with.
    """
    chosen = {**await _searched(service, collection), "max_loss": body.max_loss}
    if body.threshold is not None:
        chosen["new_threshold"] = body.threshold
    await service.move(moving.cut_over, service.store, collection, **chosen)
    return await _told(service, collection)


@router.post("/{collection}/roll-back", responses=error_responses(404, 409, 422, 507), openapi_extra=KEY_DESCRIBED)
@requires("admin")
async def roll_back(collection: CollectionName, service: Served) -> MigrationView:
    """Search the former model's vectors again, with all persons that were enrolled since."""
    await service.move(moving.roll_back, service.store, collection)
    return await _told(service, collection)


@router.post("/{collection}/finish", responses=error_responses(404, 409, 422), openapi_extra=KEY_DESCRIBED)
@requires("admin")
async def finish(collection: CollectionName, service: Served) -> FinishedView:
    """Delete the former model's vectors: after the next compaction they are in no file but snapshots."""
    done = await service.change(moving.finish, service.store, collection, service.settings.snapshots)
    service.thresholds |= done.thresholds
    service.forget(collection)
    info = await service.in_store(service.store.collection, collection)
    return FinishedView(collection=collection, contract_id=info.contract_id, **done._asdict())


@router.post(
    "/{collection}/cancel",
    status_code=204,
    response_model=None,
    responses=error_responses(404, 409, 422),
    openapi_extra=KEY_DESCRIBED,
)
@requires("admin")
async def cancel(collection: CollectionName, service: Served) -> None:
    """Delete the new model's vectors, and move no more."""
    await service.change(moving.cancel, service.store, collection)
    service.forget(collection)


async def _searched(service: Service, collection: str) -> dict[str, Any]:
    """The thresholds of both models, and which one is searched: another's step may change that meanwhile."""
    spaces = await service.require_collection(collection)
    thresholds = {"threshold": service.settings_of(spaces).threshold, "new_threshold": service.settings.next_threshold}
    return {**thresholds, "contract_id": spaces.info.contract_id}


async def _changed(service: Service, collection: str, work: Any) -> MigrationView:
    """Do ``work``, which changes a migration, and return how far it is then."""
    await service.change(work)
    return await _told(service, collection)


async def _told(service: Service, collection: str) -> MigrationView:
    """How far a migration is that has just changed."""
    service.forget(collection)
    if service.migrations is not None:
        service.migrations.wake()
    return await service.in_store(_view, service, collection)
