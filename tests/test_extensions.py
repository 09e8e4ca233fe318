"""A package that adds one of each kind by entry points, installed by pip into a folder and used by the commands."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.waiting import serving

from plsc.client import Client, ServerError
from plsc.client_values import NewPerson

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tests/extensions"


class Installed:
    """The commands where the package is installed in ``folder``/site."""

    def __init__(self, folder: Path) -> None:
        source = shutil.copytree(PACKAGE, folder / "source")  # a build writes into it
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--target", str(folder / "site"), str(source)], check=True)
        path = os.pathsep.join([str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.folder, self.environment = folder, {**os.environ, "PYTHONPATH": path}
        (folder / "example.toml").write_text(RECIPE)

    def plsc(self, *command: str) -> tuple[int, str, str]:
        line = [sys.executable, "-m", "plsc.tools.entry", *command]
        done = subprocess.run(line, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("extensions"))


RECIPE = """
backbone = "one_block"
embedding_dim = 16
precision = "fp32"
steps = 3
[data]
train = "stripes:6"
image_size = 32
batch_size = 8
[eval]
sets = ["stripes:4"]
[log]
every_steps = 1
to = ["lines"]
"""


@pytest.mark.slow
def test_a_run_of_two_ranks_takes_one_of_each_kind(installed: Installed) -> None:
    average = ("--averaging.name", "often")
    own = ("--head.margin", "halfway", "--parallel.strategy", "counted", "--parallel.comm_hook", "signs")
    code, out, err = installed.plsc("train", "example.toml", *own, "--nproc", "2", "--out", "a")
    assert code == 0, err
    assert re.search(r"halfway", out + err)
    lines = (installed.folder / "a/lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    code, out, err = installed.plsc("eval", "a", "--data", "stripes:4")
    assert code == 0, err
    code, out, err = installed.plsc("train", "example.toml", *average, "--nproc", "2", "--out", "b")
    assert code == 0, err

    serve = ["serve", "--model", "a", "--store", "local:gallery", "--quality-gate", "brightness=250"]
    with (
        serving(serve, audits=True, cwd=installed.folder, env=installed.environment) as address,
        Client(address) as client,
    ):
        client.create_collection("people")
        client.enrol("people", NewPerson("white", faces=[np.full((32, 32, 3), 255, np.uint8)]))
        with pytest.raises(ServerError, match="its brightness is 9, and this service enrols from 250 on"):
            client.enrol("people", NewPerson("dark", faces=[np.full((32, 32, 3), 9, np.uint8)]))
    assert (installed.folder / "gallery").is_dir()


@pytest.mark.slow
def test_a_packages_features_have_keys_a_plan_and_a_state(installed: Installed) -> None:
    code, out, err = installed.plsc("train", "--list-keys", "tether")
    assert code == 0, err
    assert "tether.length = 1.0" in out
    code, out, err = installed.plsc("train", "--list-keys", "thirds")
    assert "thirds.stay = false" in out
    own = ("--tether.weight", "0.1", "--thirds", "true", "--checkpoint.every_steps", "2")
    code, out, err = installed.plsc("plan", "example.toml", "--classes", "6", "--gpus", "1", *own[:4])
    assert code == 0, err
    assert "the tether's loss takes no time" in out
    code, out, err = installed.plsc("train", "example.toml", *own, "--out", "t")
    assert code == 0, err
    again = ("--resume", "auto", "--steps", "5")
    code, out, err = installed.plsc("train", "example.toml", *own, *again, "--out", "t")
    assert code == 0, err
    lines = [json.loads(line) for line in (installed.folder / "t/metrics.jsonl").read_text().splitlines()]
    losses = [line for line in lines if "tether_loss" in line]
    assert [line["tethered_steps"] for line in losses] == [1, 2, 3, 4, 5]
    assert "tether  embeddings are held at 1, weight 0.1" in (installed.folder / "t/train.log").read_text()
    code, _, err = installed.plsc("train", "example.toml", "--tether.weigth", "0.1", "--out", "u")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean tether.weight?" in err


def test_errors_list_extensions_and_name_the_package_of_a_broken_one(installed: Installed) -> None:
    code, _, err = installed.plsc("train", "example.toml", "--head.margin", "halfwey", "--out", "c")
    assert (code, err.count("\n")) == (2, 1)
    assert "halfway" in err
    module = installed.folder / "site/plsc_example.py"
    text = module.read_text()
    module.write_text(text.replace("class Halfway(Margin):", "class Halfway:"))
    try:
        code, _, err = installed.plsc("train", "example.toml", "--head.margin", "halfway", "--out", "c")
    finally:
        module.write_text(text)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"plsc\.margins: halfway of the package plsc-example 1\.0 is .*subclass of .*Margin; mend it", err)


def test_the_page_shows_the_package() -> None:
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    for name in ("pyproject.toml", "plsc_example.py"):
        (shown,) = re.findall(rf'^```\w+ title="plsc-example/{re.escape(name)}"\n(.*?)^```$', page, re.M | re.S)
        assert shown == (PACKAGE / name).read_text(encoding="utf-8")
