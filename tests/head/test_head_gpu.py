"""The class head on a GPU: its benchmark's checks, every kernel against float64, host placement, steps on all GPUs."""

import mmap
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import plsc
from benchmarks.head_gpu_checks import CHECKS, SMALL
from plsc.doctor import kernels, training
from plsc.head import host_memory
from plsc.parallel import Mesh

GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


def failures(lines):
    return [f"{line.name}: {line.text}" for line in lines if line.state == "FAIL"]


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_gpu(check):
    check(GPU)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("check", list(SMALL), ids=lambda check: check.__name__)
def test_interpreted(interpreter, check):
    interpreter(check, torch.device("cpu"), **SMALL[check])


@pytest.mark.gpu
def test_every_kernel_agrees_with_float64():
    lines = kernels.head(GPU, lambda place: None)
    assert any(line.name.startswith("triton, ") for line in lines if line.state == "ok")
    assert failures(lines) == []


@pytest.mark.gpu
def test_a_head_takes_the_kernels_that_it_has_checked():
    for storage in ({}, {"weight_dtype": "bfloat16", "momentum_dtype": "int8"}):
        for optimizer in (partial(plsc.HeadSGD, momentum=0.9), plsc.HeadAdamW):
            head = plsc.ShardedHead(512, 3000, Mesh(0, 1, 0, GPU), **storage)
            optimizer(head)
            assert head.backend.name == "triton", head.backend.describe()
            assert "disagree" not in head.backend.describe()


@pytest.mark.gpu
@pytest.mark.parametrize("sample_rate", [1.0, 0.2])
def test_rows_in_pinned_memory_equal_the_resident_table_s(monkeypatch, sample_rate):
    """Copies of many small registrations, which no copy may cross. Exact, other chunks group the sums."""
    monkeypatch.setattr(host_memory, "_PIN_BYTES", 5 * mmap.PAGESIZE)
    tables = []
    for placement in ("device", "host"):
        head = plsc.ShardedHead(
            64,
            9001,
            Mesh(0, 1, 0, GPU),
            sample_rate=sample_rate,
            weight_dtype="bfloat16",
            momentum_dtype="int8",
            placement=placement,
            chunk_classes=1024,
        )
        optimizer = plsc.HeadSGD(head, lr=0.5, momentum=0.9, weight_decay=1e-3)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            x, labels = torch.randn(32, 64, generator=generator), torch.randint(9001, (32,), generator=generator)
            head.prefetch(labels.to(GPU))
            head(x.to(GPU), labels.to(GPU)).backward()
            optimizer.step()
        tables.append(head.weight.detach().cpu().clone())
    unequal = float((tables[0] != tables[1]).double().mean())
    assert unequal == 0 if sample_rate < 1 else unequal < 2e-3


@pytest.mark.gpu
def test_training_steps_repeat_and_agree_with_float64():
    lines = training.steps(Mesh(0, 1, 0, GPU), lambda place: None)
    assert len(lines) == 4
    assert failures(lines) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_all_gpus_train_together(tmp_path):
    """NCCL's collectives are exact, and two runs of DDP and head over all GPUs agree with each other and float64."""
    command = ["doctor", "--nproc", str(torch.cuda.device_count()), "--only", "collectives", "training"]
    done = subprocess.run(
        [sys.executable, "-m", "plsc.tools.entry", *command, "--json", str(tmp_path / "doctor.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NCCL, " in done.stdout
