"""The gallery in Milvus, for galleries beyond one machine: Milvus keeps, distributes and scans the rows.

A gallery's collection is two of Milvus' or three: the persons, the faces with their vectors, and, while the collection
moves to another model, the faces with vectors of the second space. A face's row also has what filters and expiry need
of its person, so that they are decided where the vectors are. ``plsc_registry`` holds an entry for each collection
(:mod:`plsc.gallery.milvus.registry`), ``plsc_answers`` the answers to requests that may be sent again.

**Changes are whole or not at all.** Milvus has no transactions, but one request is whole or not at all. So no row is
changed in place: a change writes new rows under higher numbers than the entry knows, and then the entry, which says how
far rows count from now on, and which ones are gone. That one request is the commit. Readers take the entry first, and
see what counted at that moment: rows that are gone stay for a minute. What an unfinished change wrote counts never.

**One process writes at a time**, the holder of the *writer lease*; any number may read. Whoever takes the lease begins
a new epoch, with a copy of every entry, and only entries of the current epoch count. A change is acknowledged once its
process has seen, after the commit, that the lease is still its own. So a change of a process that lost the lease
meanwhile either came before the copies were made, or counts for nobody and raises :class:`StorageError`. After any
failed request a process begins a new epoch, too: what it sent may still arrive. One writer is also what makes external
ids unique, and preconditions hold.

**The search** is Milvus' FLAT: exact, a scan that Milvus spreads over its query nodes; recall 1. Deleted faces are
found by nobody at once. Milvus' own compaction takes them out of its files later, and its garbage collection deletes
the former files, if the server is configured to: :meth:`MilvusStore.compact` asks for it, and a client can prove
neither.

Tested against milvus-lite's server, which speaks Milvus' protocol in one process, and by hand against a standalone
Milvus 2.3.5. That proves nothing of replication, balancing over nodes, or speed at scale.
"""
