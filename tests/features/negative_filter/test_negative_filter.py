"""Negatives near to the label's class are left out: losses, gradients and steps against the dense float64 oracle."""

import pytest
import torch
from features.labels.test_labels import ARC, ORACLE, several
from reference import FilteredOracle, Oracle, relative_error
from support.head_problems import LR, ONE, assert_equal_steps, batch_of, dense_steps, make_head, sharded_steps, uneven

import plsc
from plsc.errors import UsageError

LIMIT = 0.6


def clustered(labels: int, classes: int = 53, centers: int = 1):
    """A problem whose classes come in groups of near ones, apart by about 0.7; labels (12,) for 1, else (12, K)."""
    weight, x, y = several(max(labels, 2), classes, centers=centers)
    middles = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weight = 0.65 * weight + middles[torch.arange(len(weight)) // centers % 9]
    x = x + 2 * x.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(
        weight[y[:, 0].clamp(min=0) * centers], dim=1
    )
    return weight, x, y[:, 0].clamp(min=0) if labels == 1 else y


def left_out(problem, centers=1):
    """How many pairs of other classes are near, and how many are not."""
    unit = torch.nn.functional.normalize(problem[0], dim=1)
    near = (unit @ unit.T).view(len(unit) // centers, centers, -1, centers).amax((1, 3)) >= LIMIT
    return int(near.sum()) - len(near), int((~near).sum())


@pytest.mark.parametrize(
    ("labels", "world", "options"),
    [
        (1, 1, {}),
        (1, 4, {"centers": 2}),
        (1, 2, {"placement": "host"}),
        (3, 2, {}),
        (3, 4, {"positives": "kept"}),
        (3, 1, {"centers": 2, "positives": "kept"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_near_classes_are_no_negatives(ranks, labels, world, options):
    centers = options.get("centers", 1)
    problem = clustered(labels, centers=centers)
    assert min(left_out(problem, centers)) > 100
    got = ranks(world, sharded_steps, ARC, problem, uneven(12, world), 3, negative_filter=LIMIT, **options)
    oracle = FilteredOracle(ORACLE, LIMIT, options.get("positives", "excluded"))
    assert_equal_steps(got, dense_steps(oracle, problem, 3, centers), problem[0], 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("margin", "oracle"),
    [
        (plsc.CurricularFace(s=16.0), Oracle("curricularface", s=16.0)),
        (plsc.ArcFace(s=100.0, m=0.3), Oracle("arcface", s=100.0, parameters={"m": 0.3})),
    ],
    ids=["changed negatives", "running maximum"],
)
def test_margins(ranks, margin, oracle):
    problem = clustered(1)
    if oracle.name == "curricularface":  # its statistics are of the whole batch, and the oracle goes by sample
        unit, rows = (torch.nn.functional.normalize(each, dim=1) for each in (problem[1], problem[0]))
        mean = float((unit * rows[problem[2]]).sum(1).mean())
        oracle = FixedCurricularFace("curricularface", s=16.0, parameters={"t": 0.01 * mean})
    got = ranks(2, sharded_steps, margin, problem, [9, 3], 1, negative_filter=LIMIT)
    assert_equal_steps(got, dense_steps(FilteredOracle(oracle, LIMIT), problem, 1), problem[0], 1e-10)


class FixedCurricularFace(Oracle):
    """CurricularFace after the statistics of the whole batch."""

    def margin(self, t, norm, cos):
        self.state = {"t": self.parameters["t"] / 0.99 - 0.01 / 0.99 * t.detach().mean().item()}
        return super().margin(t, norm, cos)


def two_batches_then_a_step(mesh, problem, sizes, options):
    """Accumulates a batch of several labels and one of one; the table, what was selected, and the classes here."""
    head = make_head(mesh, problem, ARC, negative_filter=LIMIT, **options)
    optimizer = plsc.HeadSGD(head, lr=LR)
    x, y = batch_of(problem, 0, mesh, sizes)
    for labels in (y, y[:, 0].clamp(min=0)):
        head(x, labels).backward()
    selected = [pending.selected for pending in head.softmax.pending.batches]
    optimizer.step()
    return head.weight.detach().clone(), selected, head.class_range


@pytest.mark.parametrize("placement", ["device", "mmap"])
@pytest.mark.parametrize("positives", ["excluded", "kept"])
def test_sampled_accumulated_batches(ranks, tmp_path, placement, positives):
    problem = clustered(3)
    where = f"mmap:{tmp_path / 'table'}" if placement == "mmap" else placement
    options = {"sample_rate": 0.5, "placement": where, "positives": positives}
    got = ranks(3, two_batches_then_a_step, problem, [7, 0, 5], options)
    weight = problem[0].clone().requires_grad_()
    total = 0.0
    for number, labels in enumerate((problem[2], problem[2][:, 0].clamp(min=0))):
        classes = torch.zeros(53, dtype=torch.bool)
        for _, selected, (first, _) in got:
            classes[selected[number] + first] = True
        total = total + FilteredOracle(ORACLE, LIMIT, positives).loss(problem[1], labels, weight, classes=classes)
    total.backward()
    expected = weight.detach() - LR * weight.grad
    assert relative_error(torch.cat([table for table, *_ in got]) - problem[0], expected - problem[0]) < 1e-9


@pytest.mark.parametrize("labels", [1, 3])
def test_a_table_of_low_precision(ranks, labels):
    weight, x, y = clustered(labels)
    problem = weight.bfloat16().double(), x, y
    options = {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8, "negative_filter": LIMIT}
    got = ranks(2, sharded_steps, ARC, problem, [7, 5], **options)
    loss, gradient, _ = dense_steps(FilteredOracle(ORACLE, LIMIT), problem)[0]
    assert relative_error(got[0][0][0], loss) < 5e-3
    assert relative_error(torch.cat([rank[0][1] for rank in got]), gradient) < 2e-2
    everyone = dense_steps(FilteredOracle(ORACLE, 2.0), problem)[0]
    assert relative_error(everyone[0], loss) > 1e-2  # what is left out shows


def test_backend_and_refusals():
    problem = clustered(1)
    backend = make_head(ONE, problem, ARC, negative_filter=LIMIT, weight_dtype=torch.float32).backend
    assert "what filters negatives compares rows with rows" in backend.reason or backend.reason == "requested"
    assert not backend.takes_passes
    for value in (0, 1.5, True, "0.5", float("nan")):
        with pytest.raises(UsageError, match="negative_filter is a cosine"):
            plsc.ShardedHead(8, 11, negative_filter=value)
    with pytest.raises(UsageError, match="MLCD has one sum for all labels"):
        plsc.ShardedHead(8, 11, margin=plsc.MLCD(), negative_filter=0.5)
