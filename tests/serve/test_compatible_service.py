"""A service whose model is compatible with a gallery's: it searches the old vectors, and enrols beside them."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.live_service import (
    CONTRACT,
    Linear,
    Live,
    image_input,
    linear_embedder,
    live_service,
    next_linear_embedder,
    picture,
)

from plsc.embedding.embedder import EmbeddingModel
from plsc.serve.settings import Limits

pytestmark = pytest.mark.live

NEW = "newer-model"
BOTH = f"{CONTRACT},{NEW}"
PLACE = "/v1/collections/staff"


class Newer(Linear):
    """Nearly the same linear map, as compatible training makes it."""

    contract_id, compatible_with, former_ids = NEW, (CONTRACT,), ()

    def __init__(self) -> None:
        super().__init__()
        self.weight += 0.05 * torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(5))


class Stranger(Newer):
    contract_id, compatible_with, former_ids = "stranger", ("another",), ()


@contextmanager
def serving(folder: Path, engine: Linear, **settings: Any) -> Iterator[Live]:
    with live_service(
        folder, embedder=EmbeddingModel(engine, "models/m.safetensors"), **{"threshold": 0.5} | settings
    ) as on:
        yield on


def enrol(live: Live, seed: int) -> int:
    answer = live.ask("POST", f"{PLACE}/persons", {"faces": [image_input(picture(seed))]})
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def search(live: Live, seed: int) -> tuple[dict[str, Any], int, float]:
    """The answer, the best match and its score."""
    answer = live.ask("POST", f"{PLACE}/search", {"query": image_input(picture(seed)), "k": 1})
    assert answer.status_code == 200, answer.text
    (match,) = answer.json()["results"][0]["matches"]
    return answer.json(), match["person"]["id"], match["score"]


@pytest.fixture
def gallery(tmp_path: Path) -> tuple[Path, list[int]]:
    """A folder with the gallery of the old model, and who is in it."""
    with serving(tmp_path / "serve", Linear()) as live:
        live.collection("staff")
        return tmp_path / "serve", [enrol(live, seed) for seed in range(3)]


def contract(live: Live) -> str:
    return str(live.ask("GET", PLACE).json()["contract_id"])


def test_new_queries_search_old_vectors_and_new_enrolments_come_beside_them(gallery: tuple[Path, list[int]]) -> None:
    folder, people = gallery
    with serving(folder, Newer()) as live:
        answer, who, score = search(live, 1)
        assert (who, answer["contract_id"], answer["threshold"]) == (people[1], CONTRACT, 0.5)
        assert 0.9 < score < 0.9999, "another model's vector"
        assert contract(live) == CONTRACT, "a search changes nothing"
        assert live.ask("GET", "/v1/info").json()["model"]["contract_id"] == NEW
        late = enrol(live, 7)
        assert contract(live) == BOTH
        answer, who, score = search(live, 7)
        assert (who, answer["contract_id"], score) == (late, BOTH, pytest.approx(1, abs=1e-6))
        assert search(live, 2)[1] == people[2]
        faces = {"faces": [image_input(picture(8))]}
        assert live.ask("POST", f"{PLACE}/persons/{people[0]}/faces", faces).status_code == 201
        assert search(live, 8)[1:] == (people[0], pytest.approx(1, abs=1e-6))
    with serving(folder, Linear()) as live:  # the former model is one of those that the contract names
        answer, who, score = search(live, 7)
        assert (who, answer["contract_id"]) == (late, BOTH)
        assert 0.9 < score < 0.9999
        back = enrol(live, 9)
        assert contract(live) == BOTH
    with serving(folder, Newer()) as live:
        assert search(live, 9)[1] == back


class Renamed(Linear):
    """The same model, under the id of a later version."""

    contract_id, compatible_with, former_ids = "renamed", (), (CONTRACT,)


def test_a_gallery_under_the_models_former_id_is_the_models_own(gallery: tuple[Path, list[int]]) -> None:
    folder, people = gallery
    with serving(folder, Renamed(), false_match_rate=1e-3) as live:
        answer, who, score = search(live, 1)
        assert (who, score) == (people[1], pytest.approx(1, abs=1e-6))
        assert (answer["contract_id"], answer["threshold"]) == (CONTRACT, 0.5), "the threshold that was measured"
        assert live.ask("GET", PLACE).json()["threshold"] == 0.5
        late = enrol(live, 7)
        assert (contract(live), search(live, 7)[1]) == (CONTRACT, late)
        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(picture(2)))))
        vector = Renamed().run(pixels.permute(2, 0, 1)[None])[0].tolist()
        for stated in (None, "renamed", CONTRACT):
            query = {"vector": vector} | ({} if stated is None else {"contract_id": stated})
            answer = live.ask("POST", f"{PLACE}/search", {"query": query, "k": 1}).json()
            assert answer["results"][0]["matches"][0]["person"]["id"] == people[2]
        live.collection("visitors")
        assert live.ask("GET", "/v1/collections/visitors").json()["contract_id"] == "renamed"


@pytest.mark.parametrize("change", ["put", "faces"])
def test_every_way_to_enrol_names_the_model(gallery: tuple[Path, list[int]], change: str) -> None:
    folder, people = gallery
    faces = {"faces": [image_input(picture(8))]}
    with serving(folder, Newer()) as live:
        refused = live.ask("POST", f"{PLACE}/persons", {"faces": [{"image": "bm8="}]})
        assert (refused.status_code // 100, contract(live)) == (4, CONTRACT), "nothing was enrolled"
        if change == "put":
            assert live.ask("PUT", f"{PLACE}/persons/by-external-id/x", faces).status_code == 201
        else:
            assert live.ask("POST", f"{PLACE}/persons/{people[0]}/faces", faces).status_code == 201
        assert contract(live) == BOTH


def test_no_refused_write_names_the_model(gallery: tuple[Path, list[int]]) -> None:
    folder, people = gallery
    faces = {"faces": [image_input(picture(8))]}
    with serving(folder, Linear()) as live:
        assert live.ask("PUT", f"{PLACE}/persons/by-external-id/x", faces).status_code == 201
    with serving(folder, Newer(), limits=Limits(persons=5)) as live:
        refused = [
            live.ask("POST", f"{PLACE}/persons/999/faces", faces),
            live.ask("POST", f"{PLACE}/persons", {**faces, "external_id": "x"}),
            live.ask("PUT", f"{PLACE}/persons/by-external-id/y", faces, headers={"If-Match": '"1.1"'}),
            live.ask("POST", f"{PLACE}/persons", {"persons": [faces, faces]}),
        ]
        assert [answer.status_code for answer in refused] == [404, 409, 412, 507]
        assert contract(live) == CONTRACT
        known = live.ask("POST", f"{PLACE}/persons?on_known=add", {"faces": [image_input(picture(1))]})
        assert (known.status_code, known.json()["id"], contract(live)) == (200, people[1], BOTH)


def test_what_is_not_compatible_or_is_being_moved_is_refused(gallery: tuple[Path, list[int]]) -> None:
    folder, people = gallery
    query = {"query": image_input(picture(1))}
    with serving(folder, Stranger()) as live:
        refused = live.ask("POST", f"{PLACE}/search", query)
        assert refused.status_code == 409
        assert f"{CONTRACT}, and this service's model makes stranger; serve it with its own model" in refused.text
        assert "or one that is compatible with it, move it to this one" in refused.text
        assert live.ask("POST", f"{PLACE}/persons", {"faces": [query["query"]]}).status_code == 409
    with serving(folder, Newer(), false_match_rate=1e-3) as live:
        answer, who, _ = search(live, 1)
        assert (who, answer["threshold"]) == (people[1], None), "the rate was measured among the model's own vectors"
        assert live.ask("GET", PLACE).json()["threshold"] is None
    with serving(folder, Newer(), next_embedder=next_linear_embedder()) as live:
        refused = live.ask("POST", "/v1/migrations", {"collection": "staff"})
        assert (refused.status_code, "serve them with their own model" in refused.text) == (409, True)
        assert search(live, 1)[1] == people[1]
    with live_service(folder, embedder=linear_embedder(), next_embedder=next_linear_embedder()) as live:
        assert live.ask("POST", "/v1/migrations", {"collection": "staff"}).status_code == 201
    with serving(folder, Newer()) as live:
        refused = live.ask("POST", f"{PLACE}/search", query)
        assert (refused.status_code, "until the move that is under way is finished" in refused.text) == (409, True)


def test_a_gallery_of_two_models_moves_to_one(gallery: tuple[Path, list[int]]) -> None:
    folder, people = gallery
    options: dict[str, Any] = {"keep_pictures": True, "thumbnails": folder / "thumbnails"}
    with serving(folder, Newer()) as live:
        late = enrol(live, 7)
    newer = EmbeddingModel(Newer(), "models/m.safetensors")
    with live_service(folder, embedder=linear_embedder(), next_embedder=newer, threshold=0.5, **options) as live:
        begun = live.ask("POST", "/v1/migrations", {"collection": "staff"}).json()
        assert (begun["contract_id"], begun["second_contract_id"], begun["lacking"]) == (BOTH, NEW, 4)
        assert search(live, 7)[1] == late
        assert contract(live) == BOTH
        for person, seed in [*zip(people, range(3), strict=True), (late, 7)]:
            sent = {"faces": [image_input(picture(seed))]}
            assert live.ask("POST", f"/v1/migrations/staff/persons/{person}/pictures", sent).status_code == 200
        assert live.ask("POST", "/v1/migrations/staff/cut-over", {"max_loss": 1, "threshold": 0.5}).status_code == 200
        assert search(live, 2)[0]["contract_id"] == NEW
        since = enrol(live, 11)
        assert live.ask("POST", "/v1/migrations/staff/roll-back").status_code == 200
        answer, who, _ = search(live, 11)
        assert (answer["contract_id"], who) == (BOTH, since)
        assert live.ask("POST", "/v1/migrations/staff/cut-over", {"max_loss": 1, "threshold": 0.5}).status_code == 200
        assert live.ask("POST", "/v1/migrations/staff/finish").status_code == 200
    with serving(folder, Newer()) as live:
        assert search(live, 11)[1:] == (since, pytest.approx(1, abs=1e-6))
        assert contract(live) == NEW
