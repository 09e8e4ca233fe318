"""Evaluate a model on people (or things) that it was not trained on.

MODEL is a run directory of `plsc train`, a .safetensors, a bare state_dict (.pt), an .onnx file with one
input and one output, or raw-pixels: a baseline that compares the pixels themselves. A run directory stands for its
model.safetensors, the last weights; --best takes best.safetensors, those of the best evaluation.

  --pairs X.bin     verification sets as insightface distributes them (lfw.bin, cfp_fp.bin, agedb_30.bin)
  --data DIR        a folder per identity, a list file, a .rec, avatars:IDSxIMAGES@FIRST or glyphs:BLOCK: all its
                    pairs are compared, every image is searched for among the first images of the identities (rank-1),
                    and every image among all others (Recall@K, mAP@R, R-precision)
  --ijb DIR         the folder IJBB or IJBC, with meta/ and loose_crop/ in it: template verification

Accuracy is the LFW protocol's: ten folds; on .bin and IJB sets each image is embedded together with its mirror
image (--flip no leaves that out of .bin sets; --flip yes does it with --data too). TAR at FAR f is the share of
same pairs accepted when a share f of the different pairs is; it is given where the set has 10/f different pairs
or more, since fewer than ten accepted ones are chance. Thresholds are cosines everywhere: in the table, in JSON
(threshold_cosine), in the histogram, in the calibration and in `plsc serve`.

--calibration FILE writes which cosine holds which false-match rate, by all pairs of the --data and --pairs sets, for
`plsc serve --calibration FILE --fmr 1e-4`. Choose people like those that will be searched for, and many: ten different
pairs have to match at each rate. Pictures are compared as they are searched, without their mirror images, unless
--flip yes is given (for sets made by `plsc embed --flip`); with .bin sets, say --flip no or --flip yes.

  plsc eval runs/first --data unseen/ --plot roc.png
  plsc eval model.onnx --pairs lfw.bin agedb_30.bin --json result.json
  plsc eval runs/first --pairs lfw.bin --nproc 8
  plsc eval runs/first --data unseen/ --calibration first.calibration.json
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import DataError, UsageError
from plsc.files import check_output, write_json
from plsc.progress import note, show
from plsc.tools.entry import (
    AUTO_PRECISION,
    PRECISIONS,
    add_outside_option,
    add_result_options,
    add_verify_option,
    is_launched,
    launch_ranks,
    natural,
    positive,
)

if TYPE_CHECKING:
    from plsc.embedding.embedder import Embedder
    from plsc.evaluation.roc import Roc

HELP = "evaluate a model: verification, identification, IJB"
FLIP = {"auto": None, "yes": True, "no": False}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a run directory, a model file, or raw-pixels")
    add("--best", action="store_true", help="of a run directory, the weights of the best evaluation")
    add("--pairs", nargs="+", default=[], metavar="X.bin", help="verification sets")
    add("--data", nargs="+", default=[], metavar="DIR", help="identities not trained on")
    add("--ijb", type=Path, metavar="DIR", help="the folder IJBB or IJBC")
    add("--plot", type=Path, metavar="FILE", help="draw the ROC curves (.png, .svg or .pdf)")
    add("--histogram", type=Path, metavar="FILE", help="draw the scores of same and different pairs")
    add("--calibration", type=Path, metavar="FILE", help="write the thresholds of false-match rates (.json)")
    add("--precision", choices=PRECISIONS, default="auto", help=AUTO_PRECISION)
    add("--batch-size", type=positive, default=64, metavar="N", help="images at a time (default: 64)")
    add("--image-size", type=positive, default=112, metavar="N", help="of raw-pixels (default: 112)")
    add("--seed", type=natural, default=0, metavar="N", help="draws the pairs (default: 0)")
    add("--flip", choices=tuple(FLIP), default="auto", help="add mirror images (auto: not with --data)")
    add("--nproc", type=positive, default=1, metavar="N", help="share the work among N ranks here")
    add_outside_option(parser)
    add_verify_option(parser)
    add_result_options(parser, replaces="--plot, --histogram, --calibration, --json")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Evaluate, print the table on the first rank, and return ``{"model", "sets"}`` there."""
    _check(args)
    if args.nproc > 1 and not is_launched():
        launch_ranks(args)
        return None
    return _evaluate(args)


