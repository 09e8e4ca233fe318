"""The Open Inference Protocol, version 2: as its text has it, in JSON and with raw tensors."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from support.live_service import DIM, SIZE, Live, linear_embedder

pytestmark = pytest.mark.live

MODEL = "/v2/models/linear"
LENGTH = "Inference-Header-Content-Length"


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 3, SIZE, SIZE), dtype=np.uint8)


def expected(images: np.ndarray) -> np.ndarray:
    return linear_embedder()(torch.from_numpy(images)).numpy()


def assert_same(found: Any, wanted: np.ndarray) -> None:
    """Equal save for float32's sums in another order, whose error goes with the terms and not with their sum."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def tensor(images: np.ndarray, **changes: Any) -> dict[str, Any]:
    return {"name": "images", "datatype": "UINT8", "shape": list(images.shape), **changes}


def raw(live: Live, request: dict[str, Any], tail: bytes, **headers: str) -> httpx.Response:
    """Post JSON with raw bytes behind it."""
    head = json.dumps(request).encode()
    given = {"Content-Type": "application/octet-stream", LENGTH: str(len(head)), **headers}
    return live.http.post(f"{MODEL}/infer", content=head + tail, headers=given)


@pytest.mark.slow
def test_metadata_and_health(live):
    assert live.ask("GET", "/v2").json()["extensions"] == ["binary_tensor_data"]
    assert live.ask("GET", "/v2/health/live").json() == {"live": True}
    assert live.ask("GET", "/v2/health/ready").json() == {"ready": True}
    assert live.ask("GET", f"{MODEL}/ready").json() == {"name": "linear", "ready": True}
    assert live.ask("GET", MODEL).json() == {
        "name": "linear",
        "versions": ["1"],
        "platform": "plsc",
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 3, SIZE, SIZE]}],
        "outputs": [{"name": "embeddings", "datatype": "FP32", "shape": [-1, DIM]}],
    }


def test_the_version_may_be_named(live):
    images = pictures(2)
    version = f"{MODEL}/versions/{live.ask('GET', MODEL).json()['versions'][0]}"
    for path in ("", "/ready"):
        assert live.ask("GET", version + path).json() == live.ask("GET", MODEL + path).json()
    answer = live.ask("POST", f"{version}/infer", {"inputs": [tensor(images, data=images.ravel().tolist())]}).json()
    assert answer["model_version"] == "1"
    assert_same(np.array(answer["outputs"][0]["data"]).reshape(2, DIM), expected(images))


@pytest.mark.parametrize("nested", [False, True])
def test_numbers_in_numbers_out(live, nested):
    images = pictures(3)
    data = images.tolist() if nested else images.ravel().tolist()
    answer = live.ask("POST", f"{MODEL}/infer", {"id": "7", "inputs": [tensor(images, data=data)]}).json()
    assert (answer["model_name"], answer["id"]) == ("linear", "7")
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("embeddings", "FP32", [3, DIM])
    assert_same(np.reshape(output["data"], (3, DIM)), expected(images))


@pytest.mark.parametrize(
    "ask",
    [
        {"outputs": [{"name": "embeddings", "parameters": {"binary_data": True}}]},
        {"parameters": {"binary_data_output": True}},
    ],
)
def test_raw_in_raw_out(live, ask):
    images = pictures(5)
    inputs = [tensor(images, parameters={"binary_data_size": images.nbytes})]
    answer = raw(live, {"inputs": inputs, **ask}, images.tobytes())
    assert answer.status_code == 200
    head = int(answer.headers[LENGTH])
    (output,) = json.loads(answer.content[:head])["outputs"]
    assert output["parameters"] == {"binary_data_size": 5 * DIM * 4}
    assert "data" not in output
    rows = np.frombuffer(answer.content[head:], dtype="<f4").reshape(5, DIM)
    assert_same(rows, expected(images))


def test_raw_in_numbers_out(live):
    images = pictures(1)
    inputs = [tensor(images, parameters={"binary_data_size": images.nbytes})]
    outputs = [{"name": "embeddings", "parameters": {"binary_data": False}}]
    request = {"inputs": inputs, "outputs": outputs, "parameters": {"binary_data_output": True}}
    answer = raw(live, request, images.tobytes())
    assert answer.headers["Content-Type"] == "application/json"
    assert_same(answer.json()["outputs"][0]["data"], expected(images)[0])


def test_what_does_not_fit_is_told_in_the_protocols_shape(live):
    images = pictures(2)
    flat = images.ravel().tolist()
    for request in (
        {},
        {"inputs": []},
        {"inputs": [tensor(images)]},
        {"inputs": [tensor(images, data=flat)] * 2},
        {"inputs": [tensor(images, data=flat, name="pixels")]},
        {"inputs": [tensor(images, data=flat, datatype="FP32")]},
        {"inputs": [tensor(images, data=flat[:-1])]},
        {"inputs": [tensor(images, data=[*flat[:-1], 256])]},
        {"inputs": [tensor(images, data=[*flat[:-1], -1])]},
        {"inputs": [tensor(images, data=[*flat[:-1], 0.5])]},
        {"inputs": [tensor(images, data=[*flat[:-1], "a"])]},
        {"inputs": [tensor(images, data=[flat, [1]])]},
        {"inputs": [tensor(images, data=flat, shape=[2, 3, SIZE, -SIZE])]},
        {"inputs": [tensor(images, data=flat, shape=[10**9, 3, SIZE, SIZE])]},
        {"inputs": [tensor(images, data=[], shape=[0, 3, SIZE, SIZE])]},
        {"inputs": [tensor(images, data=flat, shape=[2, 3 * SIZE * SIZE])]},
        {"inputs": [tensor(images, data=flat)], "outputs": [{"name": "logits"}]},
        {"inputs": [tensor(images, parameters={"binary_data_size": 10})]},
    ):
        answer = live.ask("POST", f"{MODEL}/infer", request)
        assert answer.status_code == 400, request
        assert set(answer.json()) == {"error"}
        assert isinstance(answer.json()["error"], str)
    whole = {"inputs": [tensor(images, parameters={"binary_data_size": images.nbytes})]}
    for tail, headers in (
        (images.tobytes()[:-1], {}),
        (images.tobytes() + b"x", {}),
        (images.tobytes(), {LENGTH: "10"}),
        (images.tobytes(), {LENGTH: "-1"}),
        (images.tobytes(), {LENGTH: "999999999"}),
        (images.tobytes(), {LENGTH: "x"}),
    ):
        assert raw(live, whole, tail, **headers).status_code == 400, headers
    for method, path in (
        ("GET", "/v2/models/other"),
        ("GET", "/v2/models/other/ready"),
        ("GET", "/v2/else"),
        ("GET", "/v2/models/other/versions/1"),
        ("GET", f"{MODEL}/versions/2"),
        ("GET", f"{MODEL}/versions/2/ready"),
        ("POST", f"{MODEL}/versions/2/infer"),
    ):
        answer = live.ask(method, path)
        assert (answer.status_code, isinstance(answer.json()["error"], str)) == (404, True)
