"""The pages of the documentation: every shell and Python block runs as written."""

import re
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import page_files
from support.page_files import SIDE
from support.page_runner import ROOT, PageRun, blocks_of, options_of, unknown_words

from plsc import config
from plsc.tools.entry import COMMANDS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Setting:
    """What a page needs: files that it takes as given, names of its Python blocks, and what a test cannot afford."""

    files: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    parsed_only: tuple[str, ...] = ()


# Commands that are parsed and not run, with the reason.
TOO_LONG = (
    "quickstart",  # minutes; tests/quickstart runs it on fewer identities
    "bench",  # minutes; tests/bench runs it on small tables
)
NO_FACES = {"--detector yunet": ""}  # it finds none in the stand-ins for photos
QUICK_DOCTOR = {"plsc doctor": "plsc doctor --only versions choices"}
SETTINGS = {
    "install.md": Setting(replaced=QUICK_DOCTOR),
    "gpu.md": Setting(replaced=QUICK_DOCTOR),
    "README.md": Setting(
        files="model.onnx photos/ someone.jpg quickstart/model.onnx quickstart/calibration.json",
        names={"backbone": torch.nn.Linear(4, 512), "loader": [(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))]},
        replaced={
            "10_000_000": "1_000",  # the table of ten million classes takes 15 GB
            "calibration.json": "calibration.json --fmr 1e-1",  # a lower rate takes more pairs
            **NO_FACES,
            **QUICK_DOCTOR,
        },
    ),
    "index.md": Setting("photos/ points.csv unseen/ someone.jpg lfw.bin cfp_fp.bin faces.toml", replaced=QUICK_DOCTOR),
    "distributed.md": Setting(
        "faces.toml faces.rec lfw.bin unseen/ photos/", replaced={"/shared/": "shared/", **QUICK_DOCTOR}
    ),
    "schedulers.md": Setting(files="faces.toml faces.rec lfw.bin", replaced={"/shared/": "shared/"}),
    "training.md": Setting(files="faces.rec"),
    "data.md": Setting(files="shards/000.tar shards/001.tar parts/0.tar.gz parts/1.tar.gz set/0.parquet"),
    "dynamic.md": Setting(
        parsed_only=[
            f"table {action}" for action in ("remove", "check", "merge", "split", "rename", "add")
        ],  # few steps, few names
    ),
    "gallery_pictures.md": Setting(files="gallery/"),
    "arcface_torch.md": Setting(files="faces.rec lfw.bin"),
    "faces.md": Setting(
        files="photos/ unseen/ points.csv scrfd_10g_bnkps.onnx model.safetensors portrait.jpg",
        names={"image": torch.from_numpy(np.array(page_files.photo(1))).permute(2, 0, 1)},
        replaced={
            "--fmr 1e-4": "--fmr 1e-1",  # which takes 100,000 pairs
            "enrolled/ --mated again/ --non-mated strangers/": "unseen/ --mated unseen/ --non-mated avatars:9x1@20",
        },
    ),
    "first-data-set.md": Setting(
        files="people/",
        replaced={"-ge 10": "-ge 4", "tail -n 30": "tail -n 5", "--fmr 1e-3": "--fmr 1e-1", **NO_FACES},  # 11 people
    ),
    "python.md": Setting(
        files="photos/ points.csv unseen/ lfw.bin a.jpg b.jpg",
        replaced={"200x10": "8x4", "112": f"{SIDE}", '("resnet8"': f'("resnet8", image_size={SIDE}'},
    ),
    # Letters and one label: a machine may have neither Han fonts nor Unihan.
    "glyphs.md": Setting(
        replaced={"glyphs:han:least_fonts=10": "glyphs:41-46", "character+radical+strokes+reading": "character"}
    ),
    "clusters.md": Setting(
        replaced={
            "--k 300": "--k 12",
            "--threshold 0.8": "--threshold 0.5",
        },
    ),
    # No hub is asked: what would be pushed is written into folders.
    "hub.md": Setting(
        files="unseen/ model.safetensors",
        replaced={
            "--repo ORG/NAME": "--folder again/",
            '"hf-hub:ORG/NAME")': '"pushed")',
            'timm.create_model("hf-hub:ORG/NAME", pretrained=True)': 'timm.create_model("test_resnet")',
        },
    ),
    "untrusted-files.md": Setting(files="model.safetensors photos/"),
    "migration.md": Setting("model.onnx next.onnx people/ other/"),
    "serving.md": Setting(files="model.safetensors model.onnx ada.jpg unknown.jpg portrait.jpg party.jpg"),
    "onnx.md": Setting(
        files="model.safetensors ada.jpg people/",
        replaced={
            "112": f"{SIDE}",  # a small model
            "--precision int8": "--precision int8 --max-tar-loss 1",  # that is not trained
        },
    ),
    "open_inference.md": Setting(files="model.safetensors", replaced={"112": f"{SIDE}"}),
    "safe_writes.md": Setting(files="model.safetensors ada.jpg"),
    "bulk_enrolment.md": Setting(files="model.safetensors photos/"),
    "picture_quality.md": Setting(files="model.safetensors"),
    "search_thresholds.md": Setting(
        files="model.safetensors unseen/",
        replaced={
            "enrolled/ --mated again/ --non-mated strangers/": "unseen/ --mated unseen/ --non-mated avatars:9x1@20",
            "--fpir 1e-3": "--fmr 1e-1",  # the other takes 500 people
        },
    ),
    "several_faces.md": Setting(
        files="model.onnx party.jpg", parsed_only=["gallery enrol", "embed"]
    ),  # of photos for a real detector
    "own_backbones.md": Setting(
        files="photos/ unseen/", replaced={"200x10": "8x4", "112": f"{SIDE}", "batch_size=32": "batch_size=8"}
    ),
    "embedding_sets.md": Setting(files="model.safetensors photos/"),
    "cluster_engines.md": Setting(files="model.safetensors photos/"),
    "approximate_search.md": Setting(files="model.safetensors"),
    "monitoring.md": Setting(files="model.safetensors"),
    "audit_log.md": Setting(files="model.safetensors"),
    "encryption.md": Setting(files="model.safetensors"),
}


