"""Updates that the device skips and the host hears of later, as on a GPU: here the CPU obeys the same flag."""

from typing import Any

import pytest
import torch
from support.head_problems import LOW, everything, same

import plsc
from plsc.optim import GradScaler
from plsc.optim.verdict import UpdateCounter, Verdict, step_unless

OPTIMIZERS = {
    "sgd": lambda head: plsc.HeadSGD(head, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda head: plsc.HeadAdamW(head, lr=0.01),
}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have verdicts obeyed by the flag and read when they are asked for, as on a GPU."""
    decide_late(monkeypatch)


def decide_late(monkeypatch: Any) -> None:
    monkeypatch.setattr(Verdict, "host_decides", staticmethod(lambda device: False))


def batch(seed: int, dim: int = 16, classes: int = 53) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, dim, generator=generator), torch.randint(classes, (6,), generator=generator)


def trained(name: str, skipped: tuple[int, ...], **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """Five steps, some of which a not finite batch takes the place of; the optimizer, and everything it updates."""
    head = plsc.ShardedHead(16, 53, **options)
    optimizer = OPTIMIZERS[name](head)
    for number in range(5):
        x, y = batch(number)
        (head(x * float("nan") if number in skipped else x, y)).backward()
        optimizer.step()
    return optimizer, everything(head, optimizer)


@pytest.mark.parametrize("placement", ["device", "mmap"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("options", [{}, LOW, {"sample_rate": 0.5, "centers": 2}], ids=["f32", "bf16+int8", "sampled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_late_verdict_skips_as_an_early_one_does(name, options, backend, placement, monkeypatch, tmp_path):
    options = {**options, "backend": backend, "placement": "device" if placement == "device" else f"mmap:{tmp_path}/t"}
    early, expected = trained(name, (0, 2, 3), **options)
    decide_late(monkeypatch)
    optimizer, found = trained(name, (0, 2, 3), **options)
    assert same(found, expected)
    assert (optimizer.steps, optimizer.skipped) == (early.steps, early.skipped) == (2, False)


def interpreted(name: str, skipped: tuple[int, ...], late: bool, **options: Any) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patches:
        if late:
            decide_late(patches)
        return trained(name, skipped, **options)[1]


@pytest.mark.parametrize("options", [{}, LOW], ids=["f32", "bf16+int8"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernels_obey_the_flag(name, options, interpreter):
    early, late = (interpreter(interpreted, name, (0, 2), late, **options) for late in (False, True))
    assert same(early, late)


class Asked(Verdict):
    """A verdict that records when it is read."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(numbers)
        self.times_read = 0

    def numbers(self) -> list[float]:
        self.times_read += 1
        return super().numbers()


def test_a_step_reads_the_verdict_before_it_and_not_its_own(late):
    head = plsc.ShardedHead(16, 53)
    optimizer = plsc.HeadAdamW(head, lr=0.01)
    verdicts = [Asked(torch.tensor([flag, 7.0])) for flag in (0.0, 1.0, 0.0)]
    read = []
    for number, verdict in enumerate(verdicts):
        head(*batch(number)).backward()
        optimizer.step_unless(verdict)
        read.append([each.times_read for each in verdicts])
    assert read == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert (optimizer.steps, optimizer.skipped) == (2, False)
    assert verdicts[0].numbers() == [0.0, 7.0]


def test_a_counter_counts_what_went_through():
    counter = UpdateCounter()
    numbers = [counter.begin(Verdict(torch.tensor([flag]))) for flag in (1.0, 0.0, 1.0, float("nan"), 0.0)]
    assert numbers == [1, 1, 2, 2, 2]
    assert counter.count == 2
    counter.count = 9
    assert counter.begin(Verdict(torch.zeros(1))) == 10


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [True, False])
def test_torchs_optimizers_keep_every_bit(optimizer, fused, late):
    net = torch.nn.Linear(5, 3)
    stepper = optimizer(net.parameters(), lr=0.1, fused=fused)
    for flag in (0.0, 1.0, 0.0):
        net.zero_grad()
        net(torch.ones(2, 5)).sum().mul(float("nan") if flag else 1.0).backward()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        step_unless(stepper, Verdict(torch.tensor([flag])))
        same = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert same == bool(flag)
    assert not hasattr(stepper, "found_inf")
    steps = {float(state["step"]) for state in stepper.state.values() if "step" in state}
    assert steps <= {2.0}


@pytest.mark.parametrize("overflow", ["backbone", "head", ""])
def test_the_scaler_steps_both_or_neither(overflow, late):
    head = plsc.ShardedHead(16, 53)
    net = torch.nn.Linear(16, 16)
    optimizers = torch.optim.SGD(net.parameters(), lr=0.1, fused=True), plsc.HeadSGD(head, lr=0.1)
    scaler = GradScaler(head.mesh, init_scale=1024.0)
    before = net.weight.detach().clone(), head.weight.detach().clone()
    x, y = batch(0)
    scaler.scale(head(net(x), y) * (float("inf") if overflow == "head" else 1.0)).backward()
    if overflow == "backbone":
        net.weight.grad[0, 0] = float("inf")
    scaler.unscale_all(*optimizers)
    verdict = scaler.step_both(*optimizers)
    scaler.update()
    assert verdict.skipped == bool(overflow)
    assert scaler.get_scale() == (512.0 if overflow else 1024.0)
    assert torch.equal(net.weight, before[0]) == torch.equal(head.weight, before[1]) == bool(overflow)
