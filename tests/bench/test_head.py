"""`plsc bench head`: the implementations, the rows and ratios, and heads that fail."""

import csv
import json
import math
import statistics

import pytest
import torch

from plsc.bench import head as head_bench
from plsc.bench.head import HeadComparison, compare_heads, head_ratios, result_row
from plsc.bench.head_baselines import IMPLEMENTATIONS, BenchConfig, DenseArcFace, PlainSoftmax, unavailable
from plsc.bench.head_worker import measure_head
from plsc.parallel import Mesh
from plsc.tools.entry import main

ALONE = Mesh(0, 1, 0, torch.device("cpu"))
NO_LINEAR_CROSS_ENTROPY = unavailable("linear-cross-entropy")
STAND_IN = """
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
STAND_IN_MARGINS = """
class CombinedMarginLoss:
    def __init__(self, s, m1, m2, m3):
        assert (s, m1, m2, m3) == (64.0, 1.0, 0.5, 0.0)
        self.s = s

    def __call__(self, logits, labels):
        return logits * self.s
"""


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A folder that looks like arcface_torch; its head takes 64 MiB in every forward."""
    folder = tmp_path_factory.mktemp("arcface_torch")
    (folder / "partial_fc_v2.py").write_text(STAND_IN)
    (folder / "losses.py").write_text(STAND_IN_MARGINS)
    return folder


def bench(*argv):
    return main(["bench", "head", "--dim", "16", "--batch", "4", *map(str, argv)])


@pytest.mark.slow
def test_rows_ratios_and_files(peer, tmp_path, capsys):
    assert (
        bench(
            "--classes",
            3000,
            "--nproc",
            2,
            "--rounds",
            1,
            "--steps",
            1,
            "--partial-fc",
            peer,
            "--contestants",
            "floor",
            "plsc",
            "partial-fc",
            "--out",
            tmp_path,
            "--json",
            tmp_path / "r.json",
        )
        == 0
    )
    result = json.loads((tmp_path / "r.json").read_text())
    rows = {(row["contestant"], row["classes"]): row for row in result["rows"]}
    assert list(rows) == [(name, 3000) for name in ("floor", "plsc", "partial-fc")]
    ours, theirs, floor = (rows[name, 3000] for name in ("plsc", "partial-fc", "floor"))
    for row in (ours, theirs):
        assert row["date"]
        assert row["device"]
        assert torch.__version__ in row["versions"]
        assert (row["nproc"], row["threads"], row["dim"], row["batch_per_rank"]) == (2, 1, 16, 4)
        assert (row["rounds"], row["steps"], row["kind"], row["failed"]) == (1, 1, "cpu", False)
        assert all(row[key] > 0 for key in ("cpu_s", "wall_s", "peak_mib", "loss"))
        assert row["cpu_s_low"] <= row["cpu_s"] <= row["cpu_s_high"]
        assert row["floor_share"] == pytest.approx(floor["cpu_s"] / row["cpu_s"])
        assert row["memory_mib"] < row["peak_mib"]
    assert floor["product_gflops"] > 0
    assert floor["copy_gb_s"] > 0
    assert floor["cpu_s"] == pytest.approx(8 * 8 * 3000 * 16 / 2 / floor["product_gflops"] / 1e9, rel=0.5)
    assert theirs["memory_mib"] == pytest.approx(64, abs=8)  # its ballast; ours is far smaller
    assert ours["memory_mib"] < 32
    assert theirs["note"].startswith("partial_fc_v2.py ")
    (ratio,) = result["ratios"]
    assert (ratio["ours"], ratio["peer"], ratio["classes"]) == ("plsc", "partial-fc", 3000)
    for key in ("cpu_s", "wall_s", "memory_mib"):
        assert ratio[key] is None or ratio[key] == pytest.approx(theirs[key] / ours[key])
    with (tmp_path / "head.csv").open(newline="") as file:
        assert [row["contestant"] for row in csv.DictReader(file)] == [name for name, _ in rows]
    assert (tmp_path / "head.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "PartialFC_V2  over  plsc, bf16 + int8: CPU" in shown
    assert "3,000 classes x 16, 4 samples on each of 2 ranks" in shown


@pytest.mark.slow
def test_what_fails_or_does_not_fit_is_a_row(peer, tmp_path, capsys):
    assert (
        bench(
            "--classes",
            10**10,
            "--nproc",
            1,
            "--rounds",
            1,
            "--partial-fc",
            peer,
            "--contestants",
            "plsc-fp32",
            "partial-fc",
            "--json",
            tmp_path / "r.json",
        )
        == 0
    )
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["failed"] for row in result["rows"]] == [True, True]
    assert [row["cpu_s"] for row in result["rows"]] == [None, None]
    reasons = [row["note"] for row in result["rows"]]
    assert reasons == ["does not fit into memory", "RuntimeError: the stand-in is small and says so"]
    assert result["ratios"] == []
    shown = capsys.readouterr().out
    assert all(reason in shown for reason in reasons)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if not name.startswith("partial-fc")])
