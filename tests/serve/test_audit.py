"""The audit log: what gets a line, when it is on disk, what its chain shows, and what a full disk or a crash leave."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.live_service import DIM, Live, image_input, live_service, picture
from support.waiting import wait_until

from plsc.errors import IntegrityError, UsageError
from plsc.models import create, save_model
from plsc.serve import audit
from plsc.serve.audit import EVENTS, AuditLog
from plsc.serve.audit_chain import parse_head, verify
from plsc.tools.entry import main

FACE = {"vector": [0.5] * DIM}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def filled(path: Path, count: int = 8, **options: Any) -> str:
    """A log of a genesis and ``count`` lines; returns its head."""
    log = AuditLog(path, **options)
    for number in range(count):
        log.write("write", token="desk", operation="add_persons", collection="staff", ids=[number], status=201)
    log.close()
    return str(log.head)


# --- what gets a line ---


@pytest.mark.live
def test_each_event_gets_its_line_where_it_is_asked_for(tmp_path):
    callers = {"desk": {"role": "admin"}, "camera": {"role": "search", "collections": ["staff"]}}
    with live_service(tmp_path, callers=callers, audit_events=frozenset(EVENTS.values())) as live:
        place = live.collection("staff")
        enrolled = live.ask("POST", f"{place}/persons", {"faces": [image_input(picture(1))]}).json()["id"]
        live.ask("POST", f"{place}/search", {"query": image_input(picture(1))}, by="camera")
        live.ask("GET", f"{place}/persons/{enrolled}")
        live.ask("GET", f"{place}/persons", by="camera")
        live.ask("POST", f"{place}/search", {"query": FACE}, by="camera")
        live.ask("POST", "/v1/snapshots", headers={"Authorization": "Bearer wrong"})
        live.ask("DELETE", f"{place}/persons/{enrolled}")
        live.ask("GET", "/health/live")
    keys = ("event", "token", "operation", "collection", "ids", "status")
    assert [tuple(line[key] for key in keys) for line in lines(tmp_path / "audit.jsonl")[1:]] == [
        ("write", "desk", "create_collection", None, [], 201),
        ("write", "desk", "add_persons", "staff", [enrolled], 201),
        ("search", "camera", "search", "staff", [enrolled], 200),
        ("read", "desk", "get_person", "staff", [], 200),
        ("refusal", "camera", "list_persons", "staff", [], 403),
        ("refusal", "camera", "search", "staff", [], 403),
        ("refusal", None, "take_snapshot", None, [], 401),
        ("write", "desk", "delete_person", "staff", [enrolled], 204),
    ]
    assert lines(tmp_path / "audit.jsonl")[-2]["client"] == "127.0.0.1"
    assert main(["gallery", "audit", str(tmp_path / "audit.jsonl"), "--verify"]) == 0


@pytest.mark.live
def test_writes_alone_get_lines_by_default_and_admins_see_the_head(tmp_path):
    with live_service(tmp_path, metrics_port=0) as live:
        place = live.collection("staff")
        live.ask("POST", f"{place}/search", {"query": FACE})
        live.ask("GET", "/v1/info", headers={"Host": "evil.example"})
        head = live.ask("GET", "/v1/info").json()["audit_head"]
        assert live.http.get(live.server.metrics_address).text.count("plsc_audit_sequence 1.0") == 1
    assert [line["event"] for line in lines(tmp_path / "audit.jsonl")] == ["genesis", "write"]
    assert str(verify(tmp_path / "audit.jsonl").head) == head


def test_a_flood_of_refusals_gets_few_lines_that_count_the_others(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for _ in range(10_000):
        log.write("refusal", token=None, status=401)
    log.close()
    written = lines(path)
    assert len(written) == 1 + 60 + 1
    assert written[-1]["suppressed"] == 10_000 - 60


# --- when it is on disk ---


@pytest.mark.live
def test_a_write_is_answered_when_its_line_is_synced(tmp_path, monkeypatch):
    synced: list[int] = []
    path = tmp_path / "audit.jsonl"

    def sync(descriptor: int) -> None:
        os.fsync(descriptor)
        synced.append(len(path.read_bytes().splitlines()))

    with live_service(tmp_path) as live:
        monkeypatch.setattr(audit, "_sync", sync)
        place = live.collection("staff")
        with ThreadPoolExecutor(8) as callers:
            done = [callers.submit(enrol_and_look, live, place, synced) for _ in range(40)]
        for answer in done:
            person, lines_on_disk = answer.result()
            assert any(person in line.get("ids", []) for line in lines(path)[:lines_on_disk])


def test_lines_that_wait_for_a_sync_share_the_next_one(tmp_path, monkeypatch):
    in_sync, go_on = threading.Event(), threading.Event()
    log = AuditLog(tmp_path / "audit.jsonl")
    synced: list[int] = []

    def sync(descriptor: int) -> None:
        in_sync.set()
        assert go_on.wait(60), "nobody let it go on"
        synced.append(len(lines(tmp_path / "audit.jsonl")))

    async def write_eight() -> None:
        first = asyncio.create_task(log.write_durably("write", ids=[0]))
        await asyncio.to_thread(in_sync.wait, 60)
        others = [asyncio.create_task(log.write_durably("write", ids=[number])) for number in range(1, 8)]
        await asyncio.sleep(0)  # each has handed its line over
        log.write("read")  # which nobody waits for
        go_on.set()
        await asyncio.gather(first, *others)

    monkeypatch.setattr(audit, "_sync", sync)
    asyncio.run(write_eight())
    log.close()
    assert synced == [2, 10]


def enrol_and_look(live: Live, place: str, synced: list[int]) -> tuple[int, int]:
    """Enrol somebody; returns the id, and how many lines were on disk when the answer came."""
    person = live.ask("POST", f"{place}/persons", {"faces": [FACE]}).json()["id"]
    return person, max(synced)


@pytest.mark.live
def test_no_acknowledged_write_lacks_its_line_after_a_kill(tmp_path):
    script = (
        "import asyncio, sys; from plsc.serve.audit import AuditLog; from pathlib import Path\n"
        "log = AuditLog(Path(sys.argv[1]), rotated_bytes=4096, keep=None)\n"
        "async def one(number):\n"
        "    while True:\n"
        "        await log.write_durably('write', ids=[number]); print(number, flush=True); number += 8\n"
        "async def all(): await asyncio.gather(*(one(number) for number in range(8)))\n"
        "asyncio.run(all())"
    )
    path = tmp_path / "audit.jsonl"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(60)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.communicate()[0].splitlines() if line.isdigit()]
        AuditLog(path, rotated_bytes=4096).close()
        verify(path)
        text = [line for file in sorted(tmp_path.iterdir()) for line in lines(file)]
        assert set(acknowledged) <= {number for line in text for number in line.get("ids", [])}


# --- what was done and has no line ---

BLOCKED = """
import sys, threading
from plsc.serve.audit import AuditLog
from plsc.tools.entry import main

