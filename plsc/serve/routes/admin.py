"""/health for those who start, watch and stop the service, and /v1/snapshots."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from plsc.serve.changes import KEY_DESCRIBED
from plsc.serve.errors import RETRY_SECONDS, error_responses
from plsc.serve.routing import DELETED, SEGMENT, BodyRoute, Served, get_lifecycle, requires
from plsc.serve.snapshots import SnapshotView

router = APIRouter(route_class=BodyRoute)


class SnapshotsView(BaseModel):
    """All snapshots, oldest first."""

    snapshots: list[SnapshotView]


class HealthView(BaseModel):
    """``status`` is "live", "ready", or why the service is not ready, of which ``reason`` may tell more."""

    status: str
    reason: str | None = None


@router.get("/health/live", tags=["health"], response_model=HealthView)
@requires(None)
async def live(_: Request) -> Response:
    """The process runs and answers."""
    return JSONResponse({"status": "live"})


@router.get("/health/ready", tags=["health"], response_model=HealthView, responses={503: {"model": HealthView}})
@requires(None)
async def ready(request: Request) -> Response:
    """Requests are served: the model is loaded, the store answers, and not all collections are of other models."""
    status, reason = await get_lifecycle(request.scope).readiness()
    if status == "ready":
        return JSONResponse({"status": status})
    about = {"status": status} if reason is None else {"status": status, "reason": reason}
    return JSONResponse(about, 503, {"Retry-After": str(RETRY_SECONDS)})


@router.get("/v1/snapshots", tags=["snapshots"], responses=error_responses())
@requires("admin", all_collections=True)
async def list_snapshots(service: Served) -> SnapshotsView:
    """All snapshots, oldest first."""
    found = await service.in_store(service.snapshots.list)
    return SnapshotsView(snapshots=list(found))


@router.post(
    "/v1/snapshots",
    status_code=201,
    tags=["snapshots"],
    responses=error_responses(409, 422),
    openapi_extra=KEY_DESCRIBED,
)
@requires("admin", all_collections=True)
async def take_snapshot(service: Served, request: Request, response: Response) -> SnapshotView:
    """Take a snapshot of the whole store."""
    async with service.idempotency.claim(request) as claim:
        if claim.stored is not None:
            return await service.in_store(service.snapshots.finish, claim.replay(response))
        return await service.in_store(service.snapshots.take, claim.request(str))


@router.delete("/v1/snapshots/{snapshot}", **DELETED, tags=["snapshots"], responses=error_responses(404))
@requires("admin", all_collections=True)
async def delete_snapshot(
    snapshot: Annotated[
        str,
        Path(
            description="A snapshot's id", examples=["20261121T080000000000Z"], json_schema_extra={"pattern": SEGMENT}
        ),
    ],
    service: Served,
) -> None:
    """Delete a snapshot."""
    await service.in_store(service.snapshots.delete, snapshot)
