"""`plsc bench head` and `train`: the contestants, the rows and ratios, what fails, and baselines from a file."""

import csv
import json
import math
import statistics

import pytest
import torch

import plsc
from plsc.bench import comparison as comparing
from plsc.bench.comparison import (
    BASELINES,
    Comparison,
    Task,
    all_contestants,
    compare,
    load_file,
    ratios_of,
    result_row,
)
from plsc.bench.head import HEADS, measure_head, measure_roofline
from plsc.bench.report import train_table
from plsc.bench.train import LOOPS, measure_loop
from plsc.parallel import Mesh
from plsc.tools.entry import main

ALONE = Mesh(0, 1, 0, torch.device("cpu"))
baselines = load_file(BASELINES)
NO_LINEAR_CROSS_ENTROPY = baselines.why_no_linear_cross_entropy()
KNOWN = {subject: all_contestants(subject, ours, BASELINES) for subject, ours in (("head", HEADS), ("train", LOOPS))}
HEAD = """
import torch
from torch import distributed
from torch.nn.functional import cross_entropy, linear, normalize


class PartialFC_V2(torch.nn.Module):
    def __init__(self, margin_loss, embedding_size, num_classes, sample_rate=1.0, fp16=False):
        super().__init__()
        assert distributed.is_initialized()
        if num_classes > 3000:
            raise RuntimeError("the stand-in is small\\nand says so")
        self.margin, self.count = margin_loss, max(int(num_classes * sample_rate), 1)
        self.weight = torch.nn.Parameter(torch.normal(0, 0.01, (num_classes, embedding_size)))

    def forward(self, embeddings, labels):
        ballast = torch.ones(64 << 20, dtype=torch.uint8).cuda()
        logits = linear(normalize(embeddings), normalize(self.weight[: self.count]))
        return cross_entropy(self.margin(logits, labels % self.count), labels % self.count) + 0 * ballast[0]
"""
MARGINS = """
class CombinedMarginLoss:
    def __init__(self, s, m1, m2, m3):
        assert (s, m1, m2, m3) == (64.0, 1.0, 0.5, 0.0)
        self.s = s

    def __call__(self, logits, labels):
        return logits * self.s
"""
BACKBONES = """
from torch import nn


def resnet8(pretrained, dropout, fp16, num_features):
    assert (pretrained, dropout, fp16) == (False, 0.0, False)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4, bias=False), nn.Flatten(), nn.Linear(4 * 8 * 8, num_features))


def iresnet18(*args, **options):
    raise RuntimeError("the stand-in is small\\nand says so")
"""
SMALL_HEAD = ("head", "--dim", 16, "--batch", 4, "--rounds", 1)
SMALL_LOOP = ("train", "--image-size", 32, "--dim", 16, "--batch", 4, "--classes", 30, "--rounds", 1, "--steps", 1)


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A folder that looks like arcface_torch; its head takes 64 MiB in every forward."""
    folder = tmp_path_factory.mktemp("arcface_torch")
    (folder / "backbones").mkdir()
    (folder / "partial_fc_v2.py").write_text(HEAD)
    (folder / "losses.py").write_text(MARGINS)
    (folder / "backbones" / "iresnet.py").write_text(BACKBONES)
    return folder


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs `plsc bench` with --json, which exits with ``code``: the result, and what was printed."""

    def run(*argv, code=0):
        json_path = tmp_path / "r.json"
        assert main(["bench", *map(str, argv), "--json", str(json_path)]) == code
        return json.loads(json_path.read_text()) if json_path.exists() else None, capsys.readouterr()

    return run


