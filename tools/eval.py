"""Evaluate a model on people (or things) that it was not trained on.

MODEL is a run directory of `plsc train`, a .safetensors, a bare state_dict (.pt), an .onnx file with one
input and one output, or raw-pixels: a baseline that compares the pixels themselves. A run directory stands for its
model.safetensors, the last weights; --best takes best.safetensors, those of the best evaluation.

  --pairs X.bin     verification sets as insightface distributes them (lfw.bin, cfp_fp.bin, agedb_30.bin)
  --data SOURCE     what data.train takes (docs/data.md), as a folder per identity or avatars:IDSxIMAGES@FIRST: all its
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

--groups FILE tells error rates by group: FMR and FNMR of each group's own pairs, at the one cosine that holds a
false-match rate over the whole set.

--probe asks how well a simple classifier tells classes by frozen embeddings. It learns from the labelled part --train
and classifies each --data set, whose classes have the same names; without --train it learns from half of each class,
drawn by --seed, and classifies the other half. knn: the nearest --neighbours vote, weighted by
exp(cosine / --temperature), with the numbers of DINO. linear: multinomial logistic regression (scikit-learn:
pip install plsc-torch[cluster]). Parts may be embedding sets; where all are, MODEL is left out.

--gallery, --mated and --non-mated ask how often searches err: FNIR at FPIR 1e-1, 1e-2 and 1e-3 with the cosine of each,
rank-1, 5 and 10, and 95% intervals over persons (ISO/IEC 19795-1). Each is a SOURCE as --data takes it, or an embedding
set; where all are sets, MODEL may be left out. Labels name the persons: mated probes show enrolled ones, non-mated
probes others. FNIR is the share of mated probes whose person is not the best match (R = 1), or below the threshold;
FPIR that of non-mated probes with any match. An FPIR needs ten false positives; an interval 20 persons who err, 20 who
do not, and 20 who are false positives. A gallery of 500 persons also predicts the cosines for 1,000 to 1,000,000
persons, as far as one of the compared scores would reach them. --calibration FILE keeps what predicts them, for
`plsc serve --calibration FILE --fpir 1e-3`, beside the false-match rates of all pairs.

--old OLD --new NEW, in the place of MODEL, says whether the new model's queries can search the old one's gallery
(compatible.with in plsc train): each set is evaluated four times, with queries of each model and the gallery of each,
with the cosine that holds each FAR. `plsc serve --model NEW` takes the threshold of new/old for the old one's gallery.

  plsc eval runs/first --data unseen/ --plot roc.png
  plsc eval model.onnx --pairs lfw.bin agedb_30.bin --json result.json
  plsc eval runs/first --pairs lfw.bin --nproc 8
  plsc eval runs/first --data unseen/ --calibration first.calibration.json
  plsc eval runs/first --probe linear --train flowers/train --data flowers/test
  plsc eval --probe knn --train train.emb --data test.emb
  plsc eval --probe linear --data before.emb after.emb
  plsc eval --old old.onnx --new new.onnx --data unseen/
  plsc eval model.onnx --gallery enrolled/ --mated again/ --non-mated strangers/ --calibration searches.calibration.json
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import DataError, UsageError
from plsc.files import check_output, write_json
from plsc.progress import counted, note, show
from plsc.tools.entry import (
    AUTO_PRECISION,
    PRECISIONS,
    above_0,
    add_outside_option,
    add_provider_option,
    add_result_options,
    add_verify_option,
    is_launched,
    launch_ranks,
    natural,
    positive,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plsc.embedding.embedder import EmbeddingModel
    from plsc.evaluation.probe import LabelledRows
    from plsc.evaluation.probe_parts import PartReader
    from plsc.evaluation.roc import Roc
    from plsc.evaluation.search_thresholds import SearchCalibration
    from plsc.parallel.mesh import Mesh

HELP = "evaluate a model: verification, identification, IJB"
FLIP = {"auto": None, "yes": True, "no": False}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a run directory, a model file, sface, or raw-pixels")
    add("--best", action="store_true", help="of a run directory, the weights of the best evaluation")
    add("--pairs", nargs="+", default=[], metavar="X.bin", help="verification sets")
    add("--data", nargs="+", default=[], metavar="DIR", help="identities not trained on")
    add("--ijb", type=Path, metavar="DIR", help="the folder IJBB or IJBC")
    add("--plot", type=Path, metavar="FILE", help="draw the ROC curves (.png, .svg or .pdf)")
    add("--histogram", type=Path, metavar="FILE", help="draw the scores of same and different pairs")
    add("--calibration", type=Path, metavar="FILE", help="write the thresholds of false-match rates (.json)")
    text = "error rates by group on --data: a CSV file identity,group (age, sex, origin)"
    add("--groups", type=Path, metavar="FILE", help=text)
    add("--precision", choices=PRECISIONS, default="auto", help=AUTO_PRECISION)
    add_provider_option(parser)
    add("--batch-size", type=positive, default=64, metavar="N", help="images at a time (default: 64)")
    add("--image-size", type=positive, default=112, metavar="N", help="of raw-pixels (default: 112)")
    add("--seed", type=natural, default=0, metavar="N", help="draws the pairs (default: 0)")
    add("--flip", choices=tuple(FLIP), default="auto", help="add mirror images (auto: not with --data)")
    add("--nproc", type=positive, default=1, metavar="N", help="share the work among N ranks here")
    probes = parser.add_argument_group("--probe").add_argument
    probes("--probe", choices=("knn", "linear"), help="classify by frozen embeddings: top-1 and top-5 accuracy")
    probes("--train", metavar="DIR|EMB", help="the labelled part to learn from (half of each class of --data)")
    probes("--neighbours", type=positive, metavar="N", help="knn: how many vote (20)")
    probes("--temperature", type=above_0, metavar="T", help="knn: of the votes' weights (0.07)")
    searches = parser.add_argument_group("--gallery, --mated, --non-mated").add_argument
    searches("--gallery", metavar="DIR|EMB", help="the enrolled persons, with one picture or several each")
    searches("--mated", metavar="DIR|EMB", help="other pictures of enrolled persons")
    searches("--non-mated", metavar="DIR|EMB", help="pictures of persons who are not enrolled")
    models = parser.add_argument_group("--old, --new").add_argument
    models("--old", metavar="OLD", help="the model of the gallery: a run directory or a model file")
    models("--new", metavar="NEW", help="the model that is to take its place")
    add_outside_option(parser)
    add_verify_option(parser)
    add_result_options(parser, replaces="--plot, --histogram, --calibration, --json")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Evaluate, print the table on the first rank, and return what was found there, as ``{"model", "sets"}``."""
    _check(args)
    if args.nproc > 1 and not is_launched():
        launch_ranks(args)
        return None
    if _is_of_two(args):
        return _compare(args)
    if _parts(args):
        return _search(args)
    return _evaluate(args) if args.probe is None else _probe(args)


