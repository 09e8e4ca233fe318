"""The steps of a move to another model, as the command and the service take them: judge, cut over, roll back, finish.

plsc.gallery.second_space says what each does to the store, plsc.gallery.migration.filling what comes before them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plsc.errors import ConflictError, DataError, UsageError
from plsc.gallery.migration import MAX_LOSS
from plsc.gallery.migration.filling import fit, pairs, require_migration, require_spaces
from plsc.gallery.migration.judgement import Judgement, judge
from plsc.gallery.store import Store
from plsc.native.allocator import return_freed_memory


@dataclass(frozen=True)
class Status:
    """How far a collection's move is.

    Attributes:
        collection: its name.
        contract_id: of the model whose vectors are searched.
        second_contract_id: of the other one: the new model's until the cut-over, then the former one's.
        began: ISO 8601, UTC.
        is_cut_over: the new model's vectors are searched.
        is_paused: the service fills the second space no further.
        faces: in the collection.
        lacking: of them, those without a vector in the second space.
        estimated: those that have an adapter's estimate there.
        thresholds: cosines of the same false-match rate, by contract id; empty until the move was judged by one.
        judgement: :meth:`plsc.gallery.migration.judgement.Judgement.to_dict`; None until the move was judged.
    """

    collection: str
    contract_id: str
    second_contract_id: str
    began: str
    is_cut_over: bool
    is_paused: bool
    faces: int
    lacking: int
    estimated: int
    thresholds: dict[str, float]
    judgement: dict[str, Any] | None


def status(store: Store, collection: str) -> Status:
    """Return how far the move of a collection is."""
    info, migration = require_spaces(store, collection)
    lacking, estimated = store.count_second(collection)
    return Status(
        collection=collection,
        contract_id=info.contract_id,
        second_contract_id=migration.contract_id,
        began=migration.began,
        is_cut_over=migration.is_cut_over,
        is_paused=bool(migration.details.get("paused", False)),
        faces=info.faces,
        lacking=lacking,
        estimated=estimated,
        thresholds=dict(migration.details.get("thresholds", {})),
        judgement=migration.details.get("judgement"),
    )


def set_paused(store: Store, collection: str, paused: bool) -> None:
    """Let the service fill the second space no further, or go on."""
    store.set_migration_details(collection, {"paused": paused})


def judge_move(store: Store, collection: str, threshold: float | None) -> Judgement:
    """Judge a move by people who have vectors of both models, and store what was found with the new threshold.

    Args:
        store: holds the collection.
        collection: its name.
        threshold: the service's, a cosine of the present model; None: the one that it was judged by before, else that
            of a false-match rate of 1e-3.

    Raises:
        ConflictError: the collection is cut over.
        DataError: fewer than ten people have two faces with both vectors.
    """
    info, migration = require_spaces(store, collection)
    if migration.is_cut_over:
        raise ConflictError(f"{collection} is cut over already; roll back to judge the move again")
    if threshold is None:
        threshold = migration.details.get("thresholds", {}).get(info.contract_id)
    found = pairs(store, collection, info.contract_id)
    estimated = fit(found)[1] if store.count_second(collection)[1] else None
    judgement = judge(found.searched, found.second, found.persons, threshold=threshold, estimated=estimated)
    del found, estimated
    return_freed_memory()
    thresholds = {info.contract_id: threshold, migration.contract_id: judgement.threshold}
    if threshold is None:  # who judges nobody by one today does not tomorrow
        thresholds = {}
    store.set_migration_details(collection, {"thresholds": thresholds, "judgement": judgement.to_dict()})
    return judgement


def cut_over(store: Store, collection: str, threshold: float | None, max_loss: float = MAX_LOSS) -> Status:
    """Let searches read the new model's vectors, unless that loses more than ``max_loss`` of the true accepts.

    Args:
        store: holds the collection.
        collection: its name.
        threshold: as for :func:`judge_move`.
        max_loss: of the share of a person's pairs that match; 1 cuts over also what cannot be judged.

    Raises:
        UsageError: it loses more, or cannot be judged.
        ConflictError: faces lack a vector of the new model.
    """
    migration = require_migration(store, collection)
    if not migration.is_cut_over:
        try:
            judgement = judge_move(store, collection, threshold)
        except DataError as error:
            if max_loss < 1:
                raise UsageError(f"{error}; or cut over without a judgement: a maximal loss of 1") from None
        else:
            if judgement.refuses(max_loss):
                raise UsageError(
                    f"the move loses {judgement.loss:.4f} of the true accept rate, more than {max_loss:g}; "
                    "take another model, send pictures again, or allow a larger loss"
                )
        store.exchange_spaces(collection, migration.contract_id)
    return status(store, collection)


def roll_back(store: Store, collection: str) -> Status:
    """Let searches read the former model's vectors again, with all that was enrolled and deleted since."""
    migration = require_migration(store, collection)
    if migration.is_cut_over:
        store.exchange_spaces(collection, migration.contract_id)
    return status(store, collection)


class Finished(NamedTuple):
    """The ``thresholds`` that a move found, by contract id, and how many ``snapshots`` may hold the former vectors."""

    thresholds: dict[str, float]
    snapshots: int


def finish(store: Store, collection: str, snapshots: Path | None) -> Finished:
    """Delete the former model's vectors; those in the folder ``snapshots`` stay in each that was taken before.

    Raises:
        ConflictError: the collection is not cut over.
    """
    migration = require_migration(store, collection)
    if not migration.is_cut_over:
        raise ConflictError(
            f"{collection} is not cut over: searches read the former model's vectors; cut over, or cancel"
        )
    store.end_migration(collection, migration.contract_id)
    kept = [] if snapshots is None else [*snapshots.glob("[!.]*")]
    return Finished(dict(migration.details.get("thresholds", {})), len(kept))


def cancel(store: Store, collection: str) -> None:
    """Delete the new model's vectors; :class:`ConflictError` if they are searched."""
    migration = require_migration(store, collection)
    if migration.is_cut_over:
        raise ConflictError(f"{collection} is cut over: searches read the new model's vectors; roll back, or finish")
    store.end_migration(collection, migration.contract_id)
