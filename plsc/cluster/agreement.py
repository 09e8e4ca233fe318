"""How clusters agree with known classes: purity, B-cubed and normalised mutual information."""

import numpy as np

from plsc.embedding.columns import Float64, Int64


def agreement(clusters: Int64, classes: Int64) -> dict[str, float] | None:
    """Compare ``clusters`` (n,) with ``classes`` (n,), both -1 for none.

    Points without a class do not count; one without a cluster is a cluster of its own.

    Returns:
        "purity"; "bcubed_precision", "bcubed_recall" and "bcubed_f" (Bagga & Baldwin, 1998); "nmi", by the arithmetic
        mean of the entropies; "points". None where no class is known.
    """
    known = classes >= 0
    if not known.any():
        return None
    found, truth = clusters[known].copy(), classes[known]
    alone = np.flatnonzero(found < 0)
    found[alone] = found.max(initial=0) + 1 + np.arange(len(alone))
    found, truth = (np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64) for labels in (found, truth))
    sizes, totals = np.bincount(found).astype(np.float64), np.bincount(truth).astype(np.float64)
    cells, counts = np.unique(found * len(totals) + truth, return_counts=True)
    of, to = cells // len(totals), cells % len(totals)
    shared, points = counts.astype(np.float64), len(truth)
    largest = np.zeros(len(sizes))
    np.maximum.at(largest, of, shared)
    precision, recall = (float((shared**2 / size).sum() / points) for size in (sizes[of], totals[to]))
    mutual = float((shared / points * np.log(shared * points / (sizes[of] * totals[to]))).sum())
    entropies = (_entropy(sizes / points) + _entropy(totals / points)) / 2
    return {
        "purity": float(largest.sum() / points),
        "bcubed_precision": precision,
        "bcubed_recall": recall,
        "bcubed_f": 2 * precision * recall / (precision + recall),
        "nmi": mutual / entropies if entropies > 0 else 1.0,
        "points": points,
    }


def _entropy(shares: Float64) -> float:
    return float(-(shares * np.log(shares)).sum())
