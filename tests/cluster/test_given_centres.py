"""Points assigned to centres from elsewhere: as float64 has it, as a k-means run ends, and refusals."""

import json

import numpy as np
import pytest

from plsc.cluster.folder import cluster
from plsc.cluster.given import GivenCentres
from plsc.cluster.kmeans import KMeansOptions
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.parallel import Mesh, init
from plsc.tools.entry import main

ROWS, DIM, CENTRES = 700, 16, 40


def unit(rows):
    rows = rows.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    """A set whose row 7 has an error."""
    rows = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    rows[7] = 0
    folder = tmp_path_factory.mktemp("sets") / "set.emb"
    write_embedding_set(folder, rows, contract_id="c", errors={7: "broken"}, shard_rows=300)
    return folder


@pytest.fixture
def centres(tmp_path):
    """A file of float64 rows of any length."""
    rows = 5 * np.random.default_rng(1).standard_normal((CENTRES, DIM))
    np.save(tmp_path / "centres.npy", rows)
    return tmp_path / "centres.npy"


def run_on_rank(mesh: Mesh, folder, out, centres):
    return cluster(EmbeddingSet(folder), out, GivenCentres(centres), mesh, top=3, quiet=True)


def test_every_point_goes_to_its_nearest_centre_on_any_number_of_processes(ranks, tmp_path, embeddings, centres):
    out = tmp_path / "out"
    arguments = ["cluster", str(embeddings), "--centres", str(centres), "--top", "3", "--out", str(out)]
    assert main([*arguments, "--json", str(tmp_path / "report.json")]) == 0
    exact = unit(np.delete(EmbeddingSet(embeddings).rows(0, ROWS), 7, axis=0)) @ unit(np.load(centres)).T
    labels = np.load(out / "labels.npy")
    assert labels[7] == -1
    np.testing.assert_array_equal(np.delete(labels, 7), exact.argmax(axis=1))
    np.testing.assert_array_equal(np.delete(np.load(out / "top_labels.npy"), 7, axis=0), np.argsort(-exact)[:, :3])
    np.testing.assert_allclose(
        np.delete(np.load(out / "top_cosines.npy"), 7, axis=0), -np.sort(-exact)[:, :3], atol=1e-6
    )
    np.testing.assert_allclose(np.load(out / "centres.npy"), unit(np.load(centres)), atol=1e-7)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["inertia"] == pytest.approx((2 - 2 * exact.max(axis=1)).sum(), rel=1e-6)
    assert (report["clusters"], report["iterations"], report["history"]) == (CENTRES, 0, [])
    assert not (out / "state").exists()
    ranks(2, run_on_rank, embeddings, tmp_path / "two", centres)
    for name in ("labels.npy", "centres.npy", "top_labels.npy", "top_cosines.npy", "report.json"):
        assert (tmp_path / "two" / name).read_bytes() == (out / name).read_bytes(), name


def test_the_centres_of_a_run_give_its_labels(tmp_path, embeddings):
    source, mesh = EmbeddingSet(embeddings), init("cpu")
    run = cluster(source, tmp_path / "run", KMeansOptions(CENTRES), mesh, quiet=True)
    given = GivenCentres(tmp_path / "run" / "centres.npy")
    report = cluster(source, tmp_path / "again", given, mesh, quiet=True)
    for name in ("labels.npy", "centres.npy"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
    assert report["inertia"] == pytest.approx(run["inertia"], rel=1e-9)


def test_centres_without_points_are_left_out_and_the_others_keep_their_order(tmp_path, embeddings, centres):
    rows = np.load(centres)
    nearest = (unit(np.delete(EmbeddingSet(embeddings).rows(0, ROWS), 7, axis=0)) @ unit(rows).T).argmax(axis=1)
    np.save(centres, np.insert(rows, 20, rows[5], axis=0))  # of two that are the same, the first has the points
    report = cluster(EmbeddingSet(embeddings), tmp_path / "out", GivenCentres(centres), init("cpu"), quiet=True)
    assert report["clusters"] == CENTRES
    np.testing.assert_array_equal(np.delete(np.load(tmp_path / "out" / "labels.npy"), 7), nearest)


def test_a_run_goes_on_with_the_same_centres_alone(tmp_path, monkeypatch, embeddings, centres):
    source, mesh, out = EmbeddingSet(embeddings), init("cpu"), tmp_path / "out"

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("plsc.cluster.folder._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            cluster(source, out, GivenCentres(centres), mesh, quiet=True)
    moved = centres.rename(tmp_path / "moved.npy")  # the content counts, not the name
    report = cluster(source, out, GivenCentres(moved), mesh, quiet=True)
    assert cluster(source, out, GivenCentres(moved), mesh, quiet=True) == report
    np.save(moved, -np.load(moved))
    with pytest.raises(ValueError, match=r"was begun with centres [0-9a-f]{64}, now [0-9a-f]{64}; name"):
        cluster(source, out, GivenCentres(moved), mesh, quiet=True)


def test_what_cannot_be_is_one_line(tmp_path, embeddings, centres, capsys):
    for name, row in (("zero", 0.0), ("nan", np.nan), ("infinite", np.inf)):
        rows = np.load(centres)
        rows[31] = row
        np.save(tmp_path / f"{name}.npy", rows)
    np.save(tmp_path / "narrow.npy", np.ones((3, DIM - 1)))
    np.save(tmp_path / "whole.npy", np.ones((3, DIM), np.int64))
    np.save(tmp_path / "objects.npy", np.array([[None] * DIM]))
    np.save(tmp_path / "none.npy", np.empty((0, DIM)))
    for arguments, code, message in (
        (["zero.npy"], 1, "zero.npy: row 31 is zero or not finite"),
        (["nan.npy"], 1, "nan.npy: row 31 is zero or not finite"),
        (["infinite.npy"], 1, "infinite.npy: row 31 is zero or not finite"),
        (["narrow.npy"], 2, f"has rows of {DIM - 1} numbers, the set of {DIM}"),
        (["whole.npy"], 1, "is no array (K, D) of floating point numbers"),
        (["none.npy"], 1, "is no array (K, D) of floating point numbers"),
        (["objects.npy"], 1, "is no .npy file"),
        (["missing.npy"], 2, "there is no --centres"),
        (["centres.npy", "--k", "3"], 2, "--k is not for --centres"),
        (["centres.npy", "--iterations", "3"], 2, "--iterations is not for --centres"),
        (["centres.npy", "--tolerance", "0.1"], 2, "--tolerance is not for --centres"),
        (["centres.npy", "--seeds", "3"], 2, "--seeds is not for --centres"),
        (["centres.npy", "--balanced", "2"], 2, "--balanced is not for --centres"),
        (["centres.npy", "--mini-batch", "3"], 2, "--mini-batch is not for --centres"),
        (["centres.npy", "--method", "hdbscan"], 2, "--centres is not an option of --method hdbscan"),
    ):
        words = ["cluster", str(embeddings), "--out", str(tmp_path / "out"), "--centres", str(tmp_path / arguments[0])]
        assert main([*words, *arguments[1:]]) == code, arguments
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert message in lines[0]
        assert not (tmp_path / "out").exists()
