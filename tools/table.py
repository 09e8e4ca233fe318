"""The class table of a checkpoint: what it holds, as files, to and from arcface_torch, and its classes by name.

  plsc table info runs/faces                           rows, types, norms, and the files that hold them
  plsc table export runs/faces table.safetensors       weight, the optimizer's tables, classes, margin and step
  plsc table export runs/faces shards --format arcface_torch --world-size 8
  plsc table import work_dirs/r50 table.safetensors    arcface_torch's shards joined, for head.init_rows

Of tables whose classes are known by name (dynamic.max_classes), while no training runs on them:

  plsc table info runs/faces --names                   the names of the classes that have a row
  plsc table remove runs/faces Ada "Jan Novak"         from every checkpoint of the run: nothing of them is kept
  plsc table check runs/faces Ada "Jan Novak"          exits with 1 where a file of the run still names them
  plsc table check runs/faces --removed BEFORE         likewise where one holds a row that BEFORE had of a class gone
  plsc table merge runs/faces Ada_2 Ada_3 --into Ada   the names become one class, of their rows' mean direction
  plsc table split runs/faces Ada --into Ada_2 Ada_3   classes of their own, that begin with the row of Ada
  plsc table rename runs/faces Ada Lovelace
  plsc table add runs/faces --from runs/other          rows of the classes that are missing here, by name

PATH is a checkpoint's folder, a run, or its checkpoints folder, of which the newest is taken. No ranks are started,
whatever strategy and number of ranks wrote them, and the table may be larger than the memory.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.files import check_output, remove_leftovers
from plsc.progress import counted, show
from plsc.regular_files import open_regular
from plsc.tools.entry import add_action, add_actions, add_verify_option, positive

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from plsc.features.dynamic.named_table import NamedTable
    from plsc.train.arcface_torch_shards import Shards
    from plsc.train.stored_table import StoredTable

HELP = "describe, export, import and change class tables; arcface_torch's shards"
_FORMATS = ("safetensors", "arcface_torch", "arcface_torch-2021")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = add_actions(parser, "info|export|import|remove|check|merge|split|rename|add")
    info = add_action(actions, "info", _info, "describe the table: rows, types, norms, files")
    export = add_action(actions, "export", _export, "write the table as a file, or shards", replaces="OUT, --json")
    joining = add_action(actions, "import", _import, "join arcface_torch's shards", replaces="OUT, --json")
    info.add_argument("--names", action="store_true", help="list the names of the classes")
    _configure_changes(actions, info, export)
    for action in (info, export):
        action.add_argument("path", type=Path, metavar="PATH", help="a checkpoint's folder, a run, or its checkpoints")
        action.add_argument("--table", metavar="NAME", default="", help="one of several class tables")
    for action in (info, export, joining):
        add_verify_option(action)
    export.add_argument("out", type=Path, metavar="OUT", help="a .safetensors file, or a folder for shards")
    text = "arcface_torch: softmax_fc_gpu_R.pt, as its heads since 2022 load them; "
    text += "arcface_torch-2021: rank_R_softmax_weight.pt with the momentum (default: safetensors)"
    export.add_argument("--format", choices=_FORMATS, default=_FORMATS[0], help=text)
    text = "the number of arcface_torch's ranks that will read the shards"
    export.add_argument("--world-size", "--world_size", type=positive, metavar="W", help=text)
    text = "the folder with checkpoint_gpu_R.pt, softmax_fc_gpu_R.pt or rank_R_softmax_weight.pt, or these files"
    joining.add_argument("shards", type=Path, nargs="+", metavar="SHARDS", help=text)
    joining.add_argument("out", type=Path, metavar="OUT", help="a .safetensors file; or .npy, of the weights alone")
    text = "how many classes there must be: else files of the last ranks may be missing unseen"
    joining.add_argument("--classes", type=positive, metavar="C", help=text)


def _configure_changes(actions: Any, *others: argparse.ArgumentParser) -> None:
    """Declare the actions that change classes by name."""
    remove = add_action(actions, "remove", _remove, "remove classes from all checkpoints")
    check = add_action(actions, "check", _check, "tell whether any file still holds classes")
    merge = add_action(actions, "merge", _merge, "let names be of one class")
    split = add_action(actions, "split", _split, "make classes of names, with the row of another")
    rename = add_action(actions, "rename", _rename, "give a class another name")
    adding = add_action(actions, "add", _add, "take rows of another run by name")
    for action in (remove, check, merge, split, rename, adding):
        action.add_argument("path", type=Path, metavar="PATH", help="a checkpoint's folder, a run, or its checkpoints")
        action.add_argument("--table", metavar="NAME", default="", help="one of several class tables")
        add_verify_option(action)
    for action in (remove, check, merge, adding):
        action.add_argument("names", nargs="*", metavar="NAME", help="of classes")
        action.add_argument("--names", dest="file", type=Path, metavar="FILE", help="more names, one a line")
    text = "copies from before the removal (runs, checkpoints, .safetensors of plsc table export): the rows and the "
    text += "optimizer's state that these have of the classes, without names of all that are gone, are looked for too"
    check.add_argument("--removed", type=Path, nargs="+", default=[], metavar="BEFORE", help=text)
    text = "files and folders that are looked through beside the run's own, such as exports"
    check.add_argument("--files", type=Path, nargs="+", default=[], metavar="PATH", help=text)
    merge.add_argument("--into", required=True, metavar="NAME", help="the class that they become")
    split.add_argument("name", metavar="NAME", help="the class")
    text = "new names, or names that share the class by a merge: each is a class of its own then"
    split.add_argument("--into", required=True, nargs="+", metavar="NAME", help=text)
    rename.add_argument("old", metavar="OLD", help="the class")
    rename.add_argument("new", metavar="NEW", help="its name from now on")
    text = "the run or checkpoint to take rows of; without names, all that are missing"
    adding.add_argument("--from", dest="source", required=True, type=Path, metavar="OTHER", help=text)


def exit_code(result: dict[str, Any] | None) -> int:
    """Return 1 where ``check`` has found something."""
    return int(bool((result or {}).get("found")))


def _names(args: argparse.Namespace, *, least: int = 1) -> list[str]:
    """The names that a command line gives, by itself and in a file."""
    names = list(args.names)
    if args.file is not None:
        try:
            with open_regular(args.file) as file:
                names += [line for line in file.read().decode().splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read --names {args.file}: {error}") from None
    if len(names) < least:
        raise UsageError("name a class at least, or give --names FILE")
    return names


def _remove(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.features.dynamic.named_table import NamedTable, forget_names, other_copies
    from plsc.features.dynamic.removed_rows import table_files
    from plsc.train.checkpoint import CHECKPOINTS
    from plsc.train.checkpoint_inspection import find_checkpoints

    names, paths = list(dict.fromkeys(_names(args))), find_checkpoints(args.path)
    NamedTable(paths[-1], args.table).check_names(names)  # before anything changes; older ones may lack some
    for path in paths:
        table = NamedTable(path, args.table)
        gone = [name for name in names if name in table.known_names]
        if gone:
            table.remove(gone)
            table.save()
        show(f"{path}: {counted(len(gone), 'class')} removed, {table.num_classes:,} left")
    run = paths[0].parent.parent
    if paths[0].parent.name == CHECKPOINTS:
        forget_names(run, names)
        for copy in (*other_copies(run), *table_files(paths[-1])):
            show(f"{copy} was not changed: delete it, or it keeps them")
    return {"checkpoints": [str(path) for path in paths], "removed": names}


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.features.dynamic.named_table import find_names
    from plsc.features.dynamic.removed_rows import files_of_run
    from plsc.train.checkpoint_inspection import find_checkpoints

    paths, names = find_checkpoints(args.path), _names(args, least=0 if args.removed else 1)
    files = files_of_run(paths, args.files)
    found = [
        {"file": str(path), "name": name, "holds": "name"} for path, name in find_names(paths, names, files, args.table)
    ]
    for each in found:
        show(f"{each['file']}: holds {each['name']}")
    if not found and names:
        show(f"none of the names is in any of {counted(len(files), 'file')}")
    return {"found": found + (_rows_found(args, names, paths, files) if args.removed else [])}


def _rows_found(
    args: argparse.Namespace, names: list[str], paths: list[Path], files: list[Path]
) -> list[dict[str, str]]:
    """What ``files`` hold of rows that the copies from before have."""
    from plsc.features.dynamic.named_table import NamedTable
    from plsc.features.dynamic.removed_rows import FormerTable, RemovedRows

    former = [table for path in args.removed for table in FormerTable.opened(path, args.table)]
    rows = RemovedRows(former, names, NamedTable(paths[-1], args.table).names)
    found = [{"file": str(path), "name": name, "holds": column} for path, name, column in rows.found_in(files)]
    for each in found:
        show(f"{each['file']}: holds the {each['holds']} of {each['name']}")
    if not found:
        show(f"no row of {counted(len(rows.classes), 'removed class')} is in any of {counted(len(files), 'file')}")
    if rows.skipped:
        why = "of few values or bytes, or as a class that stays has"
        show(f"  not looked for: {counted(rows.skipped, 'row')} {why}")
    return found


def _merge(args: argparse.Namespace) -> dict[str, Any]:
    names = list(dict.fromkeys(_names(args)))
    return _changed(args, lambda table: table.merge(names, args.into), f"{', '.join(names)} are of {args.into} now")


def _split(args: argparse.Namespace) -> dict[str, Any]:
    said = f"{', '.join(args.into)} begin with the row of {args.name}"
    return _changed(args, lambda table: table.split(args.name, args.into), said)


def _rename(args: argparse.Namespace) -> dict[str, Any]:
    return _changed(args, lambda table: table.rename(args.old, args.new), f"{args.old} is {args.new} now")


def _add(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.features.dynamic.named_table import NamedTable
    from plsc.train.checkpoint_inspection import find_checkpoints

    source = NamedTable(find_checkpoints(args.source)[-1], args.table)
    names = _names(args, least=0) or None
    return _changed(args, lambda table: table.add(source, names), f"rows of {source.path} added")


def _changed(args: argparse.Namespace, change: "Callable[[NamedTable], object]", said: str) -> dict[str, Any]:
    """Change the newest checkpoint: the one that a run goes on from."""
    from plsc.features.dynamic.named_table import NamedTable
    from plsc.train.checkpoint_inspection import find_checkpoints

    path = find_checkpoints(args.path)[-1]
    table = NamedTable(path, args.table)
    change(table)
    table.save()
    show(f"{path}: {said}; {counted(table.num_classes, 'class')}")
    return {"checkpoint": str(path), "classes": table.num_classes}


def _info(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.features.dynamic.named_table import NamedTable
    from plsc.train.checkpoint_inspection import find_checkpoints
    from plsc.train.stored_table import WEIGHT, open_table

    with open_table(find_checkpoints(args.path)[-1], args.table) as table:
        norms = _norms(table)
        dtypes = {name: str(each.dtype).removeprefix("torch.") for name, each in table.columns.items()}
        found = {
            "checkpoint": str(table.path),
            "table": table.name,
            "step": table.step,
            "classes": table.classes,
            "centers": table.centers,
            "rows": table.rows,
            "dim": table.dim,
            "margin": table.margin,
            "weight_dtype": dtypes[WEIGHT],
            "state_dtypes": {name: dtypes[name] for name in table.state},
            "norms": norms,
            "files": {name: list(each.files) for name, each in table.columns.items()},
        }
        show(*_lines(table, found))
    if args.names:
        names = NamedTable(table.path, args.table).names
        found["names"] = names
        show(*names)
    return found


def _lines(table: "StoredTable", found: dict[str, Any]) -> Iterator[str]:
    norms, centers = found["norms"], f" x {table.centers} sub-centres" if table.centers > 1 else ""
    state = ", ".join(f"{name} {dtype}" for name, dtype in found["state_dtypes"].items())
    none = "in the table's files, not read" if table.in_files else "none"
    of_finite = "no row is finite"
    if norms["mean"] is not None:
        of_finite = f"min {norms['min']:.6g}, mean {norms['mean']:.6g}, max {norms['max']:.6g}"
    yield f"{found['checkpoint']}{f', table {table.name}' if table.name else ''}"
    yield f"  rows      {table.rows:,} of {table.dim}: {table.classes:,} classes{centers}, {table.margin}"
    yield f"  types     weight {found['weight_dtype']}; optimizer: {state or none}"
    yield f"  norms     {of_finite}; {counted(norms['not_finite'], 'row')} not finite"
    for name, files in found["files"].items():
        yield f"  {name}: {', '.join(files)}"


def _norms(table: "StoredTable") -> dict[str, Any]:
    """Of the finite rows, in float64; None where there are none."""
    import torch

    from plsc.train.stored_table import WEIGHT

    lowest, highest, total, count = float("inf"), float("-inf"), 0.0, 0
    for start, stop in table.pieces(WEIGHT):
        norms = torch.linalg.vector_norm(table.floats(WEIGHT, start, stop), dim=1, dtype=torch.float64)
        norms = norms[norms.isfinite()]
        if len(norms):
            lowest, highest = min(lowest, norms.min().item()), max(highest, norms.max().item())
            total, count = total + norms.sum().item(), count + len(norms)
    known: dict[str, Any] = {"min": lowest, "mean": total / max(count, 1), "max": highest}
    return {**(known if count else dict.fromkeys(known)), "not_finite": table.rows - count}


def _export(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.train.checkpoint_inspection import find_checkpoints
    from plsc.train.stored_table import open_table, write_class_names

    as_file = args.format == _FORMATS[0]
    if as_file and args.out.suffix != ".safetensors":
        raise UsageError(f"{args.out}: name a .safetensors file, or give --format arcface_torch --world-size W")
    if as_file != (args.world_size is None):
        raise UsageError("--world-size W goes with --format arcface_torch, and says of how many ranks the shards are")
    _check_output(args.out, file=as_file, overwrite=args.overwrite)
    path = find_checkpoints(args.path)[-1]
    scratch = args.out.absolute().parent
    with open_table(path, args.table, state=args.format != "arcface_torch", scratch=scratch) as table:
        written = _write_file(table, args.out) if as_file else _write_shards(table, args)
    show(f"{args.out}: {written['rows']:,} rows of {written['dim']} of {path}; optimizer: {written['state']}")
    if names := write_class_names(path, args.out, args.table):
        show(f"{names}: the names of each class")
    return {"checkpoint": str(path), "file": str(args.out), **written}


def _write_file(table: "StoredTable", out: Path) -> dict[str, Any]:
    from plsc.train.table_file import write_table

    def pieces(name: str) -> "Iterator[Tensor]":
        for start, stop in table.pieces(name):
            yield table.read(name, start, stop).to(table.columns[name].dtype)

    numbers = {"classes": table.classes, "centers": table.centers, "step": table.step}
    texts = {"margin": table.margin, "table": table.name}
    remove_leftovers(out)
    tensors = {name: (each.dtype, each.shape) for name, each in table.columns.items()}
    write_table(out, tensors, pieces, {**{name: str(each) for name, each in numbers.items()}, **texts})
    return {"rows": table.rows, "dim": table.dim, "state": _state_written(table, list(table.state)), "files": []}


def _write_shards(table: "StoredTable", args: argparse.Namespace) -> dict[str, Any]:
    from plsc.train.arcface_torch_shards import MOMENTUM, write_shards

    files = write_shards(table, args.out, args.world_size, args.format)
    kept = [MOMENTUM] if args.format == "arcface_torch-2021" and MOMENTUM in table.columns else []
    return {"rows": table.rows, "dim": table.dim, "state": _state_written(table, kept), "files": files}


def _state_written(table: "StoredTable", kept: list[str]) -> str:
    return ", ".join(kept) or ("left out, as it is in the table's files" if table.in_files else "left out")


def _import(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.train.arcface_torch_shards import open_shards

    if args.out.suffix not in (".safetensors", ".npy"):
        raise UsageError(f"{args.out}: name a .safetensors or a .npy file")
    _check_output(args.out, file=True, overwrite=args.overwrite)
    shards = open_shards(args.shards, args.classes)
    remove_leftovers(args.out)
    kept = _write_joined(shards, args.out)
    found = [name for name in shards.tensors() if name not in ("weight", *kept)]
    left_out = [*shards.left_out, *(f"{name}, which a .npy has no place for" for name in found)]
    state = ", ".join(kept) or "none"
    show(f"{args.out}: {shards.classes:,} rows of {shards.dim} of {counted(len(shards.files), 'rank')}; state: {state}")
    for line in left_out:
        show(f"  left out: {line}")
    return {
        "file": str(args.out),
        "shards": [str(file) for file in shards.files],
        "classes": shards.classes,
        "dim": shards.dim,
        "state": kept,
        "left_out": left_out,
    }


def _write_joined(shards: "Shards", out: Path) -> list[str]:
    """Write the table; returns the names of the optimizer's tables that went along."""
    from plsc.embedding.columns import write_npy_header
    from plsc.files import atomic_write
    from plsc.train.checkpoint_writer import write_errors
    from plsc.train.stored_table import WEIGHT
    from plsc.train.table_file import write_rows, write_table

    tensors = shards.tensors()
    if out.suffix == ".safetensors":
        metadata = {"classes": str(shards.classes), "centers": "1", "source": "arcface_torch"}
        write_table(out, tensors, shards.pieces, metadata)
        return [name for name in tensors if name != WEIGHT]
    with write_errors(str(out)), atomic_write(out) as tmp_path, tmp_path.open("wb") as file:
        write_npy_header(file, (shards.classes, shards.dim))
        for piece in shards.pieces(WEIGHT):
            write_rows(file, piece.float())
    return []


def _check_output(out: Path, *, file: bool, overwrite: bool) -> None:
    """Refuse to write where something is, before any work is done."""
    if out.is_dir() == file and out.exists():
        raise UsageError(f"{out} is a {'folder; name a file' if file else 'file; name a folder'}")
    check_output(out, overwrite=overwrite)
