"""The command itself: starts, says so, ends in order when told to, and one line for what is wrong."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from support.live_service import answer_of, live_service
from support.waiting import wait_until

import plsc
from plsc.embedding.embedder import open_embedder
from plsc.evaluation.calibration import Calibration, OperatingPoint, write_calibration
from plsc.models import create, save_model
from plsc.tools.entry import main

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    torch.manual_seed(0)
    save_model(create("resnet8", embedding_dim=16, image_size=32), path)
    return path


def start(model: Path, store: Path, *arguments: str) -> tuple["subprocess.Popen[str]", str]:
    """``plsc serve`` and its address, once it says that it serves."""
    command = [sys.executable, "-m", "plsc.tools.entry", "serve", "--model", str(model), "--store", str(store)]
    process = subprocess.Popen(
        [*command, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "serving at http://127.0.0.1:" in line, process.communicate()
    return process, line


def refuses(host: str | None, port: int | None) -> bool:
    """Whether nobody listens there."""
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=20).close()
        return False
    return True


@pytest.mark.slow
def test_it_serves_ends_in_order_and_starts_again(model, tmp_path):
    process, line = start(model, tmp_path / "store", "--threshold", "0.5")
    address = line.split()[2].rstrip(":")
    assert "this machine alone may call" in line
    assert "possible matches from 0.5000" in line
    with plsc.Client(address) as client:
        client.create_collection("staff")
        person = client.add_person("staff", "Ada", faces=[[1.0] * 16])
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port), timeout=20) as running:
        body = b'{"query": {"vector": [' + b"1.0, " * 15 + b"1.0]}}"
        head = (
            f"POST /v1/collections/staff/search HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        )
        running.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert running.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(place.hostname, place.port))
        running.sendall(body)  # what was begun is finished
        answer = answer_of(running)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"Ada"' in answer
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")

    path = points(tmp_path / "calibration.json", open_embedder(model).contract_id)
    (model.parent / "run").mkdir()
    for name in ("model.safetensors", "best.safetensors"):
        shutil.copy(model, model.parent / "run" / name)
    of_a_run = ("--model", str(model.parent / "run"), "--best")
    process, line = start(model, tmp_path / "store", *of_a_run, "--fmr", "1e-3", "--calibration", str(path))
    assert f"model {model.parent}/run/best.safetensors (" in line
    with plsc.Client(line.split()[2].rstrip(":")) as client:
        assert client.person("staff", person.id) == person
        info = client.info()
    assert (info["threshold"], info["false_match_rate"]) == (0.47, 1e-3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")
    assert json.loads((tmp_path / "store" / "audit.jsonl").read_text(encoding="utf-8").splitlines()[1])["status"] == 201


@pytest.mark.slow
def test_while_it_loads_it_says_so(tmp_path, monkeypatch):
    from support import live_service as module

    go_on, opening = threading.Event(), module.open_store

    def slow(folder: Path) -> object:
        assert go_on.wait(120)
        return opening(folder)

    monkeypatch.setattr(module, "open_store", slow)
    found = {}

    def look(address: str) -> None:
        paths = ("/health/live", "/health/ready", "/v2/health/ready", "/v1/info")
        try:
            found.update({path: httpx.get(address + path) for path in paths})
        finally:
            go_on.set()

    original = module.Server.run

    def run(server: module.Server, *arguments: object) -> None:
        threading.Thread(target=look, args=(server.address,)).start()
        original(server, *arguments)

    monkeypatch.setattr(module.Server, "run", run)
    with live_service(tmp_path) as live:
        assert live.ask("GET", "/health/ready").status_code == 200
    assert [found[path].status_code for path in found] == [200, 503, 503, 503]
    assert found["/health/ready"].json() == {"status": "loading"}
    assert found["/v2/health/ready"].json() == {"ready": False}
    assert found["/v1/info"].json()["error"]["code"] == "unavailable"
    assert all(found[path].headers["Retry-After"] for path in ("/health/ready", "/v1/info"))


def points(path: Path, contract: str) -> Path:
    found = (OperatingPoint(1e-2, 0.31, 0.9, 100), OperatingPoint(1e-3, 0.47, 0.8, 10))
    write_calibration(path, Calibration(contract, "m", ("s",), 10, 10_000, 100, found))
    return path


@pytest.mark.slow
def test_what_is_wrong_at_the_start_is_one_line(model, tmp_path, capsys):
    other = points(tmp_path / "other.json", "another")
    rate = ["--fmr", "1e-3", "--calibration", str(other)]
    store = str(tmp_path / "store")
    for arguments, code, said in (
        (["--model", "nowhere.onnx"], 2, "nowhere.onnx"),
        (["--host", "0.0.0.0"], 2, "plsc tokens add"),
        (["--tokens", "none.toml"], 2, "none.toml"),
        (["--fmr", "1e-3"], 2, "--calibration"),
        (["--threshold", "2"], 2, "--threshold"),
        (["--threshold", "0.1", *rate], 2, "not both"),
        (rate, 2, "contract another"),
        ([*rate, "--fmr", "1e-9"], 2, "1e-09"),
        (["--max-batch", "0"], 2, "--max-batch"),
        (["--detector", "onnx:none.onnx"], 2, "none.onnx"),
        (["--port", "99999"], 2, "port"),
        (["--max-persons", "0"], 2, "--max-persons"),
        (["--max-metadata-bytes", "-1"], 2, "--max-metadata-bytes"),
        (["--store", "postgres:x", "--max-store-mib", "10"], 2, "--max-store-mib"),
        (["--score-step=-0.1"], 2, "--score-step"),
        (["--score-step=1.5"], 2, "--score-step"),
        (["--rate-limit", "searches=x"], 2, "rate limit"),
        (["--audit-events", "writes,looks"], 2, "--audit-events looks"),
        (["--audit", str(tmp_path / "no" / "audit")], 2, "audit"),
        (["--model", str(other)], 1, "other.json"),
        (["--best"], 2, "--best chooses among the weights of a run directory"),
        (["--model", str(model.parent), "--best"], 2, "has no best.safetensors"),
    ):
        given = ["serve", "--model", str(model), "--store", store, "--port", "0", *arguments]
        assert main(given) == code, arguments
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("plsc serve: error: ")
        assert said in lines[0], lines
