"""benchmarks/gpu_day.py: every part once on a CPU; what is done is not done again; a bad result is in the summary."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_day

ROOT = Path(__file__).parents[2]


def start(*arguments, hide_gpu=True):
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {})}
    command = [sys.executable, "benchmarks/gpu_day.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line():
    done = start()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "needs an NVIDIA GPU" in done.stderr


@pytest.mark.slow
def test_parts_run_once_and_leave_their_results(tmp_path):
    day = ["--allow-cpu", "--out", tmp_path, "--only", "doctor", "tests"]
    first = start(*day)
    assert first.returncode == 0, first.stdout
    assert json.loads((tmp_path / "doctor.json").read_text())["ok"]
    assert "skipped" in (tmp_path / "tests.log").read_text()
    before = (tmp_path / "doctor.state.json").read_text()
    (tmp_path / "tests.state.json").write_text('{"code": null, "seconds": 9.0}')  # ended by its time limit
    second = start(*day)
    assert second.returncode == 0, second.stdout
    assert "doctor: done before, ok" in second.stdout
    assert (tmp_path / "doctor.state.json").read_text() == before
    assert json.loads((tmp_path / "tests.state.json").read_text())["code"] == 0
    table = (tmp_path / "summary.md").read_text()
    assert table.startswith("# no GPU, CPU, ")
    assert table.count("| ok |") == 2


def test_a_day_on_gpus_fits_into_forty_minutes_and_begins_with_the_examination(tmp_path):
    for gpus in (1, 8):
        day = gpu_day.parts(tmp_path, gpus, 38)
        assert [part.name for part in day] == list(gpu_day.NAMES)
        assert sum(part.minutes for part in day) < 40
        assert all(part.environment == {} for part in day)
        assert ("--nproc" in day[0].command) == (gpus > 1)
    files = [path.name for path in gpu_day.gpu_tests()]
    assert "test_head_gpu.py" in files
    assert {"--dry", "--only", "whole"} < set(gpu_day.parts(tmp_path, 0, 38)[2].command)


def test_a_part_that_takes_too_long_is_ended(tmp_path):
    part = gpu_day.Part("slow", ["-c", "import time; print('begun', flush=True); time.sleep(60)"], 1)
    gpu_day.run(part, tmp_path, 1.0)
    assert gpu_day.state_of(tmp_path, part)["code"] is None
    assert not gpu_day.is_finished(gpu_day.state_of(tmp_path, part))
    log = (tmp_path / "slow.log").read_text()
    assert log.startswith("$ python -c")
    assert log.endswith("ended after 1 s, its time limit\n")


def test_what_is_wrong_stands_in_the_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    line = {"state": "FAIL", "text": "sums 0.1 (bound 2e-05)", "advice": "send this report"}
    good = {"state": "ok", "text": "fine"}
    report = {"sections": {"kernels": {"triton, bfloat16": line, "torch, bfloat16": good}}}
    (tmp_path / "doctor.json").write_text(json.dumps(report))
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.head.test_head_gpu" name="test_on_a_gpu">'
        '<failure message="assert 1 == 2&#10;more">x</failure></testcase></testsuite></testsuites>'
    )
    day = gpu_day.parts(tmp_path, 1, 38)
    (tmp_path / "doctor.state.json").write_text('{"code": 1, "seconds": 61.0}')
    (tmp_path / "tests.state.json").write_text('{"code": null, "seconds": 600.0}')
    page = gpu_day.summary(tmp_path, day, "1 GPU, H200")
    assert "| FAIL (exit code 1) | 61 |" in page
    assert "| ended by its time limit | 600 |" in page
    assert "| not run: no time was left |  |" in page
    assert "- doctor, kernels, triton, bfloat16: sums 0.1 (bound 2e-05) (send this report)\n" in page
    assert "- test tests.head.test_head_gpu::test_on_a_gpu: assert 1 == 2\n" in page
