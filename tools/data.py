"""Convert, check, align and describe sets of labelled images.

SOURCE is a folder per identity, a list file with a line path<TAB>label per image, an MXNet .rec (or the folder
that holds train.rec), or avatars:IDSxIMAGES[@FIRST], the built-in drawings.

  plsc data convert faces/ faces.rec           a folder to a .rec; the other way round: plsc data convert X.rec faces/
  plsc data check faces.rec                    decode everything; find duplicates and empty classes
  plsc data stats faces/ --plot classes.png    images per class
  plsc data pairs unseen/ unseen.bin           a verification set for `plsc eval`, half of its pairs the same identity
  plsc data align photos/ --out faces.rec --landmarks points.csv    cut out the faces, aligned as models expect them
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from plsc.errors import DataError, UsageError
from plsc.tools.entry import add_result_options

HELP = "convert, check, count and align sets of images; make verification pairs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _configure_convert(_command(commands, "convert", "write SOURCE as a .rec, or as a folder per identity"))
    _configure_check(_command(commands, "check", "decode every image; find duplicates and empty classes"))
    _configure_stats(_command(commands, "stats", "show how many images the classes have"))
    _configure_pairs(_command(commands, "pairs", "draw a .bin of verification pairs from SOURCE"))
    _configure_align(_command(commands, "align", "cut the faces out of SOURCE's pictures, aligned by five landmarks"))


def _command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
    )
    parser.add_argument("source", metavar="SOURCE", help="a folder, a list, a .rec or avatars:IDSxIMAGES")
    add_result_options(parser, subcommand=True)
    return parser


def _configure_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="X.rec, or a folder that is new or empty")
    _add_encoding(parser)
    parser.add_argument(
        "--max-bad-records", type=int, default=1000, metavar="N", help="give up past N broken images (1000)"
    )


def _configure_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode (0: this one)")


def _configure_stats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the histogram into FILE (.png or .svg)")


def _configure_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="the .bin to write")
    parser.add_argument("--pairs", type=int, default=6000, metavar="N", help="number of pairs (6000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws other pairs (0)")
    _add_encoding(parser)


def _configure_align(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="OUT", type=Path, help="X.rec, or a new or empty folder")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--landmarks",
        type=Path,
        metavar="FILE",
        help='lines path,x1,y1,…,x5,y5 in pixels (or with tabs, or {"path", "landmarks"} as JSON): docs/faces.md',
    )
    source.add_argument("--detector", metavar="onnx:FILE", help="an SCRFD model that finds each picture's largest face")
    parser.add_argument("--size", type=int, default=112, metavar="S", help="side of the crops in pixels (112)")
    parser.add_argument("--encoding", choices=("jpeg", "png"), default="jpeg", help="of the crops (jpeg, quality 95)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that cut (0: this one)")
    parser.add_argument(
        "--max-bad-records", type=int, metavar="N", help="give up past N pictures without a face (any number)"
    )


def _add_encoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=int, metavar="S", help="resize to SxS and encode anew; without it, bytes are copied"
    )
    parser.add_argument(
        "--encoding", choices=("jpeg", "png"), default="jpeg", help="for images encoded anew (jpeg, quality 95)"
    )


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Run the sub-command; its result is what --json writes."""
    result: dict[str, Any] = _RUN[args.command](args)
    return result


def _convert(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data.convert import convert
    from plsc.data.dataset import open_dataset

    _at_least(args.max_bad_records, 0, "--max-bad-records")
    dataset = open_dataset(args.source, image_size=_size(args), max_bad_records=args.max_bad_records)
    result = convert(dataset, args.out, encoding=args.encoding, max_bad_records=args.max_bad_records)
    left_out = f", {result['left_out']:,} left out" if result["left_out"] else ""
    print(f"{result['out']}: {result['images']:,} images of {result['classes']:,} classes{left_out}")
    return result


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data.dataset import open_dataset
    from plsc.data.inspection import check
    from plsc.files import write_json

    _at_least(args.workers, 0, "--workers")
    result = check(open_dataset(args.source, image_size=None, max_bad_records=None), workers=args.workers)
    print(f"{result['source']}: {result['images']:,} images of {result['classes']:,} classes")
    for item in result["broken_images"]:
        print(f"  broken: {item['key']}: {item['why']}")
    for item in result["duplicate_images"]:
        print(f"  duplicate: {item['key']} is {item['same_as']} again")
    for name in result["empty_classes"][:100]:
        print(f"  empty class: {name}")
    counts = (
        f"{result['broken']:,} broken, {result['duplicates']:,} duplicates ({result['duplicates_across_classes']:,} "
        f"across classes), {len(result['empty_classes']):,} empty classes"
    )
    if result["broken"]:
        if args.json is not None:
            write_json(args.json, result)
        raise DataError(f"{counts}; replace or remove the broken images")
    print(counts)
    return result


def _stats(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data.dataset import open_dataset
    from plsc.data.inspection import stats, stats_plot, stats_text

    if args.plot is not None and args.plot.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--plot {args.plot} ends in neither .png nor .svg")
    result = stats(open_dataset(args.source, image_size=None, max_bad_records=None))
    print(stats_text(result))
    if args.plot is not None:
        stats_plot(result, args.plot)
    return result


def _pairs(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data.dataset import open_dataset
    from plsc.data.pairs import make_pairs

    if args.out.suffix != ".bin":
        raise UsageError(f"{args.out} does not end in .bin")
    _at_least(args.seed, 0, "--seed")
    dataset = open_dataset(args.source, image_size=_size(args))
    result = make_pairs(dataset, args.out, pairs=args.pairs, seed=args.seed, encoding=args.encoding)
    print(
        f"{result['out']}: {result['pairs']:,} pairs, {result['same']:,} of them the same identity, from "
        f"{result['images']:,} images of {result['identities']:,} identities"
    )
    return result


def _align(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.data.alignment import AlignedImages
    from plsc.data.convert import convert
    from plsc.data.dataset import open_dataset
    from plsc.embedding.sources import locator

    _at_least(args.size, 1, "--size")
    _at_least(args.workers, 0, "--workers")
    if args.max_bad_records is not None:
        _at_least(args.max_bad_records, 0, "--max-bad-records")
    pictures = open_dataset(args.source, image_size=None, max_bad_records=args.max_bad_records)
    faces = AlignedImages(pictures, locator(pictures, args.landmarks, args.detector), args.size)
    result = convert(
        faces,
        args.out,
        encoding=args.encoding,
        max_bad_records=args.max_bad_records,
        workers=args.workers,
        label="align",
    )
    left_out = f", {result['left_out']:,} pictures left out" if result["left_out"] else ""
    print(f"{result['out']}: {result['images']:,} faces of {result['classes']:,} classes{left_out}")
    return result


def _size(args: argparse.Namespace) -> int | None:
    if args.size is not None:
        _at_least(args.size, 1, "--size")
        return int(args.size)
    return None


def _at_least(value: int, minimum: int, name: str) -> None:
    if value < minimum:
        raise UsageError(f"{name} is {value}; it must be at least {minimum}")


_RUN = {"convert": _convert, "check": _check, "stats": _stats, "pairs": _pairs, "align": _align}


if __name__ == "__main__":
    from plsc.tools.entry import main

    raise SystemExit(main(["data", *sys.argv[1:]]))
