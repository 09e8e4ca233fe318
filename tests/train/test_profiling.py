"""The profile of a run: which steps it holds, a trace that Perfetto opens, and a picture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import run, run_until

from plsc.parallel.step_timeline import Interval, StepTimeline
from plsc.tools.entry import main
from plsc.train.profiling import StepProfiler, draw_steps

pytestmark = pytest.mark.exhaustive

Ranks = Any


def stopped(mesh: Any, out: Path, changes: dict[str, Any]) -> bool:
    run_until(mesh, out, changes, None, 3)
    return torch.autograd._profiler_enabled()


@pytest.mark.slow
def test_the_first_rank_traces_and_draws_the_steps_asked_for(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"epochs": None, "steps": 13, "log.profile": 2, "data.batch_size": 6, "log.every_steps": 5}
    ranks(2, run, tmp_path, changes)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["steps-11-12.json", "steps-11-12.png"]
    events = json.loads((tmp_path / "profile" / names[0]).read_text())["traceEvents"]
    found = [str(event.get("name")) for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("ProfilerStep#") for name in found) == 2
    assert found.count("plsc: data") == 2
    for part in ("backbone", "head", "communication", "optimizer"):
        assert found.count(f"plsc: {part}") >= 2, part
    assert "aten::convolution" in found
    assert (tmp_path / "profile" / names[1]).read_bytes().startswith(b"\x89PNG")
    assert f"profile: {tmp_path / 'profile' / names[0]}" in (tmp_path / "train.log").read_text()


def test_a_run_that_ends_in_its_profile_stops_the_profiler(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"epochs": None, "steps": 6, "log.profile": 4, "checkpoint.every_steps": 0}
    assert ranks(1, stopped, tmp_path, changes) == [False]
    assert not (tmp_path / "profile").exists()


def profiler(folder: Path, steps: int, left: int, lines: list[str]) -> StepProfiler:
    cpu = torch.device("cpu")
    return StepProfiler(StepTimeline(cpu), folder, steps=steps, left=left, device=cpu, report=lines.append)


@pytest.mark.parametrize(
    ("steps", "left", "names"),
    [(2, 50, "steps-11-12"), (3, 5, "steps-3-5"), (5, 4, "steps-2-4"), (1, 2, "steps-2-2")],
)
def test_a_short_run_warms_up_for_fewer_steps(tmp_path: Path, steps: int, left: int, names: str) -> None:
    made = profiler(tmp_path, steps, left, [])
    for number in range(1, left + 1):
        made.end_step(number)
    made.close()
    assert {path.stem for path in tmp_path.iterdir()} == {names}


def test_a_single_step_is_not_profiled(tmp_path: Path) -> None:
    lines: list[str] = []
    made = profiler(tmp_path, 3, 1, lines)
    made.end_step(1)
    made.close()
    assert lines == ["log.profile = 3: none is profiled, as 1 step is left to train"]
    assert not list(tmp_path.iterdir())


def test_every_part_has_its_place_in_the_picture(tmp_path: Path) -> None:
    parts = ["other", "data", "backbone", "head", "communication", "optimizer", "evaluation", "checkpoint"]
    intervals = [Interval(part, number, number + 1.0) for number, part in enumerate(parts)]
    draw_steps(intervals, [0.0, 8.0], 11, tmp_path / "one.png")
    draw_steps(intervals[:1], [0.0, 1.0], 11, tmp_path / "other.png")
    assert (tmp_path / "one.png").stat().st_size > (tmp_path / "other.png").stat().st_size > 1000


def test_the_option_is_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "faces.toml").write_text('[data]\ntrain = "avatars:8x4"\n')
    for options, expected in ((["--profile"], 5), (["--profile", "3"], 3), ([], 0)):
        assert main(["train", str(tmp_path / "faces.toml"), *options, "--as-toml"]) == 0
        assert f"profile = {expected}\n" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "faces.toml"), "--profile", "-2", "--as-toml"]) == 2
    assert "log.profile" in capsys.readouterr().err
