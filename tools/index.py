"""Build an index over embedding sets, search it, and check it.

  plsc index build photos.emb --out photos.idx
  plsc index search photos.idx --query someone.jpg --k 5
  plsc index search faces.idx --query photo.jpg --detector mtcnn
  plsc index search photos.idx --query others.emb --json matches.json
  plsc index search staff --server http://127.0.0.1:8080 --query someone.jpg
  plsc index check photos.idx

Scores are cosines: 1 is the same picture, near 0 is strangers. Up to 200,000 rows the search is exact; above,
an approximate structure is built and tuned until it finds the share of true neighbours given by --recall. With
--latency-ms the exact search is timed first, and replaced only if it takes longer.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from plsc.errors import UsageError
from plsc.progress import counted, note, show
from plsc.tools.entry import (
    add_action,
    add_actions,
    add_detector_option,
    add_outside_option,
    add_sign_option,
    add_verify_option,
    positive,
)

HELP = "build, search and check an index of embeddings"
PRINTED = 20  # queries whose matches are printed on a terminal


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = add_actions(parser, "build|search|check")
    build = add_action(actions, "build", _build, "make an index from embedding sets", replaces="IDX, --json")
    text = "find what is most like an image or the rows of an embedding set"
    search = add_action(actions, "search", _search, text)
    check = add_action(actions, "check", _check, "verify every file, and measure the recall again")
    text = "CPU threads (default: OMP_NUM_THREADS, else all cores)"
    for action in (build, search, check):
        action.add_argument("--threads", type=positive, metavar="N", help=text)
        add_verify_option(action)
    _configure_build(build)
    add = search.add_argument
    add("index", type=Path, metavar="IDX", help="an index, or with --server a collection's name")
    add("--query", required=True, metavar="IMAGE|DIR|EMB", help="image, folder of images, or embedding set")
    add("--k", type=positive, default=10, metavar="N", help="matches for each query (10)")
    add("--model", metavar="MODEL", help="embeds image queries (default: the model that the index remembers)")
    add("--best", action="store_true", help="of a run directory given as MODEL, the weights of the best evaluation")
    add_detector_option(search, "find each image's largest face, and align it, as plsc embed did")
    add("--server", metavar="URL", help="search a collection of a running plsc serve")
    add("--token-file", type=Path, metavar="FILE", help="with --server: holds the secret (default: $PLSC_TOKEN)")
    add_outside_option(search)
    check.add_argument("index", type=Path, metavar="IDX")


def _configure_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sets", nargs="+", type=Path, metavar="EMB", help="embedding sets of one model")
    add("--out", required=True, type=Path, metavar="IDX", help="folder to write")
    add("--kind", choices=("auto", "exact", "ivf", "hnsw", "pq"), default="auto", help="(auto)")
    add("--recall", type=float, default=0.99, metavar="R", help="least recall of an approximate kind (0.99)")
    text = "of the nearest alone, or of the ten nearest too (10)"
    add("--recall-at", type=int, choices=(1, 10), default=10, help=text)
    text = "with --kind auto: longest time of a single query; an approximate structure only if exact takes longer"
    add("--latency-ms", type=float, metavar="L", help=text)
    text = "memory of the build, as 4GB or 4GiB: larger IVF structures are added part by part and merged on disk"
    add("--max-memory", metavar="M", help=text)
    add("--memory", action=_FormerMaxMemory, dest="max_memory", help=argparse.SUPPRESS)
    add("--seed", type=int, default=0, metavar="N", help="of k-means and of the choice of test queries (0)")
    add_sign_option(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the action, print its result as text, and return it."""
    if args.threads is not None:
        import torch

        from plsc.index.scan import load_faiss

        load_faiss().omp_set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    result: dict[str, Any] = args.run(args)
    return result


