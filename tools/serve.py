"""Serve a model and a gallery over HTTP: enrol people, search by picture, compare, with a page to try it all.

  plsc serve --model model.safetensors --store gallery/ --port 8080
  plsc serve --model model.onnx --store gallery/ --calibration calibration.json --fmr 1e-4 --detector mtcnn
  plsc serve --model model.onnx --store postgres:DSN --host 0.0.0.0 --tokens tokens.toml --metrics-port 9090

Without tokens only this machine may call. Pictures are expected to be aligned faces, and resized, unless they come
with landmarks or --detector finds the face. docs/serving.md shows every request.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from plsc.errors import UsageError
from plsc.gallery.backends import SPEC_FORMS, display_name, store_folder
from plsc.gallery.sqlite import COMPACT_WITHIN
from plsc.progress import show
from plsc.tools.entry import add_detector_option, add_verify_option, main

if TYPE_CHECKING:
    from plsc.embedding.embedder import Embedder
    from plsc.evaluation.calibration import Calibration
    from plsc.serve.observability import Metrics
    from plsc.serve.service import Service
    from plsc.serve.settings import Limits, Settings

HELP = "serve a model and a gallery over HTTP"
MIB = 2**20
DEFAULT_FMR = 1e-4
MAX_MEGAPIXELS = 178  # Pillow opens no larger picture


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
    judge.add_argument("--threshold", type=float, metavar="T", help="cosine above which two faces may be one person")
    judge.add_argument("--calibration", type=Path, metavar="FILE", help="or what plsc eval --calibration measured")
    judge.add_argument("--fmr", type=float, metavar="R", help="its false-match rate to keep (1e-4, if measured)")
    judge.add_argument(
        "--score-step", type=float, default=0.01, metavar="S", help="of scores shown to tokens without vectors (0.01)"
    )
    add_verify_option(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--device", choices=("cpu", "cuda"), help="(a GPU if there is one)")
    model.add_argument(
        "--model-precision",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="(auto: on a GPU bf16, fp16 on Volta and Turing; fp32 on a CPU and for .onnx)",
    )
    model.add_argument("--flip", action="store_true", help="average over each picture and its mirror image")
    add_detector_option(model, "find faces in pictures without landmarks")
    search = parser.add_argument_group("searching")
    search.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the vectors in memory (bf16)")
    search.add_argument("--latency-ms", type=float, metavar="L", help="allow approximate search where exact misses it")
    search.add_argument("--max-batch", type=int, default=64, metavar="N", help="rows of a device batch (64)")
    search.add_argument("--max-wait-ms", type=float, default=2.0, metavar="W", help="longest wait to fill one (2)")
    _add_limits(parser)
    _add_store(parser)
    _add_audit(parser)


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    os.umask(0o077)  # all that is written here holds faces, or tells of them
    from plsc.serve.server import Server

    calibration = _calibration(args)
    settings = _settings(args, calibration)
    server = Server(settings)

    def load(metrics: "Metrics") -> "Service":
        return _load(args, settings, metrics, calibration)

    def ready(service: "Service") -> None:
        judge = "no threshold" if settings.threshold is None else f"possible matches from {settings.threshold:.4f}"
        who = "this machine alone may call" if args.tokens is None else f"callers with a token of {args.tokens}"
        measured = f"; metrics at {server.metrics_address}" if server.metrics_address else ""
        model = f"model {service.embedder.source} ({service.contract_id}) in {service.embedder.precision}, {judge}"
        show(f"serving at {server.address}: {model}, store {display_name(args.store)}; {who}{measured}")

    server.run(load, ready)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add("--max-body-mib", type=int, default=16, metavar="N", help="of a request (16)")
    add("--max-megapixels", type=float, default=13.0, metavar="N", help="of a picture; larger JPEGs shrink (13)")
    add("--max-inputs", type=int, default=256, metavar="N", help="pictures and vectors a request (256)")
    add("--max-collections", type=int, default=1000, metavar="N", help="(1000)")
    add("--max-persons", type=int, metavar="N", help="of a collection (any number)")
    add("--max-store-mib", type=int, metavar="N", help="of a store in a folder (any size)")
    add("--max-metadata-bytes", type=int, metavar="N", help="of a person, as JSON (64 entries)")
    add("--max-answer-mib", type=int, default=16, metavar="N", help="of an answer about people (16)")
    add("--queue", type=int, default=4096, metavar="N", help="rows that may wait (4096)")
    add("--connections", type=int, default=1024, metavar="N", help="of known callers, at once (1024)")
    add("--anonymous-connections", type=int, default=2048, metavar="N", help="of others (2048)")
    add(
        "--token-share",
        type=float,
        default=0.25,
        metavar="S",
        help="of connections, requests in flight and their bodies, what one token may have at a time (0.25)",
    )
    add(
        "--rate-limit",
        nargs="+",
        default=[],
        metavar="KIND=N",
        help="requests, searches, embeddings or writes a second of each caller, or N/m, N/h (none)",
    )
    add("--drain-seconds", type=float, default=20.0, metavar="S", help="for the end (20)")


def _add_store(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--decode-processes", type=int, metavar="N", help="that decode pictures, for one caller (half the cores)")
    add("--encrypt", type=Path, metavar="KEYFILE", help="keep the faces of a folder's store encrypted under this key")
    add("--snapshots", type=Path, metavar="DIR", help="(STORE/snapshots where the store is a folder)")
    add(
        "--compact-within",
        type=float,
        default=COMPACT_WITHIN,
        metavar="S",
        help="seconds after which no file of a folder's store holds what was deleted (3600)",
    )
    add(
        "--keep-thumbnails", action="store_true", help="keep a small picture of each enrolled face, until it is deleted"
    )
    add("--thumbnails", type=Path, metavar="DIR", help="(STORE/thumbnails where the store is a folder)")
    add("--link-key", metavar="KEY", help="metadata key whose http(s) addresses the page shows as links (none)")
    add("--items", default="people", metavar="NAME", help="what is enrolled, such as products or mouse/mice (people)")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("audit").add_argument
    add("--audit", type=Path, metavar="FILE", help="(STORE/audit.jsonl, else standard error)")
    add(
        "--audit-events",
        nargs="+",
        default=["writes"],
        metavar="EVENT",
        help="writes, reads, searches, refusals (writes)",
    )
    add("--audit-mib", type=int, default=64, metavar="N", help="size from which a new file is begun (64)")
    add("--audit-keep", type=int, metavar="N", help="files kept besides the newest (all)")


def _settings(args: argparse.Namespace, calibration: "Calibration | None") -> "Settings":
    from plsc.serve.rate_limits import parse_rate_limits
    from plsc.serve.settings import Items, Settings

    folder = store_folder(args.store)
    if args.keep_thumbnails and folder is None and args.thumbnails is None:
        raise UsageError("--keep-thumbnails: a store on a server has no folder for them; give --thumbnails DIR")
    if args.keep_thumbnails and args.encrypt is not None:
        raise UsageError("--keep-thumbnails: thumbnails are not encrypted; leave it out with --encrypt")
    threshold, rate = _judgement(args, calibration)
    return Settings(
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        tokens=args.tokens,
        threshold=threshold,
        false_match_rate=rate,
        score_step=_score_step(args),
        rate_limits=parse_rate_limits(args.rate_limit),
        flip=args.flip,
        max_batch=_positive(args, "max_batch"),
        max_wait_ms=args.max_wait_ms,
        drain_seconds=args.drain_seconds,
        decode_processes=max((os.cpu_count() or 1) // 2, 1)
        if args.decode_processes is None
        else _positive(args, "decode_processes"),
        snapshots=folder / "snapshots" if folder is not None and args.snapshots is None else args.snapshots,
        thumbnails=folder / "thumbnails" if folder is not None and args.thumbnails is None else args.thumbnails,
        keep_thumbnails=args.keep_thumbnails,
        link_key=args.link_key,
        items=Items.parse(args.items),
        audit=folder / "audit.jsonl" if folder is not None and args.audit is None else args.audit,
        audit_events=_audit_events(args),
        audit_rotated_bytes=_positive(args, "audit_mib") * MIB,
        audit_keep=_positive_or_none(args, "audit_keep"),
        limits=_limits(args),
    )


def _audit_events(args: argparse.Namespace) -> frozenset[str]:
    from plsc.serve.audit import EVENTS

    names = [name for given in args.audit_events for name in given.split(",")]
    for name in names:
        if name not in EVENTS:
            raise UsageError(f"--audit-events {name}: the events are {', '.join(EVENTS)}")
    return frozenset(EVENTS[name] for name in names)


def _limits(args: argparse.Namespace) -> "Limits":
    from plsc.serve.settings import Limits

    pixels = _pixels(args)
    return Limits(
        body_bytes=_positive(args, "max_body_mib") * MIB,
        image_pixels=pixels,
        jpeg_pixels=max(pixels, Limits.jpeg_pixels),
        inputs=_positive(args, "max_inputs"),
        collections=_positive(args, "max_collections"),
        persons=_positive_or_none(args, "max_persons"),
        store_bytes=_store_bytes(args),
        metadata_bytes=_positive_or_none(args, "max_metadata_bytes"),
        answer_bytes=_positive(args, "max_answer_mib") * MIB,
        queue=_positive(args, "queue"),
        connections=_positive(args, "connections"),
        anonymous_connections=_positive(args, "anonymous_connections"),
        token_share=_token_share(args),
    )


def _pixels(args: argparse.Namespace) -> int:
    if not 0 < args.max_megapixels <= MAX_MEGAPIXELS:
        raise UsageError(f"--max-megapixels {args.max_megapixels}: it lies between 0 and {MAX_MEGAPIXELS}")
    return max(int(args.max_megapixels * 1e6), 1)


def _token_share(args: argparse.Namespace) -> float:
    if not 0 < args.token_share <= 1:
        raise UsageError(f"--token-share {args.token_share}: it lies between 0 and 1, which gives one token everything")
    return float(args.token_share)


def _store_bytes(args: argparse.Namespace) -> int | None:
    mebibytes = _positive_or_none(args, "max_store_mib")
    if mebibytes is not None and store_folder(args.store) is None:
        raise UsageError("--max-store-mib: a store on a server has no folder to measure; set the server's own limit")
    return None if mebibytes is None else mebibytes * MIB


def _positive_or_none(args: argparse.Namespace, name: str) -> int | None:
    return None if getattr(args, name) is None else _positive(args, name)


def _positive(args: argparse.Namespace, name: str) -> int:
    value = int(getattr(args, name))
    if value < 1:
        raise UsageError(f"--{name.replace('_', '-')} {value}: it has to be at least 1")
    return value


def _calibration(args: argparse.Namespace) -> "Calibration | None":
    if args.fmr is not None and args.calibration is None:
        raise UsageError("--fmr needs --calibration FILE, in which plsc eval measured the rates")
    if args.calibration is not None and args.threshold is not None:
        raise UsageError("give --threshold or --calibration, not both")
    if args.calibration is None:
        return None
    from plsc.evaluation.calibration import read_calibration

    return read_calibration(args.calibration)


def _judgement(args: argparse.Namespace, calibration: "Calibration | None") -> tuple[float | None, float | None]:
    """The cosine from which two may be one person, and the false-match rate that it was measured to hold."""
    if args.threshold is not None and not -1 <= args.threshold <= 1:
        raise UsageError(f"--threshold {args.threshold}: a cosine lies between -1 and 1")
    if calibration is None:
        return args.threshold, None
    rate = max(DEFAULT_FMR, calibration.points[-1].fmr) if args.fmr is None else args.fmr
    return calibration.threshold_at(rate), rate


def _score_step(args: argparse.Namespace) -> float:
    if not 0 <= args.score_step <= 1:
        raise UsageError(f"--score-step {args.score_step}: it lies between 0 (exact scores) and 1")
    return float(args.score_step)


def _load(
    args: argparse.Namespace, settings: "Settings", metrics: "Metrics", calibration: "Calibration | None"
) -> "Service":
    import torch

    from plsc.embedding.embedder import contract_of, open_embedder
    from plsc.gallery.backends import open_store
    from plsc.serve.service import Service

    device = None if args.device is None else torch.device(args.device)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to run on the CPU")
    embedder = open_embedder(args.model, device=device, precision=args.model_precision, best=args.best)
    if calibration is not None:
        _check_calibration(args.calibration, calibration.contract_id, contract_of(embedder, args.flip))
    detector = None
    if args.detector is not None:
        from plsc.embedding.detector import open_detector
        from plsc.models.preprocessing import check_square

        check_square(embedder.image_size, "--detector aligns faces, which")
        detector = open_detector(args.detector)
    _embed_blank(embedder)
    store = open_store(
        args.store,
        precision=args.precision,
        latency_ms=args.latency_ms,
        compact_within=args.compact_within,
        key_file=args.encrypt,
    )
    try:
        service = Service(embedder, store, settings, metrics, detector)
    except BaseException:
        store.close()
        raise
    service.decoders.start()
    return service


def _embed_blank(embedder: "Embedder") -> None:
    """Resize and embed a blank picture, so that nobody's first request waits seconds for imports and compilation."""
    import torch

    from plsc.data.codec import resize_image

    oblong = torch.zeros(3, 3, 1, dtype=torch.uint8)  # of no model's size: what fits is not resized
    embedder(resize_image(oblong, embedder.image_size, embedder.preprocessing.interpolation)[None])


def _check_calibration(path: Path, measured: str, contract: str) -> None:
    if measured != contract:
        raise UsageError(
            f"{path} was measured on the contract {measured}, and this model's is {contract}; calibrate this model "
            "by plsc eval --calibration (and give --flip here where --flip yes was given there)"
        )


if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
