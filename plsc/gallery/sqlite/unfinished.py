"""The table ``unfinished``: what is still to be done with a store's file, and since when, also after a kill.

Its rows are a name, ``work``, and a time, ``since``. Each is written in the transaction of the change that makes it
necessary:

- ``erase``: vectors of deleted faces have to be overwritten (plsc.gallery.sqlite.compaction).
- ``rewrite``: a person was deleted or changed, whose texts may be left in the gaps of pages: the file has to be written
  anew (plsc.gallery.sqlite.rewriting). ``rewriting`` are those changes while that is under way.
- ``vacuum``, without a time: rows of erased vectors were taken out, so the file is to be written anew at once.
- ``written anew``, without a time: it was, or began, without such traces. Files of a former version lack it.
"""

import sqlite3
from datetime import UTC, datetime, timedelta

from plsc.gallery.sqlite.database import ERASED, clock_of, corrupt_row
from plsc.gallery.sqlite.schema import WRITTEN_ANEW
from plsc.gallery.values import Clock

_ERASE, _REWRITE, _REWRITING, _PURGED = "erase", "rewrite", "rewriting", "vacuum"
_LONG_AGO = datetime.fromtimestamp(0, UTC)

# --- vectors to erase ---


def note_deletion_time(db: sqlite3.Connection) -> None:
    """Note that vectors have to be erased, and since when, unless an earlier deletion noted it."""
    _note(db, _ERASE)


def deletions_since(db: sqlite3.Connection) -> datetime | None:
    """Return the time of the first deletion whose vectors may still be in a file, as far as it was noted."""
    return _since(db, _ERASE)


def clear_deletion_time(db: sqlite3.Connection) -> None:
    """Forget the time once nothing is left to erase."""
    db.execute("DELETE FROM unfinished WHERE work = ? AND NOT EXISTS (SELECT 1 FROM forgotten)", (_ERASE,))


def purge_erased(db: sqlite3.Connection) -> None:
    """Delete the rows of erased vectors, and note in the same transaction that the file has to be written anew."""
    db.execute(f"DELETE FROM vectors WHERE checksum = x'{ERASED.hex()}'")
    db.execute("INSERT OR IGNORE INTO unfinished VALUES (?, NULL)", (_PURGED,))


# --- texts to leave behind ---


def note_left_texts(db: sqlite3.Connection) -> None:
    """Note that a person's texts go, and since when, unless an earlier change noted it."""
    _note(db, _REWRITE)


def rewrite_since(db: sqlite3.Connection) -> datetime | None:
    """Return since when the file has to be written anew; None: it has not."""
    works = {row[0] for row in db.execute("SELECT work FROM unfinished")}
    if _PURGED in works or WRITTEN_ANEW not in works:
        return _LONG_AGO
    times = [time for time in (_since(db, _REWRITE), _since(db, _REWRITING)) if time is not None]
    return min(times, default=None)


def begin_rewriting(db: sqlite3.Connection) -> None:
    """Note that the file is being written anew: changes from here on are not part of it, and noted afresh."""
    since = rewrite_since(db)
    _remove(db, _REWRITE, _REWRITING)
    if since is not None:
        db.execute("INSERT INTO unfinished VALUES (?, ?)", (_REWRITING, since.isoformat()))


def end_rewriting(db: sqlite3.Connection, schema: str = "main") -> None:
    """Note in the new file that it holds no traces but of changes since :func:`begin_rewriting`."""
    _remove(db, _REWRITING, _PURGED, schema=schema)
    db.execute(f"INSERT OR IGNORE INTO {schema}.unfinished VALUES (?, NULL)", (WRITTEN_ANEW,))


def mark_written_anew(db: sqlite3.Connection) -> None:
    """Note in a copy, which VACUUM wrote, that nothing has to be done with it."""
    _remove(db, _REWRITE)
    end_rewriting(db)


def _note(db: sqlite3.Connection, work: str) -> None:
    db.execute("INSERT OR IGNORE INTO unfinished VALUES (?, ?)", (work, _moment(clock_of(db)).isoformat()))


def _since(db: sqlite3.Connection, work: str) -> datetime | None:
    row = db.execute("SELECT since FROM unfinished WHERE work = ?", (work,)).fetchone()
    if row is None:
        return None
    try:
        return datetime.fromisoformat(row[0]).astimezone(UTC)
    except (TypeError, ValueError):
        raise corrupt_row(db, "the time of its deletions is not what was written") from None


def _remove(db: sqlite3.Connection, *works: str, schema: str = "main") -> None:
    db.executemany(f"DELETE FROM {schema}.unfinished WHERE work = ?", ((work,) for work in works))


def seconds_since(since: datetime, clock: Clock) -> float:
    """Return how long ago a time was, 0 for one to come."""
    return max((_moment(clock) - since) / timedelta(seconds=1), 0.0)


def _moment(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.time(), UTC)
