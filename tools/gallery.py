"""Look after a gallery that no service is using: verify it, copy it, bring it elsewhere; enrol many into a served one.

  plsc gallery check STORE
  plsc gallery compact STORE
  plsc gallery snapshot STORE --out monday.snapshot
  plsc gallery restore monday.snapshot --store NEW
  plsc gallery export STORE people --out people.emb
  plsc gallery import STORE people people.emb
  plsc gallery rotate-key STORE --encrypt gallery.key --new-key next.key
  plsc gallery audit STORE --verify
  plsc gallery migrate STORE --to NEW.onnx
  plsc gallery enrol http://127.0.0.1:8080 FOLDER --collection staff

STORE is the folder of plsc serve, or the address of a server: milvus:URI, postgres:DSN. An encrypted folder takes
--encrypt KEYFILE in every action. A folder has one owner at a time: a running service is asked by HTTP instead
(POST /v1/snapshots, POST /v1/collections/people/compact). enrol asks one: a person for each sub-folder of FOLDER; run
again, it goes on where it ended.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.gallery.backends import display_name, opened_store, store_folder
from plsc.gallery.migration import MAX_LOSS
from plsc.progress import counted, note, printable, show
from plsc.tools.entry import add_action, add_actions, add_outside_option, add_verify_option, number

if TYPE_CHECKING:
    from plsc.gallery.store import Store

HELP = "verify, compact, copy, export and import a gallery; enrol folders; verify its audit log"
MAX_PARALLEL = 32


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = add_actions(parser, "check|compact|snapshot|restore|export|import|rotate-key|audit|migrate|enrol")
    check = _action(actions, "check", _check, "verify every row and every file")
    text = "delete who expired, and bring changes into the files: none then holds what was deleted"
    compact = _action(actions, "compact", _compact, text)
    snapshot = _action(actions, "snapshot", _snapshot, "write a consistent copy")
    restore = add_action(actions, "restore", _restore, "make a new store of a snapshot")
    restore.add_argument("snapshot", metavar="SNAPSHOT")
    export = _action(actions, "export", _export, "write a collection as an embedding set")
    text = "enrol an embedding set, a person for each class; makes store and collection"
    importing = _action(actions, "import", _import, text)
    rotate = _action(actions, "rotate-key", _rotate_key, "put an encrypted store under another key file")
    for action in (check, compact, snapshot, restore, export, importing, rotate):
        action.add_argument("--encrypt", type=Path, metavar="KEYFILE", help="of an encrypted store")
    text = "of plsc serve --snapshots, to be looked into too"
    check.add_argument("--snapshots", type=Path, metavar="DIR", help=text)
    compact.add_argument("--collection", metavar="NAME", help="this one alone (all)")
    text = "of plsc serve --thumbnails, where those expired have theirs"
    compact.add_argument("--thumbnails", type=Path, metavar="DIR", help=text)
    snapshot.add_argument("--out", required=True, type=Path, metavar="DIR", help="new folder")
    restore.add_argument("--store", required=True, metavar="STORE", help="new folder; a server's copy goes anywhere")
    text = "of an encrypted snapshot's store (keys of the store that it lies in)"
    for action in (check, restore):
        action.add_argument("--keys", type=Path, metavar="FILE", help=text)
    for action in (export, importing):
        action.add_argument("collection", metavar="COLLECTION")
    export.add_argument("--out", required=True, type=Path, metavar="EMB", help="new folder")
    importing.add_argument("set", type=Path, metavar="EMB")
    add_verify_option(importing)
    rotate.add_argument("--new-key", required=True, type=Path, metavar="KEYFILE", help="the next key file")
    text = "print the audit log, or verify that no line is missing or altered"
    audit = _action(actions, "audit", _audit, text)
    audit.add_argument("--verify", action="store_true", help="check the chain of its lines")
    text = "NUMBER:SHA256 noted earlier; then lines cut off its end show too"
    audit.add_argument("--head", metavar="HEAD", help=text)
    _configure_migrate(actions)
    _configure_enrol(actions)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the action, print its result as text, and return it."""
    os.umask(0o077)  # all that is written here holds faces
    result: dict[str, Any] = args.run(args)
    return result


def exit_code(result: dict[str, Any] | None) -> int:
    """1 where somebody could not be enrolled."""
    return int(bool(result and (result.get("failed") or result.get("stopped"))))


