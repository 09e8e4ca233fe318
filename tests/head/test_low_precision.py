"""Stochastic rounding, counter-based bits and int8 rows."""

import pytest
import torch

import plsc
from plsc.head.low_precision import RoundingBits, quantize_rows, random_bits, round_to_bfloat16


def bits(seed: int = 1, step: int = 1, rows: int = 256, columns: int = 256) -> torch.Tensor:
    return random_bits(seed, step, torch.arange(rows), columns)


def test_bits_depend_on_seed_step_row_and_column_alone():
    whole = bits()
    assert torch.equal(whole[40:90], random_bits(1, 1, torch.arange(40, 90), 256))
    assert torch.equal(whole[:, :64], random_bits(1, 1, torch.arange(256), 64))
    far = torch.tensor([3, 2**31 + 3, 2**40 + 3])
    assert torch.unique(random_bits(1, 1, far, 256), dim=0).shape[0] == 3
    for other in (bits(seed=2), bits(step=2)):
        assert (whole == other).float().mean() < 1e-3


def test_bits_are_even_and_independent():
    sample = torch.stack([bits(step=s, rows=64, columns=64) for s in range(16)]).flatten()
    ones = torch.stack([(sample >> k) & 1 for k in range(32)]).double()
    assert (ones.mean(1) - 0.5).abs().max() < 0.01
    correlation = torch.corrcoef(ones) - torch.eye(32, dtype=torch.float64)
    assert correlation.abs().max() < 0.025
    neighbours = bits()
    same_column = ((neighbours[1:] ^ neighbours[:-1]) & 1).double().mean()
    same_row = ((neighbours[:, 1:] ^ neighbours[:, :-1]) & 1).double().mean()
    assert abs(same_column - 0.5) < 0.01
    assert abs(same_row - 0.5) < 0.01


def test_rounding_is_unbiased_and_moves_by_one_unit_at_most():
    values = torch.randn(64, 64)
    rounded = torch.stack(
        [
            round_to_bfloat16(values, RoundingBits.draw(0, step, torch.arange(64), 64).low).double()
            for step in range(2000)
        ]
    )
    unit = values.abs().double() / 128  # of bfloat16 at this magnitude, at most
    assert ((rounded - values.double()).abs() <= unit).all()
    bias = (rounded.mean(0) - values.double()) / unit
    assert bias.abs().max() < 6 * 0.5 / 2000**0.5  # six deviations
    exact = values.bfloat16().float()
    assert torch.equal(round_to_bfloat16(exact, torch.full_like(exact, 65535, dtype=torch.int32)).float(), exact)


def test_int8_rows_are_unbiased():
    values = torch.randn(32, 128) * torch.logspace(-6, 3, 32)[:, None]
    values[5] = 0
    total = torch.zeros(32, 128, dtype=torch.float64)
    for step in range(1000):
        stored, scale = quantize_rows(values, RoundingBits.draw(0, step, torch.arange(32), 128).high)
        total += stored.double() * scale[:, None]
    unit = (values.abs().amax(1, keepdim=True) / 127).double().clamp(min=1e-30)
    assert ((total / 1000 - values.double()) / unit).abs().max() < 6 * 0.5 / 1000**0.5
    assert total[5].abs().max() == 0


def train(rounding: str, steps: int = 120, **dtypes: torch.dtype) -> plsc.ShardedHead:
    torch.manual_seed(0)
    head = plsc.ShardedHead(32, 50, margin=plsc.CosFace(s=16.0, m=0.1), **dtypes)
    with torch.no_grad():
        head.weight.copy_(torch.randn(50, 32, generator=torch.Generator().manual_seed(1)) * 3)
    optimizer = plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=0.05, rounding=rounding)
    x = torch.randn(200, 32)
    for _ in range(steps):
        head(x, torch.arange(200) % 50).backward()
        optimizer.step()
    return head


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nearest_rounding_does_not_hold_the_weight_norm_and_stochastic_rounding_does():
    """Decay shrinks a row by lr·λ = 0.1% a step, less than half a unit of bfloat16: nearest rounding drops it."""
    low = {"weight_dtype": torch.bfloat16, "momentum_dtype": None}

    def decayed(rounding: str, **dtypes: torch.dtype | None) -> float:
        head = plsc.ShardedHead(32, 50, margin=plsc.CosFace(s=1.0, m=0.0), **dtypes)
        with torch.no_grad():
            head.weight.fill_(3.0)
        optimizer = plsc.HeadSGD(head, lr=0.01, weight_decay=0.1, rounding=rounding)
        for _ in range(200):
            head(torch.ones(4, 32), torch.arange(4)).backward()  # parallel to the rows: no gradient but decay's
            optimizer.step()
        return head.mean_norm()

    exact = decayed("nearest", weight_dtype=torch.float32, momentum_dtype=None)
    assert exact == pytest.approx(3 * 32**0.5 * 0.999**200, rel=1e-3)
    assert decayed("stochastic", **low) == pytest.approx(exact, rel=0.01)
    assert decayed("nearest", **low) > 1.15 * exact


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [torch.float32, torch.bfloat16, torch.int8])
def test_low_precision_training_stays_near_float32(momentum):
    exact = train("stochastic").weight.detach()
    low = train("stochastic", weight_dtype=torch.bfloat16, momentum_dtype=momentum).weight.detach().float()
    assert torch.nn.functional.cosine_similarity(exact, low).min() > 0.995
    assert low.norm(dim=1).mean() == pytest.approx(exact.norm(dim=1).mean().item(), rel=0.02)


def test_state_takes_1544_bytes_per_class_at_512():
    head = plsc.ShardedHead(512, 1000, weight_dtype=torch.bfloat16, momentum_dtype=torch.int8)
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    tensors = [
        head.weight.detach(),
        head.inverse_norms(),
        *[s.blocks[0].local for s in optimizer.sharded_state().values()],
    ]
    assert sum(t.nbytes for t in tensors) == 1544 * 1000
