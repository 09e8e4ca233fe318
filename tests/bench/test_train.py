"""`plsc bench train`: the loops, the rows and ratios, and loops that fail."""

import csv
import json
import statistics

import pytest
import torch

from plsc.bench import train as train_bench
from plsc.bench.report import train_table
from plsc.bench.train import TrainComparison, compare_training, training_ratios
from plsc.bench.train_baselines import TrainBenchConfig
from plsc.bench.train_worker import measure_loop
from plsc.parallel import Mesh
from plsc.tools.entry import main

ALONE = Mesh(0, 1, 0, torch.device("cpu"))
HEAD = """
import torch
from torch import distributed
from torch.nn.functional import cross_entropy, linear, normalize


class PartialFC_V2(torch.nn.Module):
    def __init__(self, margin_loss, embedding_size, num_classes, sample_rate=1.0, fp16=False):
        super().__init__()
        assert distributed.is_initialized()
        assert (sample_rate, fp16) == (1.0, False)
        self.margin = margin_loss
        self.weight = torch.nn.Parameter(torch.normal(0, 0.01, (num_classes, embedding_size)))

    def forward(self, embeddings, labels):
        return cross_entropy(self.margin(linear(normalize(embeddings), normalize(self.weight)), labels), labels)
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
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4, bias=False), nn.Flatten(), nn.LazyLinear(num_features))


def iresnet18(*args, **options):
    raise RuntimeError("the stand-in is small\\nand says so")
"""
SMALL = ("--image-size", 32, "--dim", 16, "--batch", 4, "--classes", 30, "--rounds", 1, "--steps", 1)


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A folder that looks like arcface_torch."""
    folder = tmp_path_factory.mktemp("arcface_torch")
    (folder / "backbones").mkdir()
    (folder / "partial_fc_v2.py").write_text(HEAD)
    (folder / "losses.py").write_text(MARGINS)
    (folder / "backbones" / "iresnet.py").write_text(BACKBONES.replace("LazyLinear(", "Linear(4 * 8 * 8, "))
    return folder


def bench(*argv):
    return main(["bench", "train", *map(str, argv)])


@pytest.mark.slow
def test_rows_ratios_and_files(peer, tmp_path, capsys):
    files = ("--out", tmp_path, "--json", tmp_path / "r.json")
    assert bench(*SMALL, "--backbone", "resnet8", "--nproc", 2, "--arcface-torch", peer, *files) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    rows = {row["contestant"]: row for row in result["rows"]}
    assert list(rows) == ["plsc", "plsc-fp32", "arcface-torch", "plain"]
    for row in rows.values():
        assert row["failed"] is False, row["note"]
        assert row["date"]
        assert torch.__version__ in row["versions"]
        sizes = [row[key] for key in ("backbone", "classes", "image_size", "batch", "nproc", "dim", "precision")]
        assert sizes == ["resnet8", 30, 32, 4, 2, 16, "fp32"]
        assert all(row[key] > 0 for key in ("cpu_s", "wall_s", "peak_mib", "loss"))
        assert row["images_per_second"] == pytest.approx(8 / row["wall_s"])
    assert rows["arcface-torch"]["note"].startswith("partial_fc_v2.py ")
    assert ", iresnet.py " in rows["arcface-torch"]["note"]
    pairs = [(ratio["ours"], ratio["peer"]) for ratio in result["ratios"]]
    assert pairs == [(own, other) for own in ("plsc", "plsc-fp32") for other in ("arcface-torch", "plain")]
    ratio = result["ratios"][1]
    assert ratio["cpu_s"] == pytest.approx(rows["plain"]["cpu_s"] / rows["plsc"]["cpu_s"])
    with (tmp_path / "train.csv").open(newline="") as file:
        assert [row["contestant"] for row in csv.DictReader(file)] == list(rows)
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "resnet8 in fp32, 30 classes x 16, 4 images of 32 px on each of 2 ranks, 1 thread each" in shown
    assert "DDP, all logits  over  plsc, table in bf16 + int8: wall " in shown


@pytest.mark.slow
def test_what_fails_is_a_row(peer, tmp_path, capsys):
    options = ("--contestants", "arcface-torch", "--nproc", 1, "--arcface-torch", peer, "--json", tmp_path / "r.json")
    assert bench(*SMALL, *options) == 0
    ((row,), ratios) = json.loads((tmp_path / "r.json").read_text()).values()
    assert row["failed"] is True
    assert (row["note"], row["images_per_second"]) == ("RuntimeError: the stand-in is small and says so", None)
    assert ratios == []
    assert "the stand-in is small and says so" in capsys.readouterr().out


def measured(name, **changes):
    sizes = {"classes": 20, "batch": 4, "image_size": 32, "dim": 16, "nproc": 1, "steps": 1}
    return measure_loop(TrainBenchConfig(name, "resnet8", **{**sizes, **changes}), ALONE)


def test_the_first_loss_is_arcfaces_in_all_loops():
    # Cosines of random vectors are near 0, and of the target's angle with the margin near -sin(0.5): with s = 64 the
    # loss is 31 above the logarithm of a sum of 20 exponentials, of numbers with a deviation of 64 / sqrt(512).
    losses = [measured(name, dim=512)["loss"] for name in ("plsc", "plsc-fp32", "plain")]
    assert all(30 < loss < 47 for loss in losses), losses


def taken(wall):
    return {"cpu_s": wall, "wall_s": wall, "memory_mib": 10.0, "peak_mib": 20.0, "loss": 3.0}


def test_ratios_are_medians_of_the_rounds_quotients():
    rounds = {"plsc": [taken(1.0), taken(2.0), taken(4.0)], "plain": [taken(3.0), taken(2.0), taken(40.0)]}
    (ratio,) = training_ratios({**rounds, "arcface-torch": [{"reason": "no"}]})
    assert (ratio["ours"], ratio["peer"], ratio["memory_mib"]) == ("plsc", "plain", 1.0)
    assert ratio["wall_s"] == statistics.median([3.0, 1.0, 10.0])


def test_loops_alternate_and_failures_are_not_tried_again(monkeypatch):
    turns = []

    def measure(module, task, nproc, threads, limit):
        assert (module, nproc, threads) == ("plsc.bench.train_worker", 2, 1)
        turns.append(task["implementation"])
        return {"reason": "does not fit into memory"} if turns[-1] == "plain" else taken(0.5)

    monkeypatch.setattr(train_bench, "measure_on_ranks", measure)
    result = compare_training(TrainComparison(("plsc", "plain"), rounds=2), quiet=True)
    assert turns == ["plsc", "plain", "plsc"]
    ours, plain = result["rows"]
    assert (ours["images_per_second"], plain["failed"], plain["note"]) == (32.0, True, "does not fit into memory")
    assert train_table(result["rows"], result["ratios"]).splitlines()[-1].endswith("does not fit into memory")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arcface-torch", "nowhere"], "--arcface-torch nowhere: there is no partial_fc_v2.py in it"),
        (["--contestants", "arcface-torch"], "PartialFC_V2 needs --arcface-torch FOLDER"),
        (["--contestants", "pfc"], "--contestants pfc: there is no such loop; choose from plsc, "),
        (["--backbone", "r18"], "--backbone r18: choose from "),
        (["--classes", "0"], "--classes 0: it must be at least 1"),
        (["--image-size", "0"], "--image-size 0: it must be at least 1"),
        (["--limit", "0"], "--limit 0.0"),
    ],
)
def test_a_wrong_request_is_one_line(argv, message, capsys):
    assert bench(*argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "left out" not in line]
    assert line.startswith("plsc bench: error: ")
    assert message in line
