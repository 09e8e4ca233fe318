"""The steps of a move to another model, as the command and the service take them: judge, cut over, roll back, finish.

plsc.gallery.second_space says what each does to the store, plsc.gallery.migration.filling what comes before them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plsc.errors import ConflictError, DataError, UsageError
from plsc.gallery.migration import MAX_LOSS
from plsc.gallery.migration.filling import LEARNED, fit, pairs, require_migration, require_spaces
from plsc.gallery.migration.judgement import Judgement, judge
from plsc.gallery.store import Store
from plsc.gallery.values import Migration
from plsc.native.allocator import return_freed_memory

_MORE_FACES = 1.25  # times as many as an adapter was learned from make another one


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


def judge_move(
    store: Store,
    collection: str,
    threshold: float | None,
    *,
    new_threshold: float | None = None,
    contract_id: str | None = None,
) -> Judgement:
    """Judge a move by people who have vectors of both models, and store what was found with the new threshold.

    Args:
        store: holds the collection.
        collection: its name.
        threshold: the service's, a cosine of the present model; None: the one that it was judged by before, else that
            of a false-match rate of 1e-3.
        new_threshold: of the new model, in place of the one with the same false-match rate.
        contract_id: of the model that ``threshold`` is of, where the collection may have been moved since it was read.

    Raises:
        ConflictError: the collection is cut over, or searched by another model; or the estimates are out of date.
        DataError: fewer than ten people have two faces with both vectors.
    """
    info, migration = require_spaces(store, collection)
    if migration.is_cut_over:
        raise ConflictError(f"{collection} is cut over already; roll back to judge the move again")
    if contract_id not in (None, info.contract_id):
        raise ConflictError(f"{collection} was rolled back meanwhile; judge the move again")
    if threshold is None:
        threshold = migration.details.get("thresholds", {}).get(info.contract_id)
    contract_ids = (info.contract_id, migration.contract_id)
    found, estimated = pairs(store, collection, contract_ids), None
    if store.count_second(collection)[1]:
        _check_learned(migration, len(found.persons))
        estimated = fit(found)[1]
    judgement = judge(*found, threshold=threshold, new_threshold=new_threshold, estimated=estimated)
    del found, estimated
    return_freed_memory()
    found_threshold = new_threshold if threshold is None else judgement.threshold  # who judges by none does not then
    details = {"thresholds": _given(contract_ids, threshold, found_threshold), "judgement": judgement.to_dict()}
    store.set_migration_details(collection, details, contract_ids)
    return judgement


def _given(contract_ids: tuple[str, str], *thresholds: float | None) -> dict[str, float]:
    return {id: value for id, value in zip(contract_ids, thresholds, strict=True) if value is not None}


def _check_learned(migration: Migration, faces: int) -> None:
    """Raise ConflictError if the stored estimates are of an adapter of fewer faces than those that are judged."""
    learned = migration.details.get(LEARNED, faces)
    if faces > _MORE_FACES * learned:
        raise ConflictError(
            f"the estimates were learned from {learned:,} faces, and {faces:,} have vectors of both models now; "
            "estimate again"
        )


def cut_over(
    store: Store,
    collection: str,
    threshold: float | None,
    max_loss: float = MAX_LOSS,
    *,
    new_threshold: float | None = None,
    contract_id: str | None = None,
) -> Status:
    """Let searches read the new model's vectors, unless that loses more than ``max_loss`` of the true accepts.

    Args:
        store: holds the collection.
        collection: its name.
        threshold: as for :func:`judge_move`.
        max_loss: of the share of a person's pairs that match; 1 cuts over also what cannot be judged.
        new_threshold: as for :func:`judge_move`; kept also where the move cannot be judged.
        contract_id: as for :func:`judge_move`.

    Raises:
        UsageError: it loses more; or it cannot be judged, and there is no new threshold where there was one.
        ConflictError: faces lack a vector of the new model; or as :func:`judge_move`.
    """
    info, migration = require_spaces(store, collection)
    if not migration.is_cut_over:
        try:
            judgement = judge_move(store, collection, threshold, new_threshold=new_threshold, contract_id=contract_id)
        except DataError as error:
            if max_loss < 1:
                raise UsageError(f"{error}; or cut over without a judgement: a maximal loss of 1") from None
            if threshold is not None and new_threshold is None:
                raise UsageError(f"{error}; or give the new model's threshold") from None
            contract_ids = (info.contract_id, migration.contract_id)
            given = {"thresholds": _given(contract_ids, threshold, new_threshold)}
            store.set_migration_details(collection, given, contract_ids)
        else:
            if judgement.refuses(max_loss):
                raise UsageError(
                    f"the move loses {judgement.largest_loss:.4f} of the true accept rate, more than {max_loss:g}; "
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
