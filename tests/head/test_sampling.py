"""Sampled softmax: which classes take part, what it computes, and what it leaves alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Oracle, relative_error

import plsc
from plsc.head.sampling import ClassSampler, sample_classes, sample_with_fixed_size


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 40), st.integers(0, 1000))
def test_sample_is_sorted_distinct_holds_positives_and_has_the_size_asked(classes, rate, positives, seed):
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randint(classes, (positives,), generator=generator)
    sample = sample_classes(classes, wanted, rate, generator)
    assert torch.equal(sample, sample.unique())
    assert torch.isin(wanted, sample).all()
    assert len(sample) == max(round(rate * classes), len(wanted.unique()))
    assert len(sample) == 0 or (sample.min() >= 0 and sample.max() < classes)


def fixed(classes, positives, rate, generator):
    return sample_with_fixed_size(classes, positives, round(rate * classes), generator)


@pytest.mark.parametrize("draw", [sample_classes, fixed])
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_negatives_are_uniform(rate, draw):
    generator = torch.Generator().manual_seed(0)
    positives = torch.tensor([3, 3, 7])
    counts = torch.zeros(100)
    for _ in range(2000):
        counts[draw(100, positives, rate, generator)] += 1
    assert counts[3] == counts[7] == 2000
    rest = torch.cat([counts[:3], counts[4:7], counts[8:]]) / 2000
    expected = (rate * 100 - 2) / 98
    assert (rest - expected).abs().max() < 5 * (expected * (1 - expected) / 2000) ** 0.5


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 300), st.integers(0, 1000))
def test_a_sample_of_fixed_size_is_one_too(classes, positives, more, seed):
    """Labels of other shards are given as the number of classes."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randint(classes + 1, (positives,), generator=generator)
    size = min(len(wanted.unique()) + more, classes)
    sample = sample_with_fixed_size(classes, wanted, size, generator)
    assert torch.equal(sample, sample.unique())
    assert len(sample) == size
    assert torch.isin(wanted[wanted < classes], sample).all()
    assert size == 0 or (sample.min() >= 0 and sample.max() < classes)


def sampled_step(mesh, weight, x, y, sizes, rate, dtype=torch.float64):
    head = plsc.ShardedHead(x.shape[1], len(weight), mesh, sample_rate=rate, weight_dtype=dtype, momentum_dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight[slice(*head.class_range)])
    optimizer = plsc.HeadSGD(head, lr=0.3, momentum=0.9, weight_decay=0.01)
    mine = x.split(sizes)[mesh.rank].clone().requires_grad_()
    loss = head(mine, y.split(sizes)[mesh.rank])
    loss.backward()
    taken = head.softmax.pending.batches[0].selected + head.class_range[0]
    optimizer.step()
    return loss.detach(), mine.grad / mesh.world_size, head.weight.detach(), taken, optimizer.tables["momentum"].values


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.7])
def test_equals_the_oracle_over_the_classes_taken_and_leaves_all_others_alone(ranks, rate):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(101, 16, generator=generator, dtype=torch.float64)
    x = torch.randn(9, 16, generator=generator, dtype=torch.float64)
    y = torch.randint(101, (9,), generator=generator)
    got = ranks(3, sampled_step, weight, x, y, [4, 1, 4], rate)
    taken = torch.zeros(101, dtype=torch.bool)
    taken[torch.cat([g[3] for g in got])] = True
    assert taken[y].all()
    dense, inputs = weight.clone().requires_grad_(), x.clone().requires_grad_()
    loss = Oracle("arcface", parameters={"m": 0.5}).loss(inputs, y, dense, classes=taken)
    loss.backward()
    assert relative_error(got[0][0], loss) < 1e-11
    assert relative_error(torch.cat([g[1] for g in got]), inputs.grad) < 1e-11
    after = torch.cat([g[2] for g in got])
    expected = weight - 0.3 * (dense.grad + 0.01 * weight)
    assert relative_error(after[taken] - weight[taken], expected[taken] - weight[taken]) < 1e-10
    assert torch.equal(after[~taken], weight[~taken])
    assert not torch.cat([g[4] for g in got])[~taken].any()


def test_another_step_takes_other_negatives_and_the_same_seed_the_same():
    def choices(seed: int) -> list[torch.Tensor]:
        head = plsc.ShardedHead(8, 1000, sample_rate=0.1, seed=seed)
        optimizer = plsc.HeadSGD(head, lr=0.1)
        out = []
        for _ in range(2):
            head(torch.ones(2, 8), torch.tensor([1, 2])).backward()
            out.append(head.softmax.pending.batches[0].selected)
            optimizer.step()
        return out

    first, again, other = choices(0), choices(0), choices(1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_shards_draw_independently():
    first, second = (ClassSampler(start, start + 1000, 0.1, 0, torch.device("cpu")) for start in (0, 1000))
    assert not torch.equal(first.draw(torch.tensor([7]), 0), second.draw(torch.tensor([1007]), 0))


def test_low_precision_rows_outside_the_sample_are_bit_unchanged():
    head = plsc.ShardedHead(16, 500, sample_rate=0.05, weight_dtype=torch.bfloat16, momentum_dtype=torch.int8)
    optimizer = plsc.HeadSGD(head, lr=1.0, momentum=0.9, weight_decay=0.1)
    before = head.weight.detach().clone()
    head(torch.randn(4, 16), torch.arange(4)).backward()
    taken = head.softmax.pending.batches[0].selected
    optimizer.step()
    changed = (head.weight.detach() != before).any(1)
    assert changed[taken].all()
    assert changed.sum() == len(taken)
