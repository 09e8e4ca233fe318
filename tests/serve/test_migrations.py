"""Moving a collection to the service's next model over HTTP: begun, filled, judged, cut over, rolled back, finished."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from support.live_service import (
    CONTRACT,
    NEXT_DIM,
    SIZE,
    Linear,
    Live,
    NextLinear,
    image_input,
    linear_embedder,
    live_service,
    next_linear_embedder,
    picture,
)
from support.live_service import (
    NEXT_CONTRACT as NEW,
)
from support.waiting import wait_until

from plsc.client import Client, ServerError, Vector
from plsc.embedding.embedder import EmbeddingModel
from plsc.gallery.backends import open_store
from plsc.gallery.migration import filling, moving
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson
from plsc.serve.migrations import Migrations
from plsc.serve.observability import Metrics
from plsc.serve.server import Load, Server
from plsc.tools.entry import main

pytestmark = pytest.mark.live

PERSONS = 30
UNJUDGED = {"max_loss": 1, "threshold": 0.6}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    settings: dict[str, Any] = {"threshold": 0.5, "keep_thumbnails": True, "thumbnails": tmp_path / "thumbnails"}
    callers = {
        "boss": {"role": "admin"},
        "writer": {"role": "write"},
        "other": {"role": "admin", "collections": ["others"]},
    }
    with live_service(tmp_path / "serve", next_embedder=next_linear_embedder(), callers=callers, **settings) as running:
        yield running


def enrol(live: Live, place: str, *seeds: int, by: str = "") -> dict[str, Any]:
    body = {"name": f"p{seeds[0]}", "faces": [image_input(picture(seed)) for seed in seeds]}
    answer = live.ask("POST", f"{place}/persons", body, by=by)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def found(live: Live, seed: int) -> tuple[str, int, float]:
    """The model that a search of a picture was answered with, who was found, and the score."""
    answer = live.ask("POST", "/v1/collections/staff/search", {"query": image_input(picture(seed)), "k": 1})
    assert answer.status_code == 200, answer.text
    (match,) = answer.json()["results"][0]["matches"]
    return answer.json()["contract_id"], match["person"]["id"], match["score"]


def step(live: Live, name: str, body: Any = None, status: int = 200) -> dict[str, Any]:
    answer = live.ask("POST", f"/v1/migrations/staff/{name}", body)
    assert answer.status_code == status, answer.text
    return dict(answer.json()) if answer.content else {}


def until_lacking(live: Live, lacking: int) -> dict[str, Any]:
    while (now := live.ask("GET", "/v1/migrations/staff").json())["lacking"] > lacking:
        time.sleep(0.05)
    return dict(now)


def test_a_collection_moves_while_it_is_used(live: Live) -> None:
    place = live.collection("staff")
    people = [enrol(live, place, 2 * n, 2 * n + 1) for n in range(PERSONS)]
    vector = live.ask("POST", f"{place}/persons", {"faces": [{"vector": [1.0] * 8}]}).json()["id"]
    lost, lost_too = people[:2]
    for person in (lost, lost_too):
        for path in live.folder.parent.glob(f"thumbnails/*/*/{person['id']}-*"):
            path.unlink()
    assert live.ask("POST", "/v1/migrations", {"collection": "staff"}, by="writer").status_code == 403
    assert live.ask("GET", "/v1/info").json()["next_model"] == NEW
    begun = live.ask("POST", "/v1/migrations", {"collection": "staff"})
    assert (begun.status_code, begun.json()["second_contract_id"], begun.json()["contract_id"]) == (201, NEW, CONTRACT)
    assert begun.json()["free_bytes"] > begun.json()["needed_bytes"] > (2 * PERSONS + 1) * 2 * 4 * NEXT_DIM
    assert live.ask("POST", "/v1/migrations", {"collection": "staff"}).status_code == 409

    now = until_lacking(live, 5)
    assert (now["faces"], now["lacking"], now["estimated"], now["is_cut_over"]) == (2 * PERSONS + 1, 5, 0, False)
    missing = live.ask("GET", "/v1/migrations/staff/missing").json()
    assert [(person["id"], person["name"]) for person in missing["persons"]] == [
        (lost["id"], "p0"),
        (lost_too["id"], "p2"),
        (vector, None),
    ]
    assert missing["next"] is None
    page = live.ask("GET", "/v1/migrations/staff/missing?limit=1").json()
    assert ([one["id"] for one in page["persons"]], page["next"]) == ([lost["id"]], lost["id"])
    full = live.ask("GET", "/v1/migrations/staff/missing?limit=3").json()
    assert full == missing, "the last page is full, and there is no next"
    sent = {"faces": [image_input(picture(seed)) for seed in (1, 0, 77)]}
    again = live.ask("POST", f"/v1/migrations/staff/persons/{lost['id']}/pictures", sent)
    assert again.json() == {"faces": [face["id"] for face in lost["faces"]]}, "each is known, the stranger's is not"
    strange = {"faces": [image_input(picture(77))]}
    assert live.ask("POST", f"/v1/migrations/staff/persons/{lost['id']}/pictures", strange).status_code == 422
    step(live, "cut-over", {"max_loss": 1}, status=409)
    assert found(live, 5)[:2] == (CONTRACT, people[2]["id"])

    now = step(live, "estimate")
    assert (now["lacking"], now["estimated"]) == (0, 3)
    missing = live.ask("GET", "/v1/migrations/staff/missing").json()
    assert [person["id"] for person in missing["persons"]] == [lost_too["id"], vector], "they have but an estimate"
    late = enrol(live, place, 200, 201)
    now = step(live, "judge")
    assert now["thresholds"].keys() == {CONTRACT, NEW}
    assert now["thresholds"][CONTRACT] == 0.5
    assert now["judgement"]["persons"] == PERSONS
    now = step(live, "cut-over", {"max_loss": 1})
    assert (now["is_cut_over"], now["contract_id"], now["second_contract_id"]) == (True, NEW, CONTRACT)
    answer = live.ask("POST", f"{place}/search", {"query": image_input(picture(201))}).json()
    assert (answer["contract_id"], answer["threshold"]) == (NEW, now["thresholds"][NEW])
    shown = live.ask("GET", place).json()
    assert (shown["contract_id"], shown["threshold"]) == (NEW, now["thresholds"][NEW])
    assert live.ask("GET", "/v1/collections").json()["collections"] == [shown]
    assert found(live, 201) == (NEW, late["id"], pytest.approx(1.0, abs=1e-6))
    assert found(live, 0) == (NEW, lost["id"], pytest.approx(1.0, abs=1e-6)), "as a fresh enrolment: it was sent again"
    assert found(live, 9)[:2] == (NEW, people[4]["id"])
    since = enrol(live, place, 300)
    live.ask("DELETE", f"{place}/persons/{people[3]['id']}")

    assert step(live, "roll-back")["contract_id"] == CONTRACT
    assert live.ask("GET", place).json()["threshold"] == 0.5
    assert found(live, 300) == (CONTRACT, since["id"], pytest.approx(1.0, abs=1e-6))
    assert found(live, 6)[1] != people[3]["id"]
    step(live, "finish", status=409)
    threshold = step(live, "cut-over", {"max_loss": 1})["thresholds"][NEW]
    live.ask("POST", "/v1/snapshots")
    listed = live.ask("GET", "/v1/migrations").json()["migrations"]
    assert [(one["collection"], one["is_cut_over"]) for one in listed] == [("staff", True)]
    assert live.ask("GET", "/v1/migrations", by="other").json() == {"migrations": []}, "who administers no such one"
    finished = step(live, "finish")
    assert (finished["contract_id"], finished["snapshots"]) == (NEW, 1)
    assert live.ask("GET", place).json()["threshold"] == threshold
    assert live.ask("GET", "/v1/migrations/staff").status_code == 404
    assert live.ask("GET", "/v1/migrations").json() == {"migrations": []}
    assert found(live, 300) == (NEW, since["id"], pytest.approx(1.0, abs=1e-6))
    lines = (live.folder / "audit.jsonl").read_text()
    assert '"operation":"begin_migration","collection":"staff"' in lines
    for operation in ("begin_migration", "fill_migration", "cut_over", "roll_back", "finish"):
        assert f'"{operation}"' in lines, operation
    assert live.ask("GET", place).json()["contract_id"] == NEW


def test_a_picture_that_comes_beside_a_vector_is_embedded_again_at_once(live: Live) -> None:
    place = live.collection("staff")
    live.ask("POST", "/v1/migrations", {"collection": "staff"})
    for number, path in enumerate((f"{place}/persons", f"{place}/persons/1/faces", f"{place}/persons/1/faces")):
        faces = [image_input(picture(number)), {"vector": [1.0 + number] * 8}]
        assert live.ask("POST", path, {"faces": faces}).status_code == 201
        assert until_lacking(live, number + 1)["faces"] == 2 * number + 2


def test_nobody_notices_a_cut_over(live: Live) -> None:
    place = live.collection("staff")
    people = {seed: enrol(live, place, seed)["id"] for seed in range(12)}
    live.ask("POST", "/v1/migrations", {"collection": "staff"})
    until_lacking(live, 0)
    ends, wrong, seen = threading.Event(), list[Any](), set[str]()

    def search() -> None:
        try:
            while not ends.is_set():
                for seed, person in people.items():
                    model, who, score = found(live, seed)
                    seen.add(model)
                    if who != person or score < 0.9:
                        wrong.append((seed, model, who, score))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(6):
            step(live, ("cut-over", "roll-back")[number % 2], UNJUDGED if number % 2 == 0 else None)
            late = enrol(live, place, 100 + number)
            assert found(live, 100 + number)[1] == late["id"]
        while not wrong and seen != {CONTRACT, NEW}:
            time.sleep(0.01)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]


def test_after_a_cut_over_no_vector_is_taken_for_one_of_the_other_model(live: Live) -> None:
    place = live.collection("staff")
    person = enrol(live, place, 1)["id"]
    live.ask("POST", "/v1/migrations", {"collection": "staff"})
    until_lacking(live, 0)
    step(live, "cut-over", UNJUDGED)

    def embedded(**more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        answer = live.ask("POST", "/v1/embeddings", {"inputs": [image_input(picture(1))], **more}).json()
        return {"vector": answer["embeddings"][0]}, {"contract_id": answer["contract_id"]}

    (old, of_old), (new, of_new) = embedded(), embedded(collection="staff")
    assert (of_old["contract_id"], of_new["contract_id"], len(new["vector"])) == (CONTRACT, NEW, NEXT_DIM)
    for given, told in (
        (old, f"searched by the model {NEW}, which is not the service's own; send pictures, or state contract_id"),
        (old | of_old, f"a vector of the model '{CONTRACT}', and those that it is for are of {NEW}; send the picture"),
        (new, "state contract_id"),
    ):
        for path, body in (("search", {"query": given}), ("persons", {"faces": [given]})):
            refused = live.ask("POST", f"{place}/{path}", body)
            assert (refused.status_code, told in refused.text) == (409, True), refused.text
    (match,) = live.ask("POST", f"{place}/search", {"query": new | of_new}).json()["results"][0]["matches"]
    assert match["person"]["id"] == person
    late = live.ask("POST", f"{place}/persons", {"faces": [new | of_new]})
    assert late.status_code == 201, late.text
    for of, status in ((of_old, 200), (of_new, 409)):
        assert live.ask("POST", "/v1/compare", {"a": old | of, "b": old}).status_code == status
    asked = {"inputs": [image_input(picture(1))], "collection": "staff"}
    assert "for other collections" in live.ask("POST", "/v1/embeddings", asked, by="other").text
    assert live.ask("POST", f"{place}/search", {"query": asked["inputs"][0] | of_new}).status_code == 400
    with Client(str(live.http.base_url), live.secrets["boss"]) as client:
        (vector,) = client.embeddings([picture(1)], collection="staff")
        (best,) = client.search("staff", Vector(vector, NEW), k=1)
        assert (best.person.id, best.score) == (late.json()["id"], pytest.approx(1, abs=1e-6))


def test_a_step_that_is_sent_again_gets_its_first_answer(live: Live) -> None:
    place = live.collection("staff")
    for number in range(10):  # of whom an adapter is learned
        enrol(live, place, *range(5 * number, 5 * number + 5))

    def twice(path: str, body: Any = None) -> httpx.Response:
        key = {"Idempotency-Key": path or "begin"}
        first, again = (live.ask("POST", f"/v1/migrations{path}", body, headers=key) for _ in range(2))
        assert (first.is_success, "Idempotent-Replayed" in first.headers) == (True, False), first.text
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert again.headers["Idempotent-Replayed"] == "true"
        return first

    assert twice("", {"collection": "staff"}).status_code == 201
    assert twice("/staff/cancel").status_code == 204
    live.ask("POST", "/v1/migrations", {"collection": "staff"})
    until_lacking(live, 0)
    twice("/staff/persons/1/pictures", {"faces": [image_input(picture(1))]})
    for name in ("pause", "resume", "estimate", "judge", "cut-over", "roll-back"):
        twice(f"/staff/{name}", {"max_loss": 1} if name == "cut-over" else None)
    step(live, "cut-over", {"max_loss": 1})
    wrong = {"Idempotency-Key": "refused"}
    for _ in range(2):
        assert live.ask("POST", "/v1/migrations/staff/cancel", headers=wrong).status_code == 409, "it is not kept"
    assert twice("/staff/finish").json()["contract_id"] == NEW


def test_the_client_moves_a_collection(live: Live) -> None:
    with Client(str(live.http.base_url), live.secrets["boss"]) as client:
        client.create_collection("staff")
        people = [client.add_person("staff", faces=[picture(2 * n), picture(2 * n + 1)]) for n in range(3)]
        lone = client.add_person("staff", faces=[np.ones(8)], external_id="E-1")
        begun = client.begin_migration("staff")
        assert begun["needed_bytes"] < begun["free_bytes"]
        assert client.migrations()[0]["began"] == begun["began"]
        until_lacking(live, 1)
        missing = {"id": lone.id, "external_id": "E-1", "name": None, "faces": list(lone.faces)}
        assert list(client.missing("staff")) == [missing]
        assert client.migrate("staff", "pause")["is_paused"]
        assert client.send_pictures("staff", people[0].id, [picture(1)]) == [people[0].faces[1]]
        with pytest.raises(ServerError, match=r"1 faces of staff have no vector of that model") as refused:
            client.migrate("staff", "cut-over", **UNJUDGED)
        assert refused.value.status == 409
        client.delete_person("staff", lone.id)
        with pytest.raises(ServerError, match=r"10 persons at the least who have two faces"):
            client.migrate("staff", "cut-over")
        with pytest.raises(ServerError, match=r"or give the new model's threshold"):
            client.migrate("staff", "cut-over", max_loss=1)
        now = client.migrate("staff", "cut-over", **UNJUDGED)
        assert (now["is_cut_over"], now["thresholds"]) == (True, {CONTRACT: 0.5, NEW: 0.6})
        assert live.ask("GET", "/v1/collections/staff").json()["threshold"] == 0.6
        with pytest.raises(ServerError, match=r"is cut over"):
            client.migrate("staff", "cancel")
        client.migrate("staff", "roll-back")
        assert client.migrate("staff", "cancel") == {}
        client.begin_migration("staff")
        until_lacking(live, 0)
        client.migrate("staff", "cut-over", **UNJUDGED)
        assert client.migrate("staff", "finish")["snapshots"] == 0
        assert client.migrations() == []


def test_writes_do_not_wait_for_what_a_step_computes(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    place = live.collection("staff")
    live.ask("POST", "/v1/migrations", {"collection": "staff"})
    judging, may_end = threading.Event(), threading.Event()

    def judge_for_long(*_: Any, **__: Any) -> None:
        judging.set()
        may_end.wait()

    monkeypatch.setattr(moving, "judge_move", judge_for_long)
    thread = threading.Thread(target=step, args=(live, "judge"))
    thread.start()
    judging.wait()
    enrol(live, place, 1)  # by the same caller
    may_end.set()
    thread.join()


def test_the_next_model_s_threshold_is_kept_over_a_start(tmp_path: Path) -> None:
    """One that was started anew after a finished move, as it was before, would know none."""
    options: dict[str, Any] = {"threshold": 0.5, "next_threshold": 0.3}
    for _ in range(2):
        with live_service(tmp_path, next_embedder=next_linear_embedder(), **options) as live:
            if not live.ask("GET", "/v1/collections").json()["collections"]:
                enrol(live, live.collection("staff"), 1)
                live.ask("POST", "/v1/migrations", {"collection": "staff"})
                sent = {"faces": [image_input(picture(1))]}
                assert live.ask("POST", "/v1/migrations/staff/persons/1/pictures", sent).status_code == 200
                now = step(live, "cut-over", {"max_loss": 1})
                assert now["thresholds"] == {CONTRACT: 0.5, NEW: 0.3}
                step(live, "finish")
            assert live.ask("GET", "/v1/collections/staff").json()["threshold"] == 0.3


def test_without_room_on_the_disk_nothing_is_begun(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    enrol(live, live.collection("staff"), 1)
    usage = shutil.disk_usage(live.folder)._replace(free=100)
    monkeypatch.setattr(filling.shutil, "disk_usage", lambda _: usage)
    answer = live.ask("POST", "/v1/migrations", {"collection": "staff"})
    assert answer.status_code == 503
    told = r"vectors of the new model need [\d,]+ bytes of disk, and 100 are free; make room"
    assert re.fullmatch(told, answer.json()["error"]["message"])
    assert live.ask("GET", "/v1/migrations/staff").status_code == 404


def test_a_service_without_a_next_model_says_so(tmp_path: Path) -> None:
    with live_service(tmp_path / "serve") as live:
        live.collection("staff")
        assert live.ask("GET", "/v1/info").json()["next_model"] is None
        answer = live.ask("POST", "/v1/migrations", {"collection": "staff"})
        assert (answer.status_code, "start it with --next-model FILE" in answer.text) == (400, True)
        assert live.ask("GET", "/v1/migrations/staff").status_code == 404


def test_what_is_paused_or_another_models_is_not_filled(tmp_path: Path) -> None:
    kept_gallery(tmp_path)
    with closing(open_store(tmp_path)) as store:
        store.begin_migration("people", NEXT_DIM, NEW)
        thumbnails, looks = ThumbnailStore(store, tmp_path / "thumbnails", keep=True), threading.Semaphore(0)

        def filling_by(contract_id: str) -> Migrations:
            told: dict[str, Any] = {"flip": False, "stored": lambda collection: looks.release()}
            return Migrations(store, thumbnails, {contract_id: next_linear_embedder()}, **told)

        for contract_id, paused in (("another model's", False), (NEW, True)):
            moving.set_paused(store, "people", paused)
            with closing(filling_by(contract_id)) as migrations:
                looks.acquire()
                migrations.wake()
                looks.acquire()  # the second look begins where the first has ended
            assert store.count_second("people") == (24, 0)
        moving.set_paused(store, "people", False)
        with closing(filling_by(NEW)):
            while store.count_second("people") != (0, 0):
                looks.acquire()


def test_filling_goes_on_after_any_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Exhausted(NextLinear):
        tries = 0

        def run(self, images_u8: torch.Tensor) -> torch.Tensor:
            self.tries += 1
            if self.tries == 1:
                raise RuntimeError("out of memory\nof the GPU")
            return super().run(images_u8)

    monkeypatch.setattr("plsc.serve.migrations._RETRY_SECONDS", 0.01)
    kept_gallery(tmp_path)
    with closing(open_store(tmp_path)) as store:
        store.begin_migration("people", NEXT_DIM, NEW)
        kept = store, ThumbnailStore(store, tmp_path / "thumbnails", keep=True)
        models = {NEW: EmbeddingModel(Exhausted(), "next")}
        with closing(Migrations(*kept, models, flip=False, stored=lambda collection: None)):
            wait_until(lambda: store.count_second("people") == (0, 0))
    assert capsys.readouterr().err.splitlines() == ["plsc serve: a migration is put off: out of memory"]


# --- the command ---


def migrate(*words: object) -> int:
    return main(["gallery", "migrate", *map(str, words)])


@pytest.fixture
def both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command opens "new" and "old" as linear models."""
    models = {"new": next_linear_embedder, "old": linear_embedder}
    monkeypatch.setattr("plsc.embedding.embedder.open_embedder", lambda path, **_: models[path]())


