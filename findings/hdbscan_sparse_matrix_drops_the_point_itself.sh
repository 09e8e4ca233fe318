#!/usr/bin/env bash
# scikit-learn 1.9.1 with scipy 1.17.1: HDBSCAN(metric="precomputed") groups the same distances differently when they
# come as a sparse matrix.
#
# Guess before running: equal labels, since the sparse matrix holds every pair of distinct points, and a missing
# entry of the diagonal can only mean distance 0.
# Seen: twelve separated groups of five points, min_cluster_size 5. Dense distances, brute force and a k-d tree
# each find the twelve groups in 20 of 20 draws and call no point noise. csr_matrix(distances), which leaves the zeros of the diagonal out,
# finds them in 0 of 20. The same sparse matrix with the diagonal's zeros stored finds them in 20 of 20.
# Why: the core distance is the min_samples-th smallest stored entry of a row. Dense rows hold the point itself at
# distance 0, as Campello et al. (2013) and the documentation count it. The sparse row does not, so each core
# distance is that of one neighbour more.
# Consequence: a neighbour graph (faiss, pynndescent, kneighbors_graph without the point itself) given to HDBSCAN
# tears every group that has exactly min_cluster_size members. Store explicit zeros on the diagonal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet scikit-learn==1.9.1 scipy==1.17.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import scipy.sparse
from sklearn.cluster import HDBSCAN
from sklearn.metrics import pairwise_distances

DRAWS, GROUPS, MEMBERS = 20, 12, 5


def found(labels):
    """Whether the labels are the drawn groups, each whole and apart from the others."""
    groups = labels.reshape(GROUPS, MEMBERS)
    whole = (groups == groups[:, :1]).all() and (groups >= 0).all()
    return bool(whole and len(set(groups[:, 0])) == GROUPS)


counts = dict.fromkeys(["dense", "sparse", "sparse with zeros", "brute", "kd_tree"], 0)
for seed in range(DRAWS):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(GROUPS, 8))
    points = np.concatenate([rng.normal(centre, 0.1, (MEMBERS, 8)) for centre in centres])
    distances = pairwise_distances(points)
    rows, columns = np.indices(distances.shape)
    stored = (distances.ravel(), (rows.ravel(), columns.ravel()))
    given = {
        "dense": distances,
        "sparse": scipy.sparse.csr_matrix(distances),
        "sparse with zeros": scipy.sparse.csr_matrix(stored, shape=distances.shape),
    }
    for name, matrix in given.items():
        model = HDBSCAN(min_cluster_size=MEMBERS, metric="precomputed", copy=True)
        counts[name] += found(model.fit_predict(matrix))
    for algorithm in ("brute", "kd_tree"):
        model = HDBSCAN(min_cluster_size=MEMBERS, algorithm=algorithm, copy=True)
        counts[algorithm] += found(model.fit_predict(points))
print(f"the {GROUPS} drawn groups found, of {DRAWS} draws:", counts)
expected = {"dense": 20, "sparse": 0, "sparse with zeros": 20, "brute": 20, "kd_tree": 20}
assert counts == expected, f"changed: {counts}, was {expected}"
PY
