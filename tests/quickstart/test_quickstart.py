"""All steps of the quickstart, on a configuration small enough for a test, and its page."""

import json
import re
from html.parser import HTMLParser

import pytest

from plsc import config
from plsc.files import read_json
from plsc.quickstart.report import write_report
from plsc.quickstart.steps import CONFIG, UNSEEN, QuickstartPaths, run_quickstart

pytestmark = pytest.mark.slow

SMALL = (
    "--data.train",
    "avatars:12x6",
    "--data.image_size",
    "32",
    "--data.batch_size",
    "12",
    "--epochs",
    "2",
    "--embedding_dim",
    "16",
    "--log.every_steps",
    "1",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    paths = QuickstartPaths(
        tmp_path_factory.mktemp("quickstart") / "out", unseen="avatars:9x6@1000000", overrides=SMALL
    )
    result = run_quickstart(paths)
    return paths, result, write_report(paths, result)


def test_report_holds_what_its_readers_expect(finished):
    paths, _, _ = finished
    report = read_json(paths.report)
    for name in ("trained", "untrained", "raw_pixels"):
        assert 0.0 <= report[name]["accuracy"] <= 1.0
        assert set(report[name]) >= {
            "accuracy",
            "accuracy_std",
            "auc",
            "tar@far",
            "impostor_pairs",
            "rank1",
            "rank5",
            "images",
            "identities",
        }
        assert report[name]["images"] == 54
        assert report[name]["identities"] == 9
    assert report["seconds"] > 0
    assert report["images_per_second"] > 0
    assert report["index"]["recall@1"] == 1.0
    assert report["export"]["max_abs_error"] < 1e-4 * max(report["export"]["max_abs_value"], 1)
    json.dumps(report, allow_nan=False)


class Links(HTMLParser):
    """Collects what a page would fetch, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href", "xlink:href") and value]


def test_page_opens_without_a_network(finished):
    _, _, page = finished
    text = page.read_text(encoding="utf-8")
    links = Links()
    links.feed(text)
    assert [source for source in links.sources if not source.startswith(("data:", "#"))] == []
    assert not re.search(r"url\(\s*['\"]?http", text)
    assert links.tags.count("svg") == 3
    assert links.tags.count("img") > 24 + 6 * 8
    assert not re.search(r"\$[a-z_]+", text)


def test_a_second_quickstart_in_the_same_folder_begins_anew(finished):
    paths, result, _ = finished
    again = run_quickstart(paths)
    assert again.report["training"]["steps"] == result.report["training"]["steps"]
    assert again.report["trained"] == result.report["trained"]


def test_config_loads_and_never_trains_on_the_unseen():
    shipped = config.load(CONFIG)
    identities = int(re.fullmatch(r"avatars:(\d+)x\d+", shipped.data.train).group(1))
    assert 2000 <= identities < 1_000_000
    assert shipped.eval.sets == (UNSEEN,)
