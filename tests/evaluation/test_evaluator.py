"""evaluate(): whole sets, from files to numbers, on any number of ranks."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import stored

from plsc.data import write_pairs
from plsc.errors import DataError
from plsc.evaluation import Evaluator, evaluate, identification, raw_pixels, score, verification
from plsc.evaluation.evaluator import set_names
from plsc.evaluation.pairs import unit_rows_float32
from plsc.evaluation.search import no_retrieval, retrieval
from plsc.parallel import Mesh

ALONE = Mesh(0, 1, 0, torch.device("cpu"))
KEYS = {"accuracy", "accuracy_std", "auc", "tar@far", "impostor_pairs", "rank1", "rank5", "images", "identities"}
FARS = ["1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6"]


def picture(identity, image, size=24, noise=0.3):
    face = np.random.default_rng(identity).random((size, size, 3))
    grain = np.random.default_rng([identity, image]).random((size, size, 3))
    return (255 * ((1 - noise) * face + noise * grain)).astype(np.uint8)


def png(pixels):
    return stored(Image.fromarray(pixels), "PNG")


def drawn(root, images, noise=0.3):
    """A folder of a folder per identity, with so many ``images`` of each."""
    for identity, count in enumerate(images):
        (root / f"id{identity:02d}").mkdir(parents=True)
        for image in range(count):
            (root / f"id{identity:02d}" / f"{image}.png").write_bytes(png(picture(identity, image, noise=noise)))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve identities with 1 to 5 images, noisy enough for errors."""
    return drawn(tmp_path_factory.mktemp("sets") / "unseen", [1 + identity % 5 for identity in range(12)], noise=0.8)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Forty pairs, of which every other shows one identity."""
    images = [png(picture(i // 2 if i % 4 < 2 else i, 100 + i, noise=0.8)) for i in range(80)]
    path = tmp_path_factory.mktemp("sets") / "people.bin"
    write_pairs(path, images, [True, False] * 20)
    return path, images


def judge(embed, sets, **options):
    return evaluate(embed, [str(s) for s in sets], image_size=24, mesh=ALONE, quiet=True, **options)


def both_sides(images):
    return (raw_pixels(images) + raw_pixels(images.flip(-1))).numpy()


def decoded(images):
    arrays = [np.array(Image.open(io.BytesIO(image))) for image in images]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def test_a_bin_set_is_judged_on_its_own_pairs(pairs):
    path, images = pairs
    result = judge(raw_pixels, [path])["people"]
    expected = verification(both_sides(decoded(images)), np.array([True, False] * 20))
    assert set(result) >= KEYS
    for key in ("accuracy", "accuracy_std", "auc", "tar@far", "impostor_pairs", "threshold_cosine"):
        assert result[key] == expected[key]
    assert (result["images"], result["impostor_pairs"]) == (80, 20)
    assert result["retrieval"] == no_retrieval()
    assert result["rank1"] is result["rank5"] is result["identities"] is None
    assert list(result["tar@far"]) == FARS


@pytest.mark.parametrize("flip", [None, True])
def test_a_folder_is_judged_on_all_its_pairs_and_searched(folder, flip):
    result = judge(raw_pixels, [folder], flip=flip)["unseen"]
    files = sorted(folder.glob("*/*.png"))
    labels = np.array([int(file.parent.name[2:]) for file in files])
    images = decoded([file.read_bytes() for file in files])
    rows = both_sides(images) if flip else raw_pixels(images).numpy()  # mirror images only where they are asked for
    found = identification(rows, labels)
    assert set(result) >= KEYS
    assert (result["rank1"], result["rank5"]) == (found["rank1"], found["rank5"])
    assert (result["images"], result["identities"]) == (len(files), 12)
    assert result["retrieval"] == retrieval(unit_rows_float32(rows), labels)
    first, second = np.triu_indices(len(files), k=1)
    same = labels[first] == labels[second]
    everything = verification(rows[np.stack([first, second], axis=1).reshape(-1)], same)
    assert result["impostor_pairs"] == np.sum(~same)
    assert result["genuine_pairs"] == np.sum(same)
    assert result["auc"] == pytest.approx(everything["auc"], abs=1e-4)
    assert result["tar@far"] == pytest.approx(everything["tar@far"], abs=1e-9)
    assert 0.5 < result["accuracy"] < 1.0


def run_on_ranks(mesh, sets, batch_size):
    return evaluate(raw_pixels, sets, image_size=24, mesh=mesh, batch_size=batch_size, curves=True, quiet=True)


@pytest.mark.first_ring("2-7")
@pytest.mark.parametrize(("world", "batch_size"), [(1, 7), (2, 7), (3, 7), (3, 64)])
def test_every_rank_gets_the_same_answer_for_any_number_of_ranks(ranks, folder, pairs, world, batch_size):
    sets = [str(folder), str(pairs[0])]
    alone = judge(raw_pixels, sets, batch_size=batch_size, curves=True)
    for result in ranks(world, run_on_ranks, sets, batch_size):
        assert result == alone


def collected(mesh, rows, labels, shares):
    evaluator = Evaluator(mesh)
    evaluator.update(torch.full((1, rows.shape[1]), 7.0), torch.tensor([0]))
    evaluator.reset()
    for part in torch.arange(len(rows)).split(shares)[mesh.rank].split(4):  # on one rank a batch, on others several
        evaluator.update(torch.from_numpy(rows)[part], torch.from_numpy(labels)[part].int())
    return evaluator.compute()


def test_what_ranks_collect_is_scored_as_a_set_is(ranks, folder):
    expected = judge(raw_pixels, [folder])["unseen"]
    files = sorted(folder.glob("*/*.png"))
    labels = np.array([int(file.parent.name[2:]) for file in files])
    rows = raw_pixels(decoded([file.read_bytes() for file in files])).numpy()
    del expected["unreadable"]
    assert score(torch.from_numpy(rows), torch.from_numpy(labels)) == expected
    assert ranks(3, collected, rows, labels, [2, 13, len(rows) - 15]) == [expected] * 3


def test_what_does_not_fit_or_is_not_there_is_not_scored():
    with pytest.raises(DataError, match=r"embeddings \(3, 4\) and labels \(2,\) do not fit"):
        score(torch.ones(3, 4), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="row 1 is not finite"):
        score(torch.tensor([[1.0, 2.0], [float("nan"), 1.0]]), torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"call update\(\) on every rank"):
        Evaluator().compute()


def test_an_unreadable_image_takes_its_pair_along_and_is_named(tmp_path, pairs, capsys):
    images = list(pairs[1])
    images[6] = b"not an image"
    write_pairs(tmp_path / "damaged.bin", images, [True, False] * 20)
    result = judge(raw_pixels, [tmp_path / "damaged.bin"])["damaged"]
    assert (result["images"], result["unreadable"], result["impostor_pairs"]) == (80, 1, 19)
    assert "image 6 (pair 3)" in capsys.readouterr().err


def test_an_unreadable_file_is_left_out_on_every_rank(ranks, tmp_path, capsys):
    drawn(tmp_path / "some", [3] * 4)
    for identity in range(3):
        path = tmp_path / "some" / f"id{identity:02d}" / f"{identity}.png"
        path.write_bytes(path.read_bytes()[:30])
    alone = judge(raw_pixels, [tmp_path / "some"], batch_size=2, curves=True)
    assert alone["some"]["unreadable"] == 3
    assert alone["some"]["genuine_pairs"] == 3 + 3 * 1
    assert capsys.readouterr().err.count("left out") == 3
    assert ranks(2, run_on_ranks, [str(tmp_path / "some")], 2) == [alone, alone]


def test_too_many_unreadable_images_are_an_error(tmp_path, pairs):
    write_pairs(tmp_path / "ruin.bin", [b"x"] * 12 + pairs[1][12:], [True, False] * 20)
    with pytest.raises(DataError, match=r"ruin: 12 of 80 images cannot be read, the first: .*image 0"):
        judge(raw_pixels, [tmp_path / "ruin.bin"])


def spoilt(images):
    rows = raw_pixels(images)
    rows[images[:, 0, 0, 0] < 20] = torch.nan
    return rows


def fails_on_rank(mesh, embed, sets):
    with pytest.raises(DataError) as caught:
        evaluate(embed, sets, image_size=24, mesh=mesh, batch_size=5, quiet=True)
    return str(caught.value)


def test_embeddings_that_are_not_finite_are_named_on_every_rank(ranks, folder):
    with pytest.raises(DataError, match=r"unseen: \d+ embeddings are not finite, the first that of .*png"):
        judge(spoilt, [folder])
    messages = ranks(2, fails_on_rank, spoilt, [str(folder)])
    assert messages[0] == messages[1]
    assert "not finite" in messages[0]


def test_one_identity_has_no_impostors(tmp_path):
    result = judge(raw_pixels, [drawn(tmp_path / "one", [4])], curves=True)["one"]
    assert result["accuracy"] is result["auc"] is result["eer"] is result["roc"] is None
    assert (result["impostor_pairs"], result["genuine_pairs"], result["rank1"]) == (0, 6, 1.0)


def test_one_image_each_gives_impostors_alone(tmp_path):
    result = judge(raw_pixels, [drawn(tmp_path / "crowd", [1] * 5)])["crowd"]
    assert result["accuracy"] is result["auc"] is result["rank1"] is None
    assert result["impostor_pairs"] == 10


def test_results_have_a_json_form(folder, pairs):
    result = judge(raw_pixels, [folder, pairs[0]], curves=True)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert sum(result["unseen"]["scores"]["different"]) == result["unseen"]["impostor_pairs"]
    assert sum(result["people"]["scores"]["same"]) == 20


def test_sets_with_one_name_are_told_apart():
    assert set_names(["a/lfw.bin", "b/cfp.bin"]) == ["lfw", "cfp"]
    assert set_names(["a/lfw.bin", "b/lfw.bin"]) == ["a/lfw.bin", "b/lfw.bin"]
    assert set_names(["x/unseen/", "x/unseen/", "avatars:5x5@9"]) == ["x/unseen/", "x/unseen/#2", "avatars:5x5@9"]
    assert set_names(["faces/train.rec"]) == ["train"]


def test_raw_pixels_ignore_brightness():
    images = torch.randint(0, 200, (2, 3, 64, 64), dtype=torch.uint8)
    assert raw_pixels(images).shape == (2, 3072)
    torch.testing.assert_close(raw_pixels(images), raw_pixels(images + 50), atol=1e-3, rtol=0)