def _is_of_two(args: argparse.Namespace) -> bool:
    return args.old is not None or args.new is not None


def _parts(args: argparse.Namespace) -> list[str]:
    """The gallery, the mated and the non-mated probes, as far as given."""
    return [part for part in (args.gallery, args.mated, args.non_mated) if part is not None]


def _check(args: argparse.Namespace) -> None:
    from plsc.data import is_named

    if _is_of_two(args):
        _check_two(args)
    if _parts(args):
        _check_searches(args)
    elif args.probe is None:
        _check_evaluation(args)
    else:
        _check_probe(args)
    sources = [*args.pairs, *args.data, *([] if args.train is None else [args.train]), *_parts(args)]
    for path in sources:  # of all, before hours are spent on the first
        if not is_named(path):
            raise UsageError(f"there is no {path} to evaluate on")


def _check_evaluation(args: argparse.Namespace) -> None:
    from plsc.api import RAW_PIXELS
    from plsc.evaluation.report import check_target
    from plsc.evaluation.templates import find_prefix

    for name in ("train", "neighbours", "temperature"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is an option of --probe; leave it out")
    if args.model is None and not _is_of_two(args):
        raise UsageError("MODEL is missing: a run directory, a model file, or raw-pixels")
    if not (args.pairs or args.data or args.ijb):
        raise UsageError("nothing to evaluate on: give --pairs X.bin, --data DIR or --ijb DIR")
    for path in args.pairs:
        if Path(path).suffix != ".bin":
            raise UsageError(f"--pairs {path}: a verification set is a .bin file; use --data for labelled images")
    if args.best and args.model == RAW_PIXELS:
        raise UsageError("--best chooses among the weights of a run directory; leave it out")
    if args.provider != "auto" and args.model == RAW_PIXELS:
        raise UsageError("--provider runs an .onnx file, and raw-pixels is none; leave it out")
    for figure in (args.plot, args.histogram):
        if figure is not None:
            check_target(figure)
            check_output(figure, overwrite=args.overwrite)
    if args.calibration is not None:
        _check_calibration(args)
    if args.groups is not None and not args.data:
        raise UsageError("--groups names identities, which --data sets have: give one")
    if args.ijb is not None:
        find_prefix(args.ijb)


def _check_two(args: argparse.Namespace) -> None:
    """Refuse what is for one model, where --old and --new give two."""
    from plsc.api import RAW_PIXELS

    for name, other in (("old", "new"), ("new", "old")):
        if getattr(args, name) is None:
            raise UsageError(f"--{other} goes with --{name}: give both models")
        if getattr(args, name) == RAW_PIXELS:
            raise UsageError(f"--{name}: raw-pixels has no gallery to search; give a model")
    if args.model is not None:
        raise UsageError(f"--old and --new take the place of MODEL; leave {args.model} out")
    if args.pairs and args.flip == "auto":
        raise UsageError("--old and --new with --pairs: say --flip no, or --flip yes for sets of `plsc embed --flip`")
    for name in ("probe", "ijb", "plot", "histogram", "calibration", "groups", "gallery", "mated", "non_mated"):
        if getattr(args, name):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is an option for one model, and --old and --new are two; leave it out")


def _check_searches(args: argparse.Namespace) -> None:
    """Refuse a part that is missing, and options that searches do not have."""
    if len(_parts(args)) < 3:
        raise UsageError("--gallery, --mated and --non-mated go together: give all three")
    for name in ("pairs", "data", "ijb", "plot", "histogram", "groups", "probe", "train"):
        if getattr(args, name):
            raise UsageError(f"--{name} does not go with --gallery; leave it out")
    _check_model_of_parts(args, _parts(args))
    if args.calibration is not None:
        if args.model is None:
            raise UsageError("--calibration names the model that it is of: give MODEL, which made these sets")
        _check_calibration_file(args)


def _check_probe(args: argparse.Namespace) -> None:
    """Refuse options that probes do not have, and a probe whose library is not installed."""
    from plsc.evaluation.probe import require_regression

    for name in ("pairs", "ijb", "plot", "histogram", "calibration", "groups"):
        if getattr(args, name):
            raise UsageError(f"--{name} is not an option of --probe; leave it out")
    if not args.data:
        raise UsageError("nothing to probe: give --data with a labelled set")
    if args.probe == "linear":
        require_regression()
        for name in ("neighbours", "temperature"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} is an option of --probe knn; leave it out")
    _check_model_of_parts(args, [*args.data, *([] if args.train is None else [args.train])])


def _check_model_of_parts(args: argparse.Namespace, sources: list[str]) -> None:
    """Refuse pictures without a model."""
    from plsc.api import RAW_PIXELS
    from plsc.evaluation.probe_parts import is_embedding_set

    pictures = [source for source in sources if not is_embedding_set(source)]
    if args.model is None and pictures:
        raise UsageError(f"MODEL is missing, to embed {pictures[0]}: a run directory, a model file, or raw-pixels")
    if args.best and args.model in (None, RAW_PIXELS):
        raise UsageError("--best chooses among the weights of a run directory; leave it out")


def _check_calibration(args: argparse.Namespace) -> None:
    """Refuse, before the work, options that cannot give a calibration."""
    _check_calibration_file(args)
    if not (args.data or args.pairs):
        raise UsageError("--calibration compares single images: give --data DIR or --pairs X.bin")
    if args.pairs and args.flip == "auto":
        raise UsageError("--calibration with --pairs: say --flip no, or --flip yes for sets of `plsc embed --flip`")


def _check_calibration_file(args: argparse.Namespace) -> None:
    from plsc.api import RAW_PIXELS

    if args.model == RAW_PIXELS:
        raise UsageError("--calibration: raw-pixels has no embeddings to search by; calibrate a model")
    if args.calibration.is_dir() or not args.calibration.absolute().parent.is_dir():
        raise UsageError(f"--calibration {args.calibration}: name a file in a folder that exists")
    check_output(args.calibration, overwrite=args.overwrite)


def _evaluate(args: argparse.Namespace) -> dict[str, Any] | None:
    from plsc.api import RAW_PIXELS, evaluate
    from plsc.evaluation.groups import read_groups
    from plsc.evaluation.report import groups_table, results_table
    from plsc.native.allocator import keep_freed_memory
    from plsc.parallel.mesh import initialised

    keep_freed_memory()
    rocs: dict[str, Roc] = {}
    groups = None if args.groups is None else read_groups(args.groups)
    with initialised() as mesh:
        model = args.model
        if model != RAW_PIXELS:
            model = _open(args, mesh)
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
            groups=groups,
        )
    if not mesh.is_main:
        return None
    sets = result["sets"]
    show(*results_table(sets).split("\n"))
    for name, values in sets.items():
        if "by_group" in values:
            show("", *groups_table(name, values["by_group"]).split("\n"))
    if model != RAW_PIXELS:
        show(f"embedded in {model.precision}")
    _check_measured(result, args.json)
    _draw(args, sets)
    if args.calibration is not None:
        _calibrate(args, model, rocs, sum(sets[name]["images"] - sets[name]["unreadable"] for name in rocs))
    return result