def _check(args: argparse.Namespace) -> None:
    from plsc.api import RAW_PIXELS
    from plsc.data import is_drawn
    from plsc.evaluation.report import check_target
    from plsc.evaluation.templates import find_prefix

    if not (args.pairs or args.data or args.ijb):
        raise UsageError("nothing to evaluate on: give --pairs X.bin, --data DIR or --ijb DIR")
    for path in args.pairs:
        if Path(path).suffix != ".bin":
            raise UsageError(f"--pairs {path}: a verification set is a .bin file; use --data for labelled images")
    if args.best and args.model == RAW_PIXELS:
        raise UsageError("--best chooses among the weights of a run directory; leave it out")
    for figure in (args.plot, args.histogram):
        if figure is not None:
            check_target(figure)
            check_output(figure, overwrite=args.overwrite)
    if args.calibration is not None:
        _check_calibration(args)
    for path in (*args.pairs, *args.data):  # of all, before hours are spent on the first
        if not is_drawn(path) and not Path(path).exists():
            raise UsageError(f"there is no {path} to evaluate on")
    if args.ijb is not None:
        find_prefix(args.ijb)


def _check_calibration(args: argparse.Namespace) -> None:
    """Refuse, before the work, options that cannot give a calibration."""
    from plsc.api import RAW_PIXELS

    if args.model == RAW_PIXELS:
        raise UsageError("--calibration: raw-pixels has no embeddings to search by; calibrate a model")
    if not (args.data or args.pairs):
        raise UsageError("--calibration compares single images: give --data DIR or --pairs X.bin")
    if args.pairs and args.flip == "auto":
        raise UsageError("--calibration with --pairs: say --flip no, or --flip yes for sets of `plsc embed --flip`")
    if args.calibration.is_dir() or not args.calibration.absolute().parent.is_dir():
        raise UsageError(f"--calibration {args.calibration}: name a file in a folder that exists")
    check_output(args.calibration, overwrite=args.overwrite)


def _evaluate(args: argparse.Namespace) -> dict[str, Any] | None:
    from plsc.api import RAW_PIXELS, evaluate
    from plsc.embedding.embedder import open_embedder
    from plsc.evaluation.report import results_table
    from plsc.native.allocator import keep_freed_memory
    from plsc.parallel.mesh import init, shutdown

    keep_freed_memory()
    mesh = init()
    rocs: dict[str, Roc] = {}
    try:
        model = args.model
        if model != RAW_PIXELS:
            model = open_embedder(model, device=mesh.device, precision=args.precision, best=args.best, mesh=mesh)
        result = evaluate(
            model,
            [*args.pairs, *args.data],
            ijb=args.ijb,
            flip=FLIP[args.flip],
            batch_size=args.batch_size,
            seed=args.seed,
            image_size=args.image_size,
            mesh=mesh,
            quiet=False,
            rocs=rocs,
        )
    finally:
        shutdown()
    if not mesh.is_main:
        return None
    sets = result["sets"]
    show(*results_table(sets).split("\n"))
    if model != RAW_PIXELS:
        show(f"embedded in {model.precision}")
    _check_measured(result, args.json)
    _draw(args, sets)
    if args.calibration is not None:
        _calibrate(args, model, rocs, sum(sets[name]["images"] - sets[name]["unreadable"] for name in rocs))
    return result


def _check_measured(result: dict[str, Any], json: Path | None) -> None:
    """Name the sets without two images of one class; :class:`DataError` where there is no other set."""
    sets = result["sets"]
    names = [name for name, values in sets.items() if not values["genuine_pairs"]]
    text = f"{', '.join(names)}: no class has two images, so there is nothing to compare; give two or more of each"
    if names and len(names) == len(sets):
        if json is not None:
            write_json(json, result)
        raise DataError(text)
    if names:
        note(f"warning: {text}")


def _calibrate(args: argparse.Namespace, model: "Embedder", rocs: "dict[str, Roc]", images: int) -> None:
    from plsc.embedding.embedder import contract_of
    from plsc.evaluation.calibration import calibrate, write_calibration

    contract = contract_of(model, FLIP[args.flip] is True)
    calibration = calibrate(rocs, contract_id=contract, model=args.model, images=images)
    write_calibration(args.calibration, calibration)
    strictest = calibration.points[-1]
    show(
        f"calibrated: {args.calibration} holds false-match rates down to {strictest.fmr:g} "
        f"(cosine {strictest.threshold:.4f}, true-match rate {strictest.tmr:.4f}), "
        f"from {calibration.impostor_pairs:,} different and {calibration.genuine_pairs:,} same pairs"
    )


def _draw(args: argparse.Namespace, sets: dict[str, dict[str, Any]]) -> None:
    from plsc.evaluation.report import roc_figure, score_figure

    for target, draw in ((args.plot, roc_figure), (args.histogram, score_figure)):
        if target is not None:
            draw(sets, target)
            show(f"drawn: {target}")
