"""/health: for those who start, watch and stop the service; open to anyone, and tells nothing else."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from plsc.errors import PlscError
from plsc.serve.failures import RETRY_SECONDS, Refusal
from plsc.serve.gate import Gate
from plsc.serve.schemas import HealthView

router = APIRouter(prefix="/health", tags=["health"])
STORE_SECONDS = 2.0  # a store that takes longer to say what it holds is lost


async def readiness(gate: Gate) -> str:
    """ "ready", or what keeps the service from being so."""
    try:
        service = gate.service
    except Refusal:
        return gate.status
    try:
        async with asyncio.timeout(STORE_SECONDS):
            await service.figures("")
    except (PlscError, TimeoutError):
        return "without its store"
    return "ready"


@router.get("/live", response_model=HealthView)
async def live() -> HealthView:
    """The process runs and answers."""
    return HealthView(status="live")


@router.get("/ready", response_model=HealthView, responses={503: {"model": HealthView}})
async def ready(request: Request) -> JSONResponse:
    """Requests are served: the model is loaded and the store answers."""
    status = await readiness(request.app.state.gate)
    if status == "ready":
        return JSONResponse({"status": status})
    return JSONResponse({"status": status}, 503, {"Retry-After": str(RETRY_SECONDS)})
