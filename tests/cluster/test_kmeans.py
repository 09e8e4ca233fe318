"""Spherical k-means against float64 on small sets: assignments, empty clusters, kills, ranks, sizes."""

import itertools
import json
import os
import signal

import numpy as np
import pytest

from plsc.cluster import kmeans
from plsc.cluster.assignment import Assigner, Points
from plsc.cluster.folder import GraphOptions, cluster
from plsc.cluster.kmeans import KMeansOptions
from plsc.cluster.means import Sums
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.parallel import Mesh, init
from plsc.tools.entry import main

ROWS, DIM, GROUPS = 1500, 16, 30


def drawn(rows=ROWS, dim=DIM, groups=GROUPS, noise=0.5, seed=0):
    random = np.random.default_rng(seed)
    centres = random.standard_normal((groups, dim))
    labels = random.integers(0, groups, rows)
    return (centres[labels] + noise * random.standard_normal((rows, dim))).astype(np.float32), labels


def unit(rows):
    rows = rows.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    """A set whose row 7 has an error."""
    rows, labels = drawn()
    rows[7] = 0
    names = [str(group) for group in range(GROUPS)]
    folder = tmp_path_factory.mktemp("sets") / "set.emb"
    write_embedding_set(
        folder, rows, contract_id="c", labels=labels, class_names=names, errors={7: "broken"}, shard_rows=400
    )
    return folder


def labels_of(out):
    return np.load(out / "labels.npy")


def run(folder, out, mesh=None, **options):
    options = KMeansOptions(**{"k": GROUPS, **options})
    return cluster(EmbeddingSet(folder), out, options, mesh or init("cpu"), quiet=True)


def test_every_assignment_is_float64s_while_most_pairs_are_left_out():
    points = unit(drawn()[0]).astype(np.float32)
    assigner, sums = Assigner(Points.of(points)), Sums(GROUPS, DIM)
    centres, compared = points[:GROUPS].copy(), 0
    for iteration in range(20):
        changed, former = assigner.assign(centres)
        exact = points.astype(np.float64) @ centres.astype(np.float64).T
        own = exact[np.arange(ROWS), assigner.labels]
        assert (exact.max(axis=1) - own < 1e-12).all()  # ties aside, the nearest
        np.testing.assert_allclose(assigner.cosines, own, atol=1e-12)
        compared += assigner.compared
        sums.move(assigner.points, changed, former, assigner.labels)
        if iteration == 9:  # one centre jumps, as a re-seeded one does
            centres = sums.centres(centres)
            centres[3] = points[11]
        else:
            centres = sums.centres(centres)
            means = np.stack(
                [points[assigner.labels == label].astype(np.float64).sum(axis=0) for label in range(GROUPS)]
            )
            np.testing.assert_allclose(centres, unit(means), atol=1e-7)
    assert compared < 0.7 * 20 * ROWS * GROUPS