def test_every_implementation_makes_steps(name):
    if reason := unavailable(name):
        pytest.skip(reason)
    figures = measure_head(BenchConfig(name, 50, 8, dim=16, nproc=1, steps=2), ALONE)
    assert set(figures) == {"cpu_s", "wall_s", "memory_mib", "peak_mib", "loss"}
    assert figures["loss"] > 0


def test_our_head_and_dense_logits_compute_the_same_loss():
    config = BenchConfig("dense", 50, 8, dim=16, nproc=1)
    theirs = DenseArcFace(config, ALONE)
    import plsc

    ours = plsc.ShardedHead(16, 50)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
    x, y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    torch.testing.assert_close(theirs(x, y), ours(x, y))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "plsc", "plsc-no-momentum", "plsc-fp32"])
def test_exact_heads_begin_at_the_loss_of_unrelated_rows(name):
    """Cosines near 0: log Z = ln C + s²/(2D), and the target's logit is s·cos(π/2 + m). Batches scatter by 0.18."""
    config = BenchConfig(name, 2000, 64, dim=1024, nproc=1, steps=1)
    expected = math.log(2000) + 64**2 / (2 * 1024) + 64 * math.sin(0.5)
    assert measure_head(config, ALONE)["loss"] == pytest.approx(expected, abs=0.9)


@pytest.mark.skipif(bool(NO_LINEAR_CROSS_ENTROPY), reason=NO_LINEAR_CROSS_ENTROPY or "")
@pytest.mark.parametrize("batch", [4, 16])  # below and from D: torch's two ways
def test_plain_softmax_is_cross_entropy_of_products(batch):
    table = PlainSoftmax(BenchConfig("linear-cross-entropy", 50, batch, dim=16, nproc=1), ALONE)
    x, y = torch.randn(batch, 16), torch.arange(batch)
    torch.testing.assert_close(table(x, y), torch.nn.functional.cross_entropy(x @ table.weight.t(), y))


def taken(cpu, memory=10.0):
    return {"cpu_s": cpu, "wall_s": 2 * cpu, "memory_mib": memory, "peak_mib": 100.0, "loss": 1.0}


def test_medians_and_ratios_are_over_the_rounds():
    plan = HeadComparison(("plsc", "dense"), [100], [4], rounds=3)
    rounds = {"plsc": [taken(1.0), taken(2.0), taken(4.0)], "dense": [taken(3.0, 30.0), taken(20.0), taken(8.0, 20.0)]}
    row = result_row(plan, "plsc", 100, 4, rounds["plsc"])
    assert (row["cpu_s"], row["cpu_s_low"], row["cpu_s_high"], row["wall_s"]) == (2.0, 1.0, 4.0, 4.0)
    (ratio,) = head_ratios(plan, 100, 4, rounds)
    assert ratio == {
        "classes": 100,
        "batch_per_rank": 4,
        "ours": "plsc",
        "peer": "dense",
        "cpu_s": statistics.median([3.0, 10.0, 2.0]),
        "wall_s": 3.0,
        "memory_mib": 2.0,
    }


def test_heads_alternate_and_failures_are_not_tried_again(monkeypatch):
    turns = []

    def measured(module, task, nproc, threads, limit):
        turns.append((task["implementation"], task["classes"]))
        return {"reason": "no"} if turns[-1] == ("dense", 200) else taken(1.0)

    monkeypatch.setattr(head_bench, "measure_on_ranks", measured)
    result = compare_heads(HeadComparison(("plsc", "dense"), [300, 100, 200], [4], rounds=2), quiet=True)
    assert turns == [
        ("plsc", 100),
        ("dense", 100),
        ("plsc", 100),
        ("dense", 100),
        ("plsc", 200),
        ("dense", 200),
        ("plsc", 200),
        ("plsc", 300),
        ("plsc", 300),
    ]
    notes = {row["classes"]: row["note"] for row in result["rows"] if row["contestant"] == "dense"}
    assert notes == {100: "", 200: "no", 300: "failed with fewer classes already"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--partial-fc", "nowhere"], "there is no partial_fc_v2.py in it"),
        (["--contestants", "partial-fc"], "PartialFC_V2 needs --partial-fc FOLDER"),
        (["--contestants", "pfc"], "--contestants pfc: there is no such head; choose from plsc, "),
        (["--classes", "0"], "--classes 0: it must be at least 1"),
        (["--sample-rate", "1"], "--sample-rate 1.0"),
        (["--limit", "0"], "--limit 0.0"),
    ],
)
def test_a_wrong_request_is_one_line(argv, message, capsys):
    assert bench(*argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "left out" not in line]
    assert line.startswith("plsc bench: error: ")
    assert message in line
