"""The house's own rules: who may import whom, who may communicate, what `import plsc` costs, what is packaged."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import plsc
from plsc.losses import margins

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import draw_architecture as architecture  # noqa: E402
import write_configuration  # noqa: E402

# The total order of packages and top-level modules: each may import those before it, and nothing else. "" is the face.
ORDER = [
    "errors", "nearest", "extensions", "arguments", "progress", "regular_files", "text_files", "files", "signing",
    "image_files", "sizes", "toml_keys", "strict_toml", "feature_config",
    "persons", "client_values", "client", "loggers", "native", "parallel",
    "collectives", "losses", "head", "devices", "optim", "", "models", "data", "embedding", "index", "evaluation",
    "api", "hub",
    "gallery", "serve", "arcface_torch", "config", "train", "plan", "features",
    "cluster", "bench", "doctor", "quickstart", "tools",
]  # fmt: skip


def layer(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def upward_arrows(found: dict[str, Path]) -> list[str]:
    """Every import that does not go down in ORDER. ``from plsc import X`` counts as X where X is a package."""
    height = {name: index for index, name in enumerate(ORDER)}
    return [
        f"{name} imports {target}"
        for name, path in found.items()
        for target in sorted(architecture.imported_modules(path))
        if target.split(".")[0] == "plsc" and name != "plsc" and layer(target) != layer(name)
        if height.get(layer(target), 0) > height[layer(name)]
    ]


def test_every_package_stands_in_the_order_and_imports_go_down():
    assert {layer(name) for name in architecture.module_paths()} == set(ORDER)
    assert upward_arrows(architecture.module_paths()) == []


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("plsc.head.fake", "plsc.serve.app"),
        ("plsc.losses.fake", "plsc.bench.serve"),
        ("plsc.parallel.fake", "plsc.gallery.store"),
        ("plsc.index.fake", "plsc.serve.app"),
        ("plsc.plan.fake", "plsc.tools.train"),
        ("plsc.parallel.fake", "plsc.tools.train"),
        ("plsc.serve.fake", "plsc.train.trainer"),
        ("plsc.files", "plsc.config"),
    ],
)
def test_an_import_that_goes_up_is_seen(tmp_path, name, target):
    path = tmp_path / "fake.py"
    package = ".".join(target.split(".")[:2])
    for line in (f"from {target} import something", f"import {target}", f"from plsc import {layer(target)}"):
        path.write_text(f"def f():\n    {line}\n")
        assert f"{name} imports {package}" in " ".join(upward_arrows({name: path})), line


def test_the_drawing_of_the_architecture_is_up_to_date():
    committed = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert committed == architecture.draw(), "run: python docs/draw_architecture.py"


def test_the_reference_of_configuration_keys_is_up_to_date():
    committed = write_configuration.PAGE.read_text(encoding="utf-8")
    assert committed == write_configuration.page(), "run: python docs/write_configuration.py"


def test_every_file_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w/.])((?:plsc|models|data|tools|tests|docs)/[\w/.]+\.(?:py|svg|md))\b", text):
        assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_imports_are_absolute_and_collectives_are_called_in_one_module_only():
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
    for name, path in architecture.module_paths().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{name}:{node.lineno}"
            if name == "plsc.parallel.collectives":
                continue
            if isinstance(node, ast.Attribute) and node.attr in calls and isinstance(node.value, ast.Name):
                assert node.value.id not in ("dist", "distributed"), f"{name}:{node.lineno} calls {node.attr}"


def test_the_public_names_are_those_that_type_checkers_see():
    tree = ast.parse((ROOT / "plsc" / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        (node.module, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("plsc.")
        for name in node.names
    }
    imported.remove(("plsc.losses.margins", "*"))
    imported |= {("plsc.losses.margins", name) for name in margins.__all__}
    assert imported == {(module, name) for module, names in plsc._EXPORTS.items() for name in names}


def test_packages_and_their_data_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    packages = {name for name, path in architecture.module_paths().items() if path.name == "__init__.py"}
    assert listed == packages | {"plsc.configs"}
    data = project["tool"]["setuptools"]["package-data"]
    assert data.pop("plsc.configs") == ["*.toml"]
    shipped = {f"{package.replace('.', '/')}/{file}" for package, files in data.items() for file in files}
    extra = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "plsc").rglob("*")
        if p.is_file() and p.suffix not in (".py", ".pyc") and "__pycache__" not in p.parts
    }
    assert extra == shipped


@pytest.mark.live
@pytest.mark.slow
def test_import_needs_torch_and_numpy_alone():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import plsc; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) - sys.stdlib_module_names <= {"plsc", "torch", "numpy"}


@pytest.mark.live
@pytest.mark.parametrize("folder", ["models", "data", "tools"])
def test_folders_at_the_top_refuse_to_be_imported_by_their_bare_names(folder):
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert f"import plsc.{folder}" in done.stderr


def test_no_tool_has_a_standard_modules_name():
    assert not {path.stem for path in (ROOT / "tools").glob("*.py")} & sys.stdlib_module_names


@pytest.mark.live
@pytest.mark.slow
def test_a_step_a_search_and_an_enrolment_enter_no_more_files_than_the_documentation_says():
    command = [sys.executable, "docs/trace_journeys.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| a search by picture |" in done.stdout


def test_rare_features_are_named_in_few_files_but_their_own():
    import feature_spread

    found = {name: feature_spread.named_in(name) for name in feature_spread.IN_FOLDERS}
    assert {name: files for name, files in found.items() if len(files) > 3} == {}
    for name in feature_spread.IN_FOLDERS:  # the words are those of the feature
        own, words = feature_spread.FEATURES[name]
        assert any(re.search(words, path.read_text("utf-8")) for path in (ROOT / own[0]).glob("*.py")), name