@pytest.mark.live
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"mini_batch": 300, "iterations": 8}, marks=pytest.mark.exhaustive),
        pytest.param({"balanced": 1.1, "iterations": 8}, marks=pytest.mark.exhaustive),
    ],
)
def test_killed_and_run_again_it_ends_in_the_same_centres_as_on_two_ranks(
    ranks, tmp_path, monkeypatch, embeddings, options
):
    whole = run(embeddings, tmp_path / "whole", **options)
    for states in (2, 1):
        kill_after(states, lambda: run(embeddings, tmp_path / "killed", **options), monkeypatch)
    resumed = run(embeddings, tmp_path / "killed", **options)
    two = ranks(2, run_on_rank, embeddings, tmp_path / "two", options)[1]
    for other, report in (("killed", resumed), ("two", two)):
        for name in ("centres.npy", "labels.npy"):
            assert (tmp_path / other / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (other, name)
        assert report["inertia"] == whole["inertia"]
    assert not (tmp_path / "killed" / "state").exists()


def kill_after(states, function, monkeypatch):
    """Run ``function`` in a fork that kill -9 ends after ``states`` states, between writing the next and its name."""
    child = os.fork()
    if not child:
        sync, written = kmeans.sync, iter(range(states))

        def sync_or_die(path):
            if next(written, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(path)

        monkeypatch.setattr(kmeans, "sync", sync_or_die)
        function()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def run_on_rank(mesh: Mesh, folder, out, options):
    return run(folder, out, mesh, **options)


def test_the_inertia_never_rises_and_the_files_agree_with_the_report(tmp_path, embeddings):
    report = run(embeddings, tmp_path / "out", tolerance=1e-9, seeds=2)
    history = [step["inertia"] for step in report["history"]]
    assert all(later <= earlier for earlier, later in itertools.pairwise(history))
    labels, centres = labels_of(tmp_path / "out"), np.load(tmp_path / "out" / "centres.npy")
    rows = unit(EmbeddingSet(embeddings).rows(0, ROWS)[labels >= 0])
    assert labels[7] == -1
    assert (labels < 0).sum() == 1
    distances = ((rows - centres[labels[labels >= 0]].astype(np.float64)) ** 2).sum()
    assert report["inertia"] == pytest.approx(distances, rel=1e-6)
    assert report["agreement"]["bcubed_f"] > 0.8
    saved = EmbeddingSet(tmp_path / "out" / "centres.emb", verify=True)
    np.testing.assert_array_equal(saved.rows(0, len(saved)), centres)
    np.testing.assert_array_equal(saved.labels, np.arange(len(centres)))
    assert (tmp_path / "out" / "report.png").stat().st_size > 1000


def test_empty_clusters_are_put_onto_points_that_fit_worst(tmp_path, monkeypatch, embeddings):
    one = unit(drawn()[0][:1]).astype(np.float32)
    monkeypatch.setattr(kmeans, "first_centres", lambda *_: np.repeat(one, GROUPS, axis=0))  # all but one are empty
    report = run(embeddings, tmp_path / "out", iterations=60)
    assert report["history"][0]["reseeded"] == GROUPS - 1
    assert report["clusters"] == GROUPS
    assert report["sizes"]["least"] >= 1


def test_no_balanced_cluster_is_larger_than_asked(tmp_path, embeddings):
    report = run(embeddings, tmp_path / "out", balanced=1.0, iterations=5)
    assert report["sizes"]["most"] <= -(-(ROWS - 1) // GROUPS)
    assert report["labelled"] == ROWS - 1


@pytest.mark.parametrize(("rows", "k", "bound"), [(50, 5, 11), (100, 2, 55)])
def test_the_bound_of_a_balanced_cluster_is_that_of_the_decimal_ratio(tmp_path, rows, k, bound):
    # All but a few rows are one crowd; 1.1 * 50 / 5 is more than 11 in floats.
    vectors = np.eye(k, 8)[np.maximum(np.arange(rows) - rows + k, 0)]
    vectors += 0.01 * np.random.default_rng(0).standard_normal((rows, 8))
    write_embedding_set(tmp_path / "set.emb", vectors.astype(np.float32), contract_id="c")
    report = run(tmp_path / "set.emb", tmp_path / "out", k=k, balanced=1.1, iterations=3)
    assert report["sizes"]["most"] == bound


def test_many_centres_start_in_two_levels(tmp_path, embeddings, monkeypatch):
    monkeypatch.setattr("plsc.cluster.starts.PLUS_PLUS_UP_TO", 20)
    first = run(embeddings, tmp_path / "two", iterations=1)["history"][0]["inertia"]
    rows = unit(np.delete(EmbeddingSet(embeddings).rows(0, ROWS), 7, axis=0))
    chosen = rows[np.random.default_rng(0).choice(len(rows), GROUPS, replace=False)]
    by_chance = (2 - 2 * (rows @ chosen.T).max(axis=1)).sum()
    assert first < by_chance


def test_the_nearest_centres_of_each_row(tmp_path, embeddings, capsys):
    out = tmp_path / "out"
    arguments = ["cluster", str(embeddings), "--k", str(GROUPS), "--out", str(out), "--top", "3"]
    assert main([*arguments, "--json", str(tmp_path / "report.json")]) == 0
    labels, cosines = np.load(out / "top_labels.npy"), np.load(out / "top_cosines.npy")
    assert labels.shape == cosines.shape == (ROWS, 3)
    assert labels.dtype == np.int64
    assert cosines.dtype == np.float32
    exact = unit(np.delete(EmbeddingSet(embeddings).rows(0, ROWS), 7, axis=0)) @ np.load(out / "centres.npy").T
    np.testing.assert_array_equal(np.delete(labels, 7, axis=0), np.argsort(-exact, axis=1)[:, :3])
    np.testing.assert_allclose(np.delete(cosines, 7, axis=0), -np.sort(-exact, axis=1)[:, :3], atol=1e-6)
    assert (labels[7] == -1).all()
    assert json.loads((tmp_path / "report.json").read_text())["clusters"] == GROUPS
    assert "1 row without a cluster" in capsys.readouterr().out
    before = labels_of(out)
    assert main(arguments) == 0  # it is complete
    np.testing.assert_array_equal(labels_of(out), before)


@pytest.mark.live
def test_what_cannot_be_is_one_line(tmp_path, embeddings, capsys):
    zero = drawn()[0]
    zero[5] = 0
    write_embedding_set(tmp_path / "zero.emb", zero, contract_id="c")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    run(embeddings, tmp_path / "done")
    out = tmp_path / "begun"
    child = os.fork()
    if not child:
        kmeans.KMeans._step = lambda *_: os._exit(0)
        run(embeddings, out)
    os.waitpid(child, 0)
    state = out / "state" / "run-000.npz"
    state.write_bytes(state.read_bytes()[:-300])
    k = ["--k", str(GROUPS)]
    for arguments, code, message in (
        ([embeddings, "--k", "1500", "--out", tmp_path / "new"], 2, "--k 1500 is more than the 1,499 embeddings"),
        ([tmp_path / "zero.emb", *k, "--out", tmp_path / "new"], 1, "row 5 (5) is zero or not finite"),
        ([embeddings, *k, "--out", out], 1, "run-000.npz is damaged"),
        ([embeddings, *k, "--seed", "1", "--out", tmp_path / "done"], 2, "was begun with seed 0, now 1"),
        ([embeddings, *k, "--out", tmp_path / "else"], 2, "is not empty and holds no clusters"),
        ([embeddings, *k, "--out", embeddings], 2, "is the embedding set itself"),
        ([embeddings, "--out", tmp_path / "new"], 2, "--k is missing"),
        ([embeddings, *k, "--threshold", "0.5", "--out", tmp_path / "new"], 2, "not an option of --method kmeans"),
    ):
        assert main(["cluster", *map(str, arguments)]) == code
        lines = capsys.readouterr().err.strip().splitlines()
        assert message in lines[-1], lines
        assert lines[-1].startswith("plsc cluster: error:")
    assert main(["cluster", str(embeddings), *k, "--out", str(out), "--overwrite"]) == 0
    assert (labels_of(out) == labels_of(tmp_path / "done")).all()


@pytest.mark.exhaustive
def test_settings_of_graphs_are_refused_in_a_folder_of_kmeans(tmp_path, embeddings):
    run(embeddings, tmp_path / "out", iterations=1)
    with pytest.raises(ValueError, match="was begun with"):
        cluster(EmbeddingSet(embeddings), tmp_path / "out", GraphOptions("connected"), init("cpu"), quiet=True)