def sentences(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def run_page(page: Path, folder: Path) -> PageRun:
    setting = SETTINGS.get(page.name, Setting())
    page_files.make(folder, setting.files)
    run = PageRun(page, folder, setting.replaced, (*TOO_LONG, *setting.parsed_only), dict(setting.names))
    run.run()
    return run


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("curl")), reason="needs bash and curl")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.stem)
def test_every_block_runs_as_written(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_stand_in_blocks_that_run(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language, f"{page.name}:{block.line}: the block has no language"
        if block.language == "toml" and page.stem != "extending":  # whose names tests/test_extensions.py installs
            config.from_dict(tomllib.loads(block.text))
        if block.language not in ("sh", "python"):
            found = re.search(r"^\s*(\$ )?(plsc|torchrun|curl|pip) .*", block.text, flags=re.MULTILINE)
            assert not found, f"{page.name}:{block.line}: {found[0]}"
    assert not re.findall(r"^ {4,}(?:plsc|torchrun|curl|pip) .*", sentences(page), flags=re.MULTILINE)


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1_800


def test_guides_and_pages_of_features_stay_short() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    guides = {ROOT / "docs" / f"{name}.md" for name in ("training", "distributed", "serving")}
    assert not [page.name for page in guides if words[page] > 3_500]
    assert not [page.name for page in PAGES if page.parent.name == "features" and words[page] > 700]


def test_readme_begins_with_one_installation_and_one_command() -> None:
    first, second, *others = blocks_of(ROOT / "README.md")
    assert re.findall("^(pip|plsc|make) .*", first.text, flags=re.MULTILINE) == ["pip", "plsc"]
    assert re.search("^plsc quickstart --serve ", first.text, flags=re.MULTILINE)
    assert second.language == "python"
    assert not [block.line for block in others if "pip install" in block.text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_sentences_have_the_options_that_they_show(page: Path) -> None:
    for span in re.findall(r"`(plsc [^`]+)`", sentences(page)):
        command = span.split()[1].split("|")[0].rstrip(":")
        if command not in COMMANDS:
            assert command.isupper() or command.startswith("-"), span
            continue
        for option in re.findall(r"--[\w.-]+", span):
            assert option in options_of(command) | {"--help", "--KEY"}, span
        assert re.search("…|: error:", span) or not unknown_words(command, span.split()[2:]), span