def _compare(args: argparse.Namespace) -> dict[str, Any] | None:
    from plsc.evaluation.compatibility import cells_for_table, check_measured, evaluate_cells
    from plsc.evaluation.report import results_table
    from plsc.native.allocator import keep_freed_memory
    from plsc.parallel.mesh import initialised

    keep_freed_memory()
    with initialised() as mesh:
        old, new = _open(args, mesh, args.old), _open(args, mesh, args.new)
        sources, options = [*args.pairs, *args.data], {"batch_size": args.batch_size, "seed": args.seed}
        sets = evaluate_cells(old, new, sources, mesh=mesh, flip=FLIP[args.flip], **options)
    if not mesh.is_main:
        return None
    for name, cells in sets.items():
        show(f"{name}, by query/gallery:", *results_table(cells_for_table(cells)).split("\n"), "")
    show(f"old: {args.old}, embedded in {old.precision}; new: {args.new}, in {new.precision}")
    check_measured(sets)
    contracts = {"old": old.contract_id, "new": new.contract_id}
    return {"old": args.old, "new": args.new, "contract_ids": contracts, "sets": sets}


def _open(args: argparse.Namespace, mesh: "Mesh", model: str | None = None) -> "EmbeddingModel":
    from plsc.embedding.embedder import open_embedder

    options = {"precision": args.precision, "best": args.best, "provider": args.provider}
    return open_embedder(args.model if model is None else model, device=mesh.device, mesh=mesh, **options)


