"""benchmarks/gpu_day.py: every part once on a CPU; what is done is not done again; a bad result is in the summary."""

import csv
import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_day, gpu_day_page

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]


def start(*arguments, code=0):
    """A day without GPUs, which ends with this exit code."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "benchmarks/gpu_day.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout
    return done


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line():
    done = start(code=2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "needs an NVIDIA GPU" in done.stderr


@pytest.mark.slow
def test_parts_run_once_and_leave_their_results(tmp_path):
    day = ["--allow-cpu", "--out", tmp_path, "--only", "doctor", "tests"]
    start(*day)
    assert json.loads((tmp_path / "doctor.json").read_text())["ok"]
    assert "skipped" in (tmp_path / "tests.log").read_text()
    before = (tmp_path / "tests.state.json").read_text()
    (tmp_path / "doctor.state.json").write_text('{"code": null, "seconds": 9.0}')  # ended by its time limit
    second = start(*day)
    assert "tests: done before, ok" in second.stdout
    assert (tmp_path / "tests.state.json").read_text() == before
    known = (tmp_path / "doctor.state.json").read_text()
    assert json.loads(known)["code"] == 0
    third = start(*day[:-2], "doctor", "--again", "doctor")
    assert (tmp_path / "doctor.state.json").read_text() != known
    table = (tmp_path / "summary.md").read_text()
    assert table.startswith("# no GPU, CPU, ")
    assert table.count("| ok |") == 2
    assert "to send: " in third.stdout
    with tarfile.open(tmp_path.with_name(f"{tmp_path.name}.tar.gz")) as archive:
        assert {f"{tmp_path.name}/{name}" for name in ("doctor.json", "report.html")} < set(archive.getnames())


@pytest.mark.slow
def test_parts_of_the_first_hour_say_that_there_is_no_gpu_or_run_on_the_cpu(tmp_path):
    names = ["compile", "checks", "counters", "sanitizer", "placement", "ranks"]
    start("--allow-cpu", "--out", tmp_path, "--only", *names)
    results = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert {name for name, result in results.items() if result.get("note") == "no GPU"} == {
        "compile", "counters", "sanitizer",
    }  # fmt: skip
    assert set(results["checks"]["checks"]) == {"passes_agree"}
    assert len(set(results["placement"]["digests"].values())) == 1
    assert set(results["ranks"]["errors"]) == {"loss", "embeddings' gradient", "table"}


@pytest.mark.slow
def test_a_killed_training_is_resumed_on_the_cpu(tmp_path):
    start("--allow-cpu", "--out", tmp_path, "--only", "resume")
    found = json.loads((tmp_path / "resume.json").read_text())
    assert found["right"]
    assert 13 <= found["killed_after"] < 40


@pytest.mark.slow
def test_parts_about_whole_steps_run_tiny_on_the_cpu(tmp_path):
    start("--allow-cpu", "--out", tmp_path, "--only", "backbones", "published")
    rows = rows_of(tmp_path / "backbones" / "resnet8" / "variants.csv")
    notes = {row["contestant"]: row["note"] for row in rows}
    assert notes.pop("graphs").startswith("compile_mode")
    assert notes == {"fp32": "", "bf16": ""}
    rows = rows_of(tmp_path / "published" / "published_on_one_gpu.csv")
    assert [row["classes"] for row in rows] == ["100", "200"]


def rows_of(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_a_day_on_gpus_fits_into_two_hours_and_begins_with_the_examination(tmp_path):
    for gpus in (1, 8):
        day = gpu_day.parts(tmp_path, gpus, 57)
        assert [part.name for part in day] == list(gpu_day.NAMES)
        assert sum(part.minutes for part in day) < 117
        assert all(part.environment == {} for part in day)
        assert ("--nproc" in day[1].command) == (gpus > 1)
        commands = {part.name: part.command for part in day}
        assert "default" in commands["tests"]  # what a GPU's libraries warn of ends no test
    files = [path.name for path in gpu_day.gpu_tests()]
    assert "test_head_gpu.py" in files
    on_cpu = {part.name: part.command for part in gpu_day.parts(tmp_path, 0, 57)}
    assert {"--dry", "--only", "whole"} < set(on_cpu["head"])
    assert "--dry" in on_cpu["backbones"]
    assert "--dry" in on_cpu["published"]
    assert "cpu" in on_cpu["resume"]


def test_a_part_that_takes_too_long_is_ended(tmp_path):
    part = gpu_day.Part("slow", ["-c", "import time; print('begun', flush=True); time.sleep(60)"], 1, "slow.json")
    (tmp_path / "slow.json").write_text("{}")  # a former run's
    gpu_day.run(part, tmp_path, 1.0)
    assert gpu_day.state_of(tmp_path, part)["code"] is None
    assert not gpu_day.is_finished(tmp_path, part)
    assert not (tmp_path / "slow.json").exists()
    log = (tmp_path / "slow.log").read_text()
    assert log.startswith("$ python -c")
    assert log.endswith("ended after 1 s, its time limit\n")


def test_a_part_without_its_module_is_no_result_and_a_bad_result_is_one(tmp_path):
    verdicts = {}
    for name, code in (("broken", "import no_such_module"), ("bad", "open(OUT, 'w').write('{}'); raise SystemExit(1)")):
        out = tmp_path / f"{name}.json"
        part = gpu_day.Part(name, ["-c", code.replace("OUT", repr(str(out)))], 1, out.name)
        gpu_day.run(part, tmp_path, 60)
        assert gpu_day.state_of(tmp_path, part)["code"] == 1
        assert gpu_day.is_finished(tmp_path, part) == (name == "bad")
        verdicts[name] = gpu_day.verdict(tmp_path, part)
    assert verdicts["bad"] == "FAIL (exit code 1)"
    assert verdicts["broken"] == "no result (exit code 1): see its log; the next start runs it again"


def test_the_page_has_a_picture_of_each_precision_and_needs_nothing_else():
    def row(precision, batch, part, way, milliseconds):
        sizes = {"batch": batch, "classes": 1000, "flops": 4e6 * batch, "bytes": 2e6}
        return {"precision": precision, "part": part, "way": way, "milliseconds": milliseconds, **sizes}

    rows = [row(precision, 128, "pass 1", way, 2.0) for precision in ("bf16", "tf32") for way in ("torch", "kernel")]
    rows += [row(precision, 128, "step", "fused", 3.0) for precision in ("bf16", "tf32")]
    shapes = {"rates": {"bf16": 8e14, "tf32": 4e14, "fp32": 5e13}, "bandwidth": 3e12, "rows": rows}
    kernels = {"kernels": [{"kernel": "first_pass", "seconds": 6.5, "cached": False}]}
    text = gpu_day_page.page("1 GPU, <H200>", "| a | b |", shapes, kernels)
    assert text.count("<svg") == 2 + 2 + 1
    assert "<title>1 GPU, &lt;H200&gt;</title>" in text
    assert "pass 1, kernel, B = 128: 2 ms" in text
    assert "3e+03 ns" in text  # of a class
    assert "6.5 s" in text
    assert "src=" not in text
    assert "href=" not in text
    assert gpu_day_page.page("CPU", "none", {}, {}).count("<svg") == 0


def test_counters_are_read_from_what_ncu_prints(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu_first_hour = importlib.import_module("gpu_first_hour")
    printed = '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    printed += '"0","first_pass","dram__bytes.sum","Gbyte","2.1"\n"0","first_pass","other","","9"\n'
    assert gpu_first_hour.counters(printed) == {"bytes of HBM": "2.1 Gbyte"}
    assert gpu_first_hour.counters("ERR_NVGPUCTRPERM") == {}


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
    day = gpu_day.parts(tmp_path, 1, 57)
    (tmp_path / "placement.json").write_text('{"digests": {"0": "ab", "1": "cd"}}')
    (tmp_path / "resume.json").write_text('{"right": false, "note": "killed after step 13: differs: losses"}')
    (tmp_path / "checks.json").write_text('{"checks": {"passes_agree": {"right": false, "text": "0.3"}}}')
    (tmp_path / "doctor.state.json").write_text('{"code": 1, "seconds": 61.0}')
    (tmp_path / "tests.state.json").write_text('{"code": null, "seconds": 600.0}')
    page = gpu_day.summary(tmp_path, day, "1 GPU, H200")
    assert "| FAIL (exit code 1) | 61 |" in page
    assert "| ended by its time limit | 600 |" in page
    assert "| not run yet |  |" in page
    assert "- placement: a table in host memory is another one" in page
    assert "- resume: killed after step 13: differs: losses\n" in page
    assert "- checks, passes_agree: 0.3\n" in page
    assert "- doctor, kernels, triton, bfloat16: sums 0.1 (bound 2e-05) (send this report)\n" in page
    assert "- test tests.head.test_head_gpu::test_on_a_gpu: assert 1 == 2\n" in page
