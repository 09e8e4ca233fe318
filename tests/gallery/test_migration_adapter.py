"""Adapters between embedding spaces, against maps that are known, and another solver's ridge regression."""

from dataclasses import asdict

import numpy as np
import pytest
from safetensors.numpy import load, save
from support.spaces import people, rotation, unit

from plsc.errors import DataError, UsageError
from plsc.gallery.migration.adapter import Adapter, fit_adapter, fit_with_estimates
from plsc.gallery.migration.linear_map import RidgePath, procrustes


def cosines(first, second):
    return np.einsum("ij,ij->i", first, second)


def ranks(scores):
    """How many strangers score higher than a face itself, of scores (n, n)."""
    return (scores > np.diagonal(scores)[:, None]).sum(axis=1)


@pytest.mark.parametrize(("old_dim", "new_dim"), [(32, 32), (24, 40)])
def test_a_rotation_is_found_and_carries_over_to_others(old_dim, new_dim):
    turn = rotation(old_dim, new_dim)
    old, persons = people(60, 5, old_dim)
    adapter = fit_adapter(old, unit(old @ turn), persons, seed=0)
    unseen, _ = people(50, 2, old_dim, seed=9)
    estimated = adapter(3.0 * unseen)
    assert estimated.dtype == np.float32
    assert estimated.shape == (100, new_dim)
    np.testing.assert_allclose(np.linalg.norm(estimated, axis=1), 1, atol=1e-6)
    assert cosines(estimated, unit(unseen @ turn)).min() > 0.999
    assert (adapter.kind, adapter.old_dim, adapter.new_dim, adapter.faces) == ("linear", old_dim, new_dim, 300)


def test_a_narrower_space_keeps_what_it_can():
    turn = rotation(40, 24)
    old, persons = people(60, 5, 40)
    adapter = fit_adapter(old, unit(old @ turn), persons, seed=0)
    unseen, _ = people(50, 2, 40, seed=9)
    assert cosines(adapter(unseen), unit(unseen @ turn)).mean() > 0.99


@pytest.mark.parametrize("count", [12, 100])
def test_the_estimates_of_the_folds_are_as_good_as_those_of_strangers(count):
    rng = np.random.default_rng(3)
    turn = rotation(32, 32)
    old, persons = people(count, 8, 32)
    new = unit(old @ turn + 0.08 * rng.standard_normal((len(old), 32)))
    adapter, estimated = fit_with_estimates(old, new, persons, seed=0)
    unseen, _ = people(300, 1, 32, seed=9)
    truth = unit(unseen @ turn + 0.08 * rng.standard_normal((300, 32)))
    expected = cosines(adapter(unseen), truth).mean()
    found = adapter.held_out[adapter.kind]
    assert (found.faces, found.persons) == (8 * count, count)
    assert found.cosine == pytest.approx(cosines(estimated, new).mean(), abs=1e-5)
    assert found.cosine == pytest.approx(expected, abs=0.03)
    assert found.cosine > 0.8


def test_the_estimate_of_a_person_is_independent_of_the_persons_new_embeddings():
    old, persons = people(20, 5, 16)
    new = unit(old @ rotation(16, 16))
    other = new.copy()
    other[persons == 7] = -other[persons == 7]
    estimated, again = (fit_with_estimates(old, rows, persons, seed=0)[1] for rows in (new, other))
    assert cosines(estimated[persons == 7], again[persons == 7]).min() > 0.999
    assert cosines(estimated[persons == 7], other[persons == 7]).max() < -0.9


def test_a_bent_space_takes_the_residual_network():
    rng = np.random.default_rng(0)
    old, persons = people(300, 4, 12)
    bend, turn = rng.standard_normal((12, 12)), rotation(12, 12)

    def moved(rows):
        return unit(0.5 * rows @ turn + np.abs(rows @ bend) @ rotation(12, 12, seed=6))

    adapter = fit_adapter(old, moved(old), persons, seed=0)
    assert adapter.kind == "mlp"
    assert adapter.held_out["mlp"].separation > 1.01 * adapter.held_out["linear"].separation
    unseen, _ = people(200, 1, 12, seed=9)
    base = {name: value for name, value in load(adapter.to_bytes()).items() if name in ("base", "base_bias")}
    found, linear = (one(unseen) @ moved(unseen).T for one in (adapter, Adapter(base, {}, 0)))
    assert ranks(found).mean() < 0.8 * ranks(linear).mean()


