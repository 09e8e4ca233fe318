"""`plsc bench head --units`: which units are measured, under which limits, and the shares of their floors."""

import json

import pytest

from plsc.bench import comparison as comparing
from plsc.native import build
from plsc.tools.entry import main

pytestmark = pytest.mark.skipif(build.library() is None, reason="needs a C++ compiler")
ARGV = ("bench", "head", "--units", "--classes", "3000", "--dim", "64", "--batch", "8", "--rounds", "2")
# GFLOP/s, copies in GB/s and the head's seconds, by unit and in a round; 8·16·3000·64 products of 2 ranks.
RATES = {"avx512-bf16": (200.0, 4.0, 1e-3), "avx2": (50.0, 2.0, 2e-3)}
FLOPS = 8 * 16 * 3000 * 64 / 2


@pytest.fixture
def turns(monkeypatch):
    """A processor with two of four units, on which every turn is told instead of measured: their names and limits."""
    monkeypatch.delenv("PLSC_CPU", raising=False)
    monkeypatch.setattr(build, "paths_of_this_kind", lambda: ["avx2", "avx512", "avx512-bf16", "amx"])
    monkeypatch.setattr(build, "available_paths", lambda: list(RATES))
    told = []

    def measured(module, task, *, nproc, threads, limit, variables):
        told.append((task["contestant"], dict(variables)))
        gflops, copies, seconds = RATES[variables["PLSC_CPU"]]
        if task["contestant"] == "floor":
            products = FLOPS / gflops / 1e9
            return {"product_gflops": gflops, "copy_gb_s": copies, "wall_s": products, "cpu_s": products, "note": "x"}
        if task["contestant"] == "plsc-fp32":
            return {"reason": "does not fit into memory"}
        return {"cpu_s": seconds, "wall_s": seconds, "memory_mib": 1.0, "peak_mib": 2.0, "loss": 1.0}

    monkeypatch.setattr(comparing, "measure_on_ranks", measured)
    return told


@pytest.fixture
def rows(tmp_path, capsys):
    """Runs the command: its rows by unit and head, and the table's lines."""

    def run(*argv):
        file = tmp_path / "units.json"
        assert main([*ARGV, *argv, "--json", str(file), "--overwrite"]) == 0
        found = json.loads(file.read_text())["rows"]
        return {(row["unit"], row["contestant"]): row for row in found}, capsys.readouterr().out.splitlines()

    return run


def test_units_take_turns_beside_their_floors_under_their_limits(turns, rows):
    found, lines = rows()
    assert list(found) == [(unit, "plsc") for unit in ("amx", "avx512-bf16", "avx512", "avx2")]
    limits = {
        "avx512-bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
        "avx2": ("avx2", "AVX2", "AVX2"),
    }
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    a_round = [
        (name, {"PLSC_CPU": unit, **dict(zip(names, limits[unit], strict=True))})
        for unit in ("avx512-bf16", "avx2")
        for name in ("floor", "plsc")
    ]
    assert turns == 2 * a_round
    for unit in ("amx", "avx512"):
        row = found[unit, "plsc"]
        assert (row["failed"], row["note"]) == (True, "this processor has none")
        assert row["cpu_s"] is row["products_s"] is row["floor_share"] is None
        assert any(line.split() == [unit, "plsc,", "bf16", "+", "int8", *row["note"].split()] for line in lines)
    for unit, (gflops, copies, seconds) in RATES.items():
        row = found[unit, "plsc"]
        products, moved = FLOPS / gflops / 1e9, 3000 / 2 * 64 * 8 / copies / 1e9  # W thrice in bf16, int8 twice
        assert (row["cpu_s"], row["product_gflops"], row["copy_gb_s"]) == (seconds, gflops, copies)
        assert row["products_s"] == pytest.approx(products)
        assert row["bytes_s"] == pytest.approx(moved)
        assert row["floor_share"] == pytest.approx(products / seconds)
        assert row["both_share"] == pytest.approx((products + moved) / seconds)
        assert any(f"{unit} " in line and f" {row['floor_share']:.0%} " in line for line in lines)


def test_a_head_that_fails_has_no_share(turns, rows):
    found, lines = rows("--contestants", "plsc-fp32")
    row = found["avx2", "plsc-fp32"]
    assert (row["failed"], row["note"], row["floor_share"]) == (True, "does not fit into memory", None)
    assert sum("does not fit into memory" in line for line in lines) == 2


def test_plsc_cpu_asks_for_one_unit(turns, rows, monkeypatch):
    path = build.available_paths()[-1]
    monkeypatch.setattr(build, "why_no_library", lambda: None)  # the processor of this test is not this one
    monkeypatch.setenv("PLSC_CPU", path)
    found, _ = rows()
    assert list(found) == [(path, "plsc")]


@pytest.mark.parametrize(
    ("variables", "argv", "said"),
    [
        ({"PLSC_CPU": "sse9"}, (), "PLSC_CPU=sse9 is unknown: give avx2, "),
        ({"PLSC_NATIVE": "0"}, (), "--units measures the compiled kernels, and there are none: PLSC_NATIVE=0"),
        ({}, ("--contestants", "plsc-sampled"), "--units measures exact heads of ours"),
        ({}, ("--device", "cuda"), "--units measures our heads on this CPU: leave --device cuda out"),
        ({}, ("--partial-fc", "x"), "--units measures our heads on this CPU: leave --partial-fc out"),
    ],
    ids=["unknown", "no kernels", "sampled", "gpu", "peer"],
)
def test_what_cannot_be_measured_is_refused_in_a_line(monkeypatch, capsys, variables, argv, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*ARGV, *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
