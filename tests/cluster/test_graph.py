"""Clusters of unknown number: parts of the graph with links, HDBSCAN*, and figures of agreement."""

import re

import numpy as np
import pytest

from plsc.cluster.agreement import agreement
from plsc.cluster.assignment import Points
from plsc.cluster.graph import Links, hdbscan, neighbour_graph
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


def test_links_that_changed_are_no_answer_of_the_links_before(tmp_path, embeddings, capsys):
    (tmp_path / "links.tsv").write_text(f"{NAMES[0]}\t{NAMES[1]}\tmust\n")
    options = ["--method", "connected", "--threshold", "0.8", "--links", str(tmp_path / "links.tsv")]
    first = clustered(embeddings, tmp_path / "out", *options)
    assert first[0] == first[1] != first[2]
    (tmp_path / "links.tsv").write_text(f"{NAMES[0]}\t{NAMES[2]}\tmust\n")
    assert main(["cluster", str(embeddings), "--out", str(tmp_path / "out"), *options]) == 2
    assert "was begun with content of links" in capsys.readouterr().err
    again = clustered(embeddings, tmp_path / "out", *options, "--overwrite")
    assert again[0] == again[2] != again[1]


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


NO_LINKS = Links(np.empty((0, 2), np.int64), np.empty((0, 2), np.int64))


# Cases whose dense clustering is the same in any order of the points: ties, such as equal densities, are split freely.
@pytest.mark.parametrize(
    ("seed", "points", "least"), [(18, 24, 2), (18, 24, 4), (19, 48, 3), (37, 48, 4), (23, 70, 6), (29, 70, 4)]
)
def test_hdbscan_is_that_of_the_dense_distances(seed, points, least):
    sklearn = pytest.importorskip("sklearn.cluster", reason="pip install plsc-torch[cluster]")
    random = np.random.default_rng(seed)
    rows = random.standard_normal((4, 6))[random.integers(0, 4, points)] + 0.3 * random.standard_normal((points, 6))
    rows = np.concatenate([rows, rows[:3]])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    model = sklearn.HDBSCAN(min_cluster_size=least, min_samples=least, metric="precomputed", copy=True)
    expected = model.fit(distances).labels_
    labels = hdbscan(neighbour_graph(Points.of(rows.astype(np.float32)), 24), least, NO_LINKS)
    assert same(labels, expected)
    assert ((labels < 0) == (expected < 0)).all()
    assert expected.max() > 0


def test_hdbscan_keeps_groups_of_the_smallest_size_whole(tmp_path):
    pytest.importorskip("sklearn", reason="pip install plsc-torch[cluster]")
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 40)
    rows = np.eye(6, 16)[labels] + 0.02 * random.standard_normal((240, 16))
    write_embedding_set(tmp_path / "set.emb", rows.astype(np.float32), contract_id="c")
    # More than the 32 neighbours of the default, and more than --neighbours says.
    for more in ([], ["--neighbours", "5"]):
        out = tmp_path / f"out {len(more)}"
        found = clustered(tmp_path / "set.emb", out, "--method", "hdbscan", "--min-size", "40", *more)
        assert same(found, labels)
        assert (found >= 0).all()


@pytest.mark.parametrize("rows", [1, 4])
def test_fewer_pictures_than_the_smallest_cluster_are_one_line(tmp_path, rows, capsys):
    pytest.importorskip("sklearn", reason="pip install plsc-torch[cluster]")
    write_embedding_set(tmp_path / "set.emb", np.eye(rows, 8, dtype=np.float32), contract_id="c")
    arguments = ["cluster", str(tmp_path / "set.emb"), "--out", str(tmp_path / "out"), "--method", "hdbscan"]
    assert main([*arguments, "--min-size", "5"]) == 1
    assert "no cluster has 5 points; lower --min-size, or give" in capsys.readouterr().err


def test_a_must_link_is_a_distance_of_0_to_hdbscan():
    sklearn = pytest.importorskip("sklearn.cluster", reason="pip install plsc-torch[cluster]")
    random = np.random.default_rng(3)
    rows = random.standard_normal((3, 6))[random.integers(0, 3, 24)] + 0.3 * random.standard_normal((24, 6))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    distances[[0, 1], [1, 0]] = 1e-6
    model = sklearn.HDBSCAN(min_cluster_size=2, min_samples=2, metric="precomputed", copy=True)
    expected = model.fit(distances).labels_
    links = Links(np.array([[0, 1], [5, 5]]), NO_LINKS.cannot)  # a row with itself says nothing
    labels = hdbscan(neighbour_graph(Points.of(rows.astype(np.float32)), 20), 2, links)
    assert expected[0] == expected[1] >= 0
    assert same(labels, expected)


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
