"""Averages of weights: against the papers' recurrences in float64 in one process, and counted on the wire."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import Oracle, relative_error
from support.weights_alone import Weights, bytes_of_steps, draw
from torch import Tensor, nn

import plsc
from plsc.errors import UsageError
from plsc.features.averaging.config import AveragingConfig
from plsc.features.averaging.exchange import AVERAGINGS, model_averaging
from plsc.parallel import Mesh, data_parallel

Ranks = Any
SHAPES = {"conv": (8, 4, 3, 3), "matrix": (10, 12), "bias": (16,)}
MOMENTUM, DECAY, RATE = 0.9, 0.01, 0.1
EVERY_3 = AveragingConfig(period=3)
# name, options, ranks
WAYS = [
    ("local_sgd", EVERY_3, 2),
    ("local_sgd", EVERY_3, 3),
    ("post_local_sgd", AveragingConfig(period=2, start_step=3), 2),
    ("local_sgd", AveragingConfig(period=3, group_ranks=2), 4),
    ("hierarchical", AveragingConfig(period=4, group_ranks=2), 4),
    ("hierarchical", AveragingConfig(period=4, group_ranks=2, group_period=2), 4),
    ("diloco", EVERY_3, 2),
    ("diloco", AveragingConfig(period=2, group_ranks=2, outer_momentum=0.0), 4),
]


def distance(weight: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient is the weight less the input."""
    return (weight - target).square().sum() / 2


def targets(step: int, rank: int) -> dict[str, Tensor]:
    return draw(SHAPES, 1 + 10 * step + rank)


def train(
    mesh: Mesh, name: str, options: AveragingConfig, steps: int, bad_step: int = -1
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """This rank's weights after so many steps; the average of all ranks' weights; whether the layout has stayed."""
    module = Weights(SHAPES, distance)
    averaging = model_averaging(replace(options, name=name), module, mesh)
    net = data_parallel(module, mesh, averaging, 0.001)  # several buckets
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY)
    averaging.take_momentum(optimizer)
    for step in range(steps):
        averaging.begin(step)
        net({name: each.float() for name, each in targets(step, mesh.rank).items()}).backward()
        if step != bad_step:
            optimizer.step()
        averaging.commit_or_undo(torch.tensor(float(step == bad_step)))
        optimizer.zero_grad()
    own = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with averaging.averaged():
        mean = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    assert all(torch.equal(own[name], parameter) for name, parameter in module.named_parameters())
    return own, mean, module.conv.is_contiguous(memory_format=torch.channels_last)


def reference(name: str, options: AveragingConfig, world: int, steps: int, bad_step: int = -1) -> list[Any]:
    """All ranks' weights, each by SGD with momentum, in float64 in one process."""
    weights = [draw(SHAPES, 0) for _ in range(world)]
    momenta = [{key: torch.zeros(shape).double() for key, shape in SHAPES.items()} for _ in range(world)]
    common, outer = draw(SHAPES, 0), {key: torch.zeros(shape).double() for key, shape in SHAPES.items()}
    everyone, start, size = list(range(world)), start_of(name, options), options.group_ranks
    groups = [everyone[first : first + size] for first in range(0, world, size)]
    for step in range(steps):
        gradients = [{key: weights[r][key] - t for key, t in targets(step, r).items()} for r in everyone]
        if step < start:
            gradients = averaged(gradients, [everyone])
        elif options.group_period == 1:
            gradients = averaged(gradients, groups)
        for rank in everyone if step != bad_step else []:
            for key, weight in weights[rank].items():
                momenta[rank][key] = MOMENTUM * momenta[rank][key] + gradients[rank][key] + DECAY * weight
                weights[rank][key] = weight - RATE * momenta[rank][key]
        done = step + 1
        if done > start and (done - start) % options.period == 0:
            weights = averaged(weights, [everyone])
            if name == "diloco":
                for key in SHAPES:
                    change = common[key] - weights[0][key]
                    outer[key] = options.outer_momentum * outer[key] + change
                    common[key] = common[key] - options.outer_lr * (change + options.outer_momentum * outer[key])
                weights = [dict(common) for _ in everyone]
        elif options.group_period > 1 and done % options.group_period == 0:
            weights = averaged(weights, groups)
    return weights


def start_of(name: str, options: AveragingConfig) -> int:
    return options.start_step if name == "post_local_sgd" else 0


def averaged(given: list[dict[str, Tensor]], groups: list[list[int]]) -> list[dict[str, Tensor]]:
    means = {
        rank: {key: torch.stack([given[peer][key] for peer in group]).mean(0) for key in SHAPES}
        for group in groups
        for rank in group
    }
    return [means[rank] for rank in range(len(given))]


