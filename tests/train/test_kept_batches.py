"""Steps that are not finite: the run stops, or goes on, as it was told, and keeps their batches to look at."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny_runs import each_step, run

from plsc.train.step_results import contact_sheet

Ranks = Any
DIVERGES: dict[str, Any] = {
    "optim.lr": 1e30,
    "optim.warmup_steps": 0,
    "optim.schedule": "constant",
    "data.batch_size": 6,
    "epochs": None,
    "steps": 6,
}


def outcome(mesh: Any, out: Path, changes: dict[str, Any]) -> Any:
    """The result of a run that diverges, or its error; and the images that this rank saw at each step."""
    from plsc.errors import PlscError

    seen = dict[int, Any]()

    def spying(take: Any, _: Any, group: Any, number: int, stop: int) -> Any:
        pairs = [pair for batch in group for pair in zip(batch.images, batch.labels, strict=True)]
        seen[number + 1] = [(image.numpy(), int(label)) for image, label in pairs]
        return take(group, number, stop)

    with each_step(spying):
        try:
            return run(mesh, out, {**DIVERGES, **changes}), seen
        except PlscError as error:
            return str(error), seen


@pytest.mark.slow
def test_batches_are_kept_as_each_rank_saw_them_the_first_ones_alone(tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(2, outcome, tmp_path, {"non_finite_kept": 2, "optim.accumulate": 2, "data.batch_size": 3})
    folders = sorted((tmp_path / "non_finite").iterdir())
    assert len(folders) == 2
    for folder in folders:
        step = int(folder.name.removeprefix("step-"))
        for rank, (result, seen) in enumerate(results):
            assert result["skipped_steps"] > 2
            listed = json.loads((folder / f"rank-{rank}.json").read_text())
            assert (listed["step"], listed["rank"], listed["lr"]) == (step, rank, 1e30)
            assert [image["label"] for image in listed["images"]] == [label for _, label in seen[step]]
            assert all(image["key"] for image in listed["images"])
            assert [image["pixels"][2] for image in listed["images"]] == [int(each.max()) for each, _ in seen[step]]
            sheet = np.asarray(Image.open(io.BytesIO((folder / f"rank-{rank}.png").read_bytes())))
            for place, (image, _) in enumerate(seen[step]):
                row, column = divmod(place, 3)
                cell = sheet[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
                assert np.array_equal(cell, image.transpose(1, 2, 0))
    log = (tmp_path / "train.log").read_text()
    assert log.count("was not finite (loss ") == 2


@pytest.mark.slow
def test_a_run_stops_where_it_is_told_to_and_goes_on_where_it_is_told_to(tmp_path: Path, ranks: Ranks) -> None:
    for message, _ in ranks(2, outcome, tmp_path, {"non_finite": "stop"}):
        assert "loss or gradients of step 2 were not finite" in message
        assert f"its batch is in {tmp_path}/non_finite;" in message
        assert (tmp_path / "non_finite/step-00000002/rank-1.png").is_file()
        assert 'non_finite = "skip"' in message


def test_the_search_for_a_loss_scale_is_no_failure(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"precision": "fp16", "optim.lr": 0.05, "non_finite": "stop", "data.batch_size": 12}
    ((result, _),) = ranks(1, outcome, tmp_path, changes)
    assert result["skipped_steps"] > 0
    assert not (tmp_path / "non_finite").exists()


@pytest.mark.parametrize("count", [1, 2, 5, 9, 10])
def test_a_contact_sheet_holds_every_image_once(count: int) -> None:
    images = torch.arange(1, count + 1, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, 3, 2, 4)
    sheet = contact_sheet(images)
    values, counts = sheet[0].unique(return_counts=True)
    assert {int(value): int(number) for value, number in zip(values, counts, strict=True) if value} == dict.fromkeys(
        range(1, count + 1), 8
    )
    assert sheet[0, ::2, ::4].flatten()[:count].tolist() == list(range(1, count + 1))
