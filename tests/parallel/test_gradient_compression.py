"""Communication hooks: against the papers' recurrences in float64 in one process, and counted on the wire."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.weights_alone import Weights, bytes_of_steps, draw
from torch import Tensor, nn

from plsc.parallel import Mesh, data_parallel, gradient_compression
from plsc.parallel.gradient_compression import ExchangeOptions, GradientExchange, gradient_exchange

Ranks = Any
WORLD = 2
SHAPES = {"conv": (16, 8, 3, 3), "matrix": (30, 40), "bias": (16,)}
MOMENTUM, DECAY, RATE = 0.9, 0.01, 0.1
DGC = ExchangeOptions(dgc_sparsity=0.9, dgc_dense_below=100)


def product(weight: Tensor, gradient: Tensor) -> Tensor:
    """A loss whose gradient is the input."""
    return (weight * gradient).sum()


def gradient_of(step: int, rank: int) -> dict[str, Tensor]:
    return draw(SHAPES, 1 + 10 * step + rank)


def wrap(mesh: Mesh, hook: str, options: ExchangeOptions) -> tuple[Weights, nn.Module, GradientExchange, Any]:
    module = Weights(SHAPES, product)
    exchange = gradient_exchange(hook, module, mesh, options)
    net = data_parallel(module, mesh, exchange, 0.004)  # several buckets
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY)
    exchange.take_momentum(optimizer)
    return module, net, exchange, optimizer


def train(mesh: Mesh, hook: str, options: ExchangeOptions, steps: int = 6, bad_step: int = -1) -> dict[str, Tensor]:
    """Weights after steps with :func:`gradient_of`; a step of which a rank's gradient is not finite is skipped."""
    module, net, exchange, optimizer = wrap(mesh, hook, options)
    for step in range(steps):
        given = {name: each.float() for name, each in gradient_of(step, mesh.rank).items()}
        if step == bad_step and mesh.rank == 0:
            given["matrix"][3, 4] = torch.nan
        exchange.begin(step)
        net(given).backward()
        finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())
        assert finite == (step != bad_step)  # on every rank
        exchange.commit_or_undo(torch.tensor(float(not finite)))
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def plain(steps: int = 6, skipped: int = -1) -> dict[str, Tensor]:
    """SGD with momentum on the mean gradient, in float64."""
    weights = draw(SHAPES, 0)
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in (step for step in range(steps) if step != skipped):
        for name, weight in weights.items():
            mean = sum(gradient_of(step, rank)[name] for rank in range(WORLD)) / WORLD
            momenta[name] = MOMENTUM * momenta[name] + mean + DECAY * weight
            weights[name] = weight - RATE * momenta[name]
    return weights


def dgc(options: ExchangeOptions, sparsities: list[float], skipped: int = -1) -> dict[str, Tensor]:
    """Algorithm 4 of Lin et al. in float64: all ranks in one process, a mask per tensor by sorting."""
    weights, dense = draw(SHAPES, 0), plain(len(sparsities), skipped)
    for name in ("conv", "matrix"):
        u, v = (torch.zeros(WORLD, *SHAPES[name], dtype=torch.float64) for _ in range(2))
        for step in (step for step in range(len(sparsities)) if step != skipped):
            total = torch.zeros(SHAPES[name], dtype=torch.float64)
            for rank in range(WORLD):
                gradient = gradient_of(step, rank)[name]
                if options.clip_norm:
                    gradient = gradient * min(1.0, options.clip_norm / WORLD**0.5 / float(gradient.norm()))
                u[rank] = MOMENTUM * u[rank] + gradient + DECAY * weights[name]
                v[rank] += u[rank]
                count = round(v[rank].numel() * (1 - sparsities[step]))
                least = v[rank].abs().flatten().sort(descending=True).values[count - 1]
                mask = v[rank].abs() >= least
                total += v[rank] * mask
                v[rank][mask] = 0
                u[rank][mask] = 0
            weights[name] = weights[name] - RATE * total / WORLD
    return {**dense, "conv": weights["conv"], "matrix": weights["matrix"]}


