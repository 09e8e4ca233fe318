"""report.html: one page that opens without a network."""

import html
import io
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from plsc import __version__
from plsc.data.dataset import ImageDataset, open_dataset
from plsc.evaluation.plots import roc_figure, score_figure
from plsc.files import atomic_write
from plsc.index import Index
from plsc.progress import duration
from plsc.quickstart.course import Course, Findings
from plsc.quickstart.figures import inline, loss_curve, thumbnail
from plsc.quickstart.neighbours import Shown, choose

PAGE = Path(__file__).with_name("page.html")
TITLES = {"trained": "trained", "untrained": "the same network, untrained", "raw_pixels": "raw pixels"}
PER_IDENTITY = 6
SHOWN_SIZE = 112  # pixels of a side; the network may see fewer


def write_report(course: Course, findings: Findings) -> Path:
    """Draw everything into one file beside report.json and return its path."""
    named = {TITLES[name]: result for name, result in findings.curves.items()}
    report = findings.report
    pictures = open_dataset(course.unseen, image_size=SHOWN_SIZE)
    slots = {
        "version": __version__,
        "time": duration(report["seconds"]),
        "rate": f"{report['images_per_second']:,.0f}",
        "classes": f"{report['training']['classes']:,}",
        "steps": f"{report['training']['steps']:,}",
        "training_time": duration(report["training"]["seconds"]),
        "accuracy": f"{100 * report['trained']['accuracy']:.2f}",
        "rank1": f"{100 * report['trained']['rank1']:.2f}",
        "identities": f"{report['trained']['identities']:,}",
        "images": f"{report['trained']['images']:,}",
        "impostors": f"{report['trained']['impostor_pairs']:,}",
        "recall": f"{100 * report['index']['recall@1']:.1f}",
        "index_kind": html.escape(report["index"]["kind"]),
        "error": f"{report['export']['max_abs_error']:.1e}",
        "rows": "\n".join(_row(TITLES[name], report[name]) for name in findings.curves),
        "examples": _examples(pictures),
        "curve": loss_curve(course.run),
        "roc": _drawn(roc_figure, named),
        "scores": _drawn(score_figure, named),
        "neighbours": "\n".join(_query(findings.index, pictures, query) for query in choose(findings.index)),
    }
    path = course.report.with_suffix(".html")
    with atomic_write(path) as tmp_path:
        tmp_path.write_text(Template(PAGE.read_text(encoding="utf-8")).substitute(slots), encoding="utf-8")
    return path


def _row(title: str, result: dict[str, Any]) -> str:
    values = [
        result["accuracy"],
        result["auc"],
        result["tar@far"]["1e-2"],
        result["tar@far"]["1e-3"],
        result["rank1"],
        result["rank5"],
    ]
    cells = "".join(f"<td>{'–' if value is None else f'{100 * value:.2f}'}</td>" for value in values)
    return f"<tr><th scope=row>{html.escape(title)}</th>{cells}</tr>"


def _drawn(draw: Any, results: dict[str, dict[str, Any]]) -> str:
    buffer = io.BytesIO()
    draw(results, buffer, "svg")
    return inline(buffer)


def _examples(pictures: ImageDataset, identities: int = 4) -> str:
    """The first pictures of some unseen identities, a row each."""
    rows = []
    for label in range(identities):
        places = np.flatnonzero(pictures.labels == label)[:PER_IDENTITY]
        images = "".join(_picture(pictures, int(place)) for place in places)
        rows.append(f"<div class=strip>{images}</div>")
    return "\n".join(rows)


def _query(index: Index, pictures: ImageDataset, query: Shown) -> str:
    """A query and its neighbours; the index' ids are places in the set that was embedded."""
    matches = "".join(
        f'<figure class="{"same" if match.same else "other"}">{_picture(pictures, int(index.ids[match.row]))}'
        f"<figcaption>{match.score:.2f}</figcaption></figure>"
        for match in query.matches
    )
    first = _picture(pictures, int(index.ids[query.row]))
    return f"<div class=result><figure class=query>{first}<figcaption>query</figcaption></figure>{matches}</div>"


def _picture(pictures: ImageDataset, place: int) -> str:
    key = html.escape(pictures.key(place))
    return f'<img src="{thumbnail(pictures.image(place))}" alt="{key}" title="{key}">'