append = AuditLog._append

def wait(log, entries, **options):
    if any(entry.get("operation") == "add_persons" for entry in entries):
        threading.Event().wait()
    append(log, entries, **options)

AuditLog._append = wait
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.live
@pytest.mark.slow
def test_a_write_that_was_committed_when_the_service_was_killed_is_a_gap_at_the_next_start(tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_model(create("resnet8", embedding_dim=DIM, image_size=32), tmp_path / "model.safetensors")
    serve = ["serve", "--model", str(tmp_path / "model.safetensors"), "--store", str(tmp_path / "store"), "--port", "0"]
    log = tmp_path / "store" / "audit.jsonl"
    with started([sys.executable, "-c", BLOCKED, *serve]) as (process, http):
        assert http.post("/v1/collections", json={"name": "staff"}).status_code == 201
        caller = threading.Thread(target=enrol_for_nobody, args=(str(http.base_url),))
        caller.start()
        wait_until(lambda: http.get("/v1/collections/staff/persons").json()["persons"])
        process.kill()
        caller.join()
    assert [(line["event"], line.get("changes")) for line in lines(log)] == [("genesis", None), ("write", [1])]
    for _ in range(2):  # said once
        with started([sys.executable, "-m", "plsc.tools.entry", *serve]) as (process, http):
            assert http.get("/v1/collections/staff/persons").json()["persons"]
            process.terminate()
        gap = lines(log)[-1]
        assert (gap["event"], gap["missing"], gap["count"], gap["changes_to"]) == ("gap", [[2, 2]], 1, 2)
    assert verify(log).lines == 3


@contextmanager
def started(command: list[str]) -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    """A service and a client of it, once it says that it serves; the block ends the service."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        with httpx.Client(base_url=line.split()[2].rstrip(":"), timeout=60) as http:
            yield process, http
    finally:
        process.communicate()


def enrol_for_nobody(address: str) -> None:
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{address}/v1/collections/staff/persons", json={"faces": [FACE]}, timeout=60)


def test_changes_without_a_line_are_named_once_through_rotations(tmp_path, capsys):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, rotated_bytes=4096)
    log.account_for(2)  # of a store that was there before its log
    for number in [3, 5, 4, 8, 7, *range(11, 60)]:
        log.write("write", operation="add_persons", changes=[number])
    log.close()
    log = AuditLog(path, rotated_bytes=4096)
    log.account_for(61)
    log.close()
    assert "have no line in the audit log: 5;" in capsys.readouterr().err
    log = AuditLog(path, rotated_bytes=4096)
    log.account_for(61)
    log.write("write", operation="add_persons", changes=[62])
    log.close()
    log = AuditLog(path, rotated_bytes=4096)
    log.account_for(60)  # an older state of the store was brought back
    log.close()
    log = AuditLog(path)
    log.account_for(60)
    log.close()
    every = [line for file in sorted(tmp_path.iterdir(), key=str) for line in lines(file)]
    gaps = sorted((line for line in every if line["event"] == "gap"), key=lambda line: line["sequence"])
    assert [(line["missing"], line.get("undone")) for line in gaps] == [
        ([[1, 2]], None),
        ([[6, 6], [9, 10], [60, 61]], None),
        ([], [61, 62]),
    ]
    assert verify(path).files > 1


# --- what the chain shows ---


def altered(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_text("".join(change(path.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8")

    return apply


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (altered(lambda all: [*all[:3], all[3].replace("desk", "door"), *all[4:]]), r"jsonl:4 \(line 3\) is altered"),
        (altered(lambda all: all[:3] + all[4:]), r"line 3 is missing before .*jsonl:4"),
        (altered(lambda all: all[:3] + all[6:]), r"lines 3 to 5 are missing before .*jsonl:4"),
        (altered(lambda all: [*all[:3], all[4], all[3], *all[5:]]), r"line 3 is missing before .*jsonl:4"),
        (altered(lambda all: [*all[:4], all[3], *all[4:]]), r"jsonl:5 is out of order: line 3 stands where 4 belongs"),
        (altered(lambda all: all[1:]), r"line 0 is missing; the log begins with line 1"),
        (altered(lambda all: [*all[:5], "{}\n", *all[5:]]), r"jsonl:6 is altered: it is no line"),
        (altered(lambda all: [*all[:5], all[5][:20] + "\n", *all[6:]]), r"jsonl:6 is altered: it is no line"),
        (altered(lambda all: [all[0].replace("genesis", "write"), *all[1:]]), r"jsonl:1 is altered: the first line"),
        (altered(lambda all: []), r"is empty: its lines, from 0 on, are missing"),
    ],
)
def test_the_first_line_that_is_missing_altered_or_out_of_order_is_named(tmp_path, capsys, change, told):
    path = tmp_path / "audit.jsonl"
    filled(path)
    change(path)
    with pytest.raises(IntegrityError, match=told):
        verify(path)
    assert main(["gallery", "audit", str(tmp_path), "--verify"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_cut_end_and_a_chain_made_anew_show_by_a_head_noted_elsewhere(tmp_path, capsys):
    path = tmp_path / "audit.jsonl"
    head = filled(path)
    cut = altered(lambda all: all[:-2])
    cut(path)
    assert verify(path).head.sequence == 6  # by itself the chain cannot tell
    with pytest.raises(IntegrityError, match="lines 7 to 8 are missing at its end, which was at 8 before"):
        verify(path, parse_head(head))
    path.unlink()
    filled(path)  # other times, other hashes
    assert main(["gallery", "audit", str(path), "--verify", "--head", head]) == 1
    assert "(line 8) is not as noted" in capsys.readouterr().err
    filled(path)  # goes on
    assert main(["gallery", "audit", str(path), "--verify", "--head", str(verify(path).head)]) == 0
    for wrong in ("8", "8:xyz", head + "0", "-" + head):
        assert main(["gallery", "audit", str(path), "--verify", f"--head={wrong}"]) == 2


def test_files_are_rotated_and_the_chain_goes_on(tmp_path, capsys):
    path = tmp_path / "audit.jsonl"
    head = ""
    for _ in range(4):  # lines that come together go into one file
        head = filled(path, 40, rotated_bytes=4096)
    found = verify(path, parse_head(head))
    assert (found.files >= 4, found.first, found.lines) == (True, 0, found.head.sequence + 1)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.iterdir())
    capsys.readouterr()
    assert main(["gallery", "audit", str(tmp_path / "none"), "--verify"]) == 2
    assert "there is no audit log" in capsys.readouterr().err
    assert main(["gallery", "audit", str(tmp_path)]) == 0
    shown = [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()]
    assert shown == list(range(found.lines))
    (tmp_path / "audit.jsonl.2").unlink()
    with pytest.raises(IntegrityError, match=r"missing before .*audit\.jsonl\.3:1"):
        verify(path)


def test_old_files_that_were_not_to_be_kept_are_no_gap(tmp_path):
    path = tmp_path / "audit.jsonl"
    for _ in range(5):
        filled(path, 40, rotated_bytes=4096, keep=2)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert len(names) == 3
    assert verify(path).first > 0
    (tmp_path / names[1]).unlink()  # one that was to be kept
    with pytest.raises(IntegrityError, match=r"lines 0 to \d+ are missing"):
        verify(path)


def test_a_line_torn_by_a_crash_stands_in_the_next(tmp_path, capsys):
    path = tmp_path / "audit.jsonl"
    filled(path)
    with path.open("ab") as file:
        file.write(b'{"sequence":9,"ti\xff')
    assert verify(path).unfinished == 18
    filled(path, 1)
    recovered = lines(path)[9]
    assert (recovered["event"], recovered["torn_bytes"], recovered["torn"]) == (
        "recovered",
        18,
        '{"sequence":9,"ti\\xff',
    )
    assert (verify(path).lines, verify(path).unfinished) == (11, 0)


def test_a_kill_between_renaming_and_the_new_file_breaks_no_chain(tmp_path):
    path = tmp_path / "audit.jsonl"
    filled(path)
    path.rename(tmp_path / "audit.jsonl.1")
    filled(path, 2)
    assert (verify(path).files, verify(path).lines, lines(path)[0]["event"]) == (2, 12, "rotated")


def test_a_log_without_a_chain_is_set_aside(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text('{"time": "2026-01-01", "token": "desk", "operation": "add_persons"}\n', encoding="utf-8")
    filled(path, 1)
    assert "desk" in (tmp_path / "audit.jsonl.unchained").read_text(encoding="utf-8")
    assert lines(path)[0]["unchained"] == "audit.jsonl.unchained"
    assert verify(path).lines == 2
    path.write_text("x\n", encoding="utf-8")
    with pytest.raises(UsageError, match="exists already"):
        AuditLog(path)


# --- a full disk ---


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_write_is_answered_though_its_line_does_not_fit(tmp_path, capfd):
    with live_service(tmp_path, audit=Path("/dev/full")) as live:
        place = live.collection("staff")
        enrolled = live.ask("POST", f"{place}/persons", {"faces": [FACE]})
        assert enrolled.status_code == 201
        assert live.ask("DELETE", f"{place}/persons/{enrolled.json()['id']}").status_code == 204
    reported = [line for line in capfd.readouterr().err.splitlines() if "audit log takes no lines" in line]
    assert "No space left" in reported[0]
    lacking = [json.loads(line.partition("It lacks: ")[2]) for line in reported]
    assert [line.get("operation") for line in lacking] == [None, "create_collection", "add_persons", "delete_person"]


def test_a_file_that_takes_half_a_line_keeps_whole_ones_and_goes_on_later(tmp_path, capfd):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, former[1]))
        log.write("write", operation="lost")
        while "lost" not in capfd.readouterr().err:
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, ignored)
    log.write("write", operation="kept")
    log.close()
    assert [line.get("operation") for line in lines(path)] == [None, "kept"]
    assert verify(path).lines == 2
