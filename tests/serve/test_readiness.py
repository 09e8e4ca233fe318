"""A service whose model none of its gallery's collections is of is not ready, and says so by name."""

from pathlib import Path

import httpx
import pytest
from support.live_service import (
    CONTRACT,
    NEXT_CONTRACT,
    Linear,
    linear_embedder,
    live_service,
    next_linear_embedder,
    vectors,
)

from plsc.embedding.embedder import EmbeddingModel
from plsc.tools.serve import _warn_of_models

pytestmark = pytest.mark.live


class Stranger(Linear):
    contract_id = "stranger"


class Later(Linear):
    contract_id, compatible_with = "later", (CONTRACT,)


def stranger() -> EmbeddingModel:
    return EmbeddingModel(Stranger(), "models/stranger.safetensors")


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    """A folder whose store has a collection of the linear model, with a person."""
    with live_service(tmp_path) as live:
        place = live.collection("people")
        face = {"vector": vectors(1)[0].tolist()}
        assert live.ask("POST", f"{place}/persons", {"faces": [face]}).status_code == 201
        assert live.ask("GET", "/health/ready").json() == {"status": "ready"}
    return tmp_path


def test_another_model_is_not_ready_by_name(gallery: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_service(gallery, embedder=stranger(), metrics_port=0) as live:
        answer = live.ask("GET", "/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "without the model of its gallery")
        reason = answer.json()["reason"]
        for part in ("collection people", CONTRACT, "stranger", "serve it with its own model", "--next-model"):
            assert part in reason
        assert live.ask("GET", "/v2/health/ready").status_code == 503
        assert live.ask("GET", "/health/live").status_code == 200
        search = live.ask("POST", "/v1/collections/people/search", {"query": {"vector": [1.0] * 8}})
        assert (search.status_code, search.json()["error"]["message"]) == (409, reason)
        assert 'plsc_collection_has_model{collection="people"} 0.0' in httpx.get(live.server.metrics_address or "").text
        _warn_of_models(live.service)
        assert capsys.readouterr().err == f"not ready: {reason}\n"
        live.collection("other")  # of this model: there is work to do
        assert live.ask("GET", "/health/ready").json() == {"status": "ready"}
        metrics = httpx.get(live.server.metrics_address or "").text
        assert 'plsc_collection_has_model{collection="people"} 0.0' in metrics
        assert 'plsc_collection_has_model{collection="other"} 1.0' in metrics
        _warn_of_models(live.service)
        assert capsys.readouterr().err == f"warning: {reason}\n"
        live.ask("DELETE", "/v1/collections/other")
        assert live.ask("GET", "/health/ready").status_code == 503


def test_strangers_learn_no_names_of_collections(gallery: Path) -> None:
    with live_service(gallery, embedder=stranger(), callers={"all": {"role": "admin"}}) as live:
        answer = httpx.get(f"{live.server.address}/health/ready")
        assert answer.status_code == 503
        assert "people" not in answer.text
        assert "no collection is of this service's model" in answer.json()["reason"]


def test_an_empty_gallery_and_a_compatible_model_are_ready(gallery: Path, tmp_path: Path) -> None:
    with live_service(tmp_path / "empty", embedder=stranger()) as live:
        assert live.ask("GET", "/health/ready").status_code == 200
    with live_service(gallery, embedder=EmbeddingModel(Later(), "models/later.safetensors")) as live:
        assert live.ask("GET", "/health/ready").status_code == 200


def test_a_gallery_that_is_moved_is_ready_with_both_models(gallery: Path) -> None:
    both = {"embedder": linear_embedder(), "next_embedder": next_linear_embedder()}
    with live_service(gallery, **both) as live:
        live.service.store.begin_migration("people", 12, NEXT_CONTRACT)
        assert live.ask("GET", "/health/ready").status_code == 200
    with live_service(gallery, embedder=next_linear_embedder()) as live:  # before the cut-over it searches nothing
        assert live.ask("GET", "/health/ready").status_code == 503
    with live_service(gallery, embedder=linear_embedder()) as live:
        person = live.service.store.persons("people")[0]
        second = {person.id: {person.faces[0]: vectors(1, 1)[0].repeat(2)[:12]}}
        live.service.store.put_second_vectors("people", second, NEXT_CONTRACT)
        live.service.store.exchange_spaces("people", NEXT_CONTRACT)
    for models in (both, {"embedder": next_linear_embedder()}):
        with live_service(gallery, **models) as live:
            assert live.ask("GET", "/health/ready").status_code == 200
