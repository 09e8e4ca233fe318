"""Serve a model and a gallery over HTTP: enrol persons, search by picture, compare, with a page to try it all.

  plsc serve --model model.safetensors --store gallery/ --port 8080
  plsc serve --model model.onnx --store gallery/ --fmr 1e-4 --calibration calibration.json
  plsc serve --model model.onnx --store postgres:DSN --host 0.0.0.0 --tokens tokens.toml --metrics-port 9090

Without tokens only this machine may call. Pictures are taken as aligned faces and resized, unless they come with
landmarks or --detector finds the face. docs/serving.md shows every request.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from plsc.errors import UsageError
from plsc.gallery.store import SPEC_FORMS, display_name, store_folder
from plsc.tools.entry import main

if TYPE_CHECKING:
    from plsc.embedding.embedder import Embedder
    from plsc.serve.observability import Metrics
    from plsc.serve.service import Service
    from plsc.serve.settings import Limits, Settings

HELP = "serve a model and a gallery over HTTP"
MIB = 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="a model file, or a run directory: its last weights")
    add("--best", action="store_true", help="of a run directory, the weights of the best evaluation")
    add("--store", required=True, metavar="DIR", help=f"a gallery's folder, {SPEC_FORMS}")
    add("--port", type=int, default=8080, metavar="N", help="0 takes a free one (8080)")
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)")
    add("--tokens", type=Path, metavar="FILE", help="who may call: a file made by plsc tokens")
    add("--metrics-port", type=int, metavar="N", help="show Prometheus metrics there (default: nowhere)")
    judge = parser.add_argument_group("judging")
    judge.add_argument("--threshold", type=float, metavar="T", help="cosine from which two may be one person")
    judge.add_argument("--fmr", type=float, metavar="R", help="or the false-match rate that it is to hold")
    judge.add_argument("--calibration", type=Path, metavar="FILE", help="what plsc eval --calibration wrote; for --fmr")
    model = parser.add_argument_group("model")
    model.add_argument("--device", choices=("cpu", "cuda"), help="(a GPU if there is one)")
    model.add_argument("--model-precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="(fp32)")
    model.add_argument("--flip", action="store_true", help="average over each picture and its mirror image")
    model.add_argument("--detector", metavar="onnx:FILE", help="finds faces in pictures without landmarks")
    search = parser.add_argument_group("searching")
    search.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the vectors in memory (bf16)")
    search.add_argument("--latency-ms", type=float, metavar="L", help="allow approximate search where exact misses it")
    search.add_argument("--max-batch", type=int, default=64, metavar="N", help="rows of a device batch (64)")
    search.add_argument("--max-wait-ms", type=float, default=2.0, metavar="W", help="longest wait to fill one (2)")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-body-mib", type=int, default=32, metavar="N", help="of a request (32)")
    limits.add_argument("--max-pixels", type=int, default=25_000_000, metavar="N", help="of a picture (25,000,000)")
    limits.add_argument("--max-inputs", type=int, default=256, metavar="N", help="pictures and vectors a request (256)")
    limits.add_argument("--max-collections", type=int, default=1000, metavar="N", help="(1000)")
    limits.add_argument("--queue", type=int, default=4096, metavar="N", help="rows that may wait (4096)")
    limits.add_argument("--connections", type=int, default=1024, metavar="N", help="open at once (1024)")
    limits.add_argument("--drain-seconds", type=float, default=20.0, metavar="S", help="for the end (20)")
    add("--decode-threads", type=int, metavar="N", help="(half the cores, at least 1)")
    add("--snapshots", type=Path, metavar="DIR", help="(STORE/snapshots where the store is a folder)")
    add(
        "--keep-thumbnails", action="store_true", help="keep a small picture of each enrolled face, until it is deleted"
    )
    add("--thumbnails", type=Path, metavar="DIR", help="(STORE/thumbnails where the store is a folder)")
    add("--link-key", metavar="KEY", help="metadata key whose http(s) addresses the page shows as links (none)")
    add("--audit", type=Path, metavar="FILE", help="(STORE/audit.jsonl, else standard error)")


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    from plsc.serve.server import Server

    settings = _settings(args)
    server = Server(settings)

    def load(metrics: "Metrics") -> "Service":
        return _load(args, settings, metrics)

    def ready(service: "Service") -> None:
        judge = "no threshold" if settings.threshold is None else f"possible matches from {settings.threshold:.4f}"
        who = "this machine alone may call" if args.tokens is None else f"callers with a token of {args.tokens}"
        measured = f"; metrics at {server.metrics_address}" if server.metrics_address else ""
        model = f"model {service.embedder.source} ({service.contract_id}), {judge}"
        print(f"serving at {server.address}: {model}, store {display_name(args.store)}; {who}{measured}", flush=True)

    server.run(load, ready)


def _settings(args: argparse.Namespace) -> "Settings":
    from plsc.serve.settings import Settings

    folder = store_folder(args.store)
    if args.keep_thumbnails and folder is None and args.thumbnails is None:
        raise UsageError("--keep-thumbnails: a store on a server has no folder for them; give --thumbnails DIR")
    return Settings(
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        tokens=args.tokens,
        threshold=_threshold(args),
        false_match_rate=args.fmr,
        flip=args.flip,
        max_batch=_positive(args, "max_batch"),
        max_wait_ms=args.max_wait_ms,
        drain_seconds=args.drain_seconds,
        decode_threads=max((os.cpu_count() or 1) // 2, 1)
        if args.decode_threads is None
        else _positive(args, "decode_threads"),
        snapshots=folder / "snapshots" if folder is not None and args.snapshots is None else args.snapshots,
        thumbnails=folder / "thumbnails" if folder is not None and args.thumbnails is None else args.thumbnails,
        keep_thumbnails=args.keep_thumbnails,
        link_key=args.link_key,
        audit=folder / "audit.jsonl" if folder is not None and args.audit is None else args.audit,
        limits=_limits(args),
    )


def _limits(args: argparse.Namespace) -> "Limits":
    from plsc.serve.settings import Limits

    return Limits(
        body_bytes=_positive(args, "max_body_mib") * MIB,
        image_pixels=_positive(args, "max_pixels"),
        inputs=_positive(args, "max_inputs"),
        collections=_positive(args, "max_collections"),
        queue=_positive(args, "queue"),
        connections=_positive(args, "connections"),
    )


def _positive(args: argparse.Namespace, name: str) -> int:
    value = int(getattr(args, name))
    if value < 1:
        raise UsageError(f"--{name.replace('_', '-')} {value}: it has to be at least 1")
    return value


def _threshold(args: argparse.Namespace) -> float | None:
    if (args.fmr is None) != (args.calibration is None):
        raise UsageError("--fmr and --calibration go together: the rate asked for, and what plsc eval measured")
    if args.fmr is not None and args.threshold is not None:
        raise UsageError("give --threshold or --fmr, not both")
    if args.threshold is not None and not -1 <= args.threshold <= 1:
        raise UsageError(f"--threshold {args.threshold}: a cosine lies between -1 and 1")
    if args.fmr is None:
        return args.threshold  # type: ignore[no-any-return]
    from plsc.evaluation.calibration import read_calibration

    return read_calibration(args.calibration).threshold_at(args.fmr)


def _load(args: argparse.Namespace, settings: "Settings", metrics: "Metrics") -> "Service":
    import torch

    from plsc.embedding.embedder import contract_of, open_embedder
    from plsc.gallery.store import open_store
    from plsc.serve.service import Service

    device = None if args.device is None else torch.device(args.device)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to run on the CPU")
    embedder = open_embedder(args.model, device=device, precision=args.model_precision, best=args.best)
    if args.calibration is not None:
        _check_calibration(args.calibration, contract_of(embedder, args.flip))
    detector = None
    if args.detector is not None:
        from plsc.embedding.detector import open_detector
        from plsc.models.preprocessing import check_square

        check_square(embedder.image_size, "--detector aligns faces, which")
        detector = open_detector(args.detector)
    _embed_blank(embedder)
    store = open_store(args.store, precision=args.precision, latency_ms=args.latency_ms)
    try:
        return Service(embedder, store, settings, metrics, detector)
    except BaseException:
        store.close()
        raise


def _embed_blank(embedder: "Embedder") -> None:
    """Resize and embed a blank picture, so that nobody's first request waits seconds for imports and compilation."""
    import torch

    from plsc.data.codec import resize_image

    oblong = torch.zeros(3, 3, 1, dtype=torch.uint8)  # of no model's size: what fits is not resized
    embedder(resize_image(oblong, embedder.image_size, embedder.preprocessing.interpolation)[None])


def _check_calibration(path: Path, contract: str) -> None:
    from plsc.evaluation.calibration import read_calibration

    measured = read_calibration(path).contract_id
    if measured != contract:
        raise UsageError(
            f"{path} was measured on the contract {measured}, and this model's is {contract}; calibrate this model "
            "by plsc eval --calibration (and give --flip here where --flip yes was given there)"
        )


if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
