"""`plsc bench train --variants`: the rows, what a machine cannot run, and the counts of a trace."""

import csv
from typing import Any

import pytest
import torch

from plsc.bench import comparison as comparing
from plsc.bench.comparison import Comparison, Task
from plsc.bench.variants import compare_variants, measure_variant, step_counts, variants_of
from plsc.devices import Peak
from plsc.errors import UsageError
from plsc.models import create
from plsc.parallel import Mesh
from plsc.tools.entry import main
from plsc.train import efficiency
from plsc.train.efficiency import backbone_flops

ALONE = Mesh(0, 1, 0, torch.device("cpu"))
TINY: dict[str, Any] = {"dim": 16, "nproc": 1, "steps": 1, "backbone": "resnet8", "image_size": 32}


def taken(seconds: float) -> dict[str, Any]:
    return {"cpu_s": 1.0, "wall_s": seconds, "memory_mib": 10.0, "loss": 1.0, "mfu": 0.25}


def test_each_backbone_has_its_variants() -> None:
    assert list(variants_of("iresnet50")) == ["fp32", "bf16", "compile", "graphs", "fp16", "nchw"]
    assert list(variants_of("vit_base")) == ["fp32", "bf16", "compile", "graphs", "fp16", "fp8", "fp8-compile"]


def test_a_variant_takes_steps_and_tells_its_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "peak_flops", lambda device: Peak(1e12, "fp32"))
    figures = measure_variant(Task("nchw", 30, 4, **TINY), ALONE)
    assert figures["loss"] > 0
    with torch.device("meta"):
        passes = backbone_flops(create("resnet8", embedding_dim=16, image_size=32), 32)
    of_image = passes.forward + passes.backward + 6 * 16 * 30
    assert figures["mfu"] == pytest.approx(of_image * 4 / figures["wall_s"] / 1e12)
    assert "launches" not in figures


def test_what_needs_a_gpu_says_so() -> None:
    with pytest.raises(UsageError, match='compile_mode = "reduce-overhead" is CUDA graphs of one GPU, and a CPU has'):
        measure_variant(Task("graphs", 30, 4, **TINY), ALONE)


def test_rows_have_the_rate_beside_fp32_and_are_written_after_each_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[str] = []
    written: list[list[str]] = []

    def measured(module: str, task: dict[str, Any], **options: Any) -> dict[str, Any]:
        assert module == "plsc.bench.variants"
        turns.append(task["contestant"])
        with_rows = (tmp_path / "variants.csv").exists()
        written.append([row["contestant"] for row in _rows(tmp_path)] if with_rows else [])
        return {"reason": "no"} if turns[-1] == "graphs" else taken(2.0 if turns[-1] == "fp32" else 0.5)

    monkeypatch.setattr(comparing, "measure_on_ranks", measured)
    names = ["fp32", "bf16", "graphs"]
    words = ["bench", "train", "--variants", "--device", "cpu", "--batch", "4", "--out", str(tmp_path)]
    assert main([*words, "--contestants", *names]) == 0
    assert turns == [*names, "fp32", "bf16"]
    assert written == [[], ["fp32"], ["fp32", "bf16"], names, names]
    fp32, bf16, graphs = _rows(tmp_path)
    assert (fp32["of_base"], bf16["of_base"], graphs["of_base"]) == ("1.0", "4.0", "")
    assert (bf16["images_per_second"], bf16["mfu"], graphs["note"]) == ("8.0", "0.25", "no")
    printed = capsys.readouterr().out
    assert "bf16                              8.0     500.0    4.00  25.0%         -        -     -       10" in printed
    assert "bf16, compile, CUDA graphs  no" in printed


def _rows(folder: Any) -> list[dict[str, str]]:
    with (folder / "variants.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_ratio_waits_for_the_rounds_of_both() -> None:
    plan = Comparison("variants", variants_of("resnet8"), ("bf16", "fp32"), Task("", 0, 0), [30], [4], rounds=1)
    seen: list[list[Any]] = []
    results = iter([taken(1.0), taken(3.0)])
    object.__setattr__(plan, "turn", lambda *args: next(results))
    compare_variants(plan, lambda rows: seen.append([row["of_base"] for row in rows]), quiet=True)
    assert seen == [[None], [3.0, 1.0]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--precision", "bf16"], "leave --precision out"),
        (["--nproc", "2"], "leave --nproc 2 out"),
        (["--contestants", "fp8"], "there is no such variant"),
        (["--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_what_does_not_go_with_variants_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "train", "--variants", *words]) == 2
    assert reason in capsys.readouterr().err


def test_overlapping_kernels_count_once_and_annotations_do_not() -> None:
    def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}

    events = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 1),
        event("cuda_driver", "cuLaunchKernelEx", 1, 1),
        event("cuda_runtime", "cudaMemcpyAsync", 2, 1),
        event("cuda_runtime", "cudaGraphLaunch", 3, 1),
        event("cuda_runtime", "cudaEventRecord", 4, 1),
        event("gpu_user_annotation", "Optimizer.step", 0, 1000),
        event("kernel", "a", 100, 50),
        event("kernel", "b", 120, 10),  # within the first, on another stream
        event("kernel", "c", 140, 20),
        event("gpu_memcpy", "Memcpy HtoD", 300, 40),
        {"ph": "i", "cat": "kernel", "name": "no interval", "ts": 0},
    ]
    assert step_counts(events, 2) == {"launches": 2.0, "kernels": 1.5, "busy_s": pytest.approx(50e-6)}
    assert step_counts([], 1) == {"launches": 0.0, "kernels": 0.0, "busy_s": 0.0}
