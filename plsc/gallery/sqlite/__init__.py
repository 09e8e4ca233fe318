"""The gallery in one folder: SQLite holds the truth, memory-mapped segments answer searches, one process owns both.

STORE/
  lock              locked by the process that owns the store; holds its process id
  reserve           disk space kept back, so that a full disk can still be opened and deleted from
  gallery.sqlite    every row (plsc.gallery.sqlite.database), with its write-ahead log beside it, and
                    .gallery.sqlite.new while it is written anew
  collections/      a sealed segment per collection (plsc.gallery.sqlite.segments): derived, rebuilt when damaged
  snapshots/        snapshots that the service was asked for (plsc.gallery.sqlite.backup)
  keys              of an encrypted store: a key for each person (plsc.gallery.sqlite.keys); its segments are in memory
"""

LOCK = "lock"
RESERVE = "reserve"
SQLITE = "gallery.sqlite"
COLLECTIONS = "collections"
SNAPSHOTS = "snapshots"
KEYS = "keys"
COMPACT_WITHIN = 3600.0  # seconds after which no file holds what was deleted, unless a store is told another time
