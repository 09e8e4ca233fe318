"""All steps of the quickstart, on a configuration small enough for a test, and its page."""

import base64
import html
import json
import re
import shlex
import socket
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from support.waiting import serving

import plsc
from plsc import config
from plsc.files import read_json
from plsc.quickstart import CONFIG, UNSEEN, QuickstartPaths, steps
from plsc.quickstart.report import write_report
from plsc.quickstart.steps import run_quickstart
from plsc.tools import quickstart
from plsc.tools.entry import main

pytestmark = [pytest.mark.slow, pytest.mark.live]

ROOT = Path(__file__).parents[2]

SMALL = (
    *("--data.train", "avatars:80x8", "--data.image_size", "32", "--data.batch_size", "16"),
    *("--epochs", "5", "--embedding_dim", "16", "--log.every_steps", "1"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    paths = QuickstartPaths(
        tmp_path_factory.mktemp("quickstart") / "out", unseen="avatars:40x6@1000000", overrides=SMALL
    )
    result = run_quickstart(paths)
    return paths, result, write_report(paths, result)


def test_report_holds_what_its_readers_expect(finished):
    paths, _, _ = finished
    report = read_json(paths.report)
    for name in ("trained", "untrained", "raw_pixels"):
        assert 0.0 <= report[name]["accuracy"] <= 1.0
        expected = {
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
        assert set(report[name]) >= expected
        assert report[name]["images"] == 240
        assert report[name]["identities"] == 40
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
    fetched = [source for source in links.sources if not source.startswith(("data:", "#"))]
    assert fetched == ["http://127.0.0.1:8080"]  # of the service that it tells how to start: a link, not a picture
    assert not re.search(r"url\(\s*['\"]?http", text)
    assert links.tags.count("svg") == 3
    assert links.tags.count("img") > 24 + 6 * 8
    assert not re.search(r"\$[a-z_]+", text)


def test_config_loads_and_never_trains_on_the_unseen():
    shipped = config.load(CONFIG)
    identities = int(re.fullmatch(r"avatars:(\d+)x\d+", shipped.data.train).group(1))
    assert 2000 <= identities < 1_000_000
    assert shipped.eval.sets == (UNSEEN,)


def test_readmes_line_serves_a_gallery_in_which_pictures_find_their_people(finished):
    paths, _, _ = finished
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^plsc (serve .*quickstart.*)$", readme, flags=re.MULTILINE)
    assert shlex.split(line) == QuickstartPaths(Path("quickstart")).serve_arguments
    assert f"plsc {line}".replace("quickstart/", f"{paths.out}/") == paths.serve_command
    assert paths.serve_command in html.unescape((paths.out / "report.html").read_text(encoding="utf-8"))

    people = {f"avatar-{number}" for number in range(1_000_000, 1_000_040)}
    queries = {path.stem: path.read_bytes() for path in paths.queries.iterdir()}
    named, told = people & queries.keys(), read_json(paths.report)["gallery"]
    assert len(named) == min(told["passed"], 10) == told["found"] > 0
    assert queries.keys() - named <= {"hard-1", "stranger-1", "stranger-2"}
    with serving(paths.serve_arguments) as address, plsc.Client(address) as client:
        info = client.info()
        assert info["false_match_rate"] >= 1e-4
        assert info["threshold"] == told["threshold"]
        assert client.collection("people").faces == 200
        found = {name: dropped(address, picture) for name, picture in queries.items()}
        for name, matches in found.items():
            judged = [match["person"]["name"] for match in matches if match["same_person"]]
            assert judged == ([name] if name in people else []), name
        if told["hard"] is not None:
            assert found["hard-1"][0]["person"]["name"] == told["hard"]
        match = found[min(named)][0]
        place = f"{address}/v1/collections/people/persons/{match['person']['id']}/faces/{match['face']}/thumbnail"
        assert httpx.get(place).headers["content-type"] == "image/jpeg"
        assert main(["quickstart", "--out", str(paths.out)]) == 2  # nothing is taken from under the service


def dropped(address: str, picture: bytes) -> list[dict]:
    """The matches that the page is shown where a picture is dropped on it: its request, with its number of matches."""
    body = {"query": {"image": base64.b64encode(picture).decode("ascii")}, "k": 10}
    answer = httpx.post(f"{address}/v1/collections/people/search", json=body, timeout=60).raise_for_status().json()
    return answer["results"][0]["matches"]


def test_a_resumed_quickstart_reports_the_whole_training(finished):
    paths, result, _ = finished
    resumed = {
        **read_json(paths.out / "training.json"),
        "seconds": 0.0,
        "images": 0,
        "images_per_second": 0.0,
        "loss": None,
    }
    whole = steps._of_all_starts(paths, resumed)
    assert {key: whole[key] for key in result.report["training"]} == result.report["training"]
    assert whole["images"] == pytest.approx(100 * 32, rel=1e-3)  # of two ranks; metrics have rounded times and rates
    assert whole["seconds"] > 0


def test_the_extra_that_readme_installs_brings_all_that_it_takes():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    brought = [name for extra in ("serve", "client", "export", "search") for name in extras[extra]]
    names = {re.match(r"[\w-]+", name)[0].removesuffix("-cpu") for name in brought}
    assert "plsc-torch[client,export,search]" in extras["serve"]
    assert set(quickstart._OF_EXTRAS) <= names


@pytest.mark.parametrize(
    ("ended", "code", "told"),
    [
        (130, 130, "stopped; the same command goes on"),
        (143, 143, "stopped; the same command goes on"),
        (137, 1, "`plsc train` failed, see above"),  # killed, for memory perhaps
        (1, 1, "`plsc train` failed, see above"),
    ],
)
def test_a_stop_during_the_training_is_no_failure_to_fix(tmp_path, monkeypatch, capsys, ended, code, told):
    monkeypatch.setattr(steps, "launch", lambda arguments, ranks: ended)
    assert main(["quickstart", "--out", str(tmp_path / "out")]) == code
    assert capsys.readouterr().err.startswith(f"plsc quickstart: error: {told}")


def test_a_port_in_use_is_told_before_the_training(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("plsc.tools.quickstart.PORT", taken.getsockname()[1])
        assert main(["quickstart", "--out", str(tmp_path / "out"), "--serve"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "in use; leave --serve out, and serve by `plsc serve" in told
    assert not (tmp_path / "out").exists()


def test_serve_alone_needs_no_second_training(finished, monkeypatch, capsys):
    paths, _, _ = finished
    served = []
    monkeypatch.setattr("plsc.tools.quickstart.PORT", 0)
    monkeypatch.setattr("plsc.tools.serve.run", lambda args: served.append((args.store, args.keep_thumbnails)))
    assert main(["quickstart", "--out", str(paths.out), "--serve"]) == 0
    assert served == [(f"{paths.gallery}/", True)]
    assert paths.serve_command in capsys.readouterr().out


def test_a_second_quickstart_in_the_same_folder_begins_anew(finished):
    paths, result, _ = finished
    (paths.run / "left.txt").touch()
    before = metrics(paths)
    again = run_quickstart(paths)
    assert not (paths.run / "left.txt").exists()
    assert again.report["training"]["steps"] == result.report["training"]["steps"]
    after = metrics(paths)
    assert [row["step"] for row in after] == [row["step"] for row in before] == list(range(1, 101))
    assert after[0]["loss"] == before[0]["loss"]  # in later steps bfloat16 makes much of a last bit
    assert again.report["trained"].keys() == result.report["trained"].keys()


def metrics(paths):
    lines = (paths.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]
