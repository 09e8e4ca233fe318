"""Moving a collection to the service's next model over HTTP: begun, filled, judged, cut over, rolled back, finished."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.live_service import (
    CONTRACT,
    NEXT_DIM,
    SIZE,
    Linear,
    Live,
    image_input,
    linear_embedder,
    live_service,
    next_linear_embedder,
    picture,
)
from support.live_service import (
    NEXT_CONTRACT as NEW,
)

from plsc.client import Client, ServerError
from plsc.gallery.migration import filling
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson
from plsc.tools.entry import main

PERSONS = 30


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    settings: dict[str, Any] = {"threshold": 0.5, "keep_thumbnails": True, "thumbnails": tmp_path / "thumbnails"}
    callers = {"boss": {"role": "admin"}, "writer": {"role": "write"}}
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
    assert begun.json()["free_bytes"] > begun.json()["needed_bytes"] == (2 * PERSONS + 1) * (2 * 4 * NEXT_DIM + 64)
    assert live.ask("POST", "/v1/migrations", {"collection": "staff"}).status_code == 409

    now = until_lacking(live, 5)
    assert (now["faces"], now["lacking"], now["estimated"], now["is_cut_over"]) == (2 * PERSONS + 1, 5, 0, False)
    missing = live.ask("GET", "/v1/migrations/staff/missing").json()
    assert [(person["id"], person["name"]) for person in missing["persons"]] == [
        (lost["id"], "p0"),
        (lost_too["id"], "p2"),
        (vector, None),
    ]
    sent = {"faces": [image_input(picture(seed)) for seed in (1, 0, 77)]}
    again = live.ask("POST", f"/v1/migrations/staff/persons/{lost['id']}/pictures", sent)
    assert again.json() == {"faces": [face["id"] for face in lost["faces"]]}, "each is known, the stranger's is not"
    strange = {"faces": [image_input(picture(77))]}
    assert live.ask("POST", f"/v1/migrations/staff/persons/{lost['id']}/pictures", strange).status_code == 422
    step(live, "cut-over", {"max_loss": 1}, status=409)
    assert found(live, 5)[:2] == (CONTRACT, people[2]["id"])

    now = step(live, "estimate")
    assert (now["lacking"], now["estimated"]) == (0, 3)
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
    step(live, "cut-over", {"max_loss": 1})
    live.ask("POST", "/v1/snapshots")
    finished = step(live, "finish")
    assert (finished["contract_id"], finished["snapshots"]) == (NEW, 1)
    assert live.ask("GET", "/v1/migrations/staff").status_code == 404
    assert live.ask("GET", "/v1/migrations").json() == {"migrations": []}
    assert found(live, 300) == (NEW, since["id"], pytest.approx(1.0, abs=1e-6))
    lines = (live.folder / "audit.jsonl").read_text()
    assert '"operation":"begin_migration","collection":"staff"' in lines
    for operation in ("begin_migration", "fill_migration", "cut_over", "roll_back", "finish"):
        assert f'"{operation}"' in lines, operation
    assert live.ask("GET", place).json()["contract_id"] == NEW


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
            step(live, ("cut-over", "roll-back")[number % 2], {"max_loss": 1} if number % 2 == 0 else None)
            late = enrol(live, place, 100 + number)
            assert found(live, 100 + number)[1] == late["id"]
        while not wrong and seen != {CONTRACT, NEW}:
            time.sleep(0.01)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]


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
            client.migrate("staff", "cut-over", max_loss=1)
        assert refused.value.status == 409
        client.delete_person("staff", lone.id)
        with pytest.raises(ServerError, match=r"10 persons at the least who have two faces"):
            client.migrate("staff", "cut-over")
        assert client.migrate("staff", "cut-over", max_loss=1)["is_cut_over"]
        with pytest.raises(ServerError, match=r"is cut over"):
            client.migrate("staff", "cancel")
        client.migrate("staff", "roll-back")
        assert client.migrate("staff", "cancel") == {}
        client.begin_migration("staff")
        until_lacking(live, 0)
        client.migrate("staff", "cut-over", max_loss=1)
        assert client.migrate("staff", "finish")["snapshots"] == 0
        assert client.migrations() == []


def test_without_room_on_the_disk_nothing_is_begun(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    enrol(live, live.collection("staff"), 1)
    usage = shutil.disk_usage(live.folder)._replace(free=100)
    monkeypatch.setattr(filling.shutil, "disk_usage", lambda _: usage)
    answer = live.ask("POST", "/v1/migrations", {"collection": "staff"})
    told = "vectors of the new model need 160 bytes of disk, and 100 are free; make room"
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, told)
    assert live.ask("GET", "/v1/migrations/staff").status_code == 404


def test_a_service_without_a_next_model_says_so(tmp_path: Path) -> None:
    with live_service(tmp_path / "serve") as live:
        live.collection("staff")
        assert live.ask("GET", "/v1/info").json()["next_model"] is None
        answer = live.ask("POST", "/v1/migrations", {"collection": "staff"})
        assert (answer.status_code, "start it with --next-model FILE" in answer.text) == (400, True)
        assert live.ask("GET", "/v1/migrations/staff").status_code == 404


# --- the command ---


def migrate(*words: object) -> int:
    return main(["gallery", "migrate", *map(str, words)])


@pytest.fixture
def both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command opens "new" and "old" as linear models."""
    models = {"new": next_linear_embedder, "old": linear_embedder}
    monkeypatch.setattr("plsc.embedding.embedder.open_embedder", lambda path, **_: models[path]())


def kept_gallery(folder: Path) -> None:
    from plsc.gallery.backends import open_store

    store, model = open_store(folder), Linear()
    store.create_collection("people", 8, CONTRACT)
    thumbnails = ThumbnailStore(store, folder / "thumbnails", keep=True)
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 256, (2, 3, SIZE, SIZE), dtype=np.uint8)
        crops = torch.from_numpy(noise)
        new = NewPerson(model.run(crops).numpy(), f"P{number}")
        thumbnails.add_persons("people", [new], CONTRACT, [list(crops)])
    store.close()


@pytest.mark.usefixtures("both_models")
def test_the_command_takes_a_store_through_all_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert f"24 faces will take up to {24 * (2 * 4 * NEXT_DIM + 64):,} bytes of disk; " in told
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
    assert migrate(store, "--cancel") == 2
    assert migrate(store, "--roll-back") == 0
    assert migrate(store, "--finish") == 2
    assert "is not cut over" in capsys.readouterr().err
    assert migrate(store, "--cut-over", "--max-loss", 1) == 0
    assert "serve it with the new model and --threshold" in capsys.readouterr().out, "by the threshold given before"
    assert migrate(store, "--finish") == 0
    assert "the former model's vectors are gone from the store's files" in capsys.readouterr().out
    assert main(["gallery", "check", str(store)]) == 0
    assert migrate(store, "--to", "old") == 0
    assert migrate(store, "--cancel") == 0
    assert migrate(store, "--status") == 2
