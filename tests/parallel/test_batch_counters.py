"""A pass that is counted for all batch normalisations together leaves what torch's own counting does."""

import copy

import pytest
import torch
from torch import Tensor, nn

from plsc.models import create
from plsc.models.recompute import recompute_in_backward
from plsc.parallel.strategies.base import BatchCounters


def passes(model: nn.Module, *, together: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Two training passes; the state, and the gradients."""
    counters, images = BatchCounters(model), torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for batch in images.split(2):
        if together:
            with counters.together():
                embeddings = model(batch)
        else:
            embeddings = model(batch)
        embeddings.square().sum().backward()
    return model.state_dict(), [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["resnet8", "resnet7", "iresnet18", "mobilefacenet"])
def test_state_and_gradients_are_the_same(name: str, recomputed: bool) -> None:
    torch.manual_seed(0)
    model = create(name, embedding_dim=16, image_size=32)
    if recomputed:
        recompute_in_backward(model.segments())
    (state, gradients), (expected, others) = (
        passes(copy.deepcopy(model), together=together) for together in (True, False)
    )
    counts = [value for key, value in expected.items() if key.endswith("num_batches_tracked")]
    assert counts
    assert all(count == 2 for count in counts)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


class Plain(nn.Module):
    """A layer that keeps its own count, one that reads it, and one in evaluation; it may fail."""

    norms_run_once = True

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.read, self.frozen = nn.BatchNorm1d(2), nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2)
        self.frozen.eval()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 2) -> (B, 2)."""
        return self.frozen(self.read(self.counted(x)))  # type: ignore[no-any-return]


def counts(model: Plain) -> list[int]:
    return [int(norm.num_batches_tracked) for norm in (model.counted, model.read, model.frozen)]  # type: ignore[arg-type]


def test_layers_that_read_their_counter_or_do_not_train_keep_it() -> None:
    model = Plain()
    with BatchCounters(model).together():
        model(torch.randn(4, 2))
    assert counts(model) == [1, 1, 0]


def test_a_pass_that_fails_does_not_count() -> None:
    model = Plain()
    with pytest.raises(ValueError, match="expected"), BatchCounters(model).together():
        model(torch.randn(4, 2, 2, 2, 2))
    assert counts(model) == [0, 0, 0]


def test_other_backbones_count_by_themselves() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    with BatchCounters(model).together():
        model[0](torch.randn(4, 2))
        model[0](torch.randn(4, 2))
    assert model[0].num_batches_tracked == 2
