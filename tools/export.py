"""Export a trained backbone for other programs; the file is verified against the backbone before it is renamed.

  onnx         one input `data` (B, 3, S, S), one output `embedding` (B, D), any batch size
  torch        a program that torch.export.load opens without plsc, any batch size
  insightface  the bare state_dict `model.pt` that arcface_torch loads
  timm         of a timm:NAME, a folder that timm.create_model("local-dir:DIR", pretrained=True) loads, and plsc too

Each takes RGB images as (x - mean)/std, which are 127.5 unless the run says otherwise, and returns embeddings that
are not normalised. A run directory stands for its model.safetensors, the last weights; --best takes best.safetensors,
those of the best evaluation.

Of onnx, --with-preprocessing makes a file that takes pictures as they are decoded, uint8 (B, S, S, 3) RGB. fp16 halves
the file, for GPUs. int8 is for CPUs: some pictures of --data give its ranges, and the others, of other people, tell
what it loses: TAR at a false accept rate, and the threshold that holds that rate. A file that loses more than
--max-tar-loss is not written. An int8 file has a contract id of its own: embed, index and calibrate with it anew.

--compatible-with OLD writes into an .onnx file that its queries search galleries of the model OLD. RUN was trained for
it, with compatible.with and OLD's class centres. plsc serve and plsc index then take such a gallery. Measure first what
is found there: `plsc eval --old OLD --new NEW`.

Instead of RUN, --format onnx takes a float32 ONNX file of any embedding model, somebody else's too, and writes it anew
with --precision fp16 or int8, or --with-preprocessing.

  plsc export runs/faces --format onnx --out faces.onnx
  plsc export runs/faces --format onnx --out faces16.onnx --with-preprocessing --precision fp16
  plsc export runs/faces --format onnx --out faces8.onnx --precision int8 --data people/
  plsc export runs/new --format onnx --out new.onnx --compatible-with old.onnx
  plsc export theirs.onnx --format onnx --out theirs8.onnx --precision int8 --data people/
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.files import check_output, remove_leftovers
from plsc.progress import show
from plsc.tools.entry import (
    add_outside_option,
    add_result_options,
    add_sign_option,
    add_verify_option,
    number,
    positive,
)

if TYPE_CHECKING:
    from plsc.embedding.embedder import Engine
    from plsc.embedding.export import Judge
    from plsc.embedding.onnx_deployment import OnnxForm
    from plsc.evaluation.precision_loss import JudgedPictures
    from plsc.models import Backbone
    from plsc.models.preprocessing import Preprocessing

HELP = "write a trained backbone as ONNX, a torch program, arcface_torch's weights or timm's folder"
FORMATS = ("onnx", "torch", "insightface", "timm")
PRECISIONS = ("fp32", "fp16", "int8")
ONNX = ".onnx"
CALIBRATED, MAX_TAR_LOSS = 256, 0.01


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "model",
        metavar="RUN",
        help="a run directory, a .safetensors file, hf-hub:ORG/NAME, arcface_torch's .pt, or an .onnx file to reduce",
    )
    parser.add_argument("--best", action="store_true", help="of RUN, the weights of the best evaluation")
    parser.add_argument("--format", required=True, choices=FORMATS, help="what to write")
    parser.add_argument(
        "--out", required=True, metavar="FILE", type=Path, help="the file to write; of timm, the folder"
    )
    text = "largest difference allowed, as a share of the largest embedding value (1e-4; fp16 1e-2; int8 any)"
    parser.add_argument("--tolerance", type=float, help=text)
    add = parser.add_argument_group("--format onnx").add_argument
    add("--with-preprocessing", action="store_true", help="take uint8 (B, S, S, 3) RGB, and normalise it inside")
    add("--precision", choices=PRECISIONS, default="fp32", help="that the file computes in (fp32)")
    add("--data", metavar="DIR", help="people that fp16 and int8 are judged on, two pictures and more of each")
    add("--calibrate", type=positive, metavar="N", help="pictures of --data that int8 takes its ranges from (256)")
    share = number(float, lambda value: 0 < value <= 1, "it lies between 0 and 1")
    add("--max-tar-loss", type=share, metavar="L", help="of fp16 and int8, on --data (0.01)")
    text = "the models whose galleries RUN was trained to search (compatible.with)"
    add("--compatible-with", nargs="+", default=[], metavar="OLD", help=text)
    add_outside_option(parser)
    add_sign_option(parser)
    add_verify_option(parser)
    add_result_options(parser, replaces="--out, --json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Export, and print the largest difference between the file's embeddings and the backbone's."""
    from plsc.embedding.embedder import model_file
    from plsc.models import load_model
    from plsc.models.preprocessing import size_text
    from plsc.signing import load_private_key, sign

    _check(args)
    if args.format == "timm":
        return _export_timm(args)
    if args.out.is_dir():
        raise UsageError(f"--out {args.out} is a folder; name a file")
    key = None if args.sign is None else load_private_key(args.sign)
    check_output(args.out, overwrite=args.overwrite)
    remove_leftovers(args.out)
    path = model_file(args.model, best=args.best)
    if path.suffix == ONNX:
        name, result = path.name, _reduce_onnx(args, path)
    else:
        model = load_model(path)
        name, result = model.name, _export_backbone(args, model)
    if key is not None:
        sign(args.out, key)
    show(
        f"{result['file']}: {name}, {result['bytes'] / 1e6:.1f} MB, {size_text(result['image_size'])}"
        f" -> {result['embedding_dim']}, largest difference {result['max_abs_error']:.1e}"
    )
    if others := result.get("compatible_with"):
        show(f"compatible with galleries of {', '.join(others)}")
    return result


