"""report.html of the quickstart: one page that embeds its figures and images, and so opens without a network."""

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from plsc import __version__
from plsc.data import ImageDataset, open_dataset
from plsc.data.codec import encode_image
from plsc.evaluation.report import COLOURS, canvas, roc_figure, score_figure
from plsc.files import atomic_write
from plsc.index import Index
from plsc.progress import duration
from plsc.quickstart import QuickstartPaths
from plsc.quickstart.queries import HARD, MARGIN
from plsc.quickstart.steps import QuickstartResult
from plsc.train.metrics import read_metrics

PAGE = Path(__file__).with_name("page.html")
TITLES = {"trained": "trained", "untrained": "the same network, untrained", "raw_pixels": "raw pixels"}
_EXAMPLE_IDENTITIES = 4
_PER_IDENTITY = 6
_IMAGE_SIZE = 112  # pixels of a side on the page; the network may see fewer


def write_report(paths: QuickstartPaths, result: QuickstartResult) -> Path:
    """Write report.html beside report.json and return its path."""
    report = result.report
    images = open_dataset(paths.unseen, image_size=_IMAGE_SIZE)
    curves = {TITLES[name]: values for name, values in result.curves.items()}
    slots = {
        "version": __version__,
        "serve": html.escape(paths.serve_command),
        "queries": _queries(paths, report["gallery"]),
        "threshold": f"{report['gallery']['threshold']:.2f}",
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
        "rows": "\n".join(_table_row(TITLES[name], report[name]) for name in result.curves),
        "examples": _examples(images),
        "curve": _loss_curve(paths.run),
        "roc": _inline_svg(lambda buffer: roc_figure(curves, buffer)),
        "scores": _inline_svg(lambda buffer: score_figure(curves, buffer)),
        "neighbours": "\n".join(_query_html(result.index, images, query) for query in choose_queries(result.index)),
    }
    path = paths.report.with_suffix(".html")
    with atomic_write(path) as tmp_path:
        tmp_path.write_text(Template(PAGE.read_text(encoding="utf-8")).substitute(slots), encoding="utf-8")
    return path


def _queries(paths: QuickstartPaths, gallery: dict[str, Any]) -> str:
    """What the pictures to search by show, and how they were chosen."""
    folder, hard, one = html.escape(f"{paths.queries}/"), gallery["hard"], gallery["found"] == 1
    found = f"{gallery['found']} {'avatar finds its namesake' if one else 'avatars find their namesakes'}"
    refused = f", <code>{HARD}.jpg</code> shows {html.escape(hard)} and is refused" if hard else ""
    return (
        f"Drop a picture of <code>{folder}</code> on the page: {found}{refused}, and a stranger finds nobody. They "
        f"were chosen so. Of {gallery['tried']:,} pictures not enrolled, {gallery['passed']:,} match their person "
        f"and nobody else at the service's threshold of {gallery['threshold']:.3f}, with {MARGIN} to spare; of "
        f"{gallery['strangers_tried']} strangers, {gallery['strangers_refused']} match nobody."
    )


# Figures ------------------------------------------------------------------------------------------------------------


def _table_row(title: str, result: dict[str, Any]) -> str:
    far, found = result["tar@far"], result["retrieval"]
    values = [result["accuracy"], result["auc"], far["1e-2"], far["1e-3"], result["rank1"], result["rank5"]]
    values += [found["recall@1"], found["map@r"]]
    cells = "".join(f"<td>{'–' if value is None else f'{100 * value:.2f}'}</td>" for value in values)
    return f"<tr><th scope=row>{html.escape(title)}</th>{cells}</tr>"


def _loss_curve(run: Path) -> str:
    """SVG of loss and learning rate over the steps of a run."""
    lines = [line for line in read_metrics(run) if line.get("loss") is not None]
    steps = [line["step"] for line in lines]
    figure, axes = canvas(1)
    axes[0].plot(steps, [line["loss"] for line in lines], color=COLOURS[0], linewidth=2)
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("loss", color=COLOURS[0])
    axes[0].set_ylim(bottom=0)
    rate = axes[0].twinx()
    rate.plot(steps, [line["lr"] for line in lines], color=COLOURS[1], linewidth=1.2, linestyle="--")
    rate.set_ylabel("learning rate", color=COLOURS[1])
    rate.set_ylim(bottom=0)
    rate.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return _inline_svg(lambda buffer: figure.savefig(buffer, format="svg"))


def _inline_svg(save: Callable[[io.BytesIO], object]) -> str:
    """Return a figure as an <svg> element: the document that ``save`` writes, without its XML prologue."""
    buffer = io.BytesIO()
    save(buffer)
    text = buffer.getvalue().decode("utf-8")
    return text[text.index("<svg") :]


# Images and their neighbours ----------------------------------------------------------------------------------------


class Query(NamedTuple):
    """A query's row in the index; rows and cosines of its neighbours, without itself, nearest first."""

    row: int
    neighbours: np.ndarray
    scores: np.ndarray


def choose_queries(index: Index, drawn: int = 6, wrong: int = 2, k: int = 8, seed: int = 0) -> list[Query]:
    """Draw ``drawn`` queries of different identities, and add ``wrong`` whose nearest neighbour is another identity.

    Queries that the search got wrong may be fewer than ``wrong``.
    """
    found = index.search(index.vectors, k + 1)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(index))
    first_rows = order[np.unique(index.labels[order], return_index=True)[1]]
    queries = []
    for row in generator.permutation(first_rows).tolist():
        others = found.rows[row] != row
        queries.append(Query(row, found.rows[row][others][:k], found.scores[row][others][:k]))
    failures = [query for query in queries[drawn:] if index.labels[query.neighbours[0]] != index.labels[query.row]]
    return queries[:drawn] + failures[:wrong]


def _query_html(index: Index, images: ImageDataset, query: Query) -> str:
    """A query and its neighbours; the index' ids are positions in the dataset that was embedded."""
    neighbours = "".join(
        f'<figure class="{"same" if index.labels[row] == index.labels[query.row] else "other"}">'
        f"{_image(images, int(index.ids[row]))}<figcaption>{score:.2f}</figcaption></figure>"
        for row, score in zip(query.neighbours, query.scores, strict=True)
    )
    first = _image(images, int(index.ids[query.row]))
    return f"<div class=result><figure class=query>{first}<figcaption>query</figcaption></figure>{neighbours}</div>"


def _examples(images: ImageDataset) -> str:
    """The first images of some unseen identities, a row each."""
    rows = []
    for label in range(_EXAMPLE_IDENTITIES):
        positions = np.flatnonzero(images.labels == label)[:_PER_IDENTITY]
        rows.append(f"<div class=strip>{''.join(_image(images, int(position)) for position in positions)}</div>")
    return "\n".join(rows)


def _image(images: ImageDataset, position: int) -> str:
    key = html.escape(images.key(position))
    jpeg = base64.b64encode(encode_image(images.image(position), "jpeg")).decode("ascii")
    return f'<img src="data:image/jpeg;base64,{jpeg}" alt="{key}" title="{key}">'
