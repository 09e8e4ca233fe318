"""Draw docs/architecture.svg from the code: the packages of plsc, and which imports which.

    python docs/draw_architecture.py

A box is a package or a top-level module; an arrow points at what it imports. Arrows that follow from others are left
out (a imports b, b imports c: no arrow from a to c). The result depends on names and imports alone, so a test can
compare the committed picture with the code.
"""

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"plsc": ROOT / "plsc"} | {f"plsc.{name}": ROOT / name for name in ("models", "data", "tools")}
SUBJECTS = {
    "tools": "one file per command",
    "quickstart": "all of it once, on drawn data",
    "bench": "our code beside its peers",
    "doctor": "machine and kernels, examined",
    "plan": "memory and time, predicted",
    "train": "loop, steps, checkpoints",
    "config": "every key of a recipe",
    "serve": "HTTP service and page",
    "gallery": "durable stores of persons",
    "hub": "model cards, pushes",
    "api": "functions of the package",
    "index": "exact, approximate search",
    "evaluation": "verification, identification",
    "embedding": "embedders, sets, export",
    "data": "datasets, readers, transforms",
    "models": "backbones and their weights",
    "optim": "SGD, AdamW, clipping",
    "head": "the sharded class head",
    "losses": "margins",
    "parallel": "ranks and collectives",
    "native": "C++ kernels for CPUs",
    "loggers": "trackers of runs",
    "extensions": "names of other packages",
    "client": "HTTP client",
    "client_values": "its inputs and results",
    "persons": "what both call a person",
    "image_files": "limits of pictures",
    "signing": "signed manifests",
    "text_files": "limits of lines",
    "strict_toml": "typed TOML",
    "toml_keys": "types, limits, choices",
    "arcface_torch": "its names, and ours",
    "files": "atomic writes, manifests",
    "progress": "lines of progress",
    "sizes": "amounts of memory as text",
    "errors": "one line each",
}
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 190, 46, 18, 54
EVERYWHERE = {"errors", "progress", "files", "sizes"}  # imported by nearly all; their arrows would hide the others


def module_paths() -> dict[str, Path]:
    """Every module of the project by its full name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if package == "plsc" and relative.parts[0] in ("models", "data", "tools"):
                continue  # symlinks to the folders at the top
            found[".".join([package, *relative.with_suffix("").parts]).removesuffix(".__init__")] = path
    return found


SEAM = "feature_config.py"  # whose types are of what it is a seam for; it imports them for type checkers alone


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name == SEAM:
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "plsc"}
    return names


def package_imports() -> dict[str, set[str]]:
    """The packages and top-level modules that each imports. The face, ``plsc/__init__.py``, is left out."""
    paths = module_paths()
    names = {name.split(".")[1] for name in paths if "." in name}
    arrows: dict[str, set[str]] = {name: set() for name in names}
    for module, path in paths.items():
        if "." not in module:
            continue
        targets = {name.split(".")[1] for name in imported_modules(path) if name.startswith("plsc.")}
        arrows[module.split(".")[1]] |= (targets & names) - {module.split(".")[1]}
    return arrows


def without_shortcuts(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The transitive reduction: no arrow to what another arrow already leads to."""
    reach: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set(arrows[name]).union(*(reached(target) for target in arrows[name]))
        return reach[name]

    return {
        name: {t for t in targets if not any(t in reached(other) for other in targets if other != t)}
        for name, targets in arrows.items()
    }


def floors(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Packages by floor, the lowest first: each stands one above the highest that it imports."""
    height: dict[str, int] = {}

    def height_of(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((height_of(target) for target in arrows[name]), default=-1)
        return height[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(height_of(name) for name in arrows))]
    for name in sorted(arrows):
        rows[height[name]].append(name)
    return rows


def place_boxes(rows: list[list[str]], arrows: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Each box's upper left corner; a floor is ordered by the middle of what its packages import, and centred."""
    widest = max(len(row) for row in rows)
    corner: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        below = {n: [corner[t][0] for t in arrows[n] if t in corner] for n in row}
        row.sort(key=lambda n: (sum(below[n]) / len(below[n]) if below[n] else 0, n))
        left = (widest - len(row)) * (BOX_WIDTH + GAP_X) / 2
        for index, name in enumerate(row):
            y = (len(rows) - 1 - level) * (BOX_HEIGHT + GAP_Y)
            corner[name] = (left + index * (BOX_WIDTH + GAP_X), y)
    return corner


def draw() -> str:
    """The picture as SVG text."""
    arrows = {n: t - EVERYWHERE for n, t in package_imports().items() if n not in EVERYWHERE}
    arrows = without_shortcuts(arrows)
    rows = floors(arrows)
    corner = place_boxes(rows, arrows)
    width = max(x for x, _ in corner.values()) + BOX_WIDTH
    height = len(rows) * (BOX_HEIGHT + GAP_Y)
    parts = [_arrow(corner[name], corner[target]) for name in sorted(arrows) for target in sorted(arrows[name])]
    parts += [_box(*corner[name], BOX_WIDTH, name) for name in sorted(corner)]
    ground = sorted(EVERYWHERE)
    share = (width - (len(ground) - 1) * GAP_X) / len(ground)
    parts += [_box(i * (share + GAP_X), height, share, name) for i, name in enumerate(ground)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 {width + 24:.0f} {height + BOX_HEIGHT + 24:.0f}" '
        'font-family="system-ui, sans-serif">\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#64748b"/></marker></defs>\n'
        '<rect x="-12" y="-12" width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _box(x: float, y: float, width: float, name: str) -> str:
    middle = x + width / 2
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="6" fill="#eef2ff" '
        f'stroke="#6366f1"/><text x="{middle:.0f}" y="{y + 19:.0f}" text-anchor="middle" font-size="15" '
        f'font-weight="600" fill="#1e1b4b">{escape(name)}</text><text x="{middle:.0f}" y="{y + 36:.0f}" '
        f'text-anchor="middle" font-size="11" fill="#475569">{escape(SUBJECTS.get(name, ""))}</text>'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1 = start[0] + BOX_WIDTH / 2, start[1] + BOX_HEIGHT
    x2, y2 = end[0] + BOX_WIDTH / 2, end[1]
    bend = (y2 - y1) / 2
    return (
        f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2 - 2:.0f}" '
        'fill="none" stroke="#94a3b8" stroke-width="1.4" marker-end="url(#head)"/>'
    )


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.svg").write_text(draw(), encoding="utf-8")
