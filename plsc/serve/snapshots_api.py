"""/v1/snapshots: consistent copies of the store, taken while it works; restored offline by plsc gallery restore."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import Response

from plsc.serve.routing import JsonRoute, Served, errors
from plsc.serve.schemas import SnapshotsView, SnapshotView

router = APIRouter(prefix="/v1/snapshots", route_class=JsonRoute, tags=["snapshots"])


@router.get("", responses=errors())
async def list_snapshots(service: Served) -> SnapshotsView:
    """All snapshots, oldest first."""
    found = await service.in_store(service.snapshots.all)
    return SnapshotsView(snapshots=[SnapshotView(**asdict(one)) for one in found])


@router.post("", status_code=201, responses=errors())
async def take_snapshot(service: Served) -> SnapshotView:
    """Take a snapshot of the whole store."""
    return SnapshotView(**asdict(await service.in_store(service.snapshots.take)))


@router.delete("/{snapshot}", status_code=204, responses=errors(404), response_class=Response)
async def delete_snapshot(
    snapshot: Annotated[str, Path(description="A snapshot's id", examples=["20261121T080000000000Z"])], service: Served
) -> Response:
    """Delete a snapshot."""
    await service.in_store(service.snapshots.delete, snapshot)
    return Response(status_code=204)