def check_files(folder, subject, names):
    with (folder / f"{subject}.csv").open(newline="") as file:
        assert [row["contestant"] for row in csv.DictReader(file)] == names
    assert (folder / f"{subject}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_heads_rows_ratios_and_files(peer, tmp_path, bench):
    names = ["floor", "plsc", "partial-fc"]
    options = ("--classes", 3000, "--nproc", 2, "--steps", 1, "--partial-fc", peer, "--out", tmp_path)
    result, printed = bench(*SMALL_HEAD, *options, "--contestants", *names)
    rows = {row["contestant"]: row for row in result["rows"]}
    assert list(rows) == names
    floor, ours, theirs = rows.values()
    for row in (ours, theirs):
        assert row["date"]
        assert torch.__version__ in row["versions"]
        assert [row[key] for key in ("classes", "nproc", "threads", "dim", "batch_per_rank")] == [3000, 2, 1, 16, 4]
        assert (row["rounds"], row["steps"], row["kind"], row["failed"]) == (1, 1, "cpu", False)
        assert all(row[key] > 0 for key in ("cpu_s", "wall_s", "peak_mib", "loss"))
        assert row["cpu_s_low"] <= row["cpu_s"] <= row["cpu_s_high"]
        assert row["floor_share"] == pytest.approx(floor["cpu_s"] / row["cpu_s"])
        assert row["memory_mib"] < row["peak_mib"]
    assert floor["product_gflops"] > 0
    assert floor["copy_gb_s"] > 0
    # the mean of two ranks' seconds is no less than the seconds at the mean of their rates
    assert floor["cpu_s"] > 0.999 * 8 * 8 * 3000 * 16 / 2 / floor["product_gflops"] / 1e9
    assert theirs["memory_mib"] == pytest.approx(64, abs=8)  # its ballast; ours is far smaller
    assert ours["memory_mib"] < 32
    assert theirs["note"].startswith("partial_fc_v2.py ")
    (ratio,) = result["ratios"]
    assert (ratio["ours"], ratio["peer"], ratio["classes"]) == ("plsc", "partial-fc", 3000)
    for key in ("cpu_s", "wall_s", "memory_mib"):
        assert ratio[key] is None or ratio[key] == pytest.approx(theirs[key] / ours[key])
    check_files(tmp_path, "head", names)
    assert "PartialFC_V2  over  plsc, bf16 + int8: CPU" in printed.out
    assert "3,000 classes x 16, 4 samples on each of 2 ranks" in printed.out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_loops_rows_ratios_and_files(peer, tmp_path, bench):
    options = ("--backbone", "resnet8", "--nproc", 2, "--arcface-torch", peer, "--out", tmp_path)
    result, printed = bench(*SMALL_LOOP, *options)
    rows = {row["contestant"]: row for row in result["rows"]}
    assert list(rows) == ["plsc", "plsc-fp32", "arcface-torch", "plain"]
    for row in rows.values():
        assert row["failed"] is False, row["note"]
        sizes = [row[key] for key in ("backbone", "classes", "image_size", "batch", "nproc", "dim", "precision")]
        assert sizes == ["resnet8", 30, 32, 4, 2, 16, "fp32"]
        assert all(row[key] > 0 for key in ("cpu_s", "wall_s", "peak_mib", "loss"))
        assert row["images_per_second"] == pytest.approx(8 / row["wall_s"])
    assert rows["arcface-torch"]["note"].startswith("partial_fc_v2.py ")
    assert ", iresnet.py " in rows["arcface-torch"]["note"]
    pairs = [(ratio["ours"], ratio["peer"]) for ratio in result["ratios"]]
    assert pairs == [(own, other) for own in ("plsc", "plsc-fp32") for other in ("arcface-torch", "plain")]
    assert result["ratios"][1]["cpu_s"] == pytest.approx(rows["plain"]["cpu_s"] / rows["plsc"]["cpu_s"])
    check_files(tmp_path, "train", list(rows))
    assert "resnet8 in fp32, 30 classes x 16, 4 images of 32 px on each of 2 ranks, 1 thread each" in printed.out
    assert "DDP, all logits  over  plsc, table in bf16 + int8: CPU " in printed.out


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option", "names", "reasons"),
    [
        (
            (*SMALL_HEAD, "--classes", 10**10),
            "--partial-fc",
            ("plsc-fp32", "partial-fc"),
            ["does not fit into memory", "RuntimeError: the stand-in is small and says so"],
        ),
        (SMALL_LOOP, "--arcface-torch", ("arcface-torch",), ["RuntimeError: the stand-in is small and says so"]),
    ],
    ids=["head", "train"],
)
def test_what_fails_or_does_not_fit_is_a_row(peer, bench, command, option, names, reasons):
    result, printed = bench(*command, "--nproc", 1, option, peer, "--contestants", *names)
    assert [(row["failed"], row["cpu_s"], row["note"]) for row in result["rows"]] == [(True, None, r) for r in reasons]
    assert result["ratios"] == []
    assert all(reason in printed.out for reason in reasons)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KNOWN["head"] if name != "floor" and "partial-fc" not in name])
def test_every_head_makes_steps(name):
    if reason := KNOWN["head"][name].why_not():
        pytest.skip(reason)
    task = Task(name, 50, 8, dim=16, nproc=1, steps=2, baselines=str(BASELINES))
    figures = measure_head(task, ALONE)
    assert set(figures) == {"cpu_s", "wall_s", "memory_mib", "peak_mib", "loss"}
    assert figures["loss"] > 0


def test_the_floor_is_the_time_of_a_steps_four_products_at_the_fastest_rate():
    floor = measure_roofline(Task("floor", 50, 8, dim=16, nproc=1), ALONE)
    assert floor["cpu_s"] == pytest.approx(8 * 8 * 50 * 16 / floor["product_gflops"] / 1e9)


def test_our_head_and_dense_logits_compute_the_same_loss():
    theirs = baselines.DenseArcFace(Task("dense", 50, 8, dim=16, nproc=1), ALONE)
    ours = plsc.ShardedHead(16, 50)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
    x, y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    torch.testing.assert_close(theirs(x, y), ours(x, y))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "plsc", "plsc-no-momentum", "plsc-fp32"])
