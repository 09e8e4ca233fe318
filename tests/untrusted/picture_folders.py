"""Folders and lists of pictures that were made to harm: pipes, devices, links out, and names that command."""

import os
from collections.abc import Callable
from pathlib import Path

from untrusted.samples import Case, Samples, arguments

COMMANDING = "crafted \x1b[2J\x1b]0;title\x07all good\nplsc data: sound.jpg"
Spoil = Callable[[Path, Samples], object]


def _folder(words: str, spoil: Spoil) -> Case:
    """The command ``words`` reads a folder of which everything is spoilt."""

    def make(folder: Path, samples: Samples) -> list[str]:
        (folder / "ann").mkdir()
        spoil(folder / "ann", samples)
        return arguments(words, folder, samples, folder)

    return make


def _sparse(folder: Path, samples: Samples) -> None:
    with (folder / "9.jpg").open("wb") as file:
        file.truncate(1 << 40)


def _list(path: Callable[[Path, Samples], str]) -> Spoil:
    def spoil(folder: Path, samples: Samples) -> None:
        (folder / "list.txt").write_text(f"{path(folder, samples)}\tann\n")

    return spoil


SPOILT: dict[str, Spoil] = {
    "a pipe": lambda folder, samples: os.mkfifo(folder / "9.jpg"),
    "a device": lambda folder, samples: (folder / "9.jpg").symlink_to("/dev/zero"),
    "a link to a private picture": lambda folder, samples: (folder / "9.jpg").symlink_to(samples.picture),
    "a terabyte": _sparse,
    "a name that commands": lambda folder, samples: (folder / COMMANDING).write_bytes(b"no picture"),
}
LISTS: dict[str, Spoil] = {
    "a list of an absolute path": _list(lambda folder, samples: str(samples.picture)),
    "a list that climbs out": _list(
        lambda folder, samples: f"../../../{os.path.relpath(samples.picture, folder.parents[2])}"
    ),
    "a list of a device": _list(lambda folder, samples: "/dev/zero"),
}
READERS = {
    "check": "data check {file}",
    "convert": "data convert {file} {out}/out.rec",
    "convert to a folder": "data convert {file} {out}/out",
    "align": "data align {file} --out {out}/out --landmarks {file}/points.csv",
    "embed": "embed {model} --data {file} --out {out}/x.emb",
    "embed with workers": "embed {model} --data {file} --out {out}/x.emb --workers 1",
}


def _with_points(spoil: Spoil) -> Spoil:
    def spoilt(folder: Path, samples: Samples) -> None:
        spoil(folder, samples)
        names = [path.name for path in folder.iterdir() if path.suffix == ".jpg" and "\n" not in path.name]
        line = ",".join(map(str, (38, 52, 74, 52, 56, 72, 42, 92, 71, 92)))
        (folder.parent / "points.csv").write_text("".join(f"ann/{name},{line}\n" for name in names or ["x.jpg"]))

    return spoilt


CASES: dict[str, Case] = {
    **{
        f"{reader} {name}": _folder(words, _with_points(spoil) if reader == "align" else spoil)
        for name, spoil in SPOILT.items()
        for reader, words in READERS.items()
    },
    **{
        f"{reader} {name}": _folder(words.replace("{file}", "{file}/ann/list.txt"), spoil)
        for name, spoil in LISTS.items()
        for reader, words in READERS.items()
        if reader != "align"
    },
}
