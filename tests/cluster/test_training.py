"""Labels of clusters in training: data.labels in place of the pictures' own."""

import numpy as np
import pytest
from support.tiny_runs import refusal, run

from plsc.data import open_dataset
from plsc.data.relabelled import RelabelledDataset
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import DataError, UsageError
from plsc.tools.entry import main

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_training_reads_the_label_file_as_it_is(ranks, tmp_path):
    pictures = open_dataset("avatars:10x6", image_size=16)
    pixels = np.stack([pictures.image(row).numpy().reshape(-1) for row in range(60)]).astype(np.float32)
    pixels[3] = 0
    write_embedding_set(tmp_path / "set.emb", pixels, contract_id="c", errors={3: "broken"})
    assert main(["cluster", str(tmp_path / "set.emb"), "--k", "7", "--out", str(tmp_path / "clusters")]) == 0
    changes = {"data.labels": str(tmp_path / "clusters" / "labels.npy"), "steps": 3, "epochs": None}
    result = ranks(1, run, tmp_path / "run", changes)[0]
    assert result["steps"] == 3
    classes = (tmp_path / "run" / "classes.json").read_text()
    assert '"6"' in classes
    assert '"7"' not in classes
    (wrong,) = ranks(1, refusal, tmp_path / "other", {**changes, "data.train": "avatars:10x7"})
    assert "has 60 labels, and avatars:10x7 70 images" in wrong


def test_several_labels_of_which_one_is_there_are_one_label(ranks, tmp_path):
    one = np.arange(60) // 6
    several = np.stack([np.full(60, -1), one, np.where(one == 3, 3, -1)], 1)
    several[7] = -1  # left out: the others train without it
    one[7] = -1
    losses = []
    for name, labels in (("one", one), ("several", several)):
        np.save(tmp_path / f"{name}.npy", labels)
        changes = {
            "data.labels": str(tmp_path / f"{name}.npy"),
            "data.train": "avatars:10x6",
            "steps": 3,
            "epochs": None,
        }
        losses.append(ranks(1, run, tmp_path / name, changes)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_rows_without_a_label_are_left_out_and_gaps_closed(tmp_path):
    base = open_dataset("avatars:2x3", image_size=16)
    np.save(tmp_path / "labels.npy", np.array([5, -1, 5, 9, -1, 2]))
    dataset = RelabelledDataset(base, tmp_path / "labels.npy")
    assert dataset.labels.tolist() == [1, 1, 2, 0]
    assert list(dataset.class_names) == ["2", "5", "9"]
    assert [dataset.key(row) for row in range(4)] == [base.key(row) for row in (0, 2, 3, 5)]
    assert (dataset.image(1) == base.image(2)).all()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, UsageError, "there is no data.labels"),
        (np.zeros(5, np.int64), UsageError, "has 5 labels"),
        (np.zeros(6), DataError, "is no array of int64"),
        (np.zeros((6, 1, 1), np.int64), DataError, "is no array of int64"),
        (np.full(6, -1), DataError, "gives no image a label"),
        (b"text", DataError, "is no .npy file"),
    ],
)
def test_a_wrong_label_file_is_refused(tmp_path, content, error, message):
    path = tmp_path / "labels.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(error, match=message):
        RelabelledDataset(open_dataset("avatars:2x3", image_size=16), path)
