"""Running statistics that each rank moves by its own images are one model's wherever they are used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import open_trainer, stored
from torch import Tensor

from plsc.train.components import MovingAverage
from plsc.train.failures import StopRequest
from plsc.train.metrics import read_metrics

Ranks = Any
SET = "avatars:6x3@100"
CHANGES: dict[str, Any] = {
    "backbone": "plain",
    "epochs": None,
    "steps": 8,
    "data.batch_size": 6,
    "ema_decay": 0.3,
    "eval.sets": [SET],
    "eval.every_steps": 4,
    "checkpoint.every_steps": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"stage": [{"from_step": 5, "frozen": ["layers.1.*"]}]},
    "zero1": {"parallel.strategy": "zero1"},
    "fsdp": {"parallel.strategy": "fsdp"},
}


def statistics(parts: Any) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in parts.items() if "running" in name}


def trained(mesh: Any, out: Path, changes: dict[str, Any]) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]:
    """Train; this rank's statistics at first, after each step and at the end, the average at the end, and what the
    file that was shipped is found to do.
    """
    from plsc.embedding.embedder import open_embedder
    from plsc.evaluation import evaluate

    followed: list[dict[str, Tensor]] = []
    update = MovingAverage.update

    def updating(self: MovingAverage, parts: Any, verdict: Any) -> None:
        followed.append(statistics(parts))
        update(self, parts, verdict)

    with open_trainer(mesh, out, {**CHANGES, **changes}, None) as trainer:
        strategy, average = trainer.components.strategy, trainer.components.average
        followed.append(statistics(average.values))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MovingAverage, "update", updating)
            trainer.run(StopRequest())
    followed.append(statistics(strategy.parts()))
    found = evaluate(open_embedder(out, device=mesh.device), [SET], image_size=32, mesh=mesh, quiet=True)[SET]
    return followed, {name: value.clone() for name, value in average.values.items()}, found


@pytest.mark.feature("frozen")
@pytest.mark.first_ring("ddp")
@pytest.mark.parametrize("case", CASES)
def test_the_moving_average_is_one_model_on_all_ranks(case: str, tmp_path: Path, ranks: Ranks) -> None:
    (own, first, shipped), (theirs, second, _) = ranks(2, trained, tmp_path, CASES[case])
    model, saved = load_file(tmp_path / "model.safetensors"), ranks(1, stored, tmp_path, 8, "average.")[0]
    assert sum("running" in name for name in first) == 4
    for name, averaged in first.items():
        if "running" not in name:  # of weights, fsdp's ranks have parts
            assert case == "fsdp" or torch.equal(averaged, model[name]), name
            continue
        assert not torch.equal(own[1][name], theirs[1][name]), name  # each rank has seen its own images
        for same in (second[name], model[name], saved[name]):
            assert torch.equal(averaged, same), name
        assert torch.equal(own[-1][name], theirs[-1][name]), name
        is_frozen = case == "ddp" and name.startswith("layers.1.")
        assert torch.equal(own[6][name], theirs[6][name]) == is_frozen, name
        expected = own[0][name].double()
        for number in range(1, 9):
            mean = (own[number][name].double() + theirs[number][name].double()) / 2
            expected += (1 - min(0.3, number / (9 + number))) * (mean - expected)
        torch.testing.assert_close(averaged.double(), expected, rtol=1e-5, atol=1e-7)
    said = [line for line in read_metrics(tmp_path) if "eval" in line][-1]["eval"][SET]
    for figure in ("accuracy", "auc", "rank1"):
        assert said[figure] == pytest.approx(shipped[figure], abs=1e-6)
