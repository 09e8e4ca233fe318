"""Export a trained backbone for other programs; the file is verified against the backbone before it is renamed.

  onnx         one input `data` (B, 3, S, S), one output `embedding` (B, D), any batch size
  torch        a program that torch.export.load opens without plsc, any batch size
  insightface  the bare state_dict `model.pt` that arcface_torch loads

Each takes RGB images as (x - mean)/std, which are 127.5 unless the run says otherwise, and returns embeddings that
are not normalised. A run directory stands for its model.safetensors, the last weights; --best takes best.safetensors,
those of the best evaluation.

example: plsc export runs/faces --format onnx --out faces.onnx
"""

import argparse
from pathlib import Path
from typing import Any

from plsc.errors import UsageError
from plsc.files import check_output, remove_leftovers
from plsc.progress import show
from plsc.tools.entry import add_result_options, add_sign_option, add_verify_option

HELP = "write a trained backbone as ONNX, a torch program or arcface_torch's weights"
FORMATS = ("onnx", "torch", "insightface")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", metavar="RUN", help="a run directory, a .safetensors file, or arcface_torch's .pt")
    parser.add_argument("--best", action="store_true", help="of RUN, the weights of the best evaluation")
    parser.add_argument("--format", required=True, choices=FORMATS, help="what to write")
    parser.add_argument("--out", required=True, metavar="FILE", type=Path, help="the file to write")
    text = "largest difference allowed, as a share of the largest embedding value (default %(default)g)"
    parser.add_argument("--tolerance", type=float, default=1e-4, help=text)
    add_sign_option(parser)
    add_verify_option(parser)
    add_result_options(parser, replaces="--out, --json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Export, and print the largest difference between the file's embeddings and the backbone's."""
    from plsc.embedding import export
    from plsc.embedding.embedder import model_file
    from plsc.models import load_model
    from plsc.models.preprocessing import size_text
    from plsc.signing import load_private_key, sign

    if args.out.is_dir():
        raise UsageError(f"--out {args.out} is a folder; name a file")
    key = None if args.sign is None else load_private_key(args.sign)
    check_output(args.out, overwrite=args.overwrite)
    remove_leftovers(args.out)
    model = load_model(model_file(args.model, best=args.best))
    if args.format == "onnx":
        result = export.export_onnx(model, args.out, tolerance=args.tolerance)
    elif args.format == "torch":
        result = export.export_torch(model, args.out, tolerance=args.tolerance)
    else:
        result = export.export_insightface(model, args.out)
    if key is not None:
        sign(args.out, key)
    show(
        f"{result['file']}: {model.name}, {result['bytes'] / 1e6:.1f} MB, {size_text(result['image_size'])}"
        f" -> {result['embedding_dim']}, largest difference {result['max_abs_error']:.1e}"
    )
    return result
