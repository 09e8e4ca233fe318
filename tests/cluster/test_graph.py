"""Clusters of unknown number: parts of the graph with links, HDBSCAN*, and figures of agreement."""

import re

import numpy as np
import pytest

from plsc.cluster.agreement import agreement
from plsc.cluster.assignment import Points
from plsc.cluster.graph import neighbour_graph
from plsc.embedding.set_writer import write_embedding_set
from plsc.tools.entry import main

ROWS, DIM, GROUPS = 240, 12, 8
NAMES = [f"picture {row}.png" for row in range(ROWS)]


def drawn():
    random = np.random.default_rng(3)
    centres = random.standard_normal((GROUPS, DIM))
    labels = np.arange(ROWS) % GROUPS
    return (centres[labels] + 0.2 * random.standard_normal((ROWS, DIM))).astype(np.float32), labels


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    rows, labels = drawn()
    folder = tmp_path_factory.mktemp("sets") / "set.emb"
    names = [str(group) for group in range(GROUPS)]
    write_embedding_set(folder, rows, contract_id="c", labels=labels, class_names=names, keys=NAMES)
    return folder


def clustered(embeddings, out, *more):
    assert main(["cluster", str(embeddings), "--out", str(out), *more]) == 0
    return np.load(out / "labels.npy")


def parts_by_search(near):
    """Connected parts of a dense matrix (n, n) of edges, by depth-first search."""
    labels = np.full(len(near), -1)
    for first in range(len(near)):
        stack, label = [first], labels.max() + 1
        while labels[first] < 0 or stack:
            at = stack.pop()
            if labels[at] < 0:
                labels[at] = label
                stack += np.flatnonzero(near[at]).tolist()
    return labels


def same(first, second):
    return bool(((first[:, None] == first) == (second[:, None] == second)).all())


def test_the_parts_are_those_of_a_search_through_all_pairs(tmp_path, embeddings):
    rows = drawn()[0].astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows @ rows.T
    options = ["--method", "connected", "--threshold", "0.93", "--neighbours", str(ROWS - 1), "--min-size", "1"]
    labels = clustered(embeddings, tmp_path / "all", *options)
    assert same(labels, parts_by_search(cosines >= 0.93))
    small = clustered(embeddings, tmp_path / "small", *options[:-1], "3")
    sizes = np.bincount(labels)[labels]
    assert ((small < 0) == (sizes < 3)).all()
    assert same(small[small >= 0], labels[small >= 0])
    assert np.load(tmp_path / "small" / "centres.npy").shape == (small.max() + 1, DIM)


def test_a_graph_has_each_pair_once_and_no_point_with_itself():
    rows = np.concatenate([drawn()[0], drawn()[0][:5]])  # copies, which may be found in place of the point itself
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    graph = neighbour_graph(Points.of(rows), 4)
    assert (graph.pairs[:, 0] < graph.pairs[:, 1]).all()
    assert len(np.unique(graph.pairs, axis=0)) == len(graph.pairs)
    expected = (rows[graph.pairs[:, 0]] * rows[graph.pairs[:, 1]]).sum(axis=1)
    np.testing.assert_allclose(graph.cosines, expected, atol=1e-6)


def links_file(folder, labels):
    """Rows 0 and 1, of two groups, must be together; rows 0 and 8, of one group, cannot."""
    path = folder / "links.tsv"
    path.write_text(f"{NAMES[0]}\t{NAMES[1]}\tmust\n\n{NAMES[0]}\t{NAMES[8]}\tcannot\n")
    assert labels[0] == labels[8] != labels[1]
    return str(path)


def test_links_join_and_part(tmp_path, embeddings):
    options = ["--method", "connected", "--threshold", "0.8", "--min-size", "1"]
    before = clustered(embeddings, tmp_path / "before", *options)
    after = clustered(embeddings, tmp_path / "after", *options, "--links", links_file(tmp_path, before))
    assert after[0] == after[1]
    assert after[0] != after[8]
    others = ~np.isin(before, before[[0, 1]])
    assert same(after[others], before[others])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("picture 0.png\tpicture 1.png\n", "line 1 is 'picture 0.png"),
        ("picture 0.png\tnobody\tmust\n", "line 1: .* has no embedding of 'nobody'"),
        (
            "".join(
                f"{NAMES[a]}\t{NAMES[b]}\t{kind}\n" for a, b, kind in ((0, 1, "must"), (1, 2, "must"), (0, 2, "cannot"))
            ),
            "'picture 0.png' and 'picture 2.png' must be together",
        ),
    ],
)
def test_wrong_links_are_one_line(tmp_path, embeddings, text, message, capsys):
    (tmp_path / "links.tsv").write_text(text)
    arguments = ["--method", "connected", "--threshold", "0.8", "--links", str(tmp_path / "links.tsv")]
    assert main(["cluster", str(embeddings), "--out", str(tmp_path / "out"), *arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_hdbscan_finds_the_groups_and_keeps_the_links(tmp_path, embeddings):
    pytest.importorskip("sklearn", reason="pip install plsc-torch[cluster]")
    options = ["--method", "hdbscan", "--min-size", "5", "--neighbours", "20"]
    labels = clustered(embeddings, tmp_path / "out", *options)
    truth = drawn()[1]
    assert agreement(labels, truth)["bcubed_f"] > 0.9
    after = clustered(embeddings, tmp_path / "after", *options, "--links", links_file(tmp_path, truth))
    assert after[0] == after[1] >= 0
    assert after[8] != after[0]


def test_agreement_is_that_of_the_definitions():
    clusters = np.array([0, 0, 0, 1, 1, -1, -1, 2])
    classes = np.array([0, 0, 1, 1, 1, 1, 2, -1])  # the last does not count
    found = clusters[:7].copy()
    found[5:] = [8, 9]  # no cluster: each one of its own
    same_cluster, same_class = found[:, None] == found, classes[:7, None] == classes[:7]
    both = (same_cluster & same_class).sum(axis=1)
    precision, recall = (both / same_cluster.sum(axis=1)).mean(), (both / same_class.sum(axis=1)).mean()
    result = agreement(clusters, classes)
    assert result["bcubed_precision"] == pytest.approx(precision)
    assert result["bcubed_recall"] == pytest.approx(recall)
    assert result["purity"] == pytest.approx(6 / 7)
    joint = np.array([[((found == a) & (classes[:7] == b)).mean() for b in range(3)] for a in np.unique(found)])
    rows, columns = joint.sum(axis=1), joint.sum(axis=0)
    inside = joint > 0
    mutual = (joint * np.log(np.where(inside, joint, 1) / np.outer(rows, columns)))[inside].sum()
    entropy = -(rows * np.log(rows)).sum() / 2 - (columns * np.log(columns)).sum() / 2
    assert result["nmi"] == pytest.approx(mutual / entropy)
    assert agreement(clusters, np.full(8, -1)) is None
    assert agreement(classes, classes)["bcubed_f"] == 1.0
