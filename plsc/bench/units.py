"""The exact class head by each unit of this processor, beside what that unit's fastest product allows.

Every turn runs in ranks of its own, whose environment limits all that computes to the unit: our kernels, and the
libraries under PyTorch. The floor of a unit is the roofline that :mod:`plsc.bench.head` measures under that limit.
"""

import os
from collections.abc import Mapping
from typing import Any

from plsc.bench.comparison import ROOFLINE, Comparison, is_ours, is_sampled, result_row
from plsc.bench.harness import Result, in_turn
from plsc.errors import UsageError
from plsc.native import build
from plsc.progress import Progress

# A unit is a value of PLSC_CPU. What limits PyTorch's own loops, MKL and oneDNN to it; ARM's libraries have no limits.
_LIMITS = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE_VNNI"),
    "avx512-bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
}
_LIMITING = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
_NONE: Result = {"reason": "this processor has none"}
# Bytes that an exact step must move of an element of the table: both passes read W, and the update writes it; it reads
# and writes the momentum.
_BYTES = {"plsc": 3 * 2 + 2 * 1, "plsc-no-momentum": 3 * 2, "plsc-fp32": 3 * 4 + 2 * 4}


def measured_units() -> dict[str, bool]:
    """The units for processors of this kind, the best first, and which of them this one has; ``PLSC_CPU`` alone if set.

    Raises:
        UsageError: no kernels are compiled here, or ``PLSC_CPU`` names what there is not.
    """
    if (reason := build.why_no_library()) is not None:
        raise UsageError(f"--units measures the compiled kernels, and there are none: {reason}")
    forced, available = os.environ.get("PLSC_CPU"), build.available_paths()
    return {unit: unit in available for unit in reversed(build.paths_of_this_kind()) if forced in (None, "", unit)}


def variables_of(unit: str) -> dict[str, str]:
    """The environment of ranks that compute by ``unit`` and what is less."""
    return {"PLSC_CPU": unit, **dict(zip(_LIMITING, _LIMITS.get(unit, ()), strict=False))}


def compare_units(comparison: Comparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure the exact heads of ``comparison`` and their floor by every unit, all in turn, ``rounds`` times over.

    Returns:
        ``rows``, one per size, unit and head (see :func:`_unit_row`), and no ``ratios``.

    Raises:
        UsageError: a contestant is no exact head of ours; or see :func:`measured_units`.
    """
    heads = [name for name in comparison.names if name != ROOFLINE]
    for name in heads:
        if not is_ours(name) or is_sampled(name):
            raise UsageError(f"--units measures exact heads of ours, and --contestants {name} is none")
    units = measured_units()
    there = [unit for unit, is_there in units.items() if is_there]
    turns = {f"{unit} {name}": (unit, name) for unit in there for name in (ROOFLINE, *heads)}
    all_classes = sorted(set(comparison.classes))
    sizes = [(batch, classes) for batch in sorted(set(comparison.batches)) for classes in all_classes]
    progress = Progress("measuring", len(sizes) * comparison.rounds * len(turns), "starts", interval=2.0, quiet=quiet)
    rows = []
    for batch, classes in sizes:

        def turn(key: str, batch: int = batch, classes: int = classes) -> Result:
            unit, name = turns[key]
            return comparison.turn(name, classes, batch, variables_of(unit))

        rounds = in_turn(turns, comparison.rounds, turn, progress)
        for unit in units:
            floors = rounds.get(f"{unit} {ROOFLINE}", [_NONE])
            floor = result_row(comparison, ROOFLINE, classes, batch, floors)
            for name in heads:
                results = rounds.get(f"{unit} {name}", [_NONE])
                rows.append(_unit_row(unit, result_row(comparison, name, classes, batch, results), floor))
    progress.finish()
    return {"rows": rows, "ratios": []}


def _unit_row(unit: str, head: Mapping[str, Any], floor: Mapping[str, Any]) -> dict[str, Any]:
    """A head's row with its floors, processor seconds per step and rank; None where either failed.

    ``products_s`` is the time of the step's products, ``bytes_s`` that of a copy of the bytes that it must move.
    ``floor_share`` is the first over the head's time, ``both_share`` their sum.
    """
    row = {**head, "unit": unit, "products_s": floor["cpu_s"], "bytes_s": None, "both_share": None}
    row |= {key: floor[key] for key in ("product_gflops", "copy_gb_s")}
    row["product_dtype"] = None if floor["failed"] else floor["note"]
    if floor["failed"] and not row["failed"]:
        row |= {"failed": True, "note": f"the floor failed: {floor['note']}"}
    if not row["failed"]:
        elements = head["classes"] * head["dim"] / head["nproc"]
        row["bytes_s"] = elements * _BYTES[head["contestant"]] / floor["copy_gb_s"] / 1e9
        row["floor_share"] = row["products_s"] / row["cpu_s"]
        row["both_share"] = (row["products_s"] + row["bytes_s"]) / row["cpu_s"]
    return row
