"""--fpir: each search is judged by the threshold for as many people as the collection has then."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_service import CONTRACT, NEXT_CONTRACT, Live, live_service, next_linear_embedder, vectors

from plsc.embedding.embedder import open_embedder
from plsc.evaluation.calibration import Calibration, OperatingPoint, read_calibration, write_calibration
from plsc.evaluation.search_thresholds import SearchCalibration, SearchThresholds
from plsc.tools.entry import main

pytestmark = pytest.mark.live

FPIR = 0.01
# A normal distribution below an exponential tail: FPIR(N, t) is known to within the hundred quantiles.
SEARCHES = SearchCalibration(
    mean=(0.0, 0.02),
    deviation=(0.1, 0.1),
    body=tuple(np.linspace(-3, 2.7, 100).tolist()),
    share=0.003,
    scale=0.35,
    shape=0.05,
    scores=2000,
    faces_each=1.0,
)
BY_SIZE = SearchThresholds(SEARCHES, FPIR)  # evidence up to 20 persons
SETTINGS: dict[str, Any] = {
    "threshold": 0.3,
    "false_match_rate": 1e-4,
    "search_thresholds": BY_SIZE,
    "callers": {"tester": {"role": "admin"}, "camera": {"role": "search", "allow": ["vectors"]}},
}


@pytest.fixture
def staff(live: Live) -> Any:
    place = live.collection("staff")
    yield place
    live.ask("DELETE", place)


def enrol(live: Live, place: str, count: int, seed: int) -> None:
    persons = [{"faces": [{"vector": row.tolist()}]} for row in vectors(count, seed)]
    assert live.ask("POST", f"{place}/persons", {"persons": persons}).status_code == 201


def search(live: Live, place: str, **options: Any) -> Any:
    return live.ask("POST", f"{place}/search", {"query": {"vector": vectors(1, 77)[0].tolist()}, **options}).json()


def test_each_search_takes_the_threshold_of_the_present_size(live, staff):
    assert live.ask("GET", staff).json()["threshold"] == BY_SIZE.threshold(1, 1)
    told = []
    for count, size in ((3, 3), (9, 12), (60, 72)):
        enrol(live, staff, count, size)
        answer = search(live, staff, k=100)
        assert answer["threshold"] == BY_SIZE.threshold(size, size)
        assert live.ask("GET", staff).json()["threshold"] == answer["threshold"]
        judged = answer["results"][0]["matches"]
        assert [match["same_person"] for match in judged] == [m["score"] >= answer["threshold"] for m in judged]
        told.append(answer["threshold"])
    assert told == sorted(set(told))


def test_a_request_keeps_a_threshold_of_its_own_and_comparisons_have_the_measured_one(live, staff):
    enrol(live, staff, 5, 1)
    answer = search(live, staff, threshold=-1.0)
    assert (answer["threshold"], len(answer["results"][0]["matches"])) == (-1.0, 5)
    one = {"vector": vectors(1)[0].tolist()}
    assert live.ask("POST", "/v1/compare", {"a": one, "b": one}).json()["threshold"] == 0.3
    info = live.ask("GET", "/v1/info").json()
    assert (info["threshold"], info["false_match_rate"], info["fpir"], info["fpir_persons"]) == (0.3, 1e-4, FPIR, 20)


def test_who_may_only_search_sees_nobody_below_the_threshold_of_the_size(live, staff):
    enrol(live, staff, 50, 2)
    query = {"query": {"vector": vectors(1, 5)[0].tolist()}, "k": 50, "threshold": -1.0}
    every = live.ask("POST", f"{staff}/search", query).json()["results"][0]["matches"]
    seen = live.ask("POST", f"{staff}/search", query, by="camera").json()["results"][0]["matches"]
    least = BY_SIZE.threshold(50, 50)
    assert [match["score"] for match in seen] == [match["score"] for match in every if match["score"] >= least]


def test_who_is_known_is_judged_by_the_same_threshold(live, staff):
    enrol(live, staff, 40, 3)
    face = {"faces": [{"vector": vectors(1, 9)[0].tolist()}]}
    best = search(live, staff, query={"vector": vectors(1, 9)[0].tolist()})["results"][0]["matches"][0]
    known = live.ask("POST", f"{staff}/persons", face).json()["known"]
    assert (known is not None) == (best["score"] >= BY_SIZE.threshold(40, 40))
    assert live.ask("POST", f"{staff}/persons", face).json()["known"]["score"] == pytest.approx(1)


def test_a_collection_of_another_model_has_no_threshold_of_this_one_s(tmp_path: Path):
    with live_service(tmp_path, next_embedder=next_linear_embedder(), search_thresholds=BY_SIZE, threshold=0.3) as live:
        live.service.store.create_collection("moved", next_linear_embedder().embedding_dim, NEXT_CONTRACT)
        live.service.store.create_collection("own", 8, CONTRACT)
        listed = live.ask("GET", "/v1/collections").json()["collections"]
    assert {one["name"]: one["threshold"] for one in listed} == {"moved": None, "own": BY_SIZE.threshold(0, 0)}


def test_a_service_without_it_says_so(tmp_path: Path):
    with live_service(tmp_path, threshold=0.3) as live:
        info = live.ask("GET", "/v1/info").json()
    assert (info["threshold"], info["fpir"], info["fpir_persons"]) == (0.3, None, None)


def test_even_a_threshold_above_every_cosine_answers(tmp_path: Path):
    heavy = SearchCalibration(**{**SEARCHES.__dict__, "shape": -5.0})
    with live_service(tmp_path, search_thresholds=SearchThresholds(heavy, FPIR)) as live:
        place = live.collection("staff")
        enrol(live, place, 30, 4)
        answer = search(live, place, query={"vector": vectors(1, 4)[0].tolist()})
        assert answer["threshold"] > 1
        assert not any(match["same_person"] for match in answer["results"][0]["matches"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from plsc.models import create, save_model

    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    torch.manual_seed(0)
    save_model(create("resnet8", embedding_dim=16, image_size=32), path)
    return path


def written(path: Path, contract: str, searches: SearchCalibration | None = SEARCHES) -> str:
    points = (OperatingPoint(1e-2, 0.31, 0.9, 100), OperatingPoint(1e-3, 0.47, 0.8, 10))
    write_calibration(path, Calibration(contract, "m", ("s",), 10, 10_000, 100, points, searches))
    return str(path)


def test_what_does_not_go_with_it_is_refused_in_one_line(model, tmp_path, capsys):
    contract = open_embedder(model).contract_id
    own = ["--calibration", written(tmp_path / "own.json", contract)]
    without = ["--calibration", written(tmp_path / "without.json", contract, None)]
    other = ["--calibration", written(tmp_path / "other.json", "another")]
    for arguments, said in (
        ([], "--fpir needs --calibration FILE"),
        (["--threshold", "0.4"], "leave --threshold out"),
        (["--fmr", "1e-3", *own], "leave --fmr out"),
        (without, "predicts no FPIR; measure it with plsc eval --gallery, --mated and --non-mated"),
        (other, "measured on the contract another"),
        (["--fpir", "0", *own], "between 0 and 1"),
        (["--fpir", "1e-9", *own], "beyond the evidence: 2,000 compared scores"),
    ):
        given = ["serve", "--model", str(model), "--store", str(tmp_path / "store"), "--port", "0", "--fpir", "0.01"]
        assert main([*given, *arguments]) == 2, arguments
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert said in lines[0]


def test_the_command_serves_by_it_and_warns_of_what_is_beyond_the_evidence(model, tmp_path, capsys, monkeypatch):
    from plsc.gallery.backends import open_store
    from plsc.gallery.values import NewPerson
    from plsc.serve.server import Server

    path = Path(written(tmp_path / "own.json", open_embedder(model).contract_id))
    store = open_store(tmp_path / "store")
    for name, count in (("few", 20), ("many", 21)):
        store.create_collection(name, 16, open_embedder(model).contract_id)
        rows = np.random.default_rng(count).normal(size=(count, 16)).astype(np.float32)
        store.add_persons(name, [NewPerson(row[None]) for row in rows], open_embedder(model).contract_id)
    store.close()
    found: list[Any] = []
    original = Server.run

    def run(server: Server, load: Any, ready: Any) -> None:
        def ended(service: Any) -> None:
            ready(service)
            found.append(service.settings)
            server.stop()

        original(server, load, ended)

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr("os.umask", lambda mask: mask)  # that of this process stays
    given = ["serve", "--model", str(model), "--store", str(tmp_path / "store"), "--port", "0", "--fpir", "0.01"]
    assert main([*given, "--calibration", str(path)]) == 0
    told = capsys.readouterr()
    assert "possible matches from 0.4700, in searches by FPIR 0.01, predicted up to 20 persons" in told.out
    assert told.err.splitlines() == [
        "warning: many counts as 21 persons, and the calibration is evidence of FPIR 0.01 up to 20: its threshold is "
        "extrapolated; calibrate on more people"
    ]
    (settings,) = found
    assert (settings.threshold, settings.false_match_rate) == (0.47, 1e-3)  # the strictest that was measured
    searches = read_calibration(path).searches
    assert searches is not None
    assert settings.search_thresholds.threshold(7, 7) == SearchThresholds(searches, 0.01).threshold(7, 7)
