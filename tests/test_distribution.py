"""Source distribution and wheel: their contents, and an installation away from the checkout."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def build(source: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files: builds leave the checkout clean, and see nothing that a clone would lack."""
    copy = tmp_path_factory.mktemp("source")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, files)):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def published(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("published")
    build(source, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(published: Path) -> Path:
    return next(published.glob("*.whl"))


def test_nothing_but_plsc_lands_in_site_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"plsc", next(n for n in names if "dist-info" in n).split("/")[0]}
    for expected in ("py.typed", "quickstart/page.html", "configs/avatars_quickstart.toml", "models/iresnet.py"):
        assert f"plsc/{expected}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_makes_the_same_wheel_as_the_checkout(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    build(source, tmp_path, "--wheel")
    (from_checkout,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(zipfile.ZipFile(from_checkout).namelist())


def test_the_source_distribution_holds_what_readme_refers_to_and_no_tests(published: Path) -> None:
    with tarfile.open(next(published.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    referred = {path for path in names if f"]({path})" in (ROOT / "README.md").read_text(encoding="utf-8")}
    assert referred >= {"docs/serving.md", "docs/page-desktop.png"}
    assert names >= {"LICENSE", "CHANGELOG.md", "configs/fine_tune.toml", "models/iresnet.py", "plsc/native/tiles.h"}
    assert not {name for name in names if name.startswith(("tests", "plsc/models", "plsc/configs"))}


def test_installed_wheel_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True)

    def run(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import plsc.models; from plsc import config; print(plsc.models.__file__, config.load('fine_tune').backbone)"
    file, backbone = run("-c", code).split()
    assert Path(file).is_relative_to(site)
    assert backbone == "iresnet50"
    assert "quickstart" in run("-m", "plsc.tools.entry", "--help")
    assert "6" in run("-m", "plsc.tools.entry", "data", "stats", "avatars:3x2")


LEAN = r"""
import sys
from importlib.machinery import PathFinder
find, needed = PathFinder.find_spec, sys.argv.pop(1).split()
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in needed else find(name, *rest)
)
from plsc.tools.entry import main
sys.exit(main())
"""


def test_a_node_that_only_trains_needs_no_more_than_the_documentation_says(tmp_path: Path) -> None:
    """The dependencies that docs/install.md leaves out cannot be imported: training and planning go on without them."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    (lean,) = re.findall(r"only trains.*?`pip install (.*?)`", page, re.DOTALL)
    with (ROOT / "pyproject.toml").open("rb") as file:
        stated = [re.match(r"[\w-]+", line)[0] for line in tomllib.load(file)["project"]["dependencies"]]
    assert set(lean.split()) < set(stated)
    modules = {"faiss-cpu": "faiss", "prometheus-client": "prometheus_client"}
    absent = " ".join(modules.get(name, name) for name in stated if name not in {*lean.split(), "filelock"})  # torch's

    def run(*command: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", LEAN, absent, *command], cwd=tmp_path, capture_output=True, text=True
        )
        return done.returncode, done.stderr

    small = ("--data.train", "avatars:8x4", "--eval.sets", "avatars:4x4", "--epochs", "1")
    code, lines = run("train", "avatars_quickstart", *small, "--out", "run")
    assert code == 0, lines
    assert (tmp_path / "run" / "best.safetensors").exists()
    code, lines = run("plan", "avatars_quickstart")
    assert code == 0, lines
    needs = "plsc serve: error: it needs uvicorn: pip install plsc-torch brings it\n"
    assert run("serve", "--model", "run", "--store", "gallery") == (1, needs)
