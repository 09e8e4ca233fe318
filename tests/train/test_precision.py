"""``precision = "auto"``: what it is on each kind of device, stands in the run directory, and stays on another one."""

import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.tiny_runs import run

from plsc import config, devices
from plsc.config.checks import with_precision
from plsc.devices import DEVICES, Peak, Units, low_precision_units, peak_flops
from plsc.embedding.embedder import auto_precision
from plsc.errors import UsageError
from plsc.parallel import Mesh
from plsc.plan import Hardware, Links, plan

Ranks = Any
CPU, GPU = torch.device("cpu"), torch.device("cuda")
NONE = Units((), "this CPU has no bf16 units")
AVX = frozenset({"avx2", "avx512f", "avx512_bf16"})


@pytest.mark.parametrize(
    ("capability", "best", "reason"),
    [
        ((9, 0), "bf16", "sm_90"),
        ((8, 0), "bf16", "sm_80"),
        ((7, 5), "fp16", "sm_75 has no bf16 units"),
        ((7, 0), "fp16", "sm_70 has no bf16 units"),
        ((6, 1), "fp32", "sm_61 has units for neither bf16 nor fp16"),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], best: str, reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    units = low_precision_units(GPU)
    assert (units.best, units.reason) == (best, reason)
    assert auto_precision(Path("m.safetensors"), Mesh(0, 1, 0, GPU)) == best
    assert auto_precision(Path("m.onnx"), Mesh(0, 1, 0, GPU)) == "fp32"


@pytest.mark.parametrize(
    ("flags", "limit", "best", "reason"),
    [
        ({"avx512_bf16", "amx_bf16"}, "", "bf16", "AMX-BF16"),
        (AVX, "AVX512_CORE_BF16", "bf16", "AVX512-BF16"),
        ({"asimd", "bf16"}, "", "bf16", "ARM BF16"),
        ({"avx2", "avx512f"}, "", "fp32", NONE.reason),
        (AVX, "avx512_core_vnni", "fp32", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI leaves out AVX512-BF16"),
    ],
)
def test_cpus(monkeypatch: pytest.MonkeyPatch, flags: set[str], limit: str, best: str, reason: str) -> None:
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setenv("PLSC_CPU", "avx2")  # is about our own kernels
    units = low_precision_units(CPU)
    assert (units.best, units.reason) == (best, reason)
    assert auto_precision(Path("m.safetensors"), Mesh(0, 1, 0, CPU)) == "fp32"  # embeddings agree on all CPUs


@pytest.mark.feature("fp8")
def test_what_goes_with_the_other_keys_is_taken() -> None:
    turing, ampere = Units(("fp16",), "sm_75 has no bf16 units"), Units(("bf16", "fp16"), "sm_80")
    powersgd = config.load(None, {"parallel.comm_hook": "powersgd"})
    float8 = config.load(None, {"backbone": "vit_tiny", "fp8": True, "data.batch_size": 32})
    assert with_precision(powersgd, turing).precision == "fp32"
    assert with_precision(float8, ampere).precision == "bf16"
    with pytest.raises(UsageError, match=r'"auto" is fp32 here \(this CPU has no bf16 units\): fp8 goes with .*"bf16"'):
        with_precision(float8, NONE)
    given = config.load(None, {"precision": "bf16"})
    assert with_precision(given, NONE) is given


def test_a_plan_takes_that_of_the_planned_device() -> None:
    settings = config.load(None, {"backbone": "resnet8", "data.image_size": 32})

    def planned(name: str) -> Any:
        return plan(settings, 1000, Hardware(DEVICES[name], 2**34, Links(1e10, 1e10))).as_dict()["precision"]

    assert [planned(name) for name in ("v100", "a100")] == ["fp16", "bf16"]


def test_the_peak_is_that_of_the_fastest_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    assert peak_flops(GPU) == Peak(125e12, "fp16")
    rates = {"fp32": 3.0, "bf16": 5.0}
    monkeypatch.setattr(devices, "_measured_flops", lambda device, precision: rates[precision])
    monkeypatch.setattr(devices, "cpu_flags", lambda: AVX)
    assert peak_flops(CPU) == Peak(5.0, "bf16")
    monkeypatch.setattr(devices, "cpu_flags", frozenset)
    assert peak_flops(CPU) == Peak(3.0, "fp32")


def on_rank(mesh: Any, out: Path, flags: list[frozenset[str]], changes: dict[str, Any], resume: str | None) -> None:
    """Train two steps more on ranks whose CPUs have these features, and are measured to be 3.7 times slower in bf16."""
    from plsc.train import resumption

    def speed(*_: object) -> float:
        assert mesh.is_main
        return 1 / 3.7

    with (
        patch.dict("os.environ", {"ONEDNN_MAX_CPU_ISA": ""}),
        patch.object(devices, "cpu_flags", lambda: flags[mesh.rank]),
        patch.object(resumption, "low_precision_speed", speed),
    ):
        run(mesh, out, {"precision": "auto", "epochs": None, "checkpoint.every_steps": 2, **changes}, resume)


def test_runs_take_it_once_and_keep_it(tmp_path: Path, ranks: Ranks) -> None:
    def trained(name: str, flags: list[frozenset[str]], steps: int, **changes: str) -> tuple[str, str]:
        """What config.toml of the run says, and what train.log has more than before."""
        out, log = tmp_path / name, tmp_path / name / "train.log"
        before = len(log.read_text()) if log.exists() else 0
        ranks(len(flags), on_rank, out, flags, {"steps": steps, **changes}, "auto" if before else None)
        return tomllib.loads((out / "config.toml").read_text())["precision"], log.read_text()[before:]

    none: frozenset[str] = frozenset()
    precision, log = trained("mixed", [AVX, none], 1)
    assert precision == "fp32"
    assert "fp32 (auto: AVX512-BF16, this CPU has no bf16 units)" in log

    precision, log = trained("run", [AVX], 2)
    assert precision == "bf16"
    assert "bf16 (auto: AVX512-BF16)" in log
    assert "warning" not in log
    slow = 'warning: precision = "{}" is 3.7 times slower than fp32 here: this CPU has no units for it; leave it out '
    slow += "for {}"
    precision, log = trained("run", [none, none], 3)  # on another machine
    assert precision == "bf16"
    assert "bf16 (auto: as in the checkpoint)" in log
    assert log.count(slow.format("bf16", "fp32")) == 1
    assert "changed on resume: precision" not in log
    precision, log = trained("run", [AVX], 4, precision="fp16")
    assert precision == "fp16"
    assert slow.format("fp16", "bf16") in log
    assert 'changed on resume: precision = "fp16" (was "bf16")' in log
