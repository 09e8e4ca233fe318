"""The short way to the hottest route: FastAPI's matching and reading of parameters cost more than a search itself."""

import logging
import re
from dataclasses import dataclass

from fastapi import FastAPI, Request

from plsc.serve.failures import Refusal, error_response
from plsc.serve.guard import Receive, Scope, Send
from plsc.serve.schemas import COLLECTION
from plsc.serve.search_api import answer_search

_SEARCH = re.compile(f"/v1/collections/({COLLECTION.strip('^$')})/search")


@dataclass(frozen=True)
class _Route:
    """What metrics and audit ask of a route."""

    path: str
    name: str


_ROUTE = _Route("/v1/collections/{collection}/search", "search")


class Express:
    """ASGI: searches are answered at once, by the very function that FastAPI's route calls; the rest is FastAPI's."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        found = _SEARCH.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        try:
            content = (await receive())["body"]  # the guard has all of it
            response = await answer_search(Request(scope, receive), found[1], content)
        except Refusal as refusal:
            response = error_response(scope["path"], refusal.status_code, refusal.detail, refusal.headers)
        except Exception:
            logging.getLogger("uvicorn.error").exception("a search failed")
            response = error_response(scope["path"], 500, "something broke in the service; its log tells what")
        await response(scope, receive, send)
