"""Pictures and the table: what is drawn, and what is refused."""

import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from plsc.errors import UsageError
from plsc.evaluation.report import percent, results_table, roc_figure, score_figure
from plsc.evaluation.roc import plot_data, roc_from_scores, roc_summary
from plsc.evaluation.search import no_retrieval


@pytest.fixture(scope="module")
def results():
    generator = np.random.default_rng(0)
    found = {}
    for name, distance in (("easy", 0.6), ("hard", 0.1)):
        is_same = generator.random(4000) < 0.4
        roc = roc_from_scores(np.clip(generator.normal(is_same * distance, 0.12), -1, 1), is_same)
        found[name] = {
            "accuracy": 0.98765,
            "accuracy_std": 0.0034,
            "threshold_cosine": 0.3,
            "rank1": None,
            "rank5": None,
            "retrieval": no_retrieval() | {"map@r": 0.4321},
            "images": 8000,
            "identities": None,
            **roc_summary(roc),
            **plot_data(roc),
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("draw", [roc_figure, score_figure])
def test_pictures_are_written_in_each_form(results, draw, tmp_path):
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    for suffix, start in starts.items():
        draw(results, tmp_path / f"picture{suffix}")
        assert (tmp_path / f"picture{suffix}").read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("draw", [roc_figure, score_figure])
def test_a_picture_can_be_kept_in_memory(results, draw):
    buffer = io.BytesIO()
    draw(results, buffer)
    assert ElementTree.fromstring(buffer.getvalue()).tag.endswith("svg")


@pytest.mark.slow
def test_many_sets_with_long_names_are_drawn(results, tmp_path):
    many = {f"a rather long name of a set {place}": results["easy"] for place in range(9)}
    roc_figure(many, tmp_path / "many.png")
    score_figure(many, tmp_path / "many-scores.png")


@pytest.mark.parametrize("draw", [roc_figure, score_figure])
def test_what_cannot_be_drawn_is_refused(results, draw, tmp_path):
    with pytest.raises(UsageError, match=r"must end in \.png, \.svg, \.pdf"):
        draw(results, tmp_path / "picture.docx")
    with pytest.raises(UsageError, match="there is no folder"):
        draw(results, tmp_path / "none" / "picture.png")
    with pytest.raises(UsageError, match="to draw"):
        draw({"empty": {"roc": None, "scores": None}}, tmp_path / "picture.png")


def test_the_table_has_a_column_for_each_set(results):
    lines = results_table(results).splitlines()
    assert lines[0].split() == ["easy", "hard"]
    assert len({len(line) for line in lines}) == 1
    rows = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in lines}
    assert rows["accuracy, %"] == "98.77 ± 0.34"
    assert rows["images"] == "8,000"
    assert rows["threshold, cosine"] == "0.3000"


def test_the_table_has_no_row_of_dashes(results):
    assert not {"rank-1, %", "identities", "TAR at FAR 1e-6, %"} & {row.split("  ")[0] for row in rows_of(results)}
    partly = {**results, "hard": {**results["hard"], "rank1": 0.5}}
    assert next(row for row in rows_of(partly) if row.startswith("rank-1")).split()[-2:] == ["–", "50.00"]


def rows_of(results):
    return results_table(results).splitlines()[1:]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1.0, "100.00"), (0.99999, "99.99"), (0.0, "0.00"), (1e-6, "<0.01"), (0.12345, "12.35")],
)
def test_only_one_reads_as_a_hundred_percent(value, text):
    assert percent(value) == text
