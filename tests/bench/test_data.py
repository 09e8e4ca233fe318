"""`plsc bench data`: every loader gives every picture once a pass, and a tiny comparison from end to end."""

import csv
import importlib.util
import multiprocessing
from collections import Counter

import pytest
import torch

from plsc.bench.comparison import BASELINES
from plsc.bench.data import (
    BARE,
    SOURCES,
    LoadingComparison,
    loading_ratios,
    loading_row,
    measure_loading,
    write_sources,
)
from plsc.data import open_dataset
from plsc.tools.entry import main

KNOWN = LoadingComparison(baselines=str(BASELINES)).known
IMAGES = 40


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of the data sets, and why forms are not read."""
    folder = tmp_path_factory.mktemp("data")
    return folder, write_sources(folder, IMAGES - 3)  # whole identities


def pictures(batches):
    """How often each pair of pixels and label came, of batches of at most 16."""
    found = Counter()
    for images, labels in batches:
        assert len(images) == len(labels) <= 16
        assert (images.dtype, images.shape[1:]) == (torch.uint8, (3, 112, 112))
        found.update((image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True))
    return found


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the last file open
@pytest.mark.parametrize("name", [name for name in KNOWN if name != BARE])
def test_every_loader_gives_every_picture_with_its_label(name, written):
    folder, unread = written
    if reason := KNOWN[name].why_not() or unread.get(name):
        pytest.skip(reason)
    dataset = open_dataset(folder / "images.rec")
    expected = Counter((dataset.image(index).numpy().tobytes(), int(dataset.labels[index])) for index in range(IMAGES))
    loader = KNOWN[name].build(folder, 0, 16)
    assert [pictures(loader), pictures(loader)] == [expected, expected]


def test_decoding_alone_decodes_every_picture(written):
    figures = measure_loading(KNOWN[BARE], written[0], 0, 16, 2)
    assert figures["images"] == 2 * IMAGES


def test_forms_that_are_not_read_are_told(written):
    folder, unread = written
    for name in SOURCES.keys() - {"rec", "folder"}:
        assert f"plsc-{name}" in KNOWN
    assert set(unread) <= {"plsc-tars", "plsc-parquet"}
    assert len(list(folder.glob("*.tar"))) > 1
    assert (folder / "images.parquet").is_file() == (importlib.util.find_spec("pyarrow") is not None)


def turn(rate, workers=(0, 2)):
    return {"workers": {str(n): {"images": 8, "images_per_cpu_s": rate / (n + 1), "images_per_s": 1} for n in workers}}


def test_rows_and_ratios_are_medians_over_the_rounds():
    rounds = {
        BARE: [turn(1000, [0]), turn(2000, [0]), turn(4000, [0])],
        "plsc-rec": [turn(500), turn(1000), turn(3000)],
        "webdataset": [turn(250), turn(1000), turn(1000)],
        "imagefolder": [turn(100), turn(100), turn(100)],
        "datasets": [{"reason": "not installed"}] * 3,
    }
    comparison = LoadingComparison(baselines=str(BASELINES), images=8)
    row = loading_row(comparison, "plsc-rec", 0, rounds)
    assert (row["images_per_cpu_s"], row["images_per_cpu_s_low"], row["images_per_cpu_s_high"]) == (1000, 500, 3000)
    assert row["decode_share"] == 0.5
    assert loading_row(comparison, "plsc-rec", 2, rounds)["decode_share"] == pytest.approx(0.5 / 3)
    failed = loading_row(comparison, "datasets", 0, rounds)
    assert (failed["failed"], failed["note"], failed["images_per_cpu_s"]) == (True, "not installed", None)
    ratios = loading_ratios([0, 2], rounds)
    expected = [(0, "plsc-rec", "webdataset", 2), (2, "plsc-rec", "webdataset", 2)]
    assert [tuple(ratio.values()) for ratio in ratios] == expected


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_loader_processes_have_ended_when_their_time_is_read(written):
    for name in ("plsc-rec", "webdataset", "imagefolder"):
        if KNOWN[name].why_not() is None:
            assert measure_loading(KNOWN[name], written[0], 2, 8, 2)["images"] == 2 * IMAGES
            assert multiprocessing.active_children() == [], name


@pytest.mark.live
@pytest.mark.slow
def test_the_command_prints_and_writes(tmp_path, capsys):
    argv = ["--images", "20", "--workers", "0", "1", "--rounds", "1", "--passes", "1", "--out", str(tmp_path)]
    assert main(["bench", "data", *argv, "--contestants", BARE, "plsc-folder", "imagefolder"]) == 0
    printed = capsys.readouterr().out
    assert "1 loader process " in printed
    assert "plsc, folder: " in printed
    with (tmp_path / "data.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["contestant"], row["workers"]) for row in rows] == [
        *((name, "0") for name in (BARE, "plsc-folder", "imagefolder")),
        *((name, "1") for name in ("plsc-folder", "imagefolder")),
    ]
    assert not any(row["note"] for row in rows)
    assert (tmp_path / "data.png").stat().st_size > 1000
