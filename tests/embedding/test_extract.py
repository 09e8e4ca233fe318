"""Extraction: the same bytes on any number of ranks and after any kill; bad images become rows that say so."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.linear_embedder import SIZE, stand_in

from plsc.data import ImageDataset, open_dataset
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.extract import default_shard_rows, extract
from plsc.embedding.set_writer import sole_writer
from plsc.embedding.sources import open_images
from plsc.errors import DataError, UsageError
from plsc.parallel import Mesh

ONE = Mesh(0, 1, 0, torch.device("cpu"))


class Pictures(ImageDataset):
    """Images made of their index; those in ``bad`` do not decode, and at those of ``strikes`` something happens."""

    def __init__(
        self, count: int, bad: Any = (), pause: float = 0, names: Any = ("a", "b"), strikes: Any = None
    ) -> None:
        super().__init__(f"pictures of {count}", np.arange(count, dtype=np.int64) % 2, names, SIZE)
        self.bad, self.pause, self.strikes = bad, pause, strikes or {}

    def image(self, index: int) -> torch.Tensor:
        time.sleep(self.pause)
        if index in self.strikes:
            self.strikes[index]()
        if index in self.bad:
            raise DataError(f"{self.key(index)} is truncated;\nreplace it")
        return torch.randint(0, 256, (3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))

    def key(self, index: int) -> str:
        return f"picture {index}"


def run(mesh: Mesh, folder: Path, pictures: ImageDataset, **more: Any) -> dict[str, Any]:
    options = {"batch_size": 7, "shard_rows": 16, "quiet": True, **more}
    return extract(options.pop("embedder", None) or stand_in(), pictures, folder, mesh, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def oracle(pictures: Pictures) -> np.ndarray[Any, Any]:
    rows = [
        torch.zeros(8) if i in pictures.bad else stand_in()(pictures.image(i)[None])[0] for i in range(len(pictures))
    ]
    return torch.stack(rows).numpy()


def test_every_row_is_its_image_and_a_bad_one_says_so(tmp_path: Path) -> None:
    pictures = Pictures(50, bad=(0, 31, 49))
    summary = run(ONE, tmp_path / "set", pictures)
    made = EmbeddingSet(tmp_path / "set", verify=True)
    np.testing.assert_allclose(made.rows(0, 50), oracle(pictures), rtol=1e-5, atol=1e-5)
    assert [len(shard) for shard in made] == [16, 16, 16, 2]
    np.testing.assert_array_equal(made.ids, np.arange(50))
    np.testing.assert_array_equal(made.labels, pictures.labels)
    assert made.keys[49] == "picture 49"
    assert made.errors == {i: f"picture {i} is truncated; replace it" for i in (0, 31, 49)}
    assert (summary["rows"], summary["errors"], summary["embedded"]) == (50, 3, 50)
    assert summary["first_errors"][1] == {"key": "picture 31", "error": "picture 31 is truncated; replace it"}
    assert made.manifest["normalized"] is False


def test_flip_averages_and_has_a_contract_of_its_own(tmp_path: Path) -> None:
    pictures = Pictures(5)
    run(ONE, tmp_path / "set", pictures, flip=True)
    made = EmbeddingSet(tmp_path / "set")
    images = torch.stack([pictures.image(i) for i in range(5)])
    expected = (stand_in()(images) + stand_in()(images.flip(-1))) / 2
    np.testing.assert_allclose(made.rows(0, 5), expected.numpy(), rtol=1e-5, atol=1e-5)
    assert made.contract_id == "linear-0+flip"


def _on_a_rank(mesh: Mesh, folder: Path, pictures: Pictures) -> dict[str, Any]:
    return run(mesh, folder, pictures)


@pytest.mark.slow
def test_three_ranks_give_the_same_bytes_as_one(ranks: Any, tmp_path: Path) -> None:
    pictures = Pictures(100, bad=(20,))
    run(ONE, tmp_path / "one", pictures)
    summaries = ranks(3, _on_a_rank, tmp_path / "many", pictures)
    assert all(summary == summaries[0] for summary in summaries)
    assert summaries[0]["embedded"] == 100
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


@pytest.mark.live
def test_decoding_in_worker_processes_changes_nothing(tmp_path: Path) -> None:
    pictures = Pictures(60, bad=(7, 8))
    run(ONE, tmp_path / "none", pictures)
    run(ONE, tmp_path / "two", pictures, workers=2)
    assert contents(tmp_path / "none") == contents(tmp_path / "two")


def _killed_in_the_middle(folder: Path, after_shards: int) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); import torch; torch.set_num_threads(1);"
        "from pathlib import Path; from test_extract import *;"
        "run(ONE, Path(sys.argv[2]), Pictures(200, (3,), pause=0.01))"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, f"{here}:{here.parent}", str(folder)]
    with subprocess.Popen(command) as process:
        while len(list(folder.glob("shard-*"))) < after_shards:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.live
@pytest.mark.slow
def test_killed_and_resumed_on_another_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    pictures = Pictures(200, (3,))
    _killed_in_the_middle(tmp_path / "killed", 2)
    with pytest.raises(DataError, match="not finished; run plsc embed again"):
        EmbeddingSet(tmp_path / "killed")
    (tmp_path / "killed" / ".shard-00009.1.tmp").mkdir()  # what a kill in the middle of writing a shard leaves
    summary = ranks(2, _on_a_rank, tmp_path / "killed", pictures)[0]
    assert 0 < summary["embedded"] <= 200 - 2 * 16
    run(ONE, tmp_path / "whole", pictures)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_kill_at_the_very_start_and_at_the_very_end(tmp_path: Path) -> None:
    run(ONE, tmp_path / "whole", Pictures(40))
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / ".manifest.json.77.tmp").write_text("{")
    (begun / ".write-test-77").touch()
    run(ONE, begun, Pictures(40))
    assert contents(begun) == contents(tmp_path / "whole")
    last = begun / "class_names.npy"
    last.write_bytes(b"")
    assert run(ONE, begun, Pictures(40))["embedded"] == 0
    assert contents(begun) == contents(tmp_path / "whole")


def test_a_damaged_shard_is_named_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(ONE, tmp_path / "set", Pictures(40))
    sound = contents(tmp_path / "set")
    path = tmp_path / "set" / "shard-00001" / "embeddings.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x11")
    assert run(ONE, tmp_path / "set", Pictures(40))["embedded"] == 16
    assert "shard-00001 is damaged" in capsys.readouterr().err
    assert contents(tmp_path / "set") == sound


def test_what_changed_is_named(tmp_path: Path) -> None:
    run(ONE, tmp_path / "set", Pictures(40))
    changed: list[tuple[Pictures, dict[str, Any], str]] = [
        (Pictures(40), {"embedder": stand_in(1)}, "the model .contract_id. linear-0, and now it is linear-1"),
        (Pictures(41), {}, "the data"),
        (Pictures(40, names=("a", "z")), {}, "the data"),
        (Pictures(40), {"dtype": "float16"}, "dtype float32, and now it is float16"),
        (Pictures(40), {"flip": True}, "linear-0, and now it is linear-0.flip"),
        (Pictures(40), {"precision": "bf16"}, "precision fp32"),
    ]
    for pictures, more, text in changed:
        with pytest.raises(UsageError, match=text):
            run(ONE, tmp_path / "set", pictures, **more)
    assert run(ONE, tmp_path / "set", Pictures(40), batch_size=3)["embedded"] == 0


def _seen_by_rank(mesh: Mesh, folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        run(mesh, folder, Pictures(40 - 11 * mesh.rank))
    return str(caught.value)


def test_ranks_that_see_other_pictures_are_refused(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, _seen_by_rank, tmp_path / "set")
    assert first == second.replace("pictures of 29", "pictures of 40")
    assert "holds 40 images for rank 0 and 29 images for rank 1" in first
    assert not (tmp_path / "set").exists()


def _refused(mesh: Mesh, folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        run(mesh, folder, Pictures(5))
    return str(caught.value)


def test_a_folder_in_use_stops_every_rank(ranks: Any, tmp_path: Path) -> None:
    with sole_writer(tmp_path / "set"):
        assert all("being written by another" in text for text in ranks(2, _refused, tmp_path / "set"))


def test_embeddings_that_are_not_finite(tmp_path: Path) -> None:
    summary = run(ONE, tmp_path / "half", Pictures(30), embedder=stand_in(scale=4500), dtype="float16")
    made = EmbeddingSet(tmp_path / "half")
    assert 0 < summary["errors"] < 30
    assert np.isfinite(made.rows(0, 30)).all()
    assert set(made.errors.values()) == {"the model's embedding is not finite in float16"}
    assert not made.rows(0, 30)[list(made.errors)].any()


def test_wrong_requests(tmp_path: Path) -> None:
    pictures = Pictures(5)
    with pytest.raises(UsageError, match="int8"):
        run(ONE, tmp_path / "set", pictures, dtype="int8")
    with pytest.raises(UsageError, match="holds no images"):
        run(ONE, tmp_path / "set", Pictures(0))
    with pytest.raises(UsageError, match="cannot write into /proc/set"):
        run(ONE, Path("/proc/set"), pictures)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.jpg").touch()
    with pytest.raises(UsageError, match="holds no embedding set"):
        run(ONE, tmp_path / "mine", pictures, overwrite=True)
    assert (tmp_path / "mine" / "mine.jpg").exists()
    pictures.image_size = 20
    with pytest.raises(UsageError, match="20 pixels; stand-in takes 16"):
        run(ONE, tmp_path / "set", pictures)
    assert not (tmp_path / "set").exists()
    with pytest.raises(DataError, match="none of the 2 images could be embedded; the first: picture 0 is truncated"):
        run(ONE, tmp_path / "none", Pictures(2, bad=(0, 1)))


def test_shards_grow_with_the_data() -> None:
    rows = (0, 1000, 10**5, 10**6, 10**8)
    assert [default_shard_rows(count) for count in rows] == [256, 256, 2048, 16384, 32768]


def _photo(path: Path, shade: int) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 12), (shade, 0, 0)).save(path)


def test_photos_without_identities(tmp_path: Path) -> None:
    _photo(tmp_path / "photos" / "b.png", 100)
    _photo(tmp_path / "photos" / "2024" / "a.PNG", 200)
    (tmp_path / "photos" / "notes.txt").write_text("not an image")
    (tmp_path / "photos" / "z.jpg").write_bytes(b"\xff\xd8broken")
    photos = open_images(tmp_path / "photos", SIZE)
    assert [photos.key(i) for i in range(3)] == ["2024/a.PNG", "b.png", "z.jpg"]
    assert photos.labels.tolist() == [0, -1, -1]
    assert list(photos.class_names) == ["2024"]
    assert photos.image(0).shape == (3, SIZE, SIZE)
    assert photos.image(0)[0].float().mean() == 200
    summary = run(ONE, tmp_path / "set", photos)
    assert (summary["rows"], summary["errors"]) == (3, 1)
    assert "z.jpg" in summary["first_errors"][0]["error"]
    single = open_images(tmp_path / "photos" / "b.png", SIZE)
    assert (len(single), single.key(0)) == (1, "b.png")
    _photo(tmp_path / "people" / "ada" / "1.png", 5)
    people = open_images(tmp_path / "people", SIZE)
    assert (people.key(0), people.labels.tolist(), list(people.class_names)) == ("ada/1.png", [0], ["ada"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no picture"):
        open_images(tmp_path / "empty", SIZE)
    with pytest.raises(UsageError, match="nowhere"):
        open_images(tmp_path / "nowhere", SIZE)


def test_links_are_followed_beside_loose_photos_as_in_a_folder_per_identity(tmp_path: Path) -> None:
    """A link may be an identity; below it none is followed, so a cycle ends."""
    _photo(tmp_path / "store" / "ada" / "2024" / "1.png", 5)
    _photo(tmp_path / "store" / "ada" / "2.png", 6)
    (tmp_path / "people" / "loose.jpg").mkdir(parents=True)
    (tmp_path / "people" / "ada").symlink_to(tmp_path / "store" / "ada")
    (tmp_path / "store" / "ada" / "cycle.png").symlink_to(tmp_path / "store" / "ada")
    (tmp_path / "people" / ".hidden").symlink_to(tmp_path / "store")
    people = open_dataset(tmp_path / "people", image_size=SIZE)
    assert [people.key(i) for i in range(len(people))] == ["ada/2.png", "ada/2024/1.png"]
    _photo(tmp_path / "people" / "b.png", 7)
    beside = open_images(tmp_path / "people", SIZE)
    assert [beside.key(i) for i in range(len(beside))] == ["ada/2.png", "ada/2024/1.png", "b.png"]
    assert beside.labels.tolist() == [0, 0, -1]


def _interrupted() -> None:
    raise KeyboardInterrupt


def test_a_set_is_replaced_when_asked_and_once_the_new_one_is_complete(tmp_path: Path) -> None:
    folder, new = tmp_path / "set", tmp_path / ".set.new"
    run(ONE, folder, Pictures(60), overwrite=True)
    old = EmbeddingSet(folder, verify=True).contract_id
    other = stand_in(seed=1)
    with pytest.raises(UsageError, match="give --overwrite to start anew"):
        run(ONE, folder, Pictures(60), embedder=other)
    with pytest.raises(KeyboardInterrupt):
        run(ONE, folder, Pictures(60, strikes={40: _interrupted}), embedder=other, overwrite=True)
    assert EmbeddingSet(folder, verify=True).contract_id == old
    assert any(new.glob("shard-*"))
    assert run(ONE, folder, Pictures(60), embedder=other, overwrite=True)["embedded"] < 60  # it goes on
    assert EmbeddingSet(folder, verify=True).contract_id == other.contract_id
    new.mkdir()  # left by a call with other settings
    run(ONE, new, Pictures(20))
    assert run(ONE, folder, Pictures(60), overwrite=True)["embedded"] == 60
    assert EmbeddingSet(folder, verify=True).contract_id == old
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.live
def test_pictures_that_are_no_crops_are_counted(tmp_path: Path) -> None:
    class Odd(Pictures):
        def picture(self, index: int) -> torch.Tensor:
            return torch.zeros(3, SIZE, SIZE, dtype=torch.uint8) if index in (3, 41) else self.image(index)

    summary = run(ONE, tmp_path / "set", Odd(60, bad=(7,)), workers=1)
    assert (summary["warnings"], summary["errors"]) == (2, 1)
    assert summary["first_warnings"] == [
        {"key": f"picture {row}", "warning": "it is nearly uniform"} for row in (3, 41)
    ]
    assert run(ONE, tmp_path / "set", Odd(60, bad=(7,)))["warnings"] == 0  # nothing was embedded


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_decoding_process_that_dies(tmp_path: Path) -> None:
    killed = {9: lambda: os.kill(os.getpid(), signal.SIGKILL)}  # as the system does when memory runs out
    with pytest.raises(DataError, match="a decoding process was killed"):
        run(ONE, tmp_path / "set", Pictures(30, strikes=killed), workers=1)
    assert run(ONE, tmp_path / "set", Pictures(30))["rows"] == 30
