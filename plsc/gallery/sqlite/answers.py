"""SQL of the answers that are stored under idempotency keys, in the transactions of the writes that they tell of."""

import sqlite3
import zlib

from plsc.errors import ConflictError
from plsc.gallery.sqlite.database import corrupt_row
from plsc.gallery.store import IdempotentRequest, StoredAnswer


def insert_answer(db: sqlite3.Connection, idempotent: IdempotentRequest | None, result: object, created: str) -> None:
    """Store the answer to ``idempotent`` (None: nothing) of a write that returned ``result``.

    Raises:
        ConflictError: there is one, of a request that was done meanwhile.
    """
    if idempotent is None:
        return
    status, body = idempotent.answer(result)
    values = (idempotent.token, idempotent.key, idempotent.fingerprint, status, body, created)
    try:
        db.execute("INSERT INTO idempotency VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, _checksum(*values)))
    except sqlite3.IntegrityError:
        raise ConflictError("the request of this Idempotency-Key was done meanwhile; send it again") from None


def find_answer(db: sqlite3.Connection, token: str, key: str) -> StoredAnswer | None:
    """Return the answer stored under a key."""
    row = db.execute(
        "SELECT token, key, fingerprint, status, body, created, checksum FROM idempotency WHERE token = ? AND key = ?",
        (token, key),
    ).fetchone()
    if row is None:
        return None
    *values, checksum = row
    try:
        intact = checksum == _checksum(*values)
    except (TypeError, AttributeError):  # a damaged header turned a text into bytes, or bytes into a text
        intact = False
    if not intact:
        raise corrupt_row(db, "an answer stored under an idempotency key is not what was written")
    _, _, fingerprint, status, body, _ = values
    return StoredAnswer(fingerprint, status, body)


def delete_answers(db: sqlite3.Connection, before: str, most: int) -> int:
    """Delete the answers stored before a time, and all but the ``most`` newest of each token; returns how many."""
    deleted = db.execute("DELETE FROM idempotency WHERE created < ?", (before,)).rowcount
    crowded = db.execute("SELECT token FROM idempotency GROUP BY token HAVING count(*) > ?", (most,)).fetchall()
    for (token,) in crowded:
        deleted += db.execute(
            "DELETE FROM idempotency WHERE rowid IN "
            "(SELECT rowid FROM idempotency WHERE token = ? ORDER BY created DESC, rowid DESC LIMIT -1 OFFSET ?)",
            (token, most),
        ).rowcount
    return deleted


def _checksum(token: str, key: str, fingerprint: bytes, status: int, body: bytes, created: str) -> int:
    head = repr((token, key, fingerprint, status, created)).encode()
    return zlib.crc32(body, zlib.crc32(head))