def _reader(args: argparse.Namespace, mesh: "Mesh") -> "PartReader":
    from plsc.api import RAW_PIXELS
    from plsc.evaluation.probe_parts import PartReader

    model = None if args.model in (None, RAW_PIXELS) else _open(args, mesh)
    return PartReader(model, mesh, args.batch_size, FLIP[args.flip] is True, args.image_size)


def _errors(parts: "Sequence[LabelledRows]", seed: int) -> dict[str, Any]:
    from plsc.evaluation.larger_galleries import predict_thresholds, sample_impostors
    from plsc.evaluation.one_to_many import identification_errors, search_gallery

    gallery, mated, non_mated = parts
    errors = identification_errors(search_gallery(gallery, mated, non_mated), seed=seed)
    return {**errors, "predicted": predict_thresholds(*sample_impostors(gallery, non_mated, seed=seed), seed=seed)}


def _search(args: argparse.Namespace) -> dict[str, Any] | None:
    from plsc.evaluation.report import searches_table, sizes_table
    from plsc.parallel.collectives import on_main
    from plsc.parallel.mesh import initialised

    with initialised() as mesh:
        reader = _reader(args, mesh)
        parts = reader.read(_parts(args), compared=True)
        found = on_main(lambda: _errors(parts, args.seed), mesh)
    if not mesh.is_main:
        return None
    show(*searches_table(found).split("\n"), "", *sizes_table(found["predicted"]).split("\n"))
    if reader.model is not None and args.calibration is not None:
        _calibrate_searches(args, reader.model, parts)
    sources = dict(zip(("gallery", "mated", "non_mated"), _parts(args), strict=True))
    return {"model": args.model, **sources, "searches": found}


