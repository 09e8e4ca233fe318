"""`plsc bench cluster`: a tiny comparison from end to end."""

import csv

import pytest

from plsc.bench.cluster import ClusterComparison, compare_clusterings
from plsc.bench.comparison import BASELINES
from plsc.bench.report import cluster_table, draw_clusterings
from plsc.errors import UsageError
from plsc.tools.entry import main

pytestmark = pytest.mark.exhaustive

SIZES = {"rows": 600, "dim": 16, "k": 20, "iterations": 6, "threads": 1}


def test_rows_ratios_and_table(tmp_path):
    pytest.importorskip("faiss")
    result = compare_clusterings(ClusterComparison(("plsc", "faiss"), **SIZES, baselines=str(BASELINES)), quiet=True)
    assert [row["contestant"] for row in result["rows"]] == ["plsc", "faiss"]
    assert not any(row["failed"] for row in result["rows"]), result["rows"]
    (ratio,) = result["ratios"]
    assert ratio["inertia_ratio"] == pytest.approx(1, abs=0.02)
    assert "times the CPU time of plsc cluster" in cluster_table(result["rows"], result["ratios"])
    draw_clusterings(result["rows"], tmp_path / "cluster.png")
    assert (tmp_path / "cluster.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_command_writes_its_files(tmp_path, capsys):
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "cluster", *sizes, "--contestants", "plsc", "--out", str(tmp_path)]) == 0
    assert "plsc cluster" in capsys.readouterr().out
    with (tmp_path / "cluster.csv").open() as file:
        assert [row["k"] for row in csv.DictReader(file)] == ["20"]
    with pytest.raises(UsageError):
        ClusterComparison(("nothing",))
