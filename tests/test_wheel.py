"""The built wheel: what it holds, and that it works away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tracked files, so that the checkout stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, files)):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def test_nothing_but_plsc_lands_in_site_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"plsc", next(n for n in names if "dist-info" in n).split("/")[0]}
    for expected in ("py.typed", "quickstart/page.html", "quickstart/recipe.toml", "models/iresnet.py"):
        assert f"plsc/{expected}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_works_elsewhere(wheel, tmp_path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True
    )

    def run(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert Path(run("-c", "import plsc.models; print(plsc.models.__file__)").strip()).is_relative_to(site)
    assert run("-m", "plsc.tools.entry", "--version").startswith("plsc 0.")
    assert "quickstart" in run("-m", "plsc.tools.entry", "--help")
    assert "6" in run("-m", "plsc.tools.entry", "data", "stats", "avatars:3x2")
