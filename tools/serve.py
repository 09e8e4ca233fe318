"""Serve a model and a gallery over HTTP: enrol people, search by picture, compare, with a page to try it all.

  plsc serve --model model.safetensors --store gallery/ --port 8080
  plsc serve --model model.onnx --store gallery/ --calibration calibration.json --fmr 1e-4 --detector mtcnn
  plsc serve --model sface --store gallery/ --detector yunet                  both out of a package: docs/faces.md
  plsc serve --model model.onnx --store postgres:DSN --host 0.0.0.0 --tokens tokens.toml --metrics-port 9090

Without tokens only this machine may call. Pictures are expected to be aligned faces, and resized, unless they come
with landmarks or --detector finds the face. docs/serving.md shows every request.
"""

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.gallery.backends import SPEC_FORMS, display_name, store_folder
from plsc.gallery.sqlite import COMPACT_WITHIN
from plsc.progress import counted, note, show
from plsc.tools.entry import (
    AUTO_PRECISION,
    PRECISIONS,
    add_detector_option,
    add_provider_option,
    add_verify_option,
    number,
    positive,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plsc.embedding.embedder import EmbeddingModel
    from plsc.evaluation.calibration import Calibration
    from plsc.evaluation.search_thresholds import SearchThresholds
    from plsc.gallery.store import Store
    from plsc.serve.observability import Metrics
    from plsc.serve.service import Service
    from plsc.serve.settings import Settings

HELP = "serve a model and a gallery over HTTP"
MIB = 2**20
MAX_MEGAPIXELS = 178  # Pillow opens no larger picture
_WARNED_OF = 5  # collections of other models, a line each


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="a model file, a run directory (its last weights), or sface")
    add("--best", action="store_true", help="of a run directory, the weights of the best evaluation")
    add("--store", required=True, metavar="DIR", help=f"a gallery's folder, {SPEC_FORMS}")
    add("--port", type=int, default=8080, metavar="N", help="0 takes a free one (8080)")
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)")
    add("--tokens", type=Path, metavar="FILE", help="who may call: a file made by plsc tokens")
    add("--metrics-port", type=int, metavar="N", help="show Prometheus metrics there (default: nowhere)")
    judge = parser.add_argument_group("judging")
    cosine = number(float, lambda value: -1 <= value <= 1, "a cosine lies between -1 and 1")
    judge.add_argument("--threshold", type=cosine, metavar="T", help="cosine above which two faces may be one person")
    judge.add_argument("--calibration", type=Path, metavar="FILE", help="or what plsc eval --calibration measured")
    judge.add_argument("--fmr", type=float, metavar="R", help="its false-match rate to keep (1e-4, if measured)")
    text = "or the share of searches for strangers that may match, however many people a collection has"
    judge.add_argument("--fpir", type=float, metavar="R", help=text)
    step = number(float, lambda value: 0 <= value <= 1, "it lies between 0 (exact scores) and 1")
    text = "of scores shown to tokens without vectors (0.01)"
    judge.add_argument("--score-step", type=step, default=0.01, metavar="S", help=text)
    add_verify_option(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--device", choices=("cpu", "cuda"), help="(a GPU if there is one)")
    model.add_argument("--model-precision", choices=PRECISIONS, default="auto", help=AUTO_PRECISION)
    add_provider_option(model)
    text = "to which collections may be moved (docs/migration.md)"
    model.add_argument("--next-model", metavar="FILE", help=text)
    text = "of the next model (what the judgement of a move finds, until the next start)"
    model.add_argument("--next-threshold", type=cosine, metavar="T", help=text)
    model.add_argument("--flip", action="store_true", help="average over each picture and its mirror image")
    add_detector_option(model, "find faces in pictures without landmarks")
    text = "enrol no picture whose quality is lower: sharpness=N, norm=N, or a package's own (none)"
    model.add_argument("--quality-gate", nargs="+", default=[], metavar="NAME=N", help=text)
    search = parser.add_argument_group("searching")
    text = "that searches scan vectors in, which changes no answer (auto: int8 where the processor multiplies bytes)"
    search.add_argument("--precision", choices=("auto", "int8", "bf16", "fp32"), default="auto", help=text)
    search.add_argument("--latency-ms", type=float, metavar="L", help="allow approximate search where exact misses it")
    search.add_argument("--max-batch", type=positive, default=64, metavar="N", help="rows of a device batch (64)")
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
        if (by_size := settings.search_thresholds) is not None:
            judge += f", in searches by FPIR {by_size.fpir:g}, predicted up to {counted(by_size.persons, 'person')}"
        who = "this machine alone may call" if args.tokens is None else f"callers with a token of {args.tokens}"
        measured = f"; metrics at {server.metrics_address}" if server.metrics_address else ""
        compatible = service.models.compatible_with(service.contract_id)
        others = "".join(f", compatible with {each}" for each in compatible if each not in service.own_contracts)
        about = f"{service.contract_id}{others}) in {service.embedder.precision}"
        model = f"model {service.embedder.source} ({about}, {judge}"
        show(f"serving at {server.address}: {model}, store {display_name(args.store)}; {who}{measured}")

    server.run(load, ready)


def _mebibytes(text: str) -> int:
    return positive(text) * MIB


_mebibytes.__name__ = "int"  # in the message where it is no number


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Declare the limits, under the names that they have in :class:`plsc.serve.settings.Limits`."""
    add = parser.add_argument_group("limits").add_argument
    megapixels = number(float, lambda value: 0 < value <= MAX_MEGAPIXELS, f"it lies between 0 and {MAX_MEGAPIXELS}")
    share = number(float, lambda value: 0 < value <= 1, "it lies between 0 and 1, which gives one token everything")
    mib: dict[str, Any] = {"type": _mebibytes, "metavar": "N"}
    count: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--max-body-mib", dest="body_bytes", **mib, default=16 * MIB, help="of a request (16)")
    text = "of a picture; larger JPEGs shrink (13)"
    add("--max-megapixels", type=megapixels, default=13.0, metavar="N", help=text)
    add("--max-inputs", dest="inputs", **count, default=256, help="pictures and vectors a request (256)")
    add("--max-collections", dest="collections", **count, default=1000, help="(1000)")
    add("--max-persons", dest="persons", **count, help="of a collection (any number)")
    add("--max-store-mib", dest="store_bytes", **mib, help="of a store in a folder (any size)")
    add("--max-metadata-bytes", dest="metadata_bytes", **count, help="of a person, as JSON (64 entries)")
    add("--max-answer-mib", dest="answer_bytes", **mib, default=16 * MIB, help="of an answer about people (16)")
    add("--queue", **count, default=4096, help="rows that may wait (4096)")
    add("--connections", **count, default=1024, help="of known callers, at once (1024)")
    add("--anonymous-connections", **count, default=2048, help="of others (2048)")
    text = "of connections, requests in flight and their bodies, what one token may have at a time (0.25)"
    add("--token-share", type=share, default=0.25, metavar="S", help=text)
    text = "requests, searches, embeddings or writes a second of each caller, or N/m, N/h (none)"
    add("--rate-limit", nargs="+", default=[], metavar="KIND=N", help=text)
    add("--drain-seconds", type=float, default=20.0, metavar="S", help="for the end (20)")


def _add_store(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    cores = max((os.cpu_count() or 1) // 2, 1)
    text = "that decode pictures, for one caller (half the cores)"
    add("--decode-processes", type=positive, default=cores, metavar="N", help=text)
    add("--encrypt", type=Path, metavar="KEYFILE", help="keep the faces of a folder's store encrypted under this key")
    add("--snapshots", type=Path, metavar="DIR", help="(STORE/snapshots where the store is a folder)")
    text = "seconds after which no file of a folder's store, and no kept picture, is of who was deleted (3600)"
    add("--compact-within", type=float, default=COMPACT_WITHIN, metavar="S", help=text)
    text = "keep a small picture of each enrolled face, until it is deleted"
    add("--keep-thumbnails", action="store_true", help=text)
    text = "keep each enrolled face's crop without loss, which another model can embed, until it is deleted"
    add("--keep-pictures", action="store_true", help=text)
    add("--thumbnails", type=Path, metavar="DIR", help="(STORE/thumbnails where the store is a folder)")
    add("--link-key", metavar="KEY", help="metadata key whose http(s) addresses the page shows as links (none)")
    add("--items", default="people", metavar="NAME", help="what is enrolled, such as products or mouse/mice (people)")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("audit").add_argument
    add("--audit", type=Path, metavar="FILE", help="(STORE/audit.jsonl, else standard error)")
    text = "writes, reads, searches, refusals (writes)"
    add("--audit-events", nargs="+", default=["writes"], metavar="EVENT", help=text)
    text = "size from which a new file is begun (64)"
    add("--audit-mib", dest="audit_rotated_bytes", type=_mebibytes, default=64 * MIB, metavar="N", help=text)
    add("--audit-keep", type=positive, metavar="N", help="files kept besides the newest (all)")


def _settings(args: argparse.Namespace, calibration: "Calibration | None") -> "Settings":
    from plsc.embedding.quality import parse_quality_gates
    from plsc.serve.limits import parse_rate_limits
    from plsc.serve.settings import Items, Limits, Settings

    folder = store_folder(args.store)
    if (args.keep_thumbnails or args.keep_pictures) and folder is None and args.thumbnails is None:
        option = "--keep-thumbnails" if args.keep_thumbnails else "--keep-pictures"
        raise UsageError(f"{option}: a store on a server has no folder for them; give --thumbnails DIR")
    if args.store_bytes is not None and folder is None:
        raise UsageError("--max-store-mib: a store on a server has no folder to measure; set the server's own limit")
    pixels = max(int(args.max_megapixels * 1e6), 1)
    limits = Limits(image_pixels=pixels, jpeg_pixels=max(pixels, Limits.jpeg_pixels), **_given(args, Limits))
    if args.next_threshold is not None and args.next_model is None:
        raise UsageError("--next-threshold is of the next model; give --next-model FILE, or leave it out")
    threshold, rate = _judgement(args, calibration)
    in_folder = {"snapshots": "snapshots", "thumbnails": "thumbnails", "audit": "audit.jsonl"}
    own = {} if folder is None else {name: folder / file for name, file in in_folder.items()}
    given = {**_given(args, Settings), **{name: getattr(args, name) or path for name, path in own.items()}}
    chosen = {"threshold": threshold, "false_match_rate": rate, "items": Items.parse(args.items), "limits": limits}
    by_size = _search_thresholds(args, calibration)
    limited: dict[str, Any] = {"quality_gates": parse_quality_gates(args.quality_gate)}
    limited |= {"rate_limits": parse_rate_limits(args.rate_limit), "audit_events": _audit_events(args)}
    return Settings(**{**given, **chosen, **limited}, search_thresholds=by_size)


def _given(args: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    """The options that have the names of fields of ``settings``."""
    return {field.name: getattr(args, field.name) for field in fields(settings) if hasattr(args, field.name)}


def _audit_events(args: argparse.Namespace) -> frozenset[str]:
    from plsc.serve.audit import EVENTS

    names = [name for given in args.audit_events for name in given.split(",")]
    for name in names:
        if name not in EVENTS:
            raise UsageError(f"--audit-events {name}: the events are {', '.join(EVENTS)}")
    return frozenset(EVENTS[name] for name in names)


def _calibration(args: argparse.Namespace) -> "Calibration | None":
    if args.fmr is not None and args.calibration is None:
        raise UsageError("--fmr needs --calibration FILE, in which plsc eval measured the rates")
    if args.fpir is not None:
        for option in ("threshold", "fmr"):
            if getattr(args, option) is not None:
                raise UsageError(f"--fpir finds the threshold of each search; leave --{option} out")
        if args.calibration is None:
            raise UsageError("--fpir needs --calibration FILE, written by plsc eval --gallery … --calibration FILE")
    if args.calibration is not None and args.threshold is not None:
        raise UsageError("give --threshold or --calibration, not both")
    if args.calibration is None:
        return None
    from plsc.evaluation.calibration import read_calibration

    return read_calibration(args.calibration)


def _judgement(args: argparse.Namespace, calibration: "Calibration | None") -> tuple[float | None, float | None]:
    """The cosine from which two may be one person, and the false-match rate that it was measured to hold."""
    if calibration is None:
        return (args.threshold, None) if args.threshold is not None or args.flip else _published(args.model)
    rate = calibration.default_fmr if args.fmr is None else args.fmr
    return calibration.threshold_at(rate), rate


def _search_thresholds(args: argparse.Namespace, calibration: "Calibration | None") -> "SearchThresholds | None":
    if args.fpir is None or calibration is None:
        return None
    from plsc.evaluation.search_thresholds import SearchThresholds

    if calibration.searches is None:
        raise UsageError(
            f"--fpir: {args.calibration} predicts no FPIR; measure it with plsc eval --gallery, --mated and --non-mated"
        )
    return SearchThresholds(calibration.searches, args.fpir)


def _published(model: str) -> tuple[float | None, float | None]:
    """The threshold that was measured of a known model, and its false-match rate; a line says where it is from."""
    from plsc.embedding.known_models import find_known
    from plsc.evaluation.calibration import DEFAULT_FMR

    known = find_known(model)
    if known is None or DEFAULT_FMR not in known.thresholds:
        return None, None
    threshold = known.thresholds[DEFAULT_FMR]
    note(
        f"the threshold {threshold} of {known.name} held a false-match rate of {DEFAULT_FMR:g} on {known.measured}; "
        "measure yours by plsc eval --calibration, and give --calibration, or --threshold"
    )
    return threshold, DEFAULT_FMR


def _load(
    args: argparse.Namespace, settings: "Settings", metrics: "Metrics", calibration: "Calibration | None"
) -> "Service":
    import torch

    from plsc.embedding.embedder import contract_of, open_embedder, own_contracts
    from plsc.gallery.backends import open_store
    from plsc.serve.service import Service

    device = None if args.device is None else torch.device(args.device)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to run on the CPU")
    options = {"precision": args.model_precision, "best": args.best, "provider": args.provider}
    embedder = open_embedder(args.model, device=device, **options)
    if calibration is not None:
        _check_calibration(args.calibration, calibration.contract_id, own_contracts(embedder, args.flip))
    detector = None
    if args.detector is not None:
        from plsc.embedding.detector import open_detector
        from plsc.models.preprocessing import check_square

        check_square(embedder.image_size, "--detector aligns faces, which")
        detector = open_detector(args.detector)
    _embed_blank(embedder)
    next_embedder = None
    if args.next_model is not None:
        next_embedder = open_embedder(args.next_model, device=device, **options)
        _embed_blank(next_embedder)
        if contract_of(next_embedder, args.flip) == contract_of(embedder, args.flip):
            raise UsageError("--next-model is the model of --model; name another, or leave it out")
    store = open_store(
        args.store,
        precision=args.precision,
        latency_ms=args.latency_ms,
        compact_within=args.compact_within,
        key_file=args.encrypt,
    )
    try:
        if next_embedder is not None and settings.next_threshold is None:
            _warn_of_moved(store, contract_of(next_embedder, args.flip), args.next_model)
        service = Service(embedder, store, settings, metrics, detector, next_embedder)
        _warn_of_models(service)
        _warn_of_sizes(service)
    except BaseException:
        store.close()
        raise
    service.decoders.start()
    return service


def _warn_of_models(service: "Service") -> None:
    from plsc.embedding.contracts import models_in

    former = {*service.own_contracts[1:]}
    stated = {info.name: models_in(info.contract_id) for info in service.store.collections()}
    names = [name for name, models in stated.items() if len({*models} - former) > 1]
    if names:
        shown = f"{names[0]} and {len(names) - 1} more collections" if len(names) > 1 else names[0]
        note(f"warning: several models enrolled into {shown}, whose scores differ: take the threshold for both")
    refusals, are_all = service.models.unsearched(service.store)
    for refusal in list(refusals.values())[:_WARNED_OF]:
        note(f"{'not ready' if are_all else 'warning'}: {refusal}")
    if len(refusals) > _WARNED_OF:
        note(f"{counted(len(refusals) - _WARNED_OF, 'more collection')} likewise")


def _warn_of_sizes(service: "Service") -> None:
    by_size = service.settings.search_thresholds
    if by_size is None:
        return
    sizes = {info.name: by_size.size(info.persons, info.faces) for info in service.store.collections()}
    for name, size in [(name, size) for name, size in sizes.items() if size > by_size.persons][:_WARNED_OF]:
        note(
            f"warning: {name} counts as {size:,} persons, and the calibration is evidence of FPIR {by_size.fpir:g} up "
            f"to {by_size.persons:,}: its threshold is extrapolated; calibrate on more people"
        )


def _warn_of_moved(store: "Store", contract_id: str, model: str) -> None:
    for info in store.collections():
        if info.contract_id == contract_id and store.spaces(info.name)[1] is None:
            note(
                f"warning: {info.name} holds vectors of the next model, whose threshold is not known here: start with "
                f"--model {model} --threshold T, which the answer to finish named, or with --next-threshold T"
            )


def _embed_blank(embedder: "EmbeddingModel") -> None:
    """Resize and embed a blank picture, so that nobody's first request waits seconds for imports and compilation."""
    import torch

    from plsc.models.preprocessing import resize_image

    oblong = torch.zeros(3, 3, 1, dtype=torch.uint8)  # of no model's size: what fits is not resized
    embedder(resize_image(oblong, embedder.image_size, embedder.preprocessing.interpolation)[None])


def _check_calibration(path: Path, measured: str, own: "Sequence[str]") -> None:
    if measured not in own:
        raise UsageError(
            f"{path} was measured on the contract {measured}, and this model's is {own[0]}; calibrate this model "
            "by plsc eval --calibration (and give --flip here where --flip yes was given there)"
        )
