"""IJB: pooling and the folder, against what the protocol says spelled out in loops."""

import numpy as np
import pytest
import torch
from PIL import Image
from support.posed_faces import face, photograph

from plsc.data.alignment import align_face
from plsc.errors import DataError, UsageError
from plsc.evaluation import ijb, raw_pixels
from plsc.evaluation.templates import pool_templates
from plsc.parallel import Mesh

ALONE = Mesh(0, 1, 0, torch.device("cpu"))


def spelled_out(rows, scores, templates, medias):
    pooled = []
    for template in np.unique(templates):
        total = np.zeros(rows.shape[1])
        for medium in np.unique(medias[templates == template]):
            chosen = (templates == template) & (medias == medium)
            total += np.mean(rows[chosen] * scores[chosen, None], axis=0)
        pooled.append(total / np.linalg.norm(total))
    return np.unique(templates), np.array(pooled)


@pytest.mark.parametrize("at_a_time", [1, 3, 512])
def test_faces_are_pooled_by_medium_then_by_template(monkeypatch, at_a_time):
    monkeypatch.setattr("plsc.evaluation.templates._TEMPLATES_AT_A_TIME", at_a_time)
    generator = np.random.default_rng(0)
    templates, medias = generator.integers(5, 25, 90), generator.integers(0, 4, 90)
    rows, scores = generator.normal(size=(90, 7)).astype(np.float32), generator.random(90)
    names, vectors = pool_templates(rows, scores, templates, medias)
    expected_names, expected = spelled_out(rows, scores, templates, medias)
    assert np.array_equal(names, expected_names)
    np.testing.assert_allclose(vectors, expected, atol=1e-12)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A small release: 6 identities, 3 templates each of 1 to 4 faces, all pairs of templates."""
    root = tmp_path_factory.mktemp("ijb") / "IJBC"
    (root / "meta").mkdir(parents=True)
    (root / "loose_crop").mkdir()
    generator = np.random.default_rng(0)
    faces, members, owner = [], [], {}
    for template in range(100, 118):
        owner[template] = template % 6
        for _ in range(generator.integers(1, 5)):
            name = f"{len(faces) + 1}.png"
            picture = np.clip(face(owner[template]) + generator.normal(scale=40, size=(112, 112, 3)), 0, 255)
            photo, landmarks = photograph(
                picture, generator.normal(scale=0.4), generator.uniform(0.7, 1.2), generator.uniform(10, 50, 2)
            )
            Image.fromarray(photo.permute(1, 2, 0).numpy()).save(root / "loose_crop" / name)
            numbers = " ".join(f"{value:.4f}" for value in landmarks.reshape(-1))
            faces.append(f"{name} {numbers} {generator.uniform(0.5, 1):.6f}")
            members.append(f"{name} {template} {generator.integers(1, 3)}")
    pairs = [f"{a} {b} {int(owner[a] == owner[b])}" for a in owner for b in owner if a < b]
    for name, lines in (("name_5pts_score", faces), ("face_tid_mid", members), ("template_pair_label", pairs)):
        (root / "meta" / f"ijbc_{name}.txt").write_text("\n".join(lines) + "\n")
    return root


def test_a_release_is_judged_as_the_protocol_says(release):
    result = ijb(raw_pixels, release, image_size=112, mesh=ALONE, batch_size=8, quiet=True)["ijbc"]
    rows, scores, templates, medias = [], [], [], []
    places = [line.split() for line in (release / "meta/ijbc_face_tid_mid.txt").read_text().splitlines()]
    for line, place in zip((release / "meta/ijbc_name_5pts_score.txt").read_text().splitlines(), places, strict=True):
        name, *numbers, score = line.split()
        pixels = np.array(Image.open(release / "loose_crop" / name))
        photo = torch.from_numpy(pixels).permute(2, 0, 1)
        aligned = align_face(photo, np.array(numbers, dtype=float).reshape(5, 2), 112)[None]
        rows.append((raw_pixels(aligned) + raw_pixels(aligned.flip(-1)))[0].numpy())
        scores.append(float(score))
        templates.append(int(place[1]))
        medias.append(int(place[2]))
    names, vectors = spelled_out(np.array(rows), np.array(scores), np.array(templates), np.array(medias))
    cosines, truth = [], []
    for line in (release / "meta/ijbc_template_pair_label.txt").read_text().splitlines():
        first, second, label = map(int, line.split())
        cosines.append(vectors[list(names).index(first)] @ vectors[list(names).index(second)])
        truth.append(label == 1)
    cosines, truth = np.array(cosines), np.array(truth)
    assert (result["images"], result["templates"], result["impostor_pairs"]) == (len(rows), 18, np.sum(~truth))
    best = max(np.mean(cosines[truth] >= t) for t in cosines if np.mean(cosines[~truth] >= t) <= 0.1)
    assert result["tar@far"]["1e-1"] == pytest.approx(best)
    assert result["tar@far"]["1e-2"] is None
    wins = np.mean(cosines[truth][:, None] > cosines[~truth][None])
    assert result["auc"] == pytest.approx(wins, abs=1e-9)
    assert result["accuracy"] is result["rank1"] is None
    assert wins > 0.9


def run_on_ranks(mesh, folder):
    return ijb(raw_pixels, folder, image_size=56, mesh=mesh, batch_size=5, curves=True, quiet=True)


@pytest.mark.exhaustive
def test_every_rank_gets_the_same_answer(ranks, release):
    alone = run_on_ranks(ALONE, release)
    assert ranks(3, run_on_ranks, release) == [alone] * 3


def copied(release, tmp_path):
    import shutil

    return shutil.copytree(release, tmp_path / "IJBC")


def test_lists_in_another_order_are_matched_by_name(release, tmp_path):
    folder = copied(release, tmp_path)
    members = folder / "meta/ijbc_face_tid_mid.txt"
    members.write_text("\n".join(reversed(members.read_text().splitlines())) + "\n")
    assert run_on_ranks(ALONE, folder) == run_on_ranks(ALONE, release)


def test_an_unreadable_face_is_left_out(release, tmp_path, capsys):
    folder = copied(release, tmp_path)
    (folder / "loose_crop" / "1.png").unlink()
    result = run_on_ranks(ALONE, folder)["ijbc"]
    assert result["unreadable"] == 1
    assert "1.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("name_5pts_score", "1.png 1 2 3\n", "name_5pts_score.txt line 1 has 3 numbers, not 11"),
        ("name_5pts_score", "1.png 1 2 3 4 5 6 7 8 9 x 1\n", "line 1: could not convert"),
        ("name_5pts_score", "", "name_5pts_score.txt is empty"),
        ("face_tid_mid", "other.png 1 1\n", "face_tid_mid.txt lacks 1.png"),
        ("template_pair_label", "100 101\n", "other lines than"),
        ("template_pair_label", "100 101 2\n", "other lines than"),
        ("template_pair_label", "100 a 1\n", "each line is"),
        ("template_pair_label", "100 999 1\n", "template 999"),
        ("template_pair_label", "", "is missing or empty"),
    ],
)
def test_malformed_lists_are_named(release, tmp_path, name, text, message):
    folder = copied(release, tmp_path)
    (folder / "meta" / f"ijbc_{name}.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        run_on_ranks(ALONE, folder)


def test_a_folder_that_is_no_release_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no lists"):
        run_on_ranks(ALONE, tmp_path)
