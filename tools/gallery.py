"""Look after a gallery that no service is using: verify it, copy it, bring it elsewhere.

  plsc gallery check STORE
  plsc gallery compact STORE
  plsc gallery snapshot STORE --out monday.snapshot
  plsc gallery restore monday.snapshot --store NEW
  plsc gallery export STORE people --out people.emb
  plsc gallery import STORE people people.emb

STORE is the folder of plsc serve, or the address of a server: milvus:URI, postgres:DSN. A folder has one owner at a
time: a running service is asked by HTTP instead (POST /v1/snapshots, POST /v1/collections/people/compact).
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plsc.errors import UsageError
from plsc.gallery.store import Store, open_store, store_folder
from plsc.progress import counted
from plsc.tools.entry import add_result_options, main

HELP = "verify, compact, copy, export and import a gallery"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    names = "check|compact|snapshot|restore|export|import"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names)
    _action(actions, "check", "verify every row and every file")
    compact = _action(actions, "compact", "bring changes into the searched files; deleted embeddings are then in none")
    compact.add_argument("--collection", metavar="NAME", help="this one alone (all)")
    snapshot = _action(actions, "snapshot", "write a consistent copy")
    snapshot.add_argument("--out", required=True, type=Path, metavar="DIR", help="new folder")
    restore = _action(actions, "restore", "make a new store of a snapshot", "snapshot", "SNAPSHOT")
    restore.add_argument("--store", required=True, metavar="STORE", help="new folder; a server's copy goes anywhere")
    export = _action(actions, "export", "write a collection as an embedding set")
    export.add_argument("collection", metavar="COLLECTION")
    export.add_argument("--out", required=True, type=Path, metavar="EMB", help="new folder")
    enrol = _action(actions, "import", "enrol an embedding set, a person for each class; makes store and collection")
    enrol.add_argument("collection", metavar="COLLECTION")
    enrol.add_argument("set", type=Path, metavar="EMB")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the action, print its result as text, and return it."""
    actions = {
        "check": _check,
        "compact": _compact,
        "snapshot": _snapshot,
        "restore": _restore,
        "export": _export,
        "import": _import,
    }
    return actions[args.action](args)


def _action(
    actions: Any, name: str, text: str, first: str = "store", metavar: str = "STORE"
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.add_argument(first, metavar=metavar)
    add_result_options(parser, subcommand=True)
    return parser


@contextmanager
def _opened(spec: str, *, create: bool = False) -> Iterator[Store]:
    from plsc.gallery.sqlite.folder import holds_store

    folder = store_folder(spec)
    if not create and folder is not None and not holds_store(folder):
        if folder.is_dir():
            raise UsageError(f"{spec} holds no gallery: name the folder that plsc serve --store was given")
        raise UsageError(f"there is no store {spec}")
    store = open_store(spec)
    try:
        yield store
    finally:
        store.close()


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.files import holds_manifest
    from plsc.gallery import transfer
    from plsc.gallery.sqlite import backup

    if holds_manifest(Path(args.store), transfer.COPY_FORMAT):
        collections = [asdict(info) for info, _ in transfer.read_copy(Path(args.store))]
        print(f"{args.store}: a sound copy; {_counts(collections)}")
        return {"snapshot": args.store, "collections": collections}
    if holds_manifest(Path(args.store), backup.FORMAT):
        collections = backup.read_snapshot(Path(args.store))["collections"]
        print(f"{args.store}: a sound snapshot; {_counts(collections)}")
        return {"snapshot": args.store, "collections": collections}
    with _opened(args.store) as store:
        result = store.check()
    print(f"{args.store}: sound; {', '.join(_figure(name, value) for name, value in result.items())}")
    return {"store": args.store, **result}


def _compact(args: argparse.Namespace) -> dict[str, Any]:
    with _opened(args.store) as store:
        store.compact(args.collection)
        result = store.statistics()
    for name, figures in result.items():
        print(f"{name}: {counted(int(figures['rows']), 'face')}")
    return {"store": args.store, "collections": result}


def _snapshot(args: argparse.Namespace) -> dict[str, Any]:
    with _opened(args.store) as store:
        store.snapshot(args.out)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {counted(size, 'byte')}")
    return {"snapshot": str(args.out), "bytes": size}


def _restore(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.files import holds_manifest
    from plsc.gallery import transfer
    from plsc.gallery.sqlite.backup import restore

    if holds_manifest(Path(args.snapshot), transfer.COPY_FORMAT):
        with _opened(args.store, create=True) as store:
            collections = [asdict(info) for info in transfer.copy_into(store, Path(args.snapshot))]
        print(f"{args.store}: {_counts(collections)}")
        return {"store": args.store, "collections": collections}
    if store_folder(args.store) is None:
        raise UsageError(f"a snapshot becomes a folder, not {args.store}; then export its collections and import them")
    result = restore(args.snapshot, args.store)
    print(f"{args.store}: {_counts(result['collections'])}, as of {result['created']}")
    return result


def _export(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.gallery.transfer import export_set

    with _opened(args.store) as store:
        written = export_set(store, args.collection, args.out)
    print(f"{args.out}: {counted(len(written), 'face')} of {counted(len(written.class_names), 'person')}")
    return {"out": str(args.out), "faces": len(written), "persons": len(written.class_names)}


def _import(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.gallery.transfer import import_set

    with _opened(args.store, create=True) as store:
        result = import_set(store, args.collection, args.set)
    print(
        f"{args.collection}: {counted(result['faces'], 'face')} of {counted(result['persons'], 'person')} enrolled, "
        f"{counted(result['left_out'], 'row')} left out"
    )
    return {"store": args.store, "collection": args.collection, **result}


def _counts(collections: list[dict[str, Any]]) -> str:
    counts = [
        f"{info['name']}: {counted(info['persons'], 'person')}, {counted(info['faces'], 'face')}"
        for info in collections
    ]
    return "; ".join(counts) or "no collections"


def _figure(name: str, value: int | bool) -> str:
    """A figure of a store's check in words."""
    if name.startswith("forgotten"):
        held_by = "snapshots" if name == "forgotten_in_snapshots" else "the store's files until the next compaction"
        return f"{counted(value, 'deleted face')} still in {held_by}"
    if isinstance(value, bool):
        return f"{name.replace('_', ' ')} {'on' if value else 'off'}"
    return counted(value, name.removesuffix("s"))


if __name__ == "__main__":
    raise SystemExit(main(["gallery", *sys.argv[1:]]))
