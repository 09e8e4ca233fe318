"""Answers to requests with an Idempotency-Key, in the collection ``plsc_answers`` of Milvus.

An answer is written before the commit of its change, with the number of a row of that change: it counts if the change
was committed. Once that is known, the answer is written again without the number, and counts by itself.
"""

import base64
from collections.abc import Iterable
from typing import Any

from plsc.errors import ConflictError
from plsc.gallery.milvus.expressions import digest
from plsc.gallery.milvus.registry import Entry, Registry
from plsc.gallery.milvus.requests import ANSWERS, MilvusServer, Row
from plsc.gallery.validation import now
from plsc.gallery.values import FORGOTTEN_AT_ONCE, Clock, IdempotentRequest, StoredAnswer

_PART = 60_000  # bytes of a row's text
_FIELDS = ("id", "request", "token", "created", "collection", "row", "part", "body")


class Answers:
    """The stored answers of a server."""

    def __init__(self, server: MilvusServer, registry: Registry) -> None:
        self._server, self._registry = server, registry

    def find(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""
        rows = self._server.query(ANSWERS, f'request == "{digest(token, key)}"', _FIELDS)
        counting = self._counting(rows)
        if not counting:
            return None
        fingerprint, status, body = "".join(row["body"] for row in sorted(counting, key=_by_part)).split(" ")
        return StoredAnswer(bytes.fromhex(fingerprint), int(status), base64.b64decode(body))

    def rows(
        self, idempotent: IdempotentRequest, result: Any, clock: Clock, collection: str = "", row: int = 0
    ) -> list[Row]:
        """Return the rows of an answer; it counts with row ``row`` of the collection of a key, or by itself.

        Raises:
            ConflictError: there is an answer under the key.
        """
        if self.find(idempotent.token, idempotent.key) is not None:
            raise ConflictError("the request of this Idempotency-Key was done meanwhile; send it again")
        status, body = idempotent.answer(result)
        text = f"{idempotent.fingerprint.hex()} {status} {base64.b64encode(body).decode()}"
        request = digest(idempotent.token, idempotent.key)
        about = {"request": request, "token": digest(idempotent.token), "created": now(clock)}
        return [
            {**about, "id": f"{request}/{row}/{part}", "collection": collection, "row": row, "part": part,
             "body": text[start : start + _PART]}
            for part, start in enumerate(range(0, len(text), _PART))
        ]  # fmt: skip

    def write(self, rows: Iterable[Row]) -> None:
        """Store rows of an answer."""
        self._server.write(ANSWERS, list(rows))

    def settle(self, rows: Iterable[Row]) -> None:
        """Let answers, whose changes were committed, count by themselves."""
        self.write([{**row, "collection": ""} for row in rows])

    def settle_all(self, entry: Entry) -> None:
        """Settle what depends on an entry, which is about to be deleted."""
        rows = self._server.query(ANSWERS, f'collection == "{entry.key}"', _FIELDS)
        self.settle(row for row in rows if entry.counts(row["row"]))

    def forget_uncommitted(self, entry: Entry, rows: str) -> None:
        """Delete answers of changes of a collection that were never committed, by a condition on their rows."""
        self._server.delete(ANSWERS, f'(collection == "{entry.key}") and ({rows})')

    def forget(self, before: str, most: int) -> int:
        """See :meth:`plsc.gallery.store.Store.forget_answers`."""
        too_many = self._server.count(ANSWERS, "part == 0") > most
        asked = "part == 0" if too_many else f'(part == 0) and (created < "{before}")'
        found = list(self._server.iterate(ANSWERS, asked, ("id", "request", "token", "created")))
        places: dict[str, int] = {}
        forgotten = []
        for row in sorted(found, key=lambda row: (row["created"], row["id"]), reverse=True):
            place = places[row["token"]] = places.get(row["token"], 0) + 1
            if row["created"] < before or place > most:
                forgotten.append(row["request"])
        forgotten = forgotten[-FORGOTTEN_AT_ONCE:]
        if forgotten:
            self._server.delete(ANSWERS, "request in [" + ", ".join(f'"{one}"' for one in forgotten) + "]")
        return len(forgotten)

    def _counting(self, rows: list[Row]) -> list[Row]:
        settled = [row for row in rows if not row["collection"]]
        if settled or not rows:
            return settled
        entries = {entry.key: entry for entry in self._registry.entries().values()}
        for row in rows:
            entry = entries.get(row["collection"])
            if entry is not None and entry.counts(row["row"]):
                return [other for other in rows if other["row"] == row["row"]]
        return []


def _by_part(row: Row) -> int:
    return int(row["part"])