def _probe(args: argparse.Namespace) -> dict[str, Any] | None:
    from functools import partial

    from plsc.evaluation.probe import NEIGHBOURS, TEMPERATURE, Probe, probe_parts
    from plsc.parallel.collectives import on_main
    from plsc.parallel.mesh import initialised

    chosen = Probe(args.probe, args.neighbours or NEIGHBOURS, args.temperature or TEMPERATURE)
    with initialised() as mesh:
        sources = [*args.data, *([] if args.train is None else [args.train])]
        parts = _reader(args, mesh).read(sources, compared=args.train is not None)
        train = None if args.train is None else parts.pop()
        sets = on_main(partial(probe_parts, chosen, train, parts, seed=args.seed), mesh)
    if not mesh.is_main:
        return None
    _show_probes(sets)
    return {"model": args.model, "sets": sets}


def _show_probes(sets: dict[str, dict[str, Any]]) -> None:
    from plsc.evaluation.report import probe_line

    for name, found in sets.items():
        show(probe_line(name, found))
        if found["unknown"]:
            images = counted(found["unknown"], "image")
            note(f"warning: {name}: {images} of classes that {found['train']} does not have count as wrong")


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


def _calibrate(
    args: argparse.Namespace,
    model: "EmbeddingModel",
    rocs: "dict[str, Roc]",
    images: int,
    searches: "SearchCalibration | None" = None,
) -> None:
    from plsc.embedding.embedder import contract_of
    from plsc.evaluation.calibration import calibrate, write_calibration

    contract = contract_of(model, FLIP[args.flip] is True)
    calibration = calibrate(rocs, contract_id=contract, model=args.model, images=images, searches=searches)
    write_calibration(args.calibration, calibration)
    strictest = calibration.points[-1]
    show(
        f"calibrated: {args.calibration} holds false-match rates down to {strictest.fmr:g} "
        f"(cosine {strictest.threshold:.4f}, true-match rate {strictest.tmr:.4f}), "
        f"from {calibration.impostor_pairs:,} different and {calibration.genuine_pairs:,} same pairs"
    )


def _calibrate_searches(args: argparse.Namespace, model: "EmbeddingModel", parts: "Sequence[LabelledRows]") -> None:
    from plsc.evaluation.one_to_many import pair_roc
    from plsc.evaluation.search_thresholds import calibrate_searches

    searches = calibrate_searches(parts[0], parts[2], seed=args.seed)
    rocs = {", ".join(part.name for part in parts): pair_roc(parts, args.seed)}
    _calibrate(args, model, rocs, sum(map(len, parts)), searches)
    if searches is None:
        note(f"warning: {args.calibration} predicts no FPIR: that takes 500 enrolled persons and 50,000 scores")
        return
    persons = searches.persons_at(1e-3)
    show(
        f"predicted: FPIR 1e-3 up to {counted(persons, 'person')}, from {searches.scores:,} scores of non-mated probes"
    )


def _draw(args: argparse.Namespace, sets: dict[str, dict[str, Any]]) -> None:
    from plsc.evaluation.report import roc_figure, score_figure

    for target, draw in ((args.plot, roc_figure), (args.histogram, score_figure)):
        if target is not None:
            draw(sets, target)
            show(f"drawn: {target}")
