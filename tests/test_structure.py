"""The house's own rules: who may import whom, who may communicate, what `import plsc` costs, what is packaged."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"plsc": ROOT / "plsc"} | {f"plsc.{name}": ROOT / name for name in ("models", "data", "tools")}
LAYERS = ["native", "parallel", "losses", "head", "optim", "train", "quickstart", "tools"]
NEVER_TRAIN = {"models", "data", "embed", "index", "evaluation", "bench", "gallery", "serve"}


def modules() -> dict[str, Path]:
    """Every module of the project by its full name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if package == "plsc" and relative.parts[0] in ("models", "data", "tools"):
                continue  # symlinks to the folders at the top
            found[".".join([package, *relative.with_suffix("").parts]).removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
    return names


def layer(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_arrows_run_one_way():
    for name, path in modules().items():
        here = layer(name)
        for target in (layer(t) for t in imports(path) if t.startswith("plsc.")):
            if here in LAYERS and target in LAYERS:
                assert LAYERS.index(target) <= LAYERS.index(here) or (here, target) == ("parallel", "tools"), name
            if here in NEVER_TRAIN:
                assert target not in ("train", "quickstart", "tools"), f"{name} imports plsc.{target}"


def test_collectives_are_called_in_one_module_only():
    calls = {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "barrier",
        "all_gather_object",
        "broadcast_object_list",
        "all_to_all",
        "reduce",
        "gather",
        "scatter",
    }
    for name, path in modules().items():
        if name == "plsc.parallel.collectives":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in calls and isinstance(node.value, ast.Name):
                assert node.value.id not in ("dist", "distributed"), f"{name}:{node.lineno} calls {node.attr}"


def test_packages_and_their_data_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    assert listed == {name for name, path in modules().items() if path.name == "__init__.py"}
    data = project["tool"]["setuptools"]["package-data"]
    shipped = {f"{package.replace('.', '/')}/{file}" for package, files in data.items() for file in files}
    extra = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "plsc").rglob("*")
        if p.is_file() and p.suffix not in (".py", ".pyc") and "__pycache__" not in p.parts
    }
    assert extra == shipped


def test_import_needs_torch_and_numpy_alone():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import plsc; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) - sys.stdlib_module_names <= {"plsc", "torch", "numpy"}


@pytest.mark.parametrize("folder", ["models", "data", "tools"])
def test_folders_at_the_top_refuse_to_be_imported_by_their_bare_names(folder):
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert f"import plsc.{folder}" in done.stderr


def test_no_tool_has_a_standard_modules_name():
    assert not {path.stem for path in (ROOT / "tools").glob("*.py")} & sys.stdlib_module_names
