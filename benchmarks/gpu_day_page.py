"""The page of gpu-day: its summary, and pictures of what was measured, in one HTML file that needs nothing else."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 620, 380, 64, 46, 34
_BAR, _NAME_WIDTH = 22, 260  # pixels
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2rem auto; padding: 0 1rem; color: #1a202c }
pre { background: #f7fafc; padding: 1rem; overflow-x: auto; white-space: pre-wrap }
svg { max-width: 100%; margin: 0 1rem 1rem 0 } svg text { font: 12px system-ui, sans-serif; fill: #1a202c }
"""
Row = Mapping[str, Any]


def page(title: str, summary: str, shapes: Mapping[str, Any], compiled: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        title: of the device.
        summary: as Markdown.
        shapes: the report of ``gpu_first_hour.py shapes``; empty where it did not run.
        compiled: that of ``compile``.
    """
    rows = shapes.get("rows", [])
    parts = []
    if rows:
        parts.append("<h2>Passes against the device's own rates</h2><p>Lines: what the measured product rate and the")
        parts.append("measured copy rate allow. A pass counts its products, and the bytes of the table that it must")
        parts.append("read and write once. Filled: a kernel; hollow: PyTorch; the number is the batch.</p>")
        parts += [_roofline(precision, shapes) for precision in _each(rows, "precision")]
        parts.append("<h2>A step, nanoseconds per class</h2>")
        parts += [_steps(precision, rows) for precision in _each(rows, "precision")]
    if kernels := compiled.get("kernels", []):
        slowest = sorted(kernels, key=lambda each: -each["seconds"])[:20]
        bars = [(f"{each['kernel']}{' (cached)' if each['cached'] else ''}", each["seconds"], 0) for each in slowest]
        parts += ["<h2>Seconds that kernels took to compile, the slowest first</h2>", _bars(bars, "s")]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return "\n".join(
        [head, f"<h1>{escape(title)}</h1>", *parts, f"<h2>Summary</h2><pre>{escape(summary)}</pre></html>"]
    )


def _each(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


# The roofline --------------------------------------------------------------------------------------------------------


class _Axes:
    """Logarithmic axes over what is drawn: x in operations per byte, y in TFLOP/s."""

    def __init__(self, points: Sequence[tuple[float, float]], peak: float) -> None:
        xs, ys = ([point[axis] for point in points] for axis in (0, 1))
        self.x = (min(xs) / 4, max(xs) * 4)
        self.y = (min(*ys, peak) / 3, max(*ys, peak) * 2)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels."""
        across = math.log(x / self.x[0]) / math.log(self.x[1] / self.x[0])
        up = math.log(y / self.y[0]) / math.log(self.y[1] / self.y[0])
        return _LEFT + across * (_WIDTH - _LEFT - 12), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)

    def frame(self) -> Iterable[str]:
        """Grid lines at powers of ten, and at 2 and 5 times these, with their numbers."""
        for exponent in range(-6, 8):
            for value in (10.0**exponent, 2 * 10.0**exponent, 5 * 10.0**exponent):
                if self.x[0] <= value <= self.x[1]:
                    x, bottom = self.at(value, self.y[0])
                    yield f'<path d="M{x:.1f} {_TOP}V{bottom:.1f}" stroke="#e2e8f0"/>'
                    yield f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{value:g}</text>'
                if self.y[0] <= value <= self.y[1]:
                    left, y = self.at(self.x[0], value)
                    yield f'<path d="M{left:.1f} {y:.1f}H{_WIDTH - 12}" stroke="#e2e8f0"/>'
                    yield f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def _roofline(precision: str, shapes: Mapping[str, Any]) -> str:
    """The passes of one precision below the lines of the measured rates."""
    rows = [row for row in shapes["rows"] if row["precision"] == precision and row["part"] != "step"]
    peak = shapes["rates"].get(precision, shapes["rates"]["fp32"]) / 1e12
    copied = shapes["bandwidth"] / 1e12
    points = [(row["flops"] / row["bytes"], row["flops"] / row["milliseconds"] / 1e9) for row in rows]
    axes = _Axes(points, peak)
    ridge = min(max(peak / copied, axes.x[0]), axes.x[1])
    start = max(axes.x[0], axes.y[0] / copied)  # where the line of bandwidth enters the picture
    line = [axes.at(start, min(start * copied, peak)), axes.at(ridge, min(ridge * copied, peak))]
    line.append(axes.at(axes.x[1], min(axes.x[1] * copied, peak)))
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
    colours = dict(zip(_each(rows, "part"), _COLOURS, strict=False))
    drawn = [
        *axes.frame(),
        f'<polyline points="{corners}" fill="none" stroke="#1a202c" stroke-width="2"/>',
        *(_point(axes.at(*point), row, colours[row["part"]]) for row, point in zip(rows, points, strict=True)),
        *_legend(colours),
        f'<text x="{_LEFT}" y="18">{precision}: {peak:,.4g} TFLOP/s, {copied:,.3g} TB/s measured</text>',
        f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 8}" text-anchor="end">operations per byte (y: TFLOP/s)</text>',
    ]
    return _svg(_WIDTH, _HEIGHT, drawn)


def _point(at: tuple[float, float], row: Row, colour: str) -> str:
    fill = "white" if row["way"] == "torch" else colour
    title = f"{row['part']}, {row['way']}, B = {row['batch']}: {row['milliseconds']:.3g} ms"
    circle = f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="6" fill="{fill}" stroke="{colour}" stroke-width="2">'
    label = f'<text x="{at[0] + 9:.1f}" y="{at[1] + 4:.1f}">{row["batch"]}</text>'
    return f"{circle}<title>{escape(title)}</title></circle>{label}"


def _legend(colours: Mapping[str, str]) -> Iterable[str]:
    for number, (name, colour) in enumerate(colours.items()):
        y = _HEIGHT - _BOTTOM - 16 - 18 * number
        yield f'<circle cx="{_WIDTH - 150}" cy="{y - 4}" r="6" fill="{colour}"/>'
        yield f'<text x="{_WIDTH - 138}" y="{y}">{escape(name)}</text>'


# Bars ----------------------------------------------------------------------------------------------------------------


def _steps(precision: str, rows: Iterable[Row]) -> str:
    """A bar for each batch and way to make a step."""
    chosen = [row for row in rows if row["precision"] == precision and row["part"] == "step"]
    ways = _each(chosen, "way")
    bars = [
        (
            f"{precision}, B = {row['batch']}, {row['way']}",
            1e6 * row["milliseconds"] / row["classes"],
            ways.index(row["way"]),
        )
        for row in chosen
    ]
    return _bars(bars, "ns")


def _bars(bars: Sequence[tuple[str, float, int]], unit: str) -> str:
    """Bars of a name, a value and the number of a colour."""
    longest = max((value for _, value, _ in bars), default=1.0) or 1.0
    drawn = []
    for number, (name, value, colour) in enumerate(bars):
        y, length = 8 + _BAR * number, (_WIDTH - _NAME_WIDTH - 80) * value / longest
        drawn.append(f'<text x="{_NAME_WIDTH - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        drawn.append(f'<rect x="{_NAME_WIDTH}" y="{y}" width="{length:.1f}" height="16" fill="{_COLOURS[colour]}"/>')
        drawn.append(f'<text x="{_NAME_WIDTH + length + 6:.1f}" y="{y + 13}">{value:.3g} {unit}</text>')
    return _svg(_WIDTH, 16 + _BAR * len(bars), drawn)


def _svg(width: int, height: int, drawn: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(drawn)}</svg>'