class _FormerMaxMemory(argparse.Action):
    """--memory, the name of --max-memory until 0.2: works for one more release, with a warning."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        note(f"plsc: {option_string} is deprecated: write --max-memory")
        setattr(namespace, self.dest, values)


def _build(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.index.build import build
    from plsc.index.tuning import BuildOptions
    from plsc.signing import load_private_key, sign
    from plsc.sizes import parse_memory

    key = None if args.sign is None else load_private_key(args.sign)
    memory = None if args.max_memory is None else parse_memory(args.max_memory, "--max-memory")
    options = BuildOptions(args.kind, args.recall, args.recall_at, args.latency_ms, memory, args.seed)
    manifest = build(args.sets, args.out, options, overwrite=args.overwrite)
    if key is not None:
        sign(args.out, key)
    left = ", ".join(
        f"{count:,} with {reason.replace('_', ' ')}" for reason, count in manifest["left_out"].items() if count
    )
    size = f"{counted(manifest['rows'], 'row')} of {manifest['dim']}"
    show(f"{args.out}: {size}, {_structure(manifest)}, {manifest['build_seconds']:.1f} s")
    show(_recall(manifest["recall"], manifest["kind"]))
    if latency := manifest.get("latency"):
        show(f"single query {latency['ms']:.2f} ms, exact {latency['exact_ms']:.2f}, asked {latency['asked_ms']:g}")
    if left:
        show(f"left out: {left}")
    measured = ("recall", "recall_asked", "held_out", "left_out", "contract_id", "build_seconds")
    told = {name: manifest[name] for name in ("rows", "dim", "kind", "parameters", *measured)}
    return {"out": str(args.out), **told, "latency": manifest.get("latency")}


def _search(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.index import Index
    from plsc.index.query import answer, open_queries

    if args.best and args.model is None:
        raise UsageError("--best chooses among the weights of a run: name it with --model RUN")
    if args.server is not None:
        return _search_service(args)
    index = Index.open(args.index)
    opened = open_queries(index, args.query, args.model, best=args.best, detector=args.detector)
    queries = answer(index, opened, args.k)
    _print_queries(queries, "class", "key")
    _warn_of_pictures(queries)
    return {"index": str(args.index), "kind": index.kind, "k": args.k, "queries": queries}


def _search_service(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.client import Client, token_from
    from plsc.index.query import search_service

    if args.model is not None:
        raise UsageError("--model is the server's own with --server; leave it out")
    if args.detector is not None:
        raise UsageError("--detector is the server's own with --server; leave it out")
    with Client(args.server, token_from(args.token_file)) as client:
        queries = search_service(client, str(args.index), args.query, args.k)
    _print_queries(queries, "name", "person")
    return {"server": args.server, "collection": str(args.index), "k": args.k, "queries": queries}


def _warn_of_pictures(queries: list[dict[str, Any]]) -> None:
    from plsc.models.preprocessing import warning_summary

    warnings = [(query["query"], query["warning"]) for query in queries if "warning" in query]
    if warnings:
        note(warning_summary(len(warnings), len(queries), *warnings[0]))


def _print_queries(queries: list[dict[str, Any]], name: str, key: str) -> None:
    """Print the queries' matches: all into a file or pipe, the first on a terminal.

    Args:
        queries: with their matches.
        name: the field of a match that names it.
        key: the field of a match that identifies it.
    """
    shown = queries[:PRINTED] if sys.stdout.isatty() else queries
    for query in shown:
        show(f"{query['query']}" + (f": not searched, {query['error']}" if "error" in query else ""))
        for rank, match in enumerate(query["matches"], start=1):
            label = "" if match[name] is None else match[name]
            show(f"  {rank:>3}  {match['score']:>7.4f}  {label:<20}  {match[key]}")
    if len(queries) > len(shown):
        rest = counted(len(queries) - len(shown), "query").replace(" ", " more ")
        show(f"… and {rest}: a pipe or --json FILE gets all")


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.index.index import check

    result = check(args.index)
    show(f"{args.index}: sound; {counted(result['rows'], 'row')} of {result['dim']}, kind {result['kind']}")
    show(
        f"{_recall(result['recall'], result['kind'])} (stored: {result['recall_stored']['recall@1']:.4f}, "
        f"{result['recall_stored']['recall@10']:.4f})"
    )
    return result


def _structure(manifest: dict[str, Any]) -> str:
    chosen = ", ".join(f"{name} {value}" for name, value in manifest["parameters"].items())
    return f"{manifest['kind']}" + (f" ({chosen})" if chosen else "")


def _recall(recall: dict[str, Any], kind: str) -> str:
    against = "float64" if kind == "exact" else "exact search, on rows held out"
    shares = f"recall@1 {recall['recall@1']:.4f}, recall@10 {recall['recall@10']:.4f}"
    return f"{shares} over {counted(recall['queries'], 'query')}, against {against}"