@pytest.mark.parametrize(("name", "options", "world"), WAYS)
@pytest.mark.parametrize(("steps", "bad_step"), [(12, -1), (11, 5)])
def test_ranks_step_as_the_recurrence_says(
    name: str, options: AveragingConfig, world: int, steps: int, bad_step: int, ranks: Ranks
) -> None:
    expected = reference(name, options, world, steps, bad_step)
    found = ranks(world, train, name, options, steps, bad_step)
    mean = averaged(expected, [list(range(world))])[0]
    for rank, (own, average, keeps_layout) in enumerate(found):
        assert keeps_layout
        for key in SHAPES:
            torch.testing.assert_close(own[key].double(), expected[rank][key], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(average[key].double(), mean[key], rtol=1e-5, atol=1e-5)
            assert torch.equal(average[key], found[0][1][key])
    is_averaged = (steps - start_of(name, options)) % options.period == 0
    assert all(torch.equal(own["conv"], found[0][0]["conv"]) for own, _, _ in found) == is_averaged


def embedding_gradient(mesh: Mesh, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The gradient of this rank's backbone weights under local SGD, and the oracle's by its own samples' mean loss."""
    generator = torch.Generator().manual_seed(3)
    table, start = (torch.randn(shape, generator=generator).double() for shape in ((20, 6), (6, 9)))
    images = torch.randn(sum(sizes), 9, generator=generator).double().split(sizes)[mesh.rank]
    labels = torch.randint(20, (sum(sizes),), generator=generator).split(sizes)[mesh.rank]
    backbone = nn.Linear(9, 6, bias=False, dtype=torch.float64)
    head = plsc.ShardedHead(6, 20, mesh, plsc.ArcFace(), weight_dtype=torch.float64)
    with torch.no_grad():
        backbone.weight.copy_(start)
        head.weight.copy_(table[slice(*head.class_range)])
    averaging = model_averaging(replace(EVERY_3, name="local_sgd"), backbone, mesh)
    net = data_parallel(backbone, mesh, averaging)
    averaging.begin(0)
    head(net(images), labels).backward()
    weight = start.clone().requires_grad_()
    Oracle("arcface", parameters={"m": 0.5}).loss(images @ weight.t(), labels, table).backward()
    return backbone.weight.grad, weight.grad


@pytest.mark.parametrize("sizes", [[4, 4], [5, 3]])
def test_a_ranks_gradient_is_that_of_its_own_mean_loss(sizes: list[int], ranks: Ranks) -> None:
    """With unequal batches it is weighted by them: each sample counts once in the average over the ranks."""
    for rank, (found, own_mean) in enumerate(ranks(2, embedding_gradient, sizes)):
        assert relative_error(found, own_mean * sizes[rank] * 2 / sum(sizes)) < 1e-12


def count_bytes(mesh: Mesh, name: str, options: AveragingConfig) -> list[tuple[int, int]]:
    """(bytes given to collectives, bytes foretold) of each of eight steps."""
    module = Weights(SHAPES, distance)
    averaging = model_averaging(replace(options, name=name), module, mesh)
    net = data_parallel(module, mesh, averaging, 0.001)
    inputs = (targets(step, mesh.rank) for step in range(8))
    return bytes_of_steps(net, averaging, inputs, (dist, "all_reduce"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local_sgd", EVERY_3),
        ("post_local_sgd", AveragingConfig(period=2, start_step=3)),
        ("diloco", AveragingConfig(period=4)),
    ],
)
def test_bytes_on_the_wire_are_those_foretold(name: str, options: AveragingConfig, ranks: Ranks) -> None:
    whole = 4 * sum(weight.numel() for weight in draw(SHAPES, 0).values())
    for counts in ranks(2, count_bytes, name, options):
        assert all(counted == foretold for counted, foretold in counts)
        due = [step + 1 - start_of(name, options) for step in range(8)]
        expected = [whole if d <= 0 or d % options.period == 0 else 0 for d in due]
        assert [counted for counted, _ in counts] == expected


def test_with_one_rank_there_is_no_average() -> None:
    alone = Mesh(0, 1, 0, torch.device("cpu"))
    plain = train(alone, "none", EVERY_3, 6)[0]
    for name in AVERAGINGS:
        assert all(torch.equal(weight, plain[key]) for key, weight in train(alone, name, EVERY_3, 6)[0].items())


def refused_groups(mesh: Mesh) -> str:
    with pytest.raises(UsageError) as caught:
        model_averaging(AveragingConfig("local_sgd", group_ranks=3), Weights(SHAPES, distance), mesh)
    return str(caught.value)


def test_odd_groups_are_refused(ranks: Ranks) -> None:
    for message in ranks(2, refused_groups):
        assert "averaging.group_ranks = 3 does not divide the number of ranks, 2; give 1, 2" in message
