"""``plsc index search --server``: images, folders and embedding sets against a running service."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_service import CONTRACT, Live, image_input, live_service, picture, vectors

from plsc.embedding.set_writer import write_embedding_set
from plsc.tools.entry import main

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Persons 0 to 19, each with a picture of that number; ``pictures/`` has some of them, and a broken one."""
    folder = tmp_path_factory.mktemp("remote")
    (folder / "pictures").mkdir()
    for number in range(3):
        (folder / "pictures" / f"{number}.png").write_bytes(picture(number))
    (folder / "pictures" / "3.bmp").write_bytes(picture(3, kind="BMP"))
    (folder / "pictures" / "4.png").write_bytes(picture(4)[:60])
    with live_service(folder, callers={"tester": {"role": "admin"}}) as running:
        (folder / "secret").write_text(f"{running.secrets['tester']}\n", encoding="ascii")
        place = running.collection("staff")
        persons = [{"name": f"p{number}", "faces": [image_input(picture(number))]} for number in range(20)]
        assert running.ask("POST", f"{place}/persons", {"persons": persons}).status_code == 201
        yield running


def search(live: Live, query: Path | str, *more: str) -> Any:
    result = live.folder / "result.json"
    result.unlink(missing_ok=True)
    command = ["index", "search", "staff", "--server", live.server.address, "--query", str(query), *more]
    assert main([*command, "--token-file", str(live.folder / "secret"), "--json", str(result)]) == 0
    return json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_folder_of_images(live, capsys):
    answer = search(live, live.folder / "pictures", "--k", "2")
    assert (answer["collection"], answer["k"]) == ("staff", 2)
    first = {query["query"]: query["matches"][0]["name"] for query in answer["queries"] if query["matches"]}
    assert first == {"0.png": "p0", "1.png": "p1", "2.png": "p2", "3.bmp": "p3"}
    broken = next(query for query in answer["queries"] if query["query"] == "4.png")
    assert broken["matches"] == []
    assert "decode" in broken["error"]
    assert "p3" in capsys.readouterr().out


def test_an_image_and_the_token_of_the_environment(live, monkeypatch, capsys):
    monkeypatch.setenv("PLSC_TOKEN", live.secrets["tester"])
    command = ["index", "search", "staff", "--server", live.server.address]
    assert main([*command, "--query", str(live.folder / "pictures" / "1.png"), "--k", "1"]) == 0
    assert " p1 " in capsys.readouterr().out
    monkeypatch.setenv("PLSC_TOKEN", "wrong")
    assert main([*command, "--query", str(live.folder / "pictures" / "1.png")]) == 1
    assert "does not know this token" in capsys.readouterr().err
    assert main([*command, "--query", "nothere.png"]) == 2
    assert main([*command, "--query", "x.png", "--model", "m"]) == 2


def test_an_embedding_set_of_the_same_contract_alone(live, tmp_path, capsys):
    rows = vectors(3, 8)
    for name, contract in (("same.emb", CONTRACT), ("other.emb", "other")):
        write_embedding_set(tmp_path / name, rows.astype(np.float32), contract_id=contract)
    answer = search(live, tmp_path / "same.emb", "--k", "3")
    for row, query in zip(rows, answer["queries"], strict=True):
        body = {"query": {"vector": row.tolist()}, "k": 3}
        expected = live.ask("POST", "/v1/collections/staff/search", body).json()["results"][0]["matches"]
        assert [match["face"] for match in query["matches"]] == [match["face"] for match in expected]
    command = ["index", "search", "staff", "--server", live.server.address]
    token = ["--token-file", str(live.folder / "secret")]
    assert main([*command, "--query", str(tmp_path / "other.emb"), *token]) == 1
    assert f"a vector of the model 'other', and those that it is for are of {CONTRACT}" in capsys.readouterr().err
