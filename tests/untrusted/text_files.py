"""Lists, tables and configurations that were made to harm: 100 MB without an end of line, nesting, huge numbers."""

import json
from collections.abc import Callable
from pathlib import Path

from untrusted.samples import Arguments, Case, Samples

Content = bytes | Callable[[], bytes]


def plain() -> bytes:
    """100 MB without an end of line."""
    return b"x" * 100_000_000


def mixed() -> bytes:
    """As many, which as text take four bytes a letter."""
    return plain() + "🙂".encode()


def _case(name: str, content: Content, arguments: Callable[[Path, Path, Samples], Arguments]) -> Case:
    def make(folder: Path, samples: Samples) -> Arguments:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content() if callable(content) else content)
        return arguments(path, folder.parent, samples)

    return make


def _list(content: Content) -> Case:
    return _case("crafted.txt", content, lambda path, out, samples: ["data", "stats", path])


def _pairs(content: Content) -> Case:
    return _case(
        "crafted.txt",
        content,
        lambda path, out, samples: ["data", "pairs", "avatars:2x2", out / "x.bin", "--list", path],
    )


def _landmarks(content: Content) -> Case:
    words = ["data", "align", "avatars:2x2", "--landmarks"]
    return _case("crafted.csv", content, lambda path, out, samples: [*words, path, "--out", out / "out"])


def _config(content: Content) -> Case:
    return _case("crafted.toml", content, lambda path, out, samples: ["train", path, "--out", out / "run"])


def _calibration(content: Content) -> Case:
    words = ["serve", "--fmr", "1e-3", "--calibration"]
    return _case(
        "crafted.json",
        content,
        lambda path, out, samples: [*words, path, "--model", samples.model, "--store", out / "s"],
    )


def _ijb(**contents: Content) -> Case:
    """A release whose lists are crafted."""
    sound: dict[str, Content] = {
        "ijbb_name_5pts_score": b"1.jpg 1 1 2 2 3 3 4 4 5 5 0.9\n",
        "ijbb_face_tid_mid": b"1.jpg 1 1\n",
        "ijbb_template_pair_label": b"1 1 1\n",
    }

    def make(folder: Path, samples: Samples) -> Arguments:
        meta = folder / "crafted/meta"
        meta.mkdir(parents=True)
        for name, content in {**sound, **contents}.items():
            (meta / f"{name}.txt").write_bytes(content() if callable(content) else content)
        return ["eval", samples.model, "--ijb", folder / "crafted"]

    return make


LONG: dict[str, Content] = {
    "100 MB without a line end": plain,
    "100 MB without a line end and a letter of four bytes": mixed,
}
CASES: dict[str, Case] = {
    **{f"a list of {name}": _list(content) for name, content in LONG.items()},
    **{f"pairs of {name}": _pairs(content) for name, content in LONG.items()},
    **{f"landmarks of {name}": _landmarks(content) for name, content in LONG.items()},
    **{f"a configuration of {name}": _config(content) for name, content in LONG.items()},
    **{f"IJB's faces of {name}": _ijb(ijbb_name_5pts_score=content) for name, content in LONG.items()},
    **{f"IJB's pairs of {name}": _ijb(ijbb_template_pair_label=content) for name, content in LONG.items()},
    "a list of zeros": _list(lambda: bytes(100_000_000)),
    "a list of no UTF-8": _list(b"\xff\xfe" * 1000),
    "a list of 10 million tabs": _list(lambda: b"\t" * 10_000_000),
    "a list of a label of a million digits": _list(b"a.png\t" + b"9" * 1_000_000 + b"\n"),
    "pairs of a number of a million digits": _pairs(b"Ada\t" + b"9" * 1_000_000 + b"\t2\n"),
    "pairs of a number in other scripts": _pairs("Ada\t²\t2\n".encode()),
    "pairs of many folds": _pairs(b"9" * 5000 + b"\t9\nAda\t1\t2\n"),
    "landmarks nested deeply": _landmarks(b"{" + b'"a":[' * 100_000),
    "landmarks of a million digits": _landmarks(b'{"path": "a", "landmarks": [' + b"9" * 1_000_000 + b"]}\n"),
    "landmarks of infinity": _landmarks(b"0/0.png," + b",".join([b"1e400"] * 10) + b"\n"),
    "landmarks in 100 MB of quotes": _landmarks(lambda: b'"' * 100_000_000),
    "a configuration nested deeply": _config(b"a = " + b"[" * 100_000),
    "a configuration of tables nested deeply": _config(b"a" + b".a" * 100_000 + b" = 1"),
    "a configuration of inline tables nested deeply": _config(b"a = " + b"{a = " * 100_000),
    "a configuration of a deep key of quotes": _config(b'"a\\"b".' * 9000 + b"x = 1"),
    "a configuration of a MB of a deep key of quotes": _config(b'"a\\"b".' * 150_000 + b"x = 1"),
    "a configuration of many keys that are deep": _config(b"\n".join([b"a." * 48 + b"a = 1"] * 600)),
    "a configuration of a deep key behind strings": _config(b'x = """ " \\"" """\ny = \'"\'\n' + b"a ." * 20_000),
    "a configuration of a deep header": _config(b"[['a#b'" + b'."\\\\"' * 10_000 + b"]]"),
    "a configuration of blanks": _config(b"a = " + b" " * 65_000),
    "a configuration of backslashes": _config(b'="' + b"\\" * 65_000),
    "a configuration of half strings": _config(b'"""\\' * 16_000),
    "a configuration of a million digits": _config(b"steps = " + b"9" * 1_000_000),
    "a configuration of 30 MB of comments": _config(lambda: b"# \n" * 10_000_000),
    "IJB's faces of digits": _ijb(ijbb_name_5pts_score=b"1.jpg " + b"9" * 1_000_000 + b"\n"),
    "IJB's templates of infinity": _ijb(ijbb_face_tid_mid=b"1.jpg 1e400 nan\n"),
    "IJB's pairs of digits": _ijb(ijbb_template_pair_label=b"1 1 " + b"9" * 1_000_000 + b"\n"),
    "a calibration nested deeply": _calibration(b"[" * 100_000),
    "a calibration of 100 MB": _calibration(lambda: b'"' + plain()),
    "a calibration of 100 MB and a letter of four bytes": _calibration(lambda: b'"' + mixed()),
    "a calibration of a million digits": _calibration(
        json.dumps({"format": "plsc calibration"}).encode()[:-1] + b', "version": ' + b"9" * 1_000_000 + b"}"
    ),
}