def test_exact_heads_begin_at_the_loss_of_unrelated_rows(name):
    """Cosines near 0: log Z = ln C + s²/(2D), and the target's logit is s·cos(π/2 + m). Batches scatter by 0.18."""
    task = Task(name, 2000, 64, dim=1024, nproc=1, steps=1, baselines=str(BASELINES))
    expected = math.log(2000) + 64**2 / (2 * 1024) + 64 * math.sin(0.5)
    assert measure_head(task, ALONE)["loss"] == pytest.approx(expected, abs=0.9)


@pytest.mark.skipif(bool(NO_LINEAR_CROSS_ENTROPY), reason=NO_LINEAR_CROSS_ENTROPY or "")
@pytest.mark.parametrize("batch", [4, 16])  # below and from D: torch's two ways
def test_plain_softmax_is_cross_entropy_of_products(batch):
    table = baselines.PlainSoftmax(Task("linear-cross-entropy", 50, batch, dim=16, nproc=1), ALONE)
    x, y = torch.randn(batch, 16), torch.arange(batch)
    torch.testing.assert_close(table(x, y), torch.nn.functional.cross_entropy(x @ table.weight.t(), y))


def test_the_first_loss_is_arcfaces_in_all_loops():
    # Cosines of random vectors are near 0, and of the target's angle with the margin near -sin(0.5): with s = 64 the
    # loss is 31 above the logarithm of a sum of 20 exponentials, of numbers with a deviation of 64 / sqrt(512).
    options = {"dim": 512, "nproc": 1, "steps": 1, "backbone": "resnet8", "image_size": 32}
    tasks = [Task(name, 20, 4, **options, baselines=str(BASELINES)) for name in ("plsc", "plsc-fp32", "plain")]
    losses = [measure_loop(task, ALONE)["loss"] for task in tasks]
    assert all(30 < loss < 47 for loss in losses), losses


def taken(cpu, memory=10.0):
    return {"cpu_s": cpu, "wall_s": 2 * cpu, "memory_mib": memory, "peak_mib": 100.0, "loss": 1.0}


def test_medians_and_ratios_are_over_the_rounds():
    plan = Comparison("head", KNOWN["head"], ("plsc", "dense"), Task("", 0, 0), [100], [4], rounds=3)
    rounds = {"plsc": [taken(1.0), taken(2.0), taken(4.0)], "dense": [taken(3.0, 30.0), taken(20.0), taken(8.0, 20.0)]}
    row = result_row(plan, "plsc", 100, 4, rounds["plsc"])
    assert (row["cpu_s"], row["cpu_s_low"], row["cpu_s_high"], row["wall_s"]) == (2.0, 1.0, 4.0, 4.0)
    (ratio,) = ratios_of(100, 4, {**rounds, "partial-fc": [{"reason": "no"}], "floor": [taken(1.0)]})
    assert ratio == {
        "classes": 100,
        "batch_per_rank": 4,
        "ours": "plsc",
        "peer": "dense",
        "cpu_s": statistics.median([3.0, 10.0, 2.0]),
        "wall_s": 3.0,
        "memory_mib": 2.0,
    }


@pytest.mark.parametrize(("subject", "baseline"), [("head", "dense"), ("train", "plain")])
def test_all_take_turns_and_failures_are_not_tried_again(monkeypatch, subject, baseline):
    turns = []

    def measured(module, task, *, nproc, threads, limit, variables):
        assert (module, nproc, threads, dict(variables)) == (f"plsc.bench.{subject}", 2, 1, {})
        turns.append((task["contestant"], task["classes"]))
        return {"reason": "no"} if turns[-1] == (baseline, 200) else taken(1.0)

    monkeypatch.setattr(comparing, "measure_on_ranks", measured)
    names = ("plsc", baseline)
    plan = Comparison(subject, KNOWN[subject], names, Task("", 0, 0), [300, 100, 200], [4], rounds=2)
    result = compare(plan, quiet=True)
    at_200 = [("plsc", 200), (baseline, 200), ("plsc", 200)]
    assert turns == [*[(name, 100) for name in names] * 2, *at_200, *[("plsc", 300)] * 2]
    notes = {row["classes"]: row["note"] for row in result["rows"] if row["contestant"] == baseline}
    assert notes == {100: "", 200: "no", 300: "failed with fewer classes already"}
    if subject == "train":
        assert result["rows"][0]["images_per_second"] == 4 * 2 / 2.0
        (line,) = [line for line in train_table(result["rows"], []).splitlines() if line.endswith("  no")]
        assert "DDP, all logits" in line


def test_without_the_file_of_baselines_ours_are_measured_alone(monkeypatch, tmp_path, bench):
    monkeypatch.setattr(comparing, "BASELINES", tmp_path / "baselines.py")  # as in an installed wheel
    monkeypatch.setattr(comparing, "measure_on_ranks", lambda *args, **options: taken(1.0))
    result, printed = bench("train", "--nproc", 1)
    assert [row["contestant"] for row in result["rows"]] == list(LOOPS)
    assert "--baselines FILE names benchmarks/baselines.py of a checkout" in printed.err
    _, printed = bench("head", "--partial-fc", tmp_path, "--overwrite", code=2)
    assert "--partial-fc needs --baselines FILE" in printed.err
