"""The ratchet: counts of traced steps beside the committed ones, and a line for each that differs."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_trace.tracer import Collective

COUNTS = Path(__file__).with_name("counts.json")
UPDATE = "python tests/gpu_trace --update"

# Measures, and by how much of the committed total a count may differ. PyTorch's own operations change with its
# version: with another one than the file's, only what the project decides is compared.
TOLERANCE = {
    "host waits": 0.0,
    "asynchronous copies, bytes": 0.0,
    "collectives": 0.0,
    "collectives, bytes": 0.0,
    "launches": 0.0,
    "Triton launches": 0.0,
    "bytes per class": 0.005,
    "peak memory, MiB": 0.002,
}
# Places of the class head, whose bytes are counted by class; smaller shares of a total go together.
TABLE = ("plsc/head/", "plsc/features/", "plsc/losses/", "plsc/optim/head_optimizers.py")
SMALLEST_SHARE = 0.001
SMALLER = "all smaller ones"
MUST_STAY = "waits that must stay"  # in counts.json: where, and why; one that is gone is a failure
OWN = ("host waits", "collectives", "collectives, bytes", "Triton launches")


@dataclass(frozen=True)
class Change:
    """A count that is not the committed one; ``worse`` where it is higher."""

    text: str
    worse: bool

    def __str__(self) -> str:
        return self.text


def committed() -> dict[str, Any]:
    """The content of counts.json."""
    content: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return content


def write(scenarios: Mapping[str, Any]) -> None:
    """Write counts.json anew; the waits that must stay are written by hand."""
    content = {"torch": torch_version(), MUST_STAY: committed()[MUST_STAY], "scenarios": scenarios}
    COUNTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def summary(traced: Mapping[str, Any], rows: int) -> dict[str, dict[str, float]]:
    """The counts of one rank as they are committed: by measure, then by place, kernel or kind.

    Args:
        traced: a :class:`gpu_trace.tracer.Counts` as a dictionary.
        rows: classes of the rank's shard, which bytes are divided by.
    """
    kinds = Counter[str]()
    sizes = Counter[str]()
    for collective in (Collective(*fields) for fields in traced["collectives"]):
        kinds[str(collective)] += 1
        sizes[str(collective)] += collective.size
    moved = {place: size / rows for place, size in head_traffic(traced).items()}
    least = SMALLEST_SHARE * sum(moved.values())
    moved[SMALLER] = sum(size for size in moved.values() if size < least)
    return {
        "host waits": traced["waits"],
        "asynchronous copies, bytes": traced["copies"],
        "collectives": dict(kinds),
        "collectives, bytes": dict(sizes),
        "launches": _by_part(traced["launches"]),
        "Triton launches": traced["triton"],
        "bytes per class": {
            place: round(size, 2) for place, size in sorted(moved.items()) if size >= least or place == SMALLER
        },
        "peak memory, MiB": {"device": round(traced["peak"] / 2**20)},
    }


def head_traffic(traced: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of device memory that a traced rank's head reads and writes, by place and operation."""
    return {place: size for place, size in traced["moved"].items() if place.startswith(TABLE)}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs between committed counts and those of now, scenario by scenario."""
    changes: list[Change] = []
    same_torch = old["torch"] == torch_version()
    for name in sorted({*old["scenarios"], *new}):
        if name not in new or name not in old["scenarios"]:
            where = "traced" if name in new else "in counts.json"
            changes.append(Change(f"{name}: only {where}", worse=False))
            continue
        for measure in TOLERANCE:
            if same_torch or measure in OWN:
                before, after = old["scenarios"][name][measure], new[name][measure]
                changes += _difference(f"{name}: {measure}", before, after, TOLERANCE[measure])
        if name in new and name in old["scenarios"]:
            changes += _missing_waits(name, old["scenarios"][name], new[name], old.get(MUST_STAY, {}))
    return changes


def _missing_waits(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], reasons: Mapping[str, str]
) -> list[Change]:
    """A line for each wait that a result rests on and that became rarer; for those of transfer threads too."""
    measures = "host waits", "asynchronous copies, bytes"
    return [
        Change(f"{name}: a wait that must stay {number} -> {after[measure].get(place, 0)}: {place}: {why}", worse=True)
        for place, why in reasons.items()
        for measure in measures
        if (number := before[measure].get(place, 0)) > after[measure].get(place, 0)
    ]


def _difference(label: str, before: Mapping[str, float], after: Mapping[str, float], tolerance: float) -> list[Change]:
    total, now = sum(before.values()), sum(after.values())
    items = [
        f"{key} {_number(before.get(key, 0))} -> {_number(after.get(key, 0))}"
        for key in sorted({*before, *after})
        if abs(before.get(key, 0) - after.get(key, 0)) > tolerance * max(before.get(key, 0), after.get(key, 0))
    ]
    if not items or (tolerance and abs(now - total) <= tolerance * total):
        return []
    verdict = f"{_number(total)} -> {_number(now)}" if now != total else f"{_number(total)} as before, elsewhere"
    return [Change(f"{label} {verdict}: {'; '.join(items)}", worse=now > total)]


def _number(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def _part(place: str) -> str:
    """The package that a place lies in."""
    parts = place.split(":")[0].split("/")
    return parts[1] if parts[0] == "plsc" and len(parts) > 2 else parts[0]


def _by_part(places: Mapping[str, int]) -> dict[str, int]:
    parts = Counter[str]()
    for place, count in places.items():
        parts[_part(place)] += count
    return dict(sorted(parts.items()))


def torch_version() -> str:
    """The version of torch that counts depend on."""
    return ".".join(torch.__version__.split(".")[:2])
