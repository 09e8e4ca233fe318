"""``plsc doctor``: green on a sound machine; of each planted fault, a red line that names it, and exit code 1."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import wrong_library
from torch.distributed import TCPStore

from plsc.data.decoders import decoder_name
from plsc.devices import Units
from plsc.doctor import kernels, machine, rates, training
from plsc.head.backends import cpu_backend, self_check
from plsc.head.backends.torch_backend import TorchBackend
from plsc.index.scan import ExactScan
from plsc.native import build
from plsc.native.scan import ScanKernel
from plsc.parallel.launch import rank_environment
from plsc.tools.entry import main

ROOT = Path(__file__).parents[2]
compiled = pytest.mark.skipif(not build.available_paths(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _forgotten_verdicts(monkeypatch):
    monkeypatch.setattr(self_check, "_verdicts", {})


@pytest.fixture
def doctor(tmp_path, capsys):
    """``doctor(*sections, code=CODE)`` exits with that code: the sections of the JSON file, and what was printed."""

    def run(*sections, code):
        file = tmp_path / "doctor.json"
        assert main(["doctor", "--only", *sections, "--json", str(file), "--overwrite"]) == code
        saved = json.loads(file.read_text())
        printed = capsys.readouterr().out
        lines = [line for found in saved["sections"].values() for line in found.values()]
        assert all(line["text"] in printed for line in lines)
        assert saved["ok"] == (code == 0) == all(line["state"] != "FAIL" for line in lines)
        assert all(line.get("advice") for line in lines if line["state"] == "FAIL")
        return saved["sections"], printed

    return run


def noise(chunk, unit_gradient, state, update):
    chunk.table.weight[chunk.index] = torch.randn(unit_gradient.shape).to(chunk.table.weight.dtype)


def test_a_sound_machine_is_green(doctor, monkeypatch):
    monkeypatch.setattr(kernels, "low_precision_units", lambda device: Units((), "this CPU has no bf16 units"))
    monkeypatch.setattr(kernels, "low_precision_speed", lambda precision, device: 1 / 3.7)
    sections, printed = doctor("versions", "machine", "choices", "collectives", code=0)
    slower = "auto is fp32: bf16 is 3.7 times slower than fp32 here (this CPU has no bf16 units)"
    assert sections["choices"]["precision"]["text"] == slower
    assert sections["versions"]["torch"] == {"state": "ok", "text": torch.__version__}
    decoder = decoder_name()
    assert sections["versions"]["JPEG decoder"]["text"] == f"{decoder} {metadata.version(decoder)}"
    assert sections["collectives"]["all-reduce"]["state"] == "-"
    assert re.search(r"^all ok: \d+ lines in \d+ s$", printed, re.MULTILINE)
    assert "\033" not in printed


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_75", "sm_80", "sm_90", "compute_120"], (7, 0), False),
        (["sm_75", "sm_80", "sm_90", "compute_120"], (9, 0), True),
        (["sm_75", "sm_80"], (8, 9), True),  # code runs on later devices of its generation
        (["sm_75", "sm_86"], (8, 0), False),
        (["sm_50", "sm_60", "sm_70"], (6, 1), True),
        (["sm_90a", "compute_80"], (12, 0), True),  # PTX is compiled for any later one
    ],
)
def test_a_torch_without_code_for_the_gpu_is_named(monkeypatch, built, capability, runs):
    gpu = SimpleNamespace(name="Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    lines = list(machine._gpu(3))
    assert [line.name for line in lines if line.state == "FAIL"] == ([] if runs else ["GPU 3, code"])
    assert runs or "CUDA 12.6" in lines[-1].advice


def test_a_v100_is_examined_in_what_it_has(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(rates, "product_flops", lambda side, name, device, least: {"fp16": 9e13, "fp32": 1e13}[name])
    monkeypatch.setattr(rates, "copy_rate", lambda size, device, least: 8e11)
    monkeypatch.setattr(rates, "_bus", lambda device: [])
    lines, measured = rates.device_rates(device, lambda text: None)
    states = {line.name: line.state for line in lines}
    none, good = {"product, bf16": "-", "product, tf32": "-"}, {"product, fp16": "ok", "product, fp32": "ok"}
    assert states == {**none, **good, "memory, copy": "ok"}
    assert measured.products == {"fp16": 9e13, "fp32": 1e13}
    assert not measured.has_kernels
    assert {shard.fp32_precision for shard in kernels._storages(device)} == {"ieee"}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_kernels_training_and_plan_are_green(doctor):
    sections, _ = doctor("kernels", "training", "plan", code=0)
    for path in build.available_paths():
        assert re.match(r"\d+ checks: sums", sections["kernels"][f"compiled for {path}, bfloat16"]["text"])
    checks = sections["kernels"]["torch, float32"]["figures"]["checks"]
    assert {"passes, D = 64", "passes, D = 512, sampled", "passes, D = 64, sub-centres"} < set(checks)
    assert {"SGD, int8 momentum, D = 512", "AdamW, bfloat16 moments, D = 64, sampled"} < set(checks)
    error, bound = checks["passes, D = 64"]["sums"]
    assert 0 < error < bound
    assert sections["training"]["steps twice, bfloat16 + int8"]["state"] == "ok"
    figures = sections["plan"]["plan, table and state"]["figures"]
    assert figures["planned"] == figures["measured"]


def test_without_compiled_kernels_pytorch_computes(doctor, monkeypatch):
    monkeypatch.setenv("PLSC_NATIVE", "0")
    sections, _ = doctor("machine", "choices", code=0)
    assert sections["choices"]["head, bfloat16 + int8"]["text"] == "torch backend: PLSC_NATIVE=0"
    assert sections["choices"]["search, bf16"]["text"] == "torch scan, by torch, on cpu"
    assert sections["machine"]["compiled CPU kernels"]["state"] == "-"


@compiled
def test_a_forced_path_is_the_one_that_is_looked_at(doctor, monkeypatch):
    path = build.available_paths()[-1]
    monkeypatch.setenv("PLSC_CPU", path)
    sections, _ = doctor("machine", "choices", code=0)
    assert f"PLSC_CPU={path}" in sections["machine"]["compiled head kernels"]["text"]
    assert sections["choices"]["head, float32"]["text"].startswith("cpu backend: ")


def test_an_unknown_path_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("PLSC_CPU", "mmx")
    assert main(["doctor", "--only", "machine"]) == 2
    assert "PLSC_CPU=mmx" in capsys.readouterr().err


# Planted faults ------------------------------------------------------------------------------------------------------


def test_supported_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = {re.match(r"\w+", text)[0]: text for text in project["dependencies"]}
    wanted = {"Python": project["requires-python"]} | {name: requirements[name] for name in ("torch", "numpy")}
    for name, (least, below) in machine.SUPPORTED.items():
        assert wanted[name] == f"{'' if name == 'Python' else name}>={least}" + (f",<{below}" if below else "")


@pytest.mark.parametrize(
    ("module", "name", "version", "advice"),
    [
        (torch, "torch", "1.13.1+cu117", "pip install 'torch>=2.11,<2.16'"),
        (torch, "torch", "2.16.0", "pip install 'torch>=2.11,<2.16'"),
        (np, "numpy", "1.26.4", "pip install 'numpy>=2'"),
    ],
)
def test_a_library_out_of_bounds_is_named(doctor, monkeypatch, module, name, version, advice):
    monkeypatch.setattr(module, "__version__", version)
    sections, printed = doctor("versions", code=1)
    assert advice in sections["versions"][name]["advice"]
    assert re.search(rf"FAIL  {name} +{re.escape(version)}", printed)
    assert f"1 of 8 lines FAIL (versions: {name})" in printed


def test_a_triton_that_torch_was_not_made_for_is_named(doctor, monkeypatch):
    versions = {"triton": "2.1.0"}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or real(name))
    monkeypatch.setattr(metadata, "requires", lambda name: ["filelock", 'triton==3.9.0; platform_system == "Linux"'])
    sections, _ = doctor("versions", code=1)
    assert sections["versions"]["triton"]["text"] == "2.1.0, and this torch needs 3.9.0"


@pytest.mark.live
@compiled
def test_a_kernel_library_of_other_sources_is_named(doctor, monkeypatch, tmp_path):
    files = wrong_library.plant(monkeypatch, tmp_path)
    try:
        sections, _ = doctor("machine", code=1)
    finally:
        build._load.cache_clear()
    for file, name in zip(files, ("head", "scan"), strict=True):
        assert (
            f"{file} was made from other sources: delete it" in sections["machine"][f"compiled {name} kernels"]["text"]
        )


@compiled
@pytest.mark.slow
def test_a_kernel_that_returns_noise_is_named(doctor, monkeypatch):
    path = build.available_paths()[-1]
    monkeypatch.setenv("PLSC_CPU", path)
    monkeypatch.setattr(cpu_backend, "_sgd", noise)
    sections, _ = doctor("choices", "kernels", code=1)
    assert "disagrees with float64 here: weights" in sections["choices"]["head, float32"]["text"]
    line = sections["kernels"][f"compiled for {path}, bfloat16"]
    assert line["state"] == "FAIL"
    assert line["text"].startswith("24 of 48 checks: SGD, D = 512: ")
    assert "PLSC_HEAD_BACKEND=torch" in line["advice"]
    assert sections["kernels"]["torch, bfloat16"]["state"] == "ok"


@compiled
def test_a_scan_that_returns_noise_is_named(doctor, monkeypatch):
    real = ScanKernel.__call__

    def swapped(self, *args, **options):
        scores, rows, ranked = real(self, *args, **options)
        return scores, rows[:, ::-1].copy(), ranked

    monkeypatch.setattr(ScanKernel, "__call__", swapped)
    monkeypatch.setattr("plsc.doctor.kernels.head", lambda *args: [])
    sections, _ = doctor("kernels", code=1)
    for line in sections["kernels"].values():
        assert line["text"].startswith("not the float64 ranking: int8, all rows; int8, a half of the rows; bf16")


def test_a_search_that_is_wrong_in_one_precision_is_named_alone(doctor, monkeypatch):
    real = ExactScan.search

    def off(self, *args, **options):
        scores, rows = real(self, *args, **options)
        return scores + np.float32(self.precision == "int8"), rows

    monkeypatch.setattr(ExactScan, "search", off)
    monkeypatch.setattr("plsc.doctor.kernels.head", lambda *args: [])
    lines = doctor("kernels", code=1)[0]["kernels"]
    monkeypatch.setenv("PLSC_NATIVE", "0")
    lines |= doctor("kernels", code=1)[0]["kernels"]
    for name, line in lines.items():
        assert line["text"] == "not the float64 ranking: int8, all rows; int8, a half of the rows"
        assert ("PLSC_NATIVE=0" in line["advice"]) == name.startswith("scan compiled")


def test_a_kernel_that_raises_is_a_line_and_not_the_end(doctor, monkeypatch):
    def broken(self, *args, **options):
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    monkeypatch.setenv("PLSC_NATIVE", "0")
    monkeypatch.setattr(TorchBackend, "first_pass", broken)
    sections, _ = doctor("kernels", "training", code=1)
    assert sections["kernels"]["torch, float32"]["text"] == "RuntimeError: CUDA error: no kernel image is available"
    assert sections["training"]["steps, float32 + float32"]["state"] == "FAIL"


@pytest.mark.slow
def test_training_that_does_not_repeat_or_is_wrong_is_named(doctor, monkeypatch):
    real, calls = training.train, []

    def drifting(*args):
        run = real(*args)
        calls.append(run)
        scale = 1.001 if len(calls) % 2 else 1.0
        return training.Run([*run.losses[:-1], run.losses[-1] * scale], run.weights)

    monkeypatch.setattr(training, "train", drifting)
    sections, _ = doctor("training", code=1)
    assert sections["training"]["steps twice, float32 + float32"]["text"].startswith("differ: ")
    assert "off by 1.0e-03 (bound 1e-04)" in sections["training"]["steps against float64, float32 + float32"]["text"]


# Several ranks -------------------------------------------------------------------------------------------------------

HANGS = """
import os, sys, time
from torch.distributed import TCPStore
from plsc.doctor import examination, training
from plsc.tools.entry import main
imported = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
imported.add("imported", 1)
while imported.add("imported", 0) < int(sys.argv[2]):  # the limit is none of imports
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    training.data_parallel = lambda *args: time.sleep(100)
sys.exit(main(["doctor", "--only", "versions", "training", "--limit", "6", "--json", sys.argv[1]]))
"""


def start_ranks(code, file, ranks, world=2):
    """The processes of some of the ranks of a run, and the store where they meet."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", code, str(file), str(len(ranks))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environments = [rank_environment(rank, world, store.port) for rank in ranks]
    return store, [subprocess.Popen(command, env={**env, "PYTHONPATH": str(ROOT)}, **pipes) for env in environments]


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["hangs", "never came"])
def test_a_rank_that_hangs_is_named(tmp_path, ranks):
    store, processes = start_ranks(HANGS, tmp_path / "doctor.json", ranks)
    try:
        printed = processes[0].communicate(timeout=240)[0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        del store
    assert processes[0].returncode == 1
    (line,) = (line for line in printed.splitlines() if line.startswith("  FAIL"))
    assert "rank 1 (" in line
    assert "the others wait for 6 s" in line
    assert ("in <lambda> (<string>:11)) hangs at 'training" if len(ranks) == 2 else "unknown host, no answer") in line
    saved = json.loads((tmp_path / "doctor.json").read_text())
    assert saved["failures"] == ["training: ranks" if len(ranks) == 2 else "versions: ranks"]


@pytest.mark.live
@pytest.mark.slow
def test_ranks_of_torchrun_report_together(tmp_path):
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent)) or shutil.which("torchrun")
    start = [torchrun] if torchrun else [sys.executable, "-m", "torch.distributed.run"]
    rendezvous = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = ["doctor", "--only", "versions", "collectives", "training", "--json", str(tmp_path / "doctor.json")]
    done = subprocess.run(
        [*start, *rendezvous, "-m", "plsc.tools.entry", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all ok:") == 1
    saved = json.loads((tmp_path / "doctor.json").read_text())
    assert saved["ranks"] == 2
    for name in ("all-reduce", "all-gather", "reduce-scatter"):
        line = saved["sections"]["collectives"][name]
        assert re.match(r"gloo, 2 ranks: exact; [\d.]+ GB/s bus bandwidth at 4 MiB", line["text"])
        assert len(line["figures"]["by_rank"]) == 2


def test_ranks_of_nproc_are_started_and_their_code_is_passed_on(monkeypatch):
    started = []
    monkeypatch.setattr("plsc.parallel.launch.launch", lambda argv, nproc: started.append((argv, nproc)) or 1)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--nproc", "3", "--only", "training", "--json", "doctor.json", "--overwrite"])
    assert end.value.code == 1
    own = ["doctor", "--nproc", "3", "--only", "training", "--json", "doctor.json", "--overwrite"]
    assert started == [(own, 3)]
