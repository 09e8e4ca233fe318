"""Foreign data sets through the commands: which sources are taken, and what is said of those that are not."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.pictures import stored

from plsc.tools.entry import main


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Two tars of four samples of two people, whose names are in ``txt``."""
    folder = tmp_path / "tars"
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(4):
                pixels = np.random.default_rng([shard, number]).integers(0, 256, (16, 16, 3), np.uint8)
                content = {"jpg": stored(Image.fromarray(pixels), "JPEG"), "txt": b"ann bob".split()[number % 2]}
                for field, data in content.items():
                    header = tarfile.TarInfo(f"{shard}{number}.{field}")
                    header.size = len(data)
                    tar.addfile(header, io.BytesIO(data))
    return folder


@pytest.mark.parametrize("form", ["?label=txt", "/{0..1}.tar?label=txt", "/*.tar?label=txt"])
def test_eval_takes_a_folder_and_patterns_with_options(tars: Path, form: str) -> None:
    assert main(["eval", "raw-pixels", "--image-size", "16", "--data", f"{tars}{form}"]) == 0


def test_plan_counts_the_classes_of_a_folder_with_options(tars: Path, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(f"""backbone = "mobilefacenet"\n[data]\ntrain = '{tars}?label=txt'\n""")
    assert main(["plan", str(tmp_path / "t.toml")]) == 0


def test_a_missing_shard_is_told(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{tars}/{{0..2}}.tar?label=txt"
    assert main(["eval", "raw-pixels", "--image-size", "16", "--data", source]) == 2
    assert f"there is no {tars}/2.tar" in capsys.readouterr().err


def test_a_folder_of_two_formats_says_which_is_read(tars: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = shutil.copytree(tars, tars.with_name("alone"))
    (tars / "0.parquet").write_bytes(b"metadata")
    assert main(["data", "stats", f"{alone}?label=txt"]) == 0
    assert main(["data", "stats", f"{tars}/*.tar?label=txt"]) == 0
    assert "are read" not in caplog.text
    assert main(["data", "stats", f"{tars}?label=txt"]) == 0
    assert f"{tars}?label=txt: its .tar files are read, and its .parquet files are not; to read those" in caplog.text


def test_a_wrong_label_is_told_as_such(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", f"{tars}?label=nope"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("the first, 0.tar/00: it has no label in nope, but jpg, txt")
    assert main(["data", "stats", str(tars)]) == 2
    assert "?image=" not in capsys.readouterr().err, "which names no labels"
