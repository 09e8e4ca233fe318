"""Look into checkpoints of plsc train: what they hold and whether they are whole; sign them; write weights as files.

  plsc checkpoint info runs/faces                      its checkpoints, and what the newest one holds
  plsc checkpoint verify runs/faces/checkpoints/step-00001000
  plsc checkpoint export runs/faces faces.safetensors --centres centres.npy
  plsc checkpoint sign runs/faces key.pem              so that others can ask for --verify-key public.pem

PATH is a checkpoint's folder, a run, or its checkpoints folder; of several, verify checks all, and export takes the
newest. No ranks are started, whatever strategy and number of ranks wrote them. verify reads every byte, and exits with
1 where a file is missing, truncated or corrupt.

OUT is a .safetensors file, which plsc embed, eval and export take, or a .pt file, the state_dict of arcface_torch.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from plsc.errors import IntegrityError, UsageError
from plsc.files import remove_leftovers
from plsc.progress import counted, note, show
from plsc.signing import VERIFY_KEY
from plsc.tools.entry import add_action, add_actions, add_verify_option

HELP = "describe, verify and export the checkpoints of a run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = add_actions(parser, "info|verify|export|sign")
    text = "describe the checkpoints: position, model, types, ranks, files"
    info = add_action(actions, "info", _info, text)
    verify = add_action(actions, "verify", _verify, "check every file against its hash")
    text = "write the backbone, and the class centres, as files"
    export = add_action(actions, "export", _export, text, replaces="OUT, --centres, --json")
    signing = add_action(actions, "sign", _sign, "check every file, and sign the manifests")
    for action in (info, verify, export, signing):
        action.add_argument("path", type=Path, metavar="PATH", help="a checkpoint's folder, a run, or its checkpoints")
    for action in (info, verify, export):
        add_verify_option(action)
    export.add_argument("out", type=Path, metavar="OUT", help="the backbone: a .safetensors or a .pt file")
    export.add_argument("--ema", action="store_true", help="the moving average of the weights (ema_decay)")
    text = "write the class table too: a .npy file, float32 (classes, dim)"
    export.add_argument("--centres", type=Path, metavar="FILE", help=text)
    export.add_argument("--table", metavar="NAME", default="", help="whose --centres: one of several class tables")
    signing.add_argument("key", type=Path, metavar="KEY", help="a private key: a PEM file of ed25519")


def exit_code(result: dict[str, Any] | None) -> int:
    """Return 1 where a checkpoint is not whole."""
    return int(any(each.get("problems") for each in (result or {}).get("checkpoints", ())))


def _info(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.train.checkpoint_inspection import describe_checkpoint, find_checkpoints

    described = [describe_checkpoint(path) for path in find_checkpoints(args.path)]
    for each in described if len(described) > 1 else ():
        accuracy = "" if each["accuracy"] is None else f", accuracy {each['accuracy']:.4f}"
        show(f"{Path(each['checkpoint']).name}  {each['saved_at']}  epoch {each['epoch']:.2f}{accuracy}")
    newest = described[-1]
    show(newest["checkpoint"])
    for name, text in _details(newest).items():
        show(f"  {name:<10}{text}")
    for file in newest["files"]:
        remark = "" if file["is_there"] else "  missing, or of another size"
        show(f"    {file['bytes']:>15,}  {file['name']}{remark}")
    return {"checkpoints": described}


def _details(each: dict[str, Any]) -> dict[str, str]:
    """The lines of ``info``, by their names."""
    size = each["image_size"]
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    average = ", with a moving average" if each["average"] else ""
    centers = f" x {each['centers']} sub-centres" if each["centers"] > 1 else ""
    table = _stored_types(each)
    if each["table_files"]:
        table = f"table in the files of {each['table_files']}, which belong to it"
    position = f"step {each['step']:,}, epoch {each['epoch']:.2f}"
    if each["accuracy"] is not None:
        position += f", mean accuracy {each['accuracy']:.4f}"
    if each["best"]:
        position += f" (best so far: {each['best'].get('accuracy')} at step {each['best'].get('step')})"
    return {
        "run": each["run"] or "-",
        "saved": f"{each['saved_at']} by {counted(each['world_size'], 'rank')}, {each['strategy']}",
        "position": position,
        "backbone": f"{each['backbone']}, {height}x{width} -> {each['embedding_dim']}, "
        f"{each['parameters']:,} numbers{average}; {each['optimizer']}",
        **({} if each["tables"] else {"head": f"{each['classes']:,} classes{centers}, {each['margin']}, {table}"}),
        **{
            f"table {own['name']}: ": f"{own['classes']:,} classes, {own['margin']}, {_stored_types(own)}"
            for own in each["tables"]
        },
        "data": f"{each['images']:,} images",
        "size": f"{each['bytes'] / 1e6:,.1f} MB in {counted(len(each['files']), 'file')}",
    }


def _stored_types(table: dict[str, Any]) -> str:
    state = ", ".join(f"{name} {dtype}" for name, dtype in table["state_dtypes"].items()) or "no momentum"
    return f"{table['weight_dtype']}; {state}"


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.train.checkpoint_inspection import find_checkpoints, verify_checkpoint

    results = []
    for path in find_checkpoints(args.path):
        result = verify_checkpoint(path)
        results.append(result)
        for problem in result["problems"]:
            note(f"plsc checkpoint: {problem}")
        verdict = counted(len(result["problems"]), "problem") if result["problems"] else "sound"
        show(f"{path}: {verdict}; {counted(result['files'], 'file')}, {result['bytes'] / 1e6:,.1f} MB")
    return {"checkpoints": results}


def _export(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.embedding.export import export_insightface
    from plsc.models import save_model
    from plsc.train.checkpoint_inspection import check_outputs, find_checkpoints, read_backbone
    from plsc.train.stored_table import write_centres, write_class_names

    if args.out.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"{args.out}: name a .safetensors file, or a .pt file for arcface_torch")
    if args.centres is not None and args.centres.suffix != ".npy":
        raise UsageError(f"--centres {args.centres}: name a .npy file")
    if args.table and args.centres is None:
        raise UsageError("--table says whose --centres are written; give --centres FILE with it")
    check_outputs(args.out, args.centres, overwrite=args.overwrite)
    path = find_checkpoints(args.path)[-1]
    model = read_backbone(path, average=args.ema)
    centres = None
    if args.centres is not None:
        remove_leftovers(args.centres)
        centres = write_centres(path, args.centres, args.table)
        show(f"{args.centres}: class centres {' x '.join(map(str, centres['shape']))}, float32")
        if names := write_class_names(path, args.centres, args.table):
            show(f"{names}: the names of each")
    remove_leftovers(args.out)
    if args.out.suffix == ".pt":
        export_insightface(model, args.out)
    else:
        save_model(model, args.out)
    weights = "the moving average" if args.ema else "the weights"
    show(f"{args.out}: {weights} of {path}, {model.name} -> {model.embedding_dim}")
    return {"checkpoint": str(path), "file": str(args.out), "ema": args.ema, "centres": centres}


def _sign(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.signing import load_private_key, sign
    from plsc.train.checkpoint_inspection import find_checkpoints, verify_checkpoint

    key = load_private_key(args.key)
    os.environ.pop(VERIFY_KEY, None)  # what is signed now need not be signed before
    signatures = []
    for path in find_checkpoints(args.path):
        if problems := verify_checkpoint(path)["problems"]:
            raise IntegrityError(f"not signed: {problems[0]}")
        signatures.append(str(sign(path, key)))
        show(signatures[-1])
    return {"signatures": signatures}
