"""Error rates by group of people: by age, sex, origin, or whatever a list says of them.

All groups are judged at one threshold, which holds a false-match rate over the whole set, as one service has one
threshold. A group's pairs are those within it (Grother et al., NIST IR 8280, 2019, section 4).
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.embedding.columns import Float32, Int64
from plsc.errors import DataError
from plsc.evaluation.roc import (
    FARS,
    MINIMUM_IMPOSTORS,
    Roc,
    all_pairs_roc,
    allowed_impostors,
    sample_identities,
    threshold_that_holds,
)
from plsc.progress import printable
from plsc.text_files import text_lines


def read_groups(path: Path) -> dict[str, str]:
    """Read which group each identity is of: a line ``identity,group`` each, CSV, after a line with these two words.

    Raises:
        DataError: a line is none, an identity stands in two groups, or there is no line.
    """
    groups: dict[str, str] = {}
    for number, line in text_lines(path):
        cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        if number == 1:
            if cells != ["identity", "group"]:
                raise DataError(f"{path} begins with {printable(line)!r}, not with the line identity,group")
            continue
        if not cells:
            continue
        if len(cells) != 2 or not all(cells):
            raise DataError(f"{path} line {number} is {printable(line)!r}, not identity,group")
        if groups.setdefault(*cells) != cells[1]:
            raise DataError(f"{path} line {number}: {printable(cells[0])} stands in another group already")
    if not groups:
        raise DataError(f"{path} names no identity")
    return groups


def group_rates(
    unit: Float32, labels: Int64, class_names: Sequence[str], groups: Mapping[str, str], roc: Roc, seed: int
) -> dict[str, Any]:
    """Compute each group's error rates at the threshold of the whole set.

    That threshold holds the lowest rate of :data:`plsc.evaluation.roc.FARS` for which every group has different pairs
    enough, or else the set has; and which a score holds, where different pairs tie at the highest.

    Args:
        unit: embeddings (N, D) of length 1.
        labels: (N,), of which ``class_names`` has the names.
        class_names: as ``groups`` has them.
        groups: the group of each identity; others are left out.
        roc: of all pairs of the set.
        seed: samples identities of a group that forms more than 10^8 pairs.

    Returns:
        ``far``, ``threshold`` (a cosine), ``identities_left_out``, and ``groups``: by name "identities", "images",
        "genuine_pairs", "impostor_pairs", "false_matches", "fmr" and "fnmr". A rate is None where ten pairs that err
        would be more than its pairs can tell: "fmr" below 10 / far different pairs, "fnmr" without a same pair.

    Raises:
        DataError: no identity is in a group, or the set has too few different pairs for any rate.
    """
    of_class = np.array([groups.get(name, "") for name in class_names], dtype=object)
    present = np.unique(labels)
    names = sorted({name for name in of_class[present] if name})
    if not names:
        raise DataError(
            f"none of the {len(present):,} identities has a group; {printable(class_names[present[0]])} is one"
        )
    members = {name: np.flatnonzero(of_class[labels] == name) for name in names}
    members = {name: rows[sample_identities(labels[rows], seed)] for name, rows in members.items()}
    rocs = {name: all_pairs_roc(unit[rows], labels[rows]) for name, rows in members.items()}
    far, threshold = _operating_point(roc, min(each.impostor_pairs for each in rocs.values()))
    return {
        "far": far,
        "threshold": threshold,
        "identities_left_out": int(np.sum(of_class[present] == "")),
        "groups": {
            name: {
                "identities": len(np.unique(labels[rows])),
                "images": len(rows),
                "genuine_pairs": rocs[name].genuine_pairs,
                "impostor_pairs": rocs[name].impostor_pairs,
                **_rates(rocs[name], far, threshold),
            }
            for name, rows in members.items()
        },
    }


def _operating_point(roc: Roc, smallest: int) -> tuple[float, float]:
    """A false-match rate and the lowest cosine that holds it over the set; ``smallest``: a group's different pairs."""
    held = [far for far in FARS.values() if allowed_impostors(roc, far) >= MINIMUM_IMPOSTORS]
    if not held:
        raise DataError(
            f"rates by group need 100 different pairs, and the set has {roc.impostor_pairs:,}; give more people"
        )
    told = [far for far in held if far * smallest * (1 + 1e-12) >= MINIMUM_IMPOSTORS] or held[:1]
    reached = [far for far in held if threshold_that_holds(roc, allowed_impostors(roc, far))[1]]
    far = min(set(told) & set(reached) or reached[:1] or held[:1])
    return far, threshold_that_holds(roc, allowed_impostors(roc, far))[0]


def _rates(roc: Roc, far: float, threshold: float) -> dict[str, Any]:
    points = int(np.searchsorted(-roc.thresholds, -threshold, side="right"))
    genuine, impostors = (int(each[points - 1]) if points else 0 for each in (roc.genuine, roc.impostors))
    is_told = allowed_impostors(roc, far) >= MINIMUM_IMPOSTORS
    return {
        "false_matches": impostors,
        "fmr": impostors / roc.impostor_pairs if is_told else None,
        "fnmr": 1 - genuine / roc.genuine_pairs if roc.genuine_pairs else None,
    }
