"""Lists, tables and configurations that were made to harm: 100 MB without an end of line, nesting, huge numbers."""

import json
from functools import partial
from pathlib import Path

from untrusted.samples import Case, Content, Samples, arguments, content_of, crafted


def plain(_: Samples) -> bytes:
    """100 MB without an end of line."""
    return b"x" * 100_000_000


def mixed(_: Samples) -> bytes:
    """As many, which as text take four bytes a letter."""
    return b"x" * 100_000_000 + "🙂".encode()


_list = partial(crafted, "data stats {file}", "crafted.txt")
_pairs = partial(crafted, "data pairs avatars:2x2 {out}/x.bin --list {file}", "crafted.txt")
_landmarks = partial(crafted, "data align avatars:2x2 --landmarks {file} --out {out}/out", "crafted.csv")
_config = partial(crafted, "train {file} --out {out}/run", "crafted.toml")
_calibration = partial(crafted, "serve --fmr 1e-3 --calibration {file} --model {model} --store {out}/s", "crafted.json")


def _ijb(**contents: Content) -> Case:
    """A release whose lists are crafted."""
    sound: dict[str, Content] = {
        "ijbb_name_5pts_score": b"1.jpg 1 1 2 2 3 3 4 4 5 5 0.9\n",
        "ijbb_face_tid_mid": b"1.jpg 1 1\n",
        "ijbb_template_pair_label": b"1 1 1\n",
    }

    def make(folder: Path, samples: Samples) -> list[str]:
        meta = folder / "crafted/meta"
        meta.mkdir(parents=True)
        for name, content in {**sound, **contents}.items():
            (meta / f"{name}.txt").write_bytes(content_of(content, samples))
        return arguments("eval {model} --ijb {file}", folder, samples, folder / "crafted")

    return make


FORMS = ("a list", "pairs", "landmarks", "a configuration")
LONG: dict[str, Content] = {
    "100 MB without a line end": plain,
    "100 MB without a line end and a letter of four bytes": mixed,
}
CASES: dict[str, Case] = {
    **{
        f"{form} of {name}": case(content)
        for form, case in zip(FORMS, (_list, _pairs, _landmarks, _config), strict=True)
        for name, content in LONG.items()
    },
    **{f"IJB's faces of {name}": _ijb(ijbb_name_5pts_score=content) for name, content in LONG.items()},
    **{f"IJB's pairs of {name}": _ijb(ijbb_template_pair_label=content) for name, content in LONG.items()},
    "a list of zeros": _list(lambda _: bytes(100_000_000)),
    "a list of no UTF-8": _list(b"\xff\xfe" * 1000),
    "a list of 10 million tabs": _list(lambda _: b"\t" * 10_000_000),
    "a list of a label of a million digits": _list(b"a.png\t" + b"9" * 1_000_000 + b"\n"),
    "pairs of a number of a million digits": _pairs(b"Ada\t" + b"9" * 1_000_000 + b"\t2\n"),
    "pairs of a number in other scripts": _pairs("Ada\t²\t2\n".encode()),
    "pairs of many folds": _pairs(b"9" * 5000 + b"\t9\nAda\t1\t2\n"),
    "landmarks nested deeply": _landmarks(b"{" + b'"a":[' * 100_000),
    "landmarks of a million digits": _landmarks(b'{"path": "a", "landmarks": [' + b"9" * 1_000_000 + b"]}\n"),
    "landmarks in 100 MB of quotes": _landmarks(lambda _: b'"' * 100_000_000),
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
    "a configuration of 30 MB of comments": _config(lambda _: b"# \n" * 10_000_000),
    "IJB's faces of digits": _ijb(ijbb_name_5pts_score=b"1.jpg " + b"9" * 1_000_000 + b"\n"),
    "IJB's templates of infinity": _ijb(ijbb_face_tid_mid=b"1.jpg 1e400 nan\n"),
    "IJB's pairs of digits": _ijb(ijbb_template_pair_label=b"1 1 " + b"9" * 1_000_000 + b"\n"),
    "a calibration nested deeply": _calibration(b"[" * 100_000),
    "a calibration of 100 MB": _calibration(lambda _: b'"' + plain(_)),
    "a calibration of 100 MB and a letter of four bytes": _calibration(lambda _: b'"' + mixed(_)),
    "a calibration of a million digits": _calibration(
        json.dumps({"format": "plsc calibration"}).encode()[:-1] + b', "version": ' + b"9" * 1_000_000 + b"}"
    ),
}