def kept_gallery(folder: Path) -> None:
    store, model = open_store(folder), Linear()
    store.create_collection("people", 8, CONTRACT)
    thumbnails = ThumbnailStore(store, folder / "thumbnails", keep=True)
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 256, (2, 3, SIZE, SIZE), dtype=np.uint8)
        crops = torch.from_numpy(noise)
        new = NewPerson(model.run(crops).numpy(), f"P{number}")
        thumbnails.add_persons("people", [new], CONTRACT, [list(crops)])
    store.close()


def enrolled_by_one_model(folder: Path, *seeds: int) -> None:
    """Enrol persons of a cut-over collection by the new model alone, with kept pictures."""
    with closing(open_store(folder)) as store:
        thumbnails = ThumbnailStore(store, folder / "thumbnails", keep=True)
        for seed in seeds:
            noise = np.random.default_rng(seed).integers(0, 256, (2, 3, SIZE, SIZE), dtype=np.uint8)
            crops = torch.from_numpy(noise)
            new = NewPerson(NextLinear().run(crops).numpy())
            thumbnails.add_persons("people", [new], NEW, [list(crops)])


@pytest.mark.usefixtures("both_models")
def test_a_service_with_both_models_makes_the_way_back_whole(tmp_path: Path) -> None:
    kept_gallery(tmp_path)
    assert migrate(tmp_path, "--to", "new") == 0
    assert migrate(tmp_path, "--cut-over", "--max-loss", 1) == 0
    enrolled_by_one_model(tmp_path, 50, 51)
    options: dict[str, Any] = {"store": str(tmp_path), "thumbnails": tmp_path / "thumbnails"}
    with live_service(tmp_path / "beside", next_embedder=next_linear_embedder(), **options) as live:
        while live.ask("GET", "/v1/migrations/people").json()["lacking"]:
            time.sleep(0.05)
        rolled = live.ask("POST", "/v1/migrations/people/roll-back")
        assert (rolled.status_code, rolled.json()["contract_id"]) == (200, CONTRACT)