def _action(actions: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser = add_action(actions, name, run, text)
    parser.add_argument("store", metavar="STORE")
    return parser


def _configure_migrate(actions: Any) -> None:
    text = "move a collection to another model: embed its kept pictures, judge, cut over, or go back"
    parser = _action(actions, "migrate", _migrate, text)
    add = parser.add_argument
    add("--to", metavar="FILE", help="the new model, to begin or to go on")
    add("--collection", default="people", metavar="NAME", help="(people)")
    add("--encrypt", type=Path, metavar="KEYFILE", help="of an encrypted store")
    add("--thumbnails", type=Path, metavar="DIR", help="of plsc serve --thumbnails, with the kept pictures")
    add("--flip", action="store_true", help="as in plsc serve --flip")
    add("--adapter", action="store_true", help="estimate vectors of faces of which no picture is kept")
    cosine = number(float, lambda value: -1 <= value <= 1, "a cosine lies between -1 and 1")
    add("--threshold", type=cosine, metavar="T", help="the service's, to judge by (that of a false-match rate of 1e-3)")
    add("--new-threshold", type=cosine, metavar="T", help="the new model's (found by judging, of the same rate)")
    at_most = number(float, lambda value: 0 <= value <= 1, "it lies between 0 and 1")
    text = f"of the true accept rate, for --cut-over ({MAX_LOSS})"
    add("--max-loss", type=at_most, default=MAX_LOSS, metavar="L", help=text)
    add("--plot", type=Path, metavar="FILE", help="of --report: draw the ROC curves (.png, .svg or .pdf)")
    step = parser.add_mutually_exclusive_group()
    for name, text in _STEPS.items():
        step.add_argument(f"--{name}", action="store_const", const=name, dest="step", help=text)


_STEPS = {
    "report": "judge: true accepts of both models, and the new threshold",
    "cut-over": "let searches read the new model's vectors",
    "roll-back": "let them read the former model's again, with all enrolled since",
    "finish": "delete the former model's vectors",
    "cancel": "delete the new model's vectors",
    "status": "say how far it is",
}


def _configure_enrol(actions: Any) -> None:
    text = "enrol a folder of folders into a running service, a person for each"
    parser = add_action(actions, "enrol", _enrol, text)
    add = parser.add_argument
    add("url", metavar="URL")
    add_outside_option(parser)
    add("folder", type=Path, metavar="FOLDER", help="holds a sub-folder of pictures for each person, named as they are")
    add("--collection", default="people", metavar="NAME", help="is made if there is none (people)")
    add("--token-file", type=Path, metavar="FILE", help="holds the secret (default: $PLSC_TOKEN)")
    text = "where a picture matches somebody enrolled, at the service's threshold (ask; skip without a terminal)"
    add("--on-known", choices=("ask", "skip", "add", "enrol"), help=text)
    parallel = number(int, lambda value: 1 <= value <= MAX_PARALLEL, f"it lies between 1 and {MAX_PARALLEL}")
    add("--parallel", type=parallel, default=4, metavar="N", help="people at a time (4)")
    text = "of a picture that shows several: the person's is the largest, or all are (largest)"
    add("--faces", choices=("largest", "all"), default="largest", help=text)


def _opened(args: argparse.Namespace, *, create: bool = False) -> AbstractContextManager[Store]:
    return opened_store(args.store, args.encrypt, create=create)


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.files import holds_manifest
    from plsc.gallery import transfer
    from plsc.gallery.sqlite import backup, schema
    from plsc.gallery.sqlite.store import SqliteStore

    is_folder = store_folder(args.store) is not None
    if is_folder and holds_manifest(Path(args.store), transfer.COPY_FORMAT):
        collections = [asdict(info) for info, _ in transfer.read_copy(Path(args.store))]
        show(f"{args.store}: a sound copy; {_counts(collections)}")
        return {"snapshot": args.store, "collections": collections}
    if is_folder and holds_manifest(Path(args.store), backup.FORMAT):
        return _check_snapshot(args, backup.read_snapshot(Path(args.store)), schema.VERSION)
    if args.keys is not None:
        raise UsageError("--keys: a store has its own; it is for a snapshot")
    if args.snapshots is not None and not args.snapshots.is_dir():
        raise UsageError(f"--snapshots {args.snapshots}: there is no such folder")
    with _opened(args) as store:
        if args.snapshots is None:
            result = store.check()
        elif isinstance(store, SqliteStore):
            result = store.check(args.snapshots)
        else:
            raise UsageError("--snapshots: a store on a server keeps copies; check each by its name")
    show(f"{display_name(args.store)}: sound; {', '.join(_figure(name, value) for name, value in result.items())}")
    return {"store": display_name(args.store), **result}


def _check_snapshot(args: argparse.Namespace, manifest: dict[str, Any], present: int) -> dict[str, Any]:
    """Print and return what a snapshot holds, of an encrypted one after trying to decrypt everybody in it."""
    from plsc.gallery.sqlite.backup import check_readers, store_id_of

    version, collections = manifest["version"], manifest["collections"]
    is_former = "" if version == present else ", which plsc migrates when a store restored from it is opened"
    result: dict[str, Any] = {"snapshot": args.store, "version": version, "collections": collections}
    text = ""
    if args.encrypt is not None or args.keys is not None:
        found = check_readers(Path(args.store), args.encrypt, args.keys)
        result |= found
        text = f"; {counted(found['readable'], 'person')} readable, {found['gone']} gone for good"
    elif store_id_of(Path(args.store)) is not None:
        text = "; encrypted: --encrypt KEYFILE tells who can be read"
    show(f"{args.store}: a sound snapshot; version {version}{is_former}; {_counts(collections)}{text}")
    return result


def _compact(args: argparse.Namespace) -> dict[str, Any]:
    with _opened(args) as store:
        _delete_expired(store, args)
        store.compact(args.collection)
        result = store.statistics()
    for name, figures in result.items():
        show(f"{name}: {counted(int(figures['rows']), 'face')}")
    return {"store": display_name(args.store), "collections": result}


def _delete_expired(store: Store, args: argparse.Namespace) -> None:
    """Delete expired people, with the thumbnails that a folder's store keeps unless it is told otherwise."""
    from plsc.gallery.thumbnails import ThumbnailStore

    folder = store_folder(args.store)
    own = None if folder is None else folder / "thumbnails"
    thumbnails = ThumbnailStore(store, args.thumbnails or own, keep=False)
    while thumbnails.delete_expired():
        pass


def _snapshot(args: argparse.Namespace) -> dict[str, Any]:
    with _opened(args) as store:
        store.snapshot(args.out)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    show(f"{args.out}: {counted(size, 'byte')}")
    return {"snapshot": str(args.out), "bytes": size}


def _restore(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.files import holds_manifest
    from plsc.gallery import transfer
    from plsc.gallery.sqlite.backup import restore

    if holds_manifest(Path(args.snapshot), transfer.COPY_FORMAT):
        with _opened(args, create=True) as store:
            collections = [asdict(info) for info in transfer.copy_into(store, Path(args.snapshot))]
        show(f"{display_name(args.store)}: {_counts(collections)}")
        return {"store": display_name(args.store), "collections": collections}
    if store_folder(args.store) is None:
        to = display_name(args.store)
        raise UsageError(f"a snapshot becomes a folder, not one in {to}; then export its collections and import them")
    result = restore(args.snapshot, args.store, key_file=args.encrypt, keys=args.keys)
    left_out = result.get("left_out")
    since = f"; {counted(left_out, 'person')} left out, deleted or given other faces since" if left_out else ""
    show(f"{display_name(args.store)}: {_counts(result['collections'])}, as of {result['created']}{since}")
    return result


def _export(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.gallery.transfer import export_set

    with _opened(args) as store:
        written = export_set(store, args.collection, args.out)
    show(f"{args.out}: {counted(len(written), 'face')} of {counted(len(written.class_names), 'person')}")
    return {"out": str(args.out), "faces": len(written), "persons": len(written.class_names)}


def _import(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.embedding.embedding_set import EmbeddingSet
    from plsc.gallery.transfer import import_set

    source = EmbeddingSet(args.set)  # before the store is made
    with _opened(args, create=True) as store:
        result = import_set(store, args.collection, source)
    there = f"{counted(result['there'], 'person')} there already, " if "there" in result else ""
    show(
        f"{args.collection}: {counted(result['faces'], 'face')} of {counted(result['persons'], 'person')} enrolled, "
        f"{there}{counted(result['left_out'], 'row')} left out"
    )
    if alignment := source.manifest.get("alignment"):
        note(f"{args.set}: its faces were aligned ({printable(str(alignment))}); serve whole photos with --detector")
    return {"store": display_name(args.store), "collection": args.collection, **result}


def _audit(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.audit import audit_path, read_lines
    from plsc.serve.audit_chain import log_files, parse_head, verify

    if store_folder(args.store) is None:
        raise UsageError(f"{display_name(args.store)} keeps no audit log; name the file of plsc serve --audit")
    path = audit_path(Path(args.store))
    if not args.verify:
        if args.head is not None:
            raise UsageError("--head is for --verify: give both")
        lines = [line.decode("utf-8", "backslashreplace").rstrip("\n") for _, _, line in read_lines(log_files(path))]
        show(*lines)
        return {"audit": str(path), "lines": len(lines)}
    found = verify(path, None if args.head is None else parse_head(args.head))
    begins = "" if found.first == 0 else f" from line {found.first}, those before were not to be kept"
    show(f"{path}: sound; {counted(found.lines, 'line')} in {counted(found.files, 'file')}{begins}; head {found.head}")
    if found.unfinished:
        show(f"after the last line stand {counted(found.unfinished, 'byte')} of one that was not finished")
    result = {"audit": str(path), **asdict(found)}
    return {**result, "head": str(found.head)}


def _rotate_key(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.gallery.sqlite.folder import rotate_key

    if args.encrypt is None:
        raise UsageError("rotate-key needs --encrypt KEYFILE, the present key file, as well as --new-key")
    if store_folder(args.store) is None:
        raise UsageError(f"{display_name(args.store)} keeps its own files, and has no key file")
    keys = rotate_key(Path(args.store), args.encrypt, args.new_key)
    show(f"{args.store}: {counted(keys, 'key')} under {args.new_key}; {args.encrypt} opens none of them")
    return {"store": display_name(args.store), "keys": keys}


def _migrate(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.gallery.migration import moving, offline

    name, folder = args.collection, store_folder(args.store)
    with _opened(args) as store:
        store.collection(name)  # before a model is read
        _delete_expired(store, args)  # who would be counted among those that lack a vector
        if args.step is None:
            from plsc.embedding.embedder import open_embedder

            embedder = open_embedder(offline.require_model(args.to))
            own = args.thumbnails or (None if folder is None else folder / "thumbnails")
            options = {"flip": args.flip, "thumbnails": own, "adapter": args.adapter}
            done = offline.fill(store, name, embedder, **options)
            return {"store": display_name(args.store), **done, **offline.tell_status(store, name)}
        thresholds = {"threshold": args.threshold, "new_threshold": args.new_threshold}
        steps: dict[str, Any] = {
            "report": lambda: offline.report(store, name, thresholds, args.plot),
            "cut-over": lambda: offline.cut_over(store, name, thresholds, args.max_loss),
            "roll-back": lambda: vars(moving.roll_back(store, name)),
            "finish": lambda: offline.finish(store, name, folder),
            "cancel": lambda: offline.cancel(store, name),
            "status": lambda: {},
        }
        result = steps[args.step]()
        told = {} if args.step in ("finish", "cancel", "report") else offline.tell_status(store, name)
    return {"store": display_name(args.store), "collection": name, **result, **told}


def _enrol(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.client import Client, token_from
    from plsc.gallery.enrolment import enrol_folder

    on_known = args.on_known
    if on_known is None:
        on_known = "ask" if sys.stdin.isatty() else "skip"
    with Client(args.url, token_from(args.token_file)) as client:
        return enrol_folder(client, args.folder, args.collection, on_known, args.parallel, args.faces == "all")


def _counts(collections: list[dict[str, Any]]) -> str:
    counts = [
        f"{info['name']}: {counted(info['persons'], 'person')}, {counted(info['faces'], 'face')}"
        for info in collections
    ]
    return "; ".join(counts) or "no collections"


def _figure(name: str, value: int | bool) -> str:
    """A figure of a store's check in words."""
    if name in ("version", "migrated_from"):
        return f"{name.replace('_', ' ')} {value}"
    if name == "expired":
        return f"{counted(value, 'person')} expired"
    if name in ("tombstones", "deleted_in_snapshots"):
        held_by = "snapshots" if name == "deleted_in_snapshots" else "the store's files until the next compaction"
        return f"{counted(value, 'deleted face')} still in {held_by}"
    if isinstance(value, bool):
        return f"{name.replace('_', ' ')} {'on' if value else 'off'}"
    return counted(value, name.removesuffix("s").replace("_", " "))
