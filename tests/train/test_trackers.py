"""The loggers of log.to, the real packages among them: runs offline, killed and resumed; pictures; refusals."""

import csv
import importlib.util
import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import Killable
from support.waiting import wait_until

from plsc.errors import UsageError
from plsc.loggers import LOGGERS, LoggedRun, check_loggers
from plsc.train.metrics import MetricsLog, read_metrics

SETS = ["avatars:6x3@100"]
CHANGES: dict[str, Any] = {
    "epochs": None,
    "optim.schedule": "constant",  # which another number of steps leaves as it is
    "eval.sets": SETS,
    "eval.every_steps": 4,
    "log.to": ["tensorboard", "wandb", "mlflow", "csv"],
}
CURVE, ROC, NEIGHBOURS = f"eval/{SETS[0]}/accuracy", "eval/roc", f"eval/{SETS[0]}/neighbours"


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log of protocol buffers, in blocks of 32 KiB, after a header of 7."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7 + size
        if position > len(data) or kind == 0:  # not yet written as a whole
            return
        whole += data[position - size : position]
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_rows(out: Path) -> list[tuple[str, dict[str, str]]]:
    """(run id and project, row) of each line of history in a run's folder, in the order of the files."""
    rows = []
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        run = ""
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                run = f"{record.run.run_id} of {record.run.project}"
            elif record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append((run, row))
    return rows


def mlflow_run(out: Path) -> dict[str, Any]:
    """What MLflow's own client reads of the only run in its database, in a process of its own."""
    code = (
        "import json, sys\nfrom mlflow.tracking import MlflowClient\n"
        "client = MlflowClient(tracking_uri=sys.argv[1], registry_uri=sys.argv[1])\n"
        "(run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])\n"
        "history = lambda key: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, key)]\n"
        "images = [file.path for file in client.list_artifacts(run.info.run_id, 'images')]\n"
        "print(json.dumps({'status': run.info.status, 'params': run.data.params, 'images': images, "
        "'history': {key: history(key) for key in run.data.metrics}}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, f"sqlite:///{out / 'mlflow.db'}"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pictures_of_tensorboard(out: Path) -> dict[str, set[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"images": 0}).Reload()
    return {tag: {image.step for image in events.Images(tag)} for tag in events.Tags()["images"]}


@pytest.mark.live
@pytest.mark.slow
def test_trackers_go_on_in_the_same_run_after_a_kill(tmp_path: Path) -> None:
    for package in ("wandb", "mlflow"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    out = tmp_path / "faces"
    killable = Killable(1, out, {**CHANGES, "steps": 10_000})
    killable.wait_for_step(9)
    wait_until(lambda: any(row.get("_step") == "9" for _, row in wandb_rows(out)), seconds=120)
    killable.kill([0])
    assert killable.wait() == [-signal.SIGKILL]
    before = read_metrics(out)[-1]["step"]
    went_on = max(int(path.name[5:]) for path in out.glob("checkpoints/step-*"))
    last = max(before, went_on) + 2
    assert Killable(1, out, {**CHANGES, "steps": last}, "auto").wait() == [0]

    log = (out / "train.log").read_text()
    assert "failed" not in log
    assert f"W&B run {next(iter(wandb_rows(out)))[0]}" in log
    lines = read_metrics(out)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    evaluated = {line["step"]: line["eval"][SETS[0]]["accuracy"] for line in lines if "eval" in line}
    assert sorted(losses) == list(range(1, last + 1))

    rows = wandb_rows(out)
    assert len(list(out.glob("wandb/offline-run-*"))) == 2
    assert {run for run, _ in rows} == {f"{rows[0][0].split()[0]} of plsc"}
    assert {int(row["_step"]): float(row["loss"]) for _, row in rows if "loss" in row} == losses
    assert {int(row["_step"]) for _, row in rows if any(ROC in key for key in row)} == set(evaluated)
    assert len(list(out.glob("wandb/offline-run-*/files/media/images/**/*.png"))) >= 2 * len(evaluated)

    found = mlflow_run(out)
    assert found["status"] == "FINISHED"
    assert found["params"]["backbone"] == "tiny"
    assert found["history"]["loss"] == [[step, value] for step, value in losses.items()]
    assert found["history"][CURVE.replace("@", "_")] == [[step, value] for step, value in evaluated.items()]
    for step in evaluated:
        assert any("roc" in name and f"+step+{step}+" in name for name in found["images"]), found["images"]
        assert any("neighbours" in name and f"+step+{step}+" in name for name in found["images"])

    with (out / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {int(row["step"]): float(row["loss"]) for row in table if row["loss"]} == losses
    assert {int(row["step"]): float(row[CURVE]) for row in table if row[CURVE]} == evaluated
    assert len(table) == len(lines)
    assert pictures_of_tensorboard(out) == {ROC: set(evaluated), NEIGHBOURS: set(evaluated)}


def test_a_csv_gets_columns_when_they_come_and_loses_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for first, last in [(1, 6), (4, 8)]:  # a run that was killed after step 5, and resumed from step 3
        metrics = MetricsLog(LoggedRun(tmp_path, {}, first - 1), to=["csv"], enabled=True)
        for step in range(first, last):
            metrics.write(step, {"loss": step / 3, **({"eval": {"a,b": {"auc": 0.5}}} if step % 2 else {})})
        metrics.close()
        with path.open("a") as file:
            file.write("5,1.")  # of a process that was killed as it wrote
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["eval/a,b/auc"] is not None]
    want = [{"step": str(s), "loss": repr(s / 3), "eval/a,b/auc": "0.5" if s % 2 else ""} for s in range(1, 8)]
    assert rows == want


def test_a_logger_whose_package_is_missing_is_refused_with_the_line_to_install(monkeypatch: Any) -> None:
    find = importlib.util.find_spec
    missing = "wandb"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(UsageError, match=r'"wandb", and wandb is not installed: pip install plsc-torch\[wandb\]'):
        check_loggers(["csv", "wandb"])
    missing = "alembic"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UsageError, match=r"alembic is not installed: pip install plsc-torch\[mlflow\]"):
        check_loggers(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://example.org")
    check_loggers(["mlflow"])


def test_a_logger_that_does_not_open_ends_a_new_run_and_not_one_that_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(run: LoggedRun) -> None:
        raise ConnectionError("no route to the service\nat all")

    warned: list[str] = []
    monkeypatch.setitem(LOGGERS, "down", refuse)
    with pytest.raises(UsageError, match=r'"down", which does not open \(ConnectionError: no route to the service\)'):
        MetricsLog(LoggedRun(tmp_path, {}, 0), to=["down"], enabled=True)
    metrics = MetricsLog(LoggedRun(tmp_path, {}, 3), to=["down", "csv"], enabled=True, warn=warned.append)
    metrics.write(4, {"loss": 1.0})
    metrics.close()
    assert len(warned) == 1
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n4,1.0\n"


def test_the_former_key_is_understood_and_a_wrong_name_refused() -> None:
    from plsc import config

    assert config.load(None).log.to == ("tensorboard",)
    for value, want in [(True, ("tensorboard",)), (False, ()), ("false", ())]:
        with pytest.warns(FutureWarning, match=r"log\.tensorboard is now called log\.to"):
            assert config.load(None, {"log.tensorboard": value}).log.to == want
    assert config.load(None, {"log.to": "csv,wandb"}).log.to == ("csv", "wandb")
    with pytest.raises(UsageError, match=r'log\.to = "wandbs" is not one of .*mlflow; did you mean wandb\?'):
        config.load(None, {"log.to": ["wandbs"]})
