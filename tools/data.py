"""Convert, check, align and describe sets of labelled images.

SOURCE is what data.train takes (docs/data.md): a folder per identity, a list file with a line path<TAB>label per image,
.rec, .tar, .parquet, .arrow or .lance files (one, a glob in quotes, {000..999}, a folder of them, or a list of their
names), perhaps with ?label=FIELD behind it; these in s3://, gs:// or az://; hub:ORG/NAME?split=train; or a built-in
drawing, avatars:IDSxIMAGES[@FIRST] or glyphs:BLOCK.

  plsc data convert faces/ faces.rec           a folder to a .rec; the other way round: plsc data convert X.rec faces/
  plsc data check faces.rec                    decode everything; find duplicates and empty classes
  plsc data stats faces/ --plot classes.png    images per class
  plsc data pairs unseen/ unseen.bin           a verification set for `plsc eval`, half of its pairs the same identity
  plsc data pairs lfw-aligned/ lfw.bin --list pairs.txt             LFW's own pairs and folds
  plsc data align photos/ --out faces.rec --landmarks points.csv    cut out the faces, aligned as models expect them
  plsc data align photos/ --out faces/ --detector mtcnn             also of photos that are in no sub-folder
  plsc data from-gallery gallery/ people/      the pictures that `plsc serve --keep-thumbnails` kept, a class per person

Of a folder, files ending in .jpg, .jpeg, .jfif, .png, .webp, .bmp, .gif (the first frame), .tif, .tiff, .pgm, .ppm,
.pbm, .pnm and .avif are read, and .heic, .heif and .hif where pillow-heif is installed (the extra heic); a line names
what is left out. Hidden files are passed over, and folders that systems make: @eaDir, #recycle and #snapshot
(Synology), @__thumb, @Recycle and @Recently-Snapshot (QNAP), $RECYCLE.BIN, RECYCLER, System Volume Information,
__MACOSX and lost+found.

A pipe, a device or a link out of the folder is no picture, whatever its name; a list may name pictures in its own
folder. --allow-outside reads those in other places too.

Images keep their paths below SOURCE: in a folder with another suffix where the format changes, in a .rec by the keys
file X.keys.tsv beside it (lines key<TAB>class<TAB>path). An output that exists is refused, unless --overwrite is given.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import DataError, UsageError, quoted
from plsc.files import check_output, new_folder
from plsc.progress import counted, show
from plsc.tools.entry import (
    SOURCES,
    add_action,
    add_actions,
    add_detector_option,
    add_outside_option,
    natural,
    positive,
)

if TYPE_CHECKING:
    from plsc.data.dataset import ImageDataset

DRAWN_PAIRS = 6000
USUAL_SIDE = 112  # pixels, of models of faces
HELP = "convert, check, count and align sets of images; make verification pairs; take a gallery's pictures"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    actions = add_actions(parser, "COMMAND")
    text = "write SOURCE as a .rec, or as a folder per identity"
    convert = add_action(actions, "convert", _convert, text, replaces="OUT, --json")
    check = add_action(actions, "check", _check, "decode every image; find duplicates and empty classes")
    text = "show how many images the classes have"
    stats = add_action(actions, "stats", _stats, text, replaces="--plot, --json")
    pairs = add_action(actions, "pairs", _pairs, "write a .bin of verification pairs of SOURCE", replaces="OUT, --json")
    text = "cut the faces out of SOURCE's pictures, aligned by five landmarks"
    align = add_action(actions, "align", _align, text, replaces="OUT, --json")
    for action in (convert, check, stats, pairs, align):
        action.add_argument("source", metavar="SOURCE", help=SOURCES)
        add_outside_option(action)
    convert.add_argument("out", metavar="OUT", type=Path, help="X.rec, or a folder")
    text = "give up past N broken images (1000)"
    convert.add_argument("--max-bad-records", type=natural, default=1000, metavar="N", help=text)
    check.add_argument("--workers", type=natural, default=0, metavar="N", help="processes that decode (0: this one)")
    stats.add_argument("--plot", type=Path, metavar="FILE", help="draw the histogram into FILE (.png or .svg)")
    _configure_pairs(pairs)
    for action in (convert, pairs):
        text = "resize to SxS and encode anew; without it, bytes are copied"
        action.add_argument("--size", type=positive, metavar="S", help=text)
        text = "for images encoded anew (jpeg, quality 95)"
        action.add_argument("--encoding", choices=("jpeg", "png"), default="jpeg", help=text)
    _configure_align(align)
    text = "write the pictures that a gallery's service keeps as a folder per person"
    _configure_from_gallery(add_action(actions, "from-gallery", _from_gallery, text, replaces="OUT, --json"))


def _configure_pairs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="the .bin to write")
    text = "take the pairs of this list, in LFW's form (pairs.txt), by the images' names (NAME/NAME_0001.jpg)"
    add("--list", type=Path, metavar="FILE", help=text)
    add("--skip-missing", action="store_true", help="with --list: leave out pairs of which SOURCE lacks an image")
    add("--pairs", type=int, metavar="N", help=f"number of pairs that are drawn ({DRAWN_PAIRS})")
    add("--seed", type=natural, metavar="N", help="another seed draws other pairs (0)")


def _configure_align(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", required=True, metavar="OUT", type=Path, help="X.rec, or a folder")
    source = parser.add_mutually_exclusive_group(required=True)
    text = 'lines path,x1,y1,…,x5,y5 in pixels (or with tabs, or {"path", "landmarks"} as JSON): docs/faces.md'
    source.add_argument("--landmarks", type=Path, metavar="FILE", help=text)
    add_detector_option(source, "find each picture's largest face")
    add("--size", type=positive, default=112, metavar="S", help="side of the crops in pixels (112)")
    add("--encoding", choices=("jpeg", "png"), default="jpeg", help="of the crops (jpeg, quality 95)")
    add("--workers", type=natural, default=0, metavar="N", help="processes that cut (0: this one)")
    add("--max-bad-records", type=natural, metavar="N", help="give up past N pictures without a face (any number)")


def _configure_from_gallery(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", metavar="STORE", help="the folder of plsc serve, or milvus:URI, postgres:DSN")
    add("out", metavar="OUT", type=Path, help="a folder; its classes are named by the ids of the persons")
    add("--collection", default="people", metavar="NAME", help="whose persons (people)")
    text = "of plsc serve --thumbnails (STORE/thumbnails where the store is a folder)"
    add("--thumbnails", type=Path, metavar="DIR", help=text)
    add("--encrypt", type=Path, metavar="KEYFILE", help="of an encrypted store, with --thumbnails")
    add_outside_option(parser)
    add("--least", type=positive, default=1, metavar="N", help="leave out persons with fewer pictures (1)")
    add("--names", action="store_true", help="write OUT/persons.json, the names by id")


def _convert(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data import open_dataset
    from plsc.data.convert import check_out
    from plsc.data.packed_tars import unpacked_tars

    check_out(args.source, args.out, overwrite=args.overwrite)
    options = {"image_size": args.size, "max_bad_records": args.max_bad_records}
    with unpacked_tars(args.source, args.out) as source:
        dataset = open_dataset(source, **options, label_columns=None)
        dataset.source = args.source
        return _written(args, dataset)


def _align(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data import open_dataset
    from plsc.data.alignment import AlignedImages
    from plsc.data.convert import check_out
    from plsc.embedding.sources import locator, open_pictures

    check_out(args.source, args.out, overwrite=args.overwrite)
    if args.out.suffix == ".rec":  # whose pictures all have a class
        pictures = open_dataset(args.source, image_size=None, max_bad_records=args.max_bad_records)
    else:
        pictures = open_pictures(args.source, max_bad_records=args.max_bad_records)
    faces = AlignedImages(pictures, locator(pictures, args.landmarks, args.detector), args.size)
    return _written(args, faces, "face", workers=args.workers, label="align")


def _written(args: argparse.Namespace, images: "ImageDataset", noun: str = "image", **options: Any) -> dict[str, Any]:
    from plsc.data.convert import convert

    common = {"encoding": args.encoding, "max_bad_records": args.max_bad_records, "overwrite": args.overwrite}
    result = convert(images, args.out, **common, **options)
    lost = counted(result["left_out"], "picture") if noun == "face" else f"{result['left_out']:,}"
    left_out = f", {lost} left out" if result["left_out"] else ""
    several = f", {result['several']:,} of them the largest of several" if "several" in result else ""
    show(f"{result['out']}: {_images_of_classes(result, noun)}{several}{left_out}")
    return result


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data import open_dataset
    from plsc.data.inspection import check
    from plsc.files import write_json

    dataset = open_dataset(args.source, image_size=None, max_bad_records=None)
    result = check(dataset, workers=args.workers)
    show(f"{result['source']}: {_images_of_classes(result)}")
    for item in result["broken_images"]:
        show(f"  broken: {item['key']}: {item['why']}")
    for item in result["duplicate_images"]:
        show(f"  duplicate: {item['key']} is {item['same_as']} again")
    for name in result["empty_classes"][:100]:
        others = dataset.empty_classes.get(name)
        show(f"  empty class: {name}" + (f", which holds {others}" if others else ""))
    counts = (
        f"{result['broken']:,} broken, {counted(result['duplicates'], 'duplicate')} "
        f"({result['duplicates_across_classes']:,} across classes), "
        f"{counted(len(result['empty_classes']), 'empty class')}"
    )
    if result["broken"]:
        if args.json is not None:
            write_json(args.json, result)
        raise DataError(f"{result['source']}: {counts}; replace or remove the broken images")
    show(counts)
    return result


def _stats(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data import open_dataset
    from plsc.data.inspection import stats, stats_lines, stats_plot

    if args.plot is not None and args.plot.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--plot {args.plot} ends in neither .png nor .svg")
    if args.plot is not None:
        check_output(args.plot, overwrite=args.overwrite)
        if not args.plot.absolute().parent.is_dir():
            raise UsageError(f"--plot {args.plot}: there is no folder {args.plot.parent}; make it first")
    result = stats(open_dataset(args.source, image_size=None, max_bad_records=None))
    show(*stats_lines(result))
    if args.plot is not None:
        stats_plot(result, args.plot)
    return result


def _pairs(args: argparse.Namespace) -> dict[str, Any]:
    if args.out.suffix != ".bin":
        raise UsageError(f"{args.out} does not end in .bin")
    if args.out.is_dir():
        raise UsageError(f"{args.out} is a folder; name a file")
    check_output(args.out, overwrite=args.overwrite)
    with new_folder(args.out.absolute().parent):
        return _drawn_pairs(args) if args.list is None else _listed_pairs(args)


def _drawn_pairs(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data import open_dataset
    from plsc.data.pairs import make_pairs

    if args.skip_missing:
        raise UsageError("--skip-missing goes with --list")
    seed = 0 if args.seed is None else args.seed
    dataset = open_dataset(args.source, image_size=args.size)
    pairs = DRAWN_PAIRS if args.pairs is None else args.pairs
    result = make_pairs(dataset, args.out, pairs=pairs, seed=seed, encoding=args.encoding, overwrite=args.overwrite)
    show(_pairs_text(result))
    return result


def _listed_pairs(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data.pair_list import pairs_of_list, read_pair_list
    from plsc.embedding.sources import open_images, open_pictures

    if args.pairs is not None or args.seed is not None:
        raise UsageError("--list takes all pairs of the list; leave --pairs and --seed out")
    pair_list = read_pair_list(args.list)
    dataset = open_pictures(args.source) if args.size is None else open_images(args.source, args.size)
    options = {"encoding": args.encoding, "skip_missing": args.skip_missing, "overwrite": args.overwrite}
    result = pairs_of_list(dataset, pair_list, args.out, **options)
    folds = f", in {counted(result['folds'], 'fold')}" if result["folds"] else ""
    left_out = f", {counted(result['left_out'], 'pair')} left out" if result["left_out"] else ""
    show(f"{_pairs_text(result)}{folds}{left_out}")
    return result


def _pairs_text(result: dict[str, Any]) -> str:
    return (
        f"{result['out']}: {counted(result['pairs'], 'pair')}, {result['same']:,} of them the same identity, from "
        f"{counted(result['images'], 'image')} of {counted(result['identities'], 'identity')}"
    )


def _from_gallery(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.gallery.backends import display_name, opened_store
    from plsc.gallery.pictures import write_pictures

    os.umask(0o077)  # all that is written here holds faces
    thumbnails = _thumbnails_of(args)
    with opened_store(args.store, args.encrypt) as store:
        held = [info.name for info in store.collections()]
        if args.collection not in held:
            others = f"name one of {', '.join(held)}" if held else "it has none"
            raise UsageError(f"{display_name(args.store)} has no collection {quoted(args.collection)}: {others}")
        options = {"least": args.least, "names": args.names}
        result = write_pictures(store, args.collection, thumbnails, args.out, **options)
    show(*_picture_lines(result, args.least))
    return result


def _thumbnails_of(args: argparse.Namespace) -> Path:
    """The folder of the pictures of --collection's store, after looking at OUT, which lies in neither of them."""
    from plsc.data.convert import check_out
    from plsc.gallery.backends import display_name, store_folder

    folder = store_folder(args.store)
    thumbnails = Path(args.thumbnails or Path(args.store) / "thumbnails")
    if folder is None and args.thumbnails is None:
        raise UsageError(f"{display_name(args.store)}: a server has no folder of pictures; give --thumbnails DIR")
    if args.thumbnails is not None and not thumbnails.is_dir():
        raise UsageError(f"--thumbnails {thumbnails}: there is no such folder")
    if args.out.suffix == ".rec":
        raise UsageError(f"{args.out}: name a folder, of which plsc data convert makes a .rec")
    for place in (folder or thumbnails, thumbnails):
        check_out(str(place), args.out, overwrite=args.overwrite)
        if place.resolve() in args.out.resolve().parents:
            raise UsageError(f"{args.out} lies in {place}, the service's own; name another folder")
    return thumbnails


def _picture_lines(result: dict[str, Any], least: int) -> list[str]:
    sizes = ", ".join(sorted(result["sizes"])[:4]) + (", …" if len(result["sizes"]) > 4 else "")
    lines = [f"{result['out']}: {_images_of_classes(result)}, {sizes} pixels"]
    if result["faces_without_picture"] or result["persons_without_picture"]:
        faces, persons = result["faces_without_picture"], result["persons_without_picture"]
        lines.append(f"without a picture: {counted(faces, 'face')}; {counted(persons, 'person')} without any")
    if result["persons_below_least"]:
        lines.append(f"left out, with fewer than {least} pictures: {counted(result['persons_below_least'], 'person')}")
    if result["smallest_side"] < USUAL_SIDE:
        lines.append(f"some have fewer than most models' {USUAL_SIDE}x{USUAL_SIDE} pixels: training enlarges them")
    return lines


def _images_of_classes(result: dict[str, Any], noun: str = "image") -> str:
    classes = f" of {counted(result['classes'], 'class')}" if result["classes"] else ""
    return f"{counted(result['images'], noun)}{classes}"
