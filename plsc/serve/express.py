"""The short way to the hottest route: FastAPI's matching and reading of parameters cost more than a search itself."""

import logging
import re
from collections.abc import Awaitable
from dataclasses import dataclass

from fastapi import FastAPI

from plsc.errors import PlscError
from plsc.serve.exchange import Exchange
from plsc.serve.failures import Refusal, as_refusal, error_response
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
    """Answers searches by the very function that FastAPI's route calls; the rest is FastAPI's."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def __call__(self, exchange: Exchange) -> Awaitable[None]:
        """Answer one request, which the guard has admitted."""
        found = _SEARCH.fullmatch(exchange.path) if exchange.method == "POST" else None
        if found is None:
            return self._app(exchange.scope, exchange.replay, exchange.send)
        exchange.scope["route"] = _ROUTE
        return _search(exchange, found[1])


async def _search(exchange: Exchange, collection: str) -> None:
    try:
        content = await answer_search(exchange.scope, collection, exchange.content)
    except (Refusal, PlscError) as error:
        refusal = error if isinstance(error, Refusal) else as_refusal(error)
        await exchange.respond(error_response(exchange.path, refusal.status_code, refusal.detail, refusal.headers))
    except Exception:
        logging.getLogger("uvicorn.error").exception("a search failed")
        broken = error_response(exchange.path, 500, "something broke in the service; its log tells what")
        await exchange.respond(broken)
    else:
        await exchange.answer(content)