def assert_weights(found: list[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(found[0][name].double(), weight, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(rank[name], found[0][name]) for rank in found), f"the ranks' {name} differ"


@pytest.mark.parametrize("hook", ["none", "dgc"])
def test_at_sparsity_0_the_steps_are_those_of_momentum_sgd(hook: str, ranks: Ranks) -> None:
    options = ExchangeOptions(dgc_sparsity=0.0, dgc_dense_below=100)
    assert_weights(ranks(WORLD, train, hook, options), plain(), 1e-5)


@pytest.mark.parametrize("clip_norm", [0.0, 3.0])
def test_largest_elements_are_sent_and_the_rest_is_kept(clip_norm: float, ranks: Ranks) -> None:
    options = ExchangeOptions(dgc_sparsity=0.9, dgc_dense_below=100, clip_norm=clip_norm)
    assert_weights(ranks(WORLD, train, "dgc", options), dgc(options, [0.9] * 6), 1e-5)


def test_the_sparsity_rises_in_four_stages(ranks: Ranks) -> None:
    options = ExchangeOptions(dgc_sparsity=0.995, dgc_dense_below=100, dgc_warmup_steps=8)
    stages = [0.75, 0.75, 0.9375, 0.9375, 0.984375, 0.984375, 0.99609375, 0.99609375, 0.995, 0.995]
    expected = dgc(options, [min(stage, 0.995) for stage in stages])
    assert_weights(ranks(WORLD, train, "dgc", options, len(stages)), expected, 1e-5)


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_a_skipped_step_leaves_momentum_and_residual_as_they_were(sparsity: float, ranks: Ranks) -> None:
    options = ExchangeOptions(dgc_sparsity=sparsity, dgc_dense_below=100)
    expected = dgc(options, [0.9] * 6, skipped=2) if sparsity else plain(skipped=2)
    assert_weights(ranks(WORLD, train, "dgc", options, bad_step=2), expected, 1e-5)


@pytest.mark.parametrize(("hook", "tolerance"), [("bf16", 4e-2), ("fp16", 4e-3)])
def test_half_precision_rounds_gradients_alone(hook: str, tolerance: float, ranks: Ranks) -> None:
    assert_weights(ranks(WORLD, train, hook, DGC), plain(), tolerance)


def approach(mesh: Mesh, hook: str, options: ExchangeOptions, bad_step: int = -1) -> list[float]:
    """Squared distance to a target at the first and the last of 60 steps; each rank's gradient is off by a constant."""
    module, net, exchange, optimizer = wrap(mesh, hook, options)
    target, side = draw(SHAPES, 77), draw(SHAPES, 78)
    optimizer.param_groups[0].update(lr=0.05, momentum=0.0, weight_decay=0.0)
    distances = []
    for step in range(60):
        gaps = {name: (p.detach() - target[name]).float() for name, p in module.named_parameters()}
        distances.append(sum(float(gap.square().sum()) for gap in gaps.values()))
        exchange.begin(step)
        off = (2 * mesh.rank - 1) * (torch.inf if step == bad_step else 1.0)
        net({name: gap + off * side[name].float() for name, gap in gaps.items()}).backward()
        exchange.commit_or_undo(torch.tensor(float(step == bad_step)))
        if step != bad_step:
            optimizer.step()
        optimizer.zero_grad()
    return [distances[0], distances[-1]]


@pytest.mark.slow
def test_powersgd_converges_by_its_error_feedback(ranks: Ranks) -> None:
    options = ExchangeOptions(powersgd_rank=2, powersgd_start_step=2)
    for bad_step in (-1, 30):
        first, last = ranks(WORLD, approach, "powersgd", options, bad_step)[0]
        assert last < 0.05 * first


def gradients_of_rank_1(mesh: Mesh, rank: int) -> float:
    """The largest error of PowerSGD's gradients, to their norm, where those of all ranks are u·vᵀ."""
    module, net, exchange, _ = wrap(mesh, "powersgd", ExchangeOptions(powersgd_rank=rank, powersgd_start_step=2))
    given = {name: draw({name: (shape[0], 1)}, 5)[name] for name, shape in SHAPES.items() if len(shape) > 1}
    given = {name: column @ draw({name: (1, math.prod(SHAPES[name][1:]))}, 6)[name] for name, column in given.items()}
    inputs = {name: value.reshape(SHAPES[name]).float() for name, value in given.items()}
    errors = []
    for step in range(6):
        exchange.begin(step)
        net({**inputs, "bias": torch.ones(SHAPES["bias"])}).backward()
        exchange.commit_or_undo(torch.tensor(0.0))
        for name, weight in module.named_parameters():
            if name in inputs and weight.grad is not None:
                errors.append(float((weight.grad - inputs[name]).norm() / inputs[name].norm()))
        module.zero_grad()
    assert len(errors) == 12
    return max(errors)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_powersgd_of_any_rank_sends_a_gradient_of_rank_1_as_it_is(rank: int, ranks: Ranks) -> None:
    assert max(ranks(WORLD, gradients_of_rank_1, rank)) < 1e-4


def count_bytes(mesh: Mesh, hook: str, options: ExchangeOptions) -> list[tuple[int, int]]:
    """(bytes counted, bytes foretold) of each of four steps."""
    _, net, exchange, _ = wrap(mesh, hook, options)
    inputs = (gradient_of(step, mesh.rank) for step in range(4))
    return bytes_of_steps(net, exchange, inputs, (dist, "all_reduce"), (gradient_compression, "all_gather_equal"))


@pytest.mark.parametrize("hook", ["bf16", "fp16", "powersgd", "dgc"])
def test_bytes_on_the_wire_are_those_foretold(hook: str, ranks: Ranks) -> None:
    options = ExchangeOptions(powersgd_start_step=2, dgc_sparsity=0.99, dgc_dense_below=100, dgc_warmup_steps=2)
    for counts in ranks(WORLD, count_bytes, hook, options):
        assert all(counted == foretold for counted, foretold in counts)


def sent_shares(mesh: Mesh) -> dict[str, float]:
    from plsc.models import create

    model = create("iresnet18", embedding_dim=512)
    whole = sum(4 * p.numel() for p in model.parameters())
    exchanges = {hook: gradient_exchange(hook, model, mesh) for hook in gradient_compression.HOOKS}
    return {hook: each.sent_bytes(model.parameters(), 10**6) / whole for hook, each in exchanges.items()}


def test_dgc_sends_at_most_a_hundredth_and_half_precision_half(ranks: Ranks) -> None:
    shares = ranks(WORLD, sent_shares)[0]
    assert shares["none"] == 1
    assert shares["bf16"] == shares["fp16"] == 0.5
    assert shares["dgc"] <= 0.01
    assert shares["powersgd"] <= 0.01


def test_with_one_rank_a_hook_changes_nothing() -> None:
    alone = Mesh(0, 1, 0, torch.device("cpu"))
    whole = train(alone, "none", DGC)
    for hook in gradient_compression.HOOKS:
        found = train(alone, hook, DGC)
        assert all(torch.equal(found[name], weight) for name, weight in whole.items())