def test_the_same_seed_gives_the_same_bytes_and_bytes_give_the_adapter_back():
    rng = np.random.default_rng(1)
    old, persons = people(40, 3, 16)
    new = unit(np.abs(old @ rotation(16, 20)) + 0.1 * rng.standard_normal((120, 20)))
    adapter = fit_adapter(old, new, persons, seed=4)
    content = adapter.to_bytes()
    assert fit_adapter(old, new, persons, seed=4).to_bytes() == content
    read = Adapter.from_bytes(content)
    assert read.to_bytes() == content
    assert (read.kind, read.faces) == (adapter.kind, adapter.faces)
    assert {kind: asdict(found) for kind, found in read.held_out.items()} == {
        kind: asdict(found) for kind, found in adapter.held_out.items()
    }
    np.testing.assert_array_equal(read(old), adapter(old))


def test_ridge_regression_towards_a_prior_is_that_of_stacked_least_squares():
    rng = np.random.default_rng(2)
    old, new = rng.standard_normal((50, 6)), rng.standard_normal((50, 4))
    x, y = old - old.mean(axis=0), new - new.mean(axis=0)
    prior = procrustes(x.T @ y)
    np.testing.assert_allclose(prior.T @ prior, np.eye(4), atol=1e-12)
    for strength in (0.01, 1.0, 100.0):
        root = np.sqrt(strength * np.trace(x.T @ x) / 6)
        stacked = np.linalg.lstsq(np.vstack([x, root * np.eye(6)]), np.vstack([y, root * prior]), rcond=None)[0]
        weight, bias = RidgePath(old, new).at(strength)
        np.testing.assert_allclose(weight, stacked, atol=1e-10)
        np.testing.assert_allclose(old.mean(axis=0) @ weight + bias, new.mean(axis=0), atol=1e-12)


def test_the_prior_sends_what_no_row_shows_nowhere():
    old, new = np.zeros((30, 5)), np.zeros((30, 5))
    old[:, :2] = np.random.default_rng(0).standard_normal((30, 2))
    new[:, 3:] = old[:, :2]
    prior = procrustes(old.T @ new)
    np.testing.assert_allclose(prior[:2, 3:], np.eye(2), atol=1e-12)
    np.testing.assert_allclose(prior[2:], 0, atol=1e-12)


def test_a_person_of_most_faces_is_one_of_many():
    few, persons = people(12, 5, 8)
    crowd, _ = people(1, 2000, 8, seed=3)
    old = np.vstack([crowd, few])
    adapter = fit_adapter(old, unit(old @ rotation(8, 8)), np.append([-5] * 2000, persons), seed=0)
    assert np.isfinite(adapter.held_out["linear"].separation)
    assert cosines(adapter(few), unit(few @ rotation(8, 8))).min() > 0.95


@pytest.mark.parametrize(
    ("count", "faces", "message"),
    [(6, 20, "120 of 6"), (49, 1, "49 of 49")],
)
def test_too_few_are_refused(count, faces, message):
    old, persons = people(count, faces, 8)
    with pytest.raises(DataError, match=f"50 faces of 10 persons at the least.*{message}"):
        fit_adapter(old, old, persons, seed=0)


def test_what_is_no_embedding_is_refused():
    old, persons = people(20, 5, 8)
    with pytest.raises(UsageError, match="no old and new ones of the same faces"):
        fit_adapter(old, old[:-1], persons, seed=0)
    for value, message in ((np.nan, "row 3 is not finite"), (0.0, "row 3 is of zeros")):
        bad = old.copy()
        bad[3] = value
        with pytest.raises(DataError, match=message):
            fit_adapter(old, bad, persons, seed=0)
    adapter = fit_adapter(old, old, persons, seed=0)
    with pytest.raises(UsageError, match="do not fit an adapter of 8 numbers"):
        adapter(old[:, :7])


def hostile():
    old, persons = people(20, 5, 8)
    content = fit_adapter(old, old, persons, seed=0).to_bytes()
    arrays = load(content)
    yield from (b"", b"\xff" * 64, content[:-1], content[: len(content) // 2], (10**15).to_bytes(8, "little") + b"{}")
    yield save({name: value for name, value in arrays.items() if name != "about"})
    yield save({**arrays, "about": np.frombuffer(b"[" * 100_000, dtype=np.uint8).copy()})
    yield save({**arrays, "about": np.frombuffer(b'{"format": "another"}', dtype=np.uint8).copy()})
    yield save({**arrays, "base": arrays["base"][:, :5].copy()})
    yield save({**arrays, "base": arrays["base"].astype(np.float64)})
    yield save({**arrays, "base": np.full_like(arrays["base"], np.nan)})
    yield save({**arrays, "outer": arrays["base"]})


def test_bytes_that_are_no_adapter_are_refused_in_one_line():
    for content in hostile():
        with pytest.raises(DataError, match=r"^the file a\.bin is no adapter of a gallery") as caught:
            Adapter.from_bytes(content, "the file a.bin")
        assert "\n" not in str(caught.value)
