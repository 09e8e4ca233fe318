#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0: AccuracyCalculator turns integer labels into float32, so people with large ids become
# one person, and the accuracy of random embeddings rises to 1.
#
# Guess before running: labels are only compared, so adding the same number to every int64 label changes no metric, as
# it changes no loss of the package.
# Seen: 200 people, four near-random embeddings each. By numpy precision@1 is 0.071 and MAP@R 0.040, whatever is added.
# The calculator agrees for ids from 0 and from 16,000,000. From 20,000,000 on precision@1 is 0.085, from 100,000,000
# 0.122, from 1,000,000,000 0.339, from 10,000,000,000 1.000. MAP@R falls to 0.015 first, and is 1.000 at the end.
# SupConLoss of the same labels is the same number each time. There is no error and no warning.
# Why: embeddings and labels go through one conversion to float32, which has 24 bits. Neighbouring ids then round to
# one number: 2 of them at twenty million, 64 at a billion, 1,024 at ten billion. Counts of positives merge alike.
# Consequence: ids of a database or a crawl, used as labels, give a model an accuracy that it does not have. The larger
# the ids, the better it looks. Number the labels of queries and references together first, as is shown here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pytorch-metric-learning==2.9.0 torch==2.15.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import SupConLoss
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

torch.set_num_threads(1)
PEOPLE, IMAGES, SIZE = 200, 4, 16
METRICS = ("precision_at_1", "mean_average_precision_at_r")
rng = np.random.default_rng(0)
people = np.repeat(np.arange(PEOPLE), IMAGES)
centres = rng.normal(size=(PEOPLE, SIZE))
embeddings = (centres[people] + 1.5 * rng.normal(size=(len(people), SIZE))).astype(np.float32)
embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)


def by_numpy(labels):
    """Precision at 1 and MAP@R of each image against all others."""
    similarities = embeddings.astype(np.float64) @ embeddings.T.astype(np.float64)
    np.fill_diagonal(similarities, -np.inf)
    nearest = np.argsort(-similarities, axis=1)[:, : IMAGES - 1]
    hits = labels[nearest] == labels[:, None]
    precision = hits.cumsum(axis=1) / np.arange(1, IMAGES)
    return hits[:, 0].mean(), (precision * hits).sum(axis=1).mean() / (IMAGES - 1)


calculator = AccuracyCalculator(
    include=METRICS, k="max_bin_count", knn_func=CustomKNN(CosineSimilarity()), device=torch.device("cpu")
)


def by_package(labels):
    found = calculator.get_accuracy(torch.from_numpy(embeddings), torch.from_numpy(labels))
    return tuple(found[name] for name in METRICS)


wanted, losses, seen = by_numpy(people), set(), {}
print(f"numpy: precision@1 {wanted[0]:.3f}, MAP@R {wanted[1]:.3f}")
for first in (0, 16_000_000, 20_000_000, 100_000_000, 1_000_000_000, 10_000_000_000):
    labels = people + first
    assert labels.dtype == np.int64 and by_numpy(labels) == wanted
    losses.add(float(SupConLoss()(torch.from_numpy(embeddings), torch.from_numpy(labels))))
    seen[first] = by_package(labels)
    print(f"ids from {first:,}: precision@1 {seen[first][0]:.3f}, MAP@R {seen[first][1]:.3f}", end="; ")
    numbered = by_package(np.unique(labels, return_inverse=True)[1])
    print(f"numbered anew: {numbered[0]:.3f}, {numbered[1]:.3f}")
    assert np.allclose(numbered, wanted), "changed: small labels"
    assert np.allclose(seen[first], wanted) == (first < 2**24), f"changed: ids from {first}"
assert len(losses) == 1
precisions = [precision for precision, _ in seen.values()]
assert precisions == sorted(precisions) and precisions[-1] == 1, f"changed: {precisions}"
print("as described")
PY
