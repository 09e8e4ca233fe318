"""Omniglot's 20 published one-shot tasks: which of 20 characters, seen once each, is a drawing by somebody else?

    python examples/omniglot_one_shot.py MODEL [MODEL...] --runs all_runs/ --out errors.html

all_runs/ is one-shot-classification/all_runs.zip of github.com/brendenlake/omniglot, unpacked. A trial is an error
where the most similar character, by the cosine, is not the one that class_labels.txt names. Of several models (seeds)
each is judged alone. The page shows every error: the drawing, what it was taken for, and what it is.
"""

import argparse
import base64
import html
import json
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np

import plsc
from plsc.embedding.embedder import EmbeddingModel


class Trial(NamedTuple):
    """A drawing, what it was taken for and what it is; paths of pictures."""

    drawing: Path
    taken_for: Path
    truth: Path


def read_run(folder: Path) -> list[tuple[Path, Path]]:
    """The test drawings of a run, each with the training drawing of its character."""
    lines = (folder / "class_labels.txt").read_text(encoding="utf-8").split("\n")
    pairs = [line.split() for line in lines if line.strip()]
    return [(folder.parent / test, folder.parent / training) for test, training in pairs]


def trials_of(model: EmbeddingModel, folder: Path) -> list[Trial]:
    """Take each test drawing of a run for the most similar training drawing."""
    pairs = read_run(folder)
    training = sorted({truth for _, truth in pairs})
    files = [str(path) for path in (*(test for test, _ in pairs), *training)]
    rows = plsc.embed(model, files)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    nearest = np.argmax(unit[: len(pairs)] @ unit[len(pairs) :].T, axis=1)
    return [Trial(test, training[place], truth) for (test, truth), place in zip(pairs, nearest, strict=True)]


def page(model: str, errors: list[Trial], share: float) -> str:
    """A section of the page of errors."""

    def shown(path: Path) -> str:
        picture = base64.b64encode(path.read_bytes()).decode()
        image = f'<img src="data:image/png;base64,{picture}" alt="">'
        return f"<td><figure>{image}<figcaption>{html.escape(path.stem)}</figcaption></figure></td>"

    rows = "".join(
        f"<tr><td>{html.escape(one.drawing.parents[1].name)}</td>{''.join(map(shown, one))}</tr>" for one in errors
    )
    head = "<tr><th>run</th><th>drawing</th><th>taken for</th><th>is</th></tr>"
    return f"<h2>{html.escape(model)}: {100 * share:.2f}% errors</h2><table>{head}{rows}</table>"


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Judge the models; returns the share of errors of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as plsc.load_model takes it")
    parser.add_argument("--runs", type=Path, required=True, help="the folder of run01 to run20")
    parser.add_argument("--out", type=Path, help="a page of the errors, as HTML")
    args = parser.parse_args(argv)
    folders = sorted(path.parent for path in args.runs.glob("run*/class_labels.txt"))
    if not folders:
        parser.error(f"{args.runs} holds no run*/class_labels.txt")
    found, sections = {}, []
    for name in args.models:
        model = plsc.load_model(name)
        trials = [trial for folder in folders for trial in trials_of(model, folder)]
        errors = [trial for trial in trials if trial.taken_for != trial.truth]
        found[name] = len(errors) / len(trials)
        sections.append(page(name, errors, found[name]))
        print(f"{name}: {len(errors)} of {len(trials)} wrong, {100 * found[name]:.2f}%")
    print(json.dumps({"error": statistics.mean(found.values()), **found}))
    if args.out is not None:
        style = "img{width:6em;border:1px solid #999}figure{margin:0}td,th{padding:.3em;font:1em sans-serif}"
        body = f'<!doctype html><meta charset="utf-8"><title>Errors</title><style>{style}</style>{"".join(sections)}'
        args.out.write_text(body, encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
