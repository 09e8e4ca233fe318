"""Folders and lists of pictures that were made to harm: pipes, devices, links out, and names that command."""

import os
from collections.abc import Callable
from pathlib import Path

from untrusted.samples import Arguments, Case, Samples

COMMANDING = "crafted \x1b[2J\x1b]0;title\x07all good\nplsc data: sound.jpg"
Spoil = Callable[[Path, Samples], object]


def _folder(spoil: Spoil, words: list[str]) -> Case:
    """A folder of which everything is spoilt, read by ``plsc WORDS``; {} is the folder, {out} a place beside it."""

    def make(folder: Path, samples: Samples) -> Arguments:
        (folder / "ann").mkdir()
        spoil(folder / "ann", samples)
        places = {"{}": folder, "{out}": folder.parent, "{model}": samples.model}
        return [next((word.replace(key, str(at)) for key, at in places.items() if key in word), word) for word in words]

    return make


def _pipe(folder: Path, samples: Samples) -> None:
    os.mkfifo(folder / "9.jpg")


def _device(folder: Path, samples: Samples) -> None:
    (folder / "9.jpg").symlink_to("/dev/zero")


def _private(folder: Path, samples: Samples) -> None:
    (folder / "9.jpg").symlink_to(samples.picture)


def _sparse(folder: Path, samples: Samples) -> None:
    with (folder / "9.jpg").open("wb") as file:
        file.truncate(1 << 40)


def _commanding(folder: Path, samples: Samples) -> None:
    (folder / COMMANDING).write_bytes(b"no picture")


def _list(path: Callable[[Path, Samples], str]) -> Spoil:
    def spoil(folder: Path, samples: Samples) -> None:
        (folder / "list.txt").write_text(f"{path(folder, samples)}\tann\n")

    return spoil


def _climbing(folder: Path, samples: Samples) -> str:
    return f"../../../{os.path.relpath(samples.picture, folder.parents[2])}"


SPOILT: dict[str, Spoil] = {
    "a pipe": _pipe,
    "a device": _device,
    "a link to a private picture": _private,
    "a terabyte": _sparse,
    "a name that commands": _commanding,
}
LISTS: dict[str, Spoil] = {
    "a list of an absolute path": _list(lambda folder, samples: str(samples.picture)),
    "a list that climbs out": _list(_climbing),
    "a list of a device": _list(lambda folder, samples: "/dev/zero"),
}
READERS: dict[str, list[str]] = {
    "check": ["data", "check", "{}"],
    "convert": ["data", "convert", "{}", "{out}/out.rec"],
    "convert to a folder": ["data", "convert", "{}", "{out}/out"],
    "align": ["data", "align", "{}", "--out", "{out}/out", "--landmarks", "{}/points.csv"],
    "embed": ["embed", "{model}", "--data", "{}", "--out", "{out}/x.emb"],
    "embed with workers": ["embed", "{model}", "--data", "{}", "--out", "{out}/x.emb", "--workers", "1"],
}


def _with_points(spoil: Spoil) -> Spoil:
    def spoilt(folder: Path, samples: Samples) -> None:
        spoil(folder, samples)
        names = [path.name for path in folder.iterdir() if path.suffix == ".jpg" and "\n" not in path.name]
        line = ",".join(map(str, (38, 52, 74, 52, 56, 72, 42, 92, 71, 92)))
        (folder.parent / "points.csv").write_text("".join(f"ann/{name},{line}\n" for name in names or ["x.jpg"]))

    return spoilt


def _reading_a_list(words: list[str]) -> list[str]:
    return [word.replace("{}", "{}/ann/list.txt") if word == "{}" else word for word in words]


CASES: dict[str, Case] = {
    **{
        f"{reader} {name}": _folder(_with_points(spoil) if reader == "align" else spoil, words)
        for name, spoil in SPOILT.items()
        for reader, words in READERS.items()
    },
    **{
        f"{reader} {name}": _folder(spoil, _reading_a_list(words))
        for name, spoil in LISTS.items()
        for reader, words in READERS.items()
        if reader != "align"
    },
}
