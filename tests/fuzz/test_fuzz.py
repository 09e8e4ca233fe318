"""A minute of the fuzz targets, with fixed seeds; make fuzz runs them for longer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_service import live_service

from fuzz import driver
from fuzz.__main__ import all_targets
from fuzz.driver import Target, fault_of, fuzz, save
from fuzz.routes import requests

pytestmark = pytest.mark.exhaustive

SEED = 1
COUNT = {"onnx": 8, "snapshot": 20, "encrypted snapshot": 20}  # a process each; a store made and opened each
ROUTE_COUNT, READER_COUNT = 40, 60


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Target]]:
    with all_targets(tmp_path_factory.mktemp("fuzz") / "all") as targets:
        yield targets


def test_no_input_breaks_a_reader_or_a_route(found: list[Target]) -> None:
    failures = []
    for target in found:
        is_route = "/" in target.name
        count = COUNT.get(target.name, ROUTE_COUNT if is_route else READER_COUNT)
        failures += [f"{each.target} {each.number}: {each.reason}" for each in fuzz(target, SEED, count=count)]
    assert not failures, "\n".join(failures)


def test_the_samples_of_requests_are_valid(tmp_path: Path) -> None:
    with live_service(tmp_path) as live:
        live.ask("POST", "/v1/collections", {"name": "people"})
        for name, body in requests().items():
            method, path = name.split(" ")
            answer = live.ask(method, path, body)
            assert answer.status_code < 300, (name, answer.text)


def test_every_route_and_reader_has_a_target(found: list[Target]) -> None:
    names = {target.name for target in found}
    assert len(names) == len(found)
    assert {"bin", "rec", "onnx", "pt", "safetensors", "npy", "checkpoint", "index", "embedding set", "toml"} <= names
    assert {"keys", "key file", "snapshot", "encrypted snapshot", "signed checkpoint", "tokens", "audit log"} <= names
    assert {f"token {kind}" for kind in ("stranger", "searcher", "reader", "writer", "owner")} <= names
    assert sum("/" in name for name in names) > 25


def test_a_failure_is_found_kept_and_repeated(tmp_path: Path) -> None:
    def run(content: bytes) -> None:
        if content == b"7":
            raise KeyError(content)

    target = Target("digits", lambda rng: str(rng.randrange(10)).encode(), run)
    first, *_ = fuzz(target, 3, count=100)
    assert "KeyError" in first.reason
    kept = save(first, tmp_path / "failures", 3)
    assert fault_of(target, kept.read_bytes()) is not None
    assert next(each.number for each in fuzz(target, 3, count=100)) == first.number


def test_what_takes_too_long_or_too_much_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def long(content: bytes) -> None:
        while True:
            pass

    def large(content: bytes) -> None:
        # far beyond the limit: what an earlier test's thread gives back meanwhile is taken off
        bytearray(800 << 20)[::4096] = b"x" * len(range(0, 800 << 20, 4096))

    for run, word in ((long, "seconds"), (large, "MiB")):
        monkeypatch.setattr(driver, "SECONDS", 0.5 if run is long else 60.0)  # to make pages takes a busy machine long
        reason = fault_of(Target("x", lambda rng: b"", run), b"")
        assert reason is not None
        assert word in reason
