"""``plsc gallery migrate``: the steps of a move in a store that no service has open."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plsc.embedding.embedder import EmbeddingModel, contract_of
from plsc.errors import ConflictError, StorageError, UsageError
from plsc.gallery.migration import filling, moving
from plsc.gallery.migration.filling import Filled
from plsc.gallery.sqlite import SNAPSHOTS
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.progress import counted, show


def fill(
    store: Store, collection: str, embedder: EmbeddingModel, *, flip: bool, thumbnails: Path | None, adapter: bool
) -> dict[str, Any]:
    """Begin to move a collection to a model, or go on: embed the kept pictures, and estimate the rest where asked to.

    After a cut-over the former model's vectors are filled, for those who were enrolled without it.

    Args:
        store: holds the collection.
        collection: its name.
        embedder: the new model, or after a cut-over the former one.
        flip: average over each picture and its mirror image, as the service that will serve it does.
        thumbnails: the folder of the kept pictures; None: there is none.
        adapter: give faces without a picture an estimate.

    Raises:
        ConflictError: it is being moved to another model, or is cut over to this one.
        DataError: too few faces have both vectors for an adapter.
        StorageError: there is no room.
    """
    contract_id, found = contract_of(embedder, flip), store.migration(collection)
    if found is None:
        room = filling.room_of(store, collection, embedder.embedding_dim)
        if room.shortage is not None:
            raise StorageError(f"{store.folder}: {room.shortage}")
        faces, free = counted(room.faces, "face"), "" if room.free is None else f"; {room.free:,} are free"
        show(f"{collection}: vectors of {faces} will take up to {room.needed:,} bytes of disk{free}")
        store.begin_migration(collection, embedder.embedding_dim, contract_id)
    elif found.is_cut_over and found.contract_id != contract_id:
        raise ConflictError(
            f"{collection} is cut over: searches read the new model's vectors; finish, roll back, or name the former "
            "model, whose vectors are kept to roll back to"
        )
    elif found.contract_id != contract_id:
        raise ConflictError(
            f"{collection} is being moved to the contract {found.contract_id}, and this model's is {contract_id}; name "
            "that model, or cancel"
        )
    pictures = ThumbnailStore(store, thumbnails, keep=False)
    done = filling.fill_from_pictures(store, collection, filling.embed_with(embedder, flip), pictures.contents)
    if adapter and any(store.count_second(collection)):
        done.estimated = filling.fill_by_adapter(store, collection).estimated
    _tell(done)
    return vars(done)


def _tell(done: Filled) -> None:
    parts = [f"{counted(done.filled, 'face')} embedded"]
    parts += [f"{done.estimated:,} estimated"] if done.estimated else []
    parts += [f"{done.without_picture:,} without a picture"] if done.without_picture else []
    show(", ".join(parts))


def report(store: Store, collection: str, thresholds: Mapping[str, Any], plot: Path | None) -> dict[str, Any]:
    """Judge a move, print the table, and write the curves as a picture where ``plot`` names one.

    Args:
        store: holds the collection.
        collection: its name.
        thresholds: ``threshold`` and ``new_threshold``, as :func:`plsc.gallery.migration.moving.judge_move` takes them.
        plot: a file.
    """
    judgement = moving.judge_move(store, collection, **thresholds)
    show(*judgement.table().splitlines())
    if plot is not None:
        from plsc.evaluation.report import roc_figure

        roc_figure(judgement.curves, plot)
        show(f"curves: {plot}")
    return judgement.to_dict()


def cut_over(store: Store, collection: str, thresholds: Mapping[str, Any], max_loss: float) -> dict[str, Any]:
    """Cut a collection over to the new model; ``thresholds`` as for :func:`report`."""
    found = moving.cut_over(store, collection, **thresholds, max_loss=max_loss)
    new = found.thresholds.get(found.contract_id)
    judged = "" if new is None else f" and --threshold {new:.4f}"
    show(f"{collection}: serve it with the new model{judged}; --next-model with the former one keeps both up to date")
    return vars(found)


def finish(store: Store, collection: str, folder: Path | None) -> dict[str, Any]:
    """Delete the former model's vectors from every file of a store but its snapshots, which are counted."""
    done = moving.finish(store, collection, None if folder is None else folder / SNAPSHOTS)
    store.compact(collection)
    kept = f"; {counted(done.snapshots, 'snapshot')} may hold them still: delete those taken before"
    show(f"{collection}: the former model's vectors are gone from the store's files{kept if done.snapshots else ''}")
    return done._asdict()


def cancel(store: Store, collection: str) -> dict[str, Any]:
    """Delete the new model's vectors from every file but snapshots."""
    moving.cancel(store, collection)
    store.compact(collection)
    show(f"{collection}: the new model's vectors are gone from the store's files")
    return {}


def tell_status(store: Store, collection: str) -> dict[str, Any]:
    """Print and return how far a move is."""
    found = moving.status(store, collection)
    if found.is_cut_over:
        show(f"{collection}: cut over to {found.contract_id}; {found.second_contract_id} is kept to roll back to")
    elif found.lacking:
        show(
            f"{collection}: {found.lacking:,} of {counted(found.faces, 'face')} have no vector of the new model: send "
            "their pictures to a service (--next-model), estimate them (--adapter), or delete them"
        )
    else:
        rest = f", {found.estimated:,} of them estimated" if found.estimated else ""
        show(f"{collection}: all of {counted(found.faces, 'face')} have vectors of both models{rest}; judge: --report")
    return {name: value for name, value in vars(found).items() if name != "judgement"}


def require_model(path: str | None) -> str:
    """Return the new model's file; :class:`UsageError` if none was named."""
    if path is None:
        raise UsageError("name the new model: --to FILE")
    return path