@pytest.mark.usefixtures("both_models")
def test_who_has_expired_holds_up_no_step_of_the_command(tmp_path: Path) -> None:
    kept_gallery(tmp_path)
    assert migrate(tmp_path, "--to", "new") == 0
    with closing(open_store(tmp_path)) as store:
        soon = (datetime.now(UTC) + timedelta(seconds=0.2)).isoformat()
        store.add_persons("people", [NewPerson(np.ones((1, 8)), expires=soon)], CONTRACT)
        wait_until(lambda: store.expired(1))
    assert migrate(tmp_path, "--cut-over", "--max-loss", 1) == 0


@pytest.mark.usefixtures("both_models")
def test_the_command_takes_a_store_through_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, plot = tmp_path / "gallery", tmp_path / "roc.png"
    kept_gallery(store)
    assert migrate(store) == 2
    assert "name the new model: --to FILE" in capsys.readouterr().err
    assert migrate(store, "--to", "old") == 2
    assert "of that model already" in capsys.readouterr().err
    assert migrate(store, "--cut-over") == 2
    assert "people is not being moved to another model; begin a migration" in capsys.readouterr().err
    assert migrate(store, "--to", "new") == 0
    told = capsys.readouterr().out
    assert re.search(r"24 faces will take up to [\d,]+ bytes of disk; ", told)
    assert "24 faces embedded" in told
    assert "all of 24 faces have vectors of both models; judge: --report" in told
    assert migrate(store, "--report", "--plot", plot) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["old", "new"]
    assert sum(line.startswith(("TAR at ", "TAR lost: ", "threshold: ")) for line in table) == 4
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert migrate(store, "--cut-over", "--threshold", 0.5, "--max-loss", 1, "--json", tmp_path / "cut.json") == 0
    assert "serve it with the new model and --threshold" in capsys.readouterr().out
    assert migrate(store, "--to", "new") == 2
    assert "is cut over" in capsys.readouterr().err
    enrolled_by_one_model(store, 50)
    assert migrate(store, "--roll-back") == 2
    assert "2 faces of people have no vector of that model" in capsys.readouterr().err
    assert migrate(store, "--to", "old") == 0
    assert "2 faces embedded" in capsys.readouterr().out
    for given in ("nan", 7):
        assert migrate(store, "--report", "--threshold", given) == 2
        assert "a cosine lies between -1 and 1" in capsys.readouterr().err
    assert migrate(store, "--cancel") == 2
    assert migrate(store, "--roll-back") == 0
    assert migrate(store, "--finish") == 2
    assert "is not cut over" in capsys.readouterr().err
    assert migrate(store, "--cut-over", "--max-loss", 1) == 0
    assert "serve it with the new model and --threshold" in capsys.readouterr().out, "by the threshold given before"

    async def load_and_end(self: Server, load: Load, ready: object) -> None:
        load(Metrics()).close()

    monkeypatch.setattr(Server, "_run", load_and_end)
    monkeypatch.setattr("os.umask", lambda mask: mask)  # that of this process stays
    service = ["serve", "--model", "old", "--next-model", "new", "--store", str(store), "--port", "0"]
    told = "warning: people holds vectors of the next model, whose threshold is not known here: start with --model new "
    assert main(service) == 0
    assert told not in capsys.readouterr().err
    assert migrate(store, "--finish") == 0
    assert "the former model's vectors are gone from the store's files" in capsys.readouterr().out
    assert main(service) == 0
    assert told in capsys.readouterr().err
    assert main([*service, "--next-threshold", "0.3"]) == 0
    assert told not in capsys.readouterr().err
    assert main(["serve", "--model", "old", "--store", str(store), "--next-threshold", "0.3"]) == 2
    assert "--next-threshold is of the next model; give --next-model FILE" in capsys.readouterr().err
    assert main(["gallery", "check", str(store)]) == 0
    assert migrate(store, "--to", "old") == 0
    assert migrate(store, "--cancel") == 0
    assert migrate(store, "--status") == 2