def _check(args: argparse.Namespace) -> None:
    """Refuse options that the file cannot have."""
    from plsc.embedding.known_models import find_known

    given = {
        "--with-preprocessing": args.with_preprocessing,
        "--precision": args.precision != "fp32",
        "--data": args.data is not None,
        "--calibrate": args.calibrate is not None,
        "--max-tar-loss": args.max_tar_loss is not None,
        "--compatible-with": bool(args.compatible_with),
    }
    for option in (name for name, is_given in given.items() if is_given):
        if args.format != "onnx":
            raise UsageError(f"{option} is an option of --format onnx; leave it out")
        if option == "--calibrate" and args.precision != "int8":
            raise UsageError("--calibrate: int8 alone is calibrated; leave it out, or give --precision int8")
        if option == "--data" and args.precision == "fp32":
            raise UsageError("--data judges --precision fp16 and int8; leave it out")
        if option == "--max-tar-loss" and args.data is None:
            raise UsageError("--max-tar-loss is judged on pictures of people: give --data")
    if args.precision == "int8" and args.data is None:
        raise UsageError("--precision int8 is calibrated and judged on pictures of people: give --data")
    if Path(args.model).suffix != ONNX and find_known(args.model) is None:
        return
    if args.compatible_with:
        raise UsageError(f"--compatible-with takes the run that was trained: {args.model} keeps what it states itself")
    if args.format != "onnx":
        raise UsageError(f"{args.model} is reduced to another .onnx file only: give --format onnx, or the model's run")
    if args.precision == "fp32" and not args.with_preprocessing:
        raise UsageError(f"{args.model} is ONNX already: give --precision fp16 or int8, or --with-preprocessing")


def _export_backbone(args: argparse.Namespace, model: "Backbone") -> dict[str, Any]:
    from plsc.embedding import export
    from plsc.features.compatible.models import compatible_models

    if args.format == "onnx":
        form, pictures = _form(args, model.preprocessing)
        judge = None if pictures is None else _judge(args, pictures)
        others = compatible_models(args.model, model, args.compatible_with) if args.compatible_with else []
        about: dict[str, Any] = {"tolerance": args.tolerance, "form": form, "judge": judge}
        return export.export_onnx(model, args.out, **about, compatible_with=others)
    if args.format == "torch":
        tolerance = export.TOLERANCE if args.tolerance is None else args.tolerance
        return export.export_torch(model, args.out, tolerance=tolerance)
    return export.export_insightface(model, args.out)


def _reduce_onnx(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    from plsc.embedding.export import reduce_onnx
    from plsc.embedding.onnx_source import open_source

    source = open_source(path)
    form, pictures = _form(args, source.engine.preprocessing)
    judge = None if pictures is None else _judge(args, pictures)
    return reduce_onnx(source, args.out, tolerance=args.tolerance, form=form, judge=judge)


def _form(args: argparse.Namespace, preprocessing: "Preprocessing") -> tuple["OnnxForm", "JudgedPictures | None"]:
    """What the file is to be, and the pictures of --data."""
    from plsc.embedding.onnx_deployment import OnnxForm
    from plsc.evaluation.precision_loss import JudgedPictures

    if args.data is None:
        return OnnxForm(args.precision, args.with_preprocessing), None
    calibrated = (args.calibrate or CALIBRATED) if args.precision == "int8" else 0
    pictures = JudgedPictures(args.data, preprocessing, calibrated)
    return OnnxForm(args.precision, args.with_preprocessing, pictures.batches()), pictures


def _judge(args: argparse.Namespace, pictures: "JudgedPictures") -> "Judge":
    def judge(reference: "Engine", reduced: "Engine") -> dict[str, Any]:
        found = pictures.loss(reference, reduced, args.max_tar_loss or MAX_TAR_LOSS)
        show(*found.lines(args.precision))
        return found.to_dict()

    return judge


def _export_timm(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.embedding.embedder import model_file
    from plsc.files import atomic_folder
    from plsc.hub import check_folder, write_timm
    from plsc.models import load_model
    from plsc.signing import load_private_key

    check_folder(args.out, overwrite=args.overwrite)
    key = None if args.sign is None else load_private_key(args.sign)
    model = load_model(model_file(args.model, best=args.best))
    with atomic_folder(args.out) as folder:
        about, written = write_timm(model, folder, key=key)
    show(f"{args.out}: timm's model returns the {written.returns}, largest difference {written.max_abs_error:.1e}")
    return {"format": "timm", "folder": str(args.out), **written._asdict(), "contract_id": about["contract_id"]}
