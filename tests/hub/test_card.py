"""Model cards: names that somebody gave are shown letter by letter, in the front matter and in the text."""

from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from plsc.evaluation.calibration import Calibration, OperatingPoint
from plsc.evaluation.report import FARS, RECALLS
from plsc.hub.card import CardFacts, Measurements, _plain, model_card
from plsc.models import create

HOSTILE = [
    "a|b",
    "`code` and ``more``",
    "<img src=x onerror=alert(1)> <b>",
    "&lt;b&gt; &#60; & c",
    "[here](javascript:alert)",
    "![picture](x.png)",
    "*stars* __lines__ _line_ snake_case ~~gone~~",
    "www.example.org somebody@example.org",
    "$x^2$ and \\frac and \\| and \\",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "2)",
    "---",
    "> quoted",
    "=== setext",
    "word: 'quoted' \"twice\" # comment",
    "{x: [y]}",
    "true",
    "ünïcode 人 🙂",
]
NEUTRAL = "plain"
MEASURED: dict[str, Any] = {
    **dict.fromkeys(("images", "identities", "impostor_pairs"), 4),
    **dict.fromkeys(("accuracy", "auc", "eer", "rank1", "rank5", "accuracy_std", "threshold_cosine"), 1e-05),
    "tar@far": dict.fromkeys(FARS, 0.5),
    "retrieval": {**{f"recall@{k}": 0.5 for k in RECALLS}, "map@r": 0.5, "r_precision": 0.5},
}


def card(name: str) -> str:
    """The card of a model of which the set, a group, the data and the licence have this name."""
    counts = dict.fromkeys(("identities", "images", "impostor_pairs", "genuine_pairs"), 1)
    group = {**counts, "fmr": 0.5, "fnmr": 0.5}
    judged = {"threshold": 0.5, "far": 0.1, "identities_left_out": 0, "groups": {name: group}}
    probe = {"probe": "knn", "images": 4, "top1": 0.5, "top5": 1.0}
    found = Measurements({name: {**MEASURED, "by_group": judged}}, {name: probe})
    found.calibrations.append(Calibration("0" * 16, "m", (name,), 4, 30, 9, (OperatingPoint(0.1, 0.5, 0.5, 3),)))
    facts = CardFacts("ORG/faces", found, license=name, data=name)
    return model_card(create("resnet8", embedding_dim=8, image_size=32), "0" * 16, facts, None)


def blocks(text: str) -> list[tuple[str, str]]:
    """What Markdown takes a card for: each part's kind, and its text where it has one."""
    _, _, body = text.removeprefix("---\n").partition("\n---\n")
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = [inner for token in markdown.parse(body) for inner in (token, *(token.children or ()))]
    return [(token.type, "" if token.type == "inline" else token.content) for token in tokens]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_shown_letter_by_letter_and_nothing_else_changes(name: str) -> None:
    text, neutral = card(name), card(NEUTRAL)
    assert blocks(text) == [(kind, content.replace(NEUTRAL, name)) for kind, content in blocks(neutral)]
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == name
    for result in front["model-index"][0]["results"]:
        assert result["dataset"] == {"name": name, "type": name}
    assert front["model-index"][0]["results"][0]["metrics"][1] == {"type": "auc", "value": 1e-05}


@pytest.mark.parametrize(
    ("name", "shown"),
    [("two\nlines", "two lines"), ("three\r\n\r\n# lines", "three # lines"), ("a\x1b[2Jb\x7f\ud800c", "a�[2Jb��c")],
)
def test_a_name_stays_in_its_line(name: str, shown: str) -> None:
    text = card(name)
    text.encode()
    assert all(letter.isprintable() for line in text.split("\n") for letter in line)
    assert ("text", f"Data: {shown}.") in blocks(text)
    assert len(blocks(text)) == len(blocks(card(NEUTRAL)))
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "plsc"


def test_addresses_are_no_links() -> None:
    text = _plain("https://example.org www.example.org somebody@example.org")
    assert text == r"https\://example.org www\.example.org somebody\@example.org"
