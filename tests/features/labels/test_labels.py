"""Several labels a sample: losses, gradients and steps against the dense float64 oracle."""

from dataclasses import replace

import pytest
import torch
from head.test_triton_passes import GRADIENTS, by_kernels, check
from head.test_triton_passes import problem as passes_problem
from reference import MultiLabelOracle, Oracle, SeparateOracle, relative_error
from support.head_problems import (
    LR,
    ONE,
    assert_equal_steps,
    batch_of,
    dense_steps,
    make_head,
    make_problem,
    sharded_steps,
    uneven,
)

import plsc
from plsc.errors import LabelError, UsageError

ARC = plsc.ArcFace(s=16.0, m=0.3)
ORACLE = Oracle("arcface", s=16.0, parameters={"m": 0.3})


def several(labels: int, classes: int = 53, batch: int = 12, centers: int = 1):
    """A problem of (B, K) labels: ragged, one sample without any, one label twice, one sample's all in one shard."""
    weight, x, y = make_problem(classes, batch, centers=centers)
    generator = torch.Generator().manual_seed(labels)
    rows = [torch.randperm(classes, generator=generator)[:labels] for _ in range(batch)]
    many = torch.stack([torch.nn.functional.pad(row, (0, labels - len(row)), value=-1) for row in rows])
    many[:, 0] = y
    many[2] = -1
    many[4, 1:] = -1
    if labels > 2:
        many[5, 2] = many[5, 1]
        many[6, 1:3] = torch.tensor([0, 1])
        many[6, 0], many[6, 3:] = 2, -1
        many[7, 0] = -1
    return weight, x, many


@pytest.mark.parametrize("positives", ["excluded", "kept"])
@pytest.mark.parametrize(("labels", "world"), [(1, 2), (3, 1), (3, 2), (8, 4), (100, 2)], ids=lambda value: str(value))
def test_losses_gradients_and_steps_are_those_of_the_formula(ranks, positives, labels, world):
    problem = several(labels, classes=130 if labels == 100 else 53)
    got = ranks(world, sharded_steps, ARC, problem, uneven(12, world), 3, positives=positives)
    assert_equal_steps(got, dense_steps(MultiLabelOracle(ORACLE, positives), problem, 3), problem[0], 1e-10)


def test_the_mean_of_one_label_is_the_loss_of_one_label(ranks):
    weight, x, y = make_problem()
    one = ranks(2, sharded_steps, ARC, (weight, x, y), [7, 5], 2)
    for positives in ("excluded", "kept"):
        many = ranks(2, sharded_steps, ARC, (weight, x, y[:, None]), [7, 5], 2, positives=positives)
        for rank_one, rank_many in zip(one, many, strict=True):
            for step_one, step_many in zip(rank_one, rank_many, strict=True):
                assert all(relative_error(a, b) < 1e-13 for a, b in zip(step_many, step_one, strict=True))


@pytest.mark.parametrize(
    ("margin", "oracle", "options"),
    [
        (plsc.MagFace(s=16.0), Oracle("magface", s=16.0), {}),
        (plsc.AdaFace(s=16.0), Oracle("adaface", s=16.0), {"positives": "kept"}),
        (replace(ARC, gradient="straight_through"), replace(ORACLE, gradient="straight_through"), {}),
        (replace(ARC, s=100.0), replace(ORACLE, s=100.0), {"positives": "kept"}),
        (ARC, ORACLE, {"label_reduction": "sum"}),
        (ARC, ORACLE, {"centers": 3, "positives": "kept"}),
    ],
    ids=["magface", "adaface", "straight through", "running maximum", "sum", "sub-centres"],
)
def test_margins_reductions_and_centres(ranks, margin, oracle, options):
    centers = options.get("centers", 1)
    problem = several(3, centers=centers)
    if oracle.name == "adaface":  # statistics are of all samples' norms, and the oracle meets them label by label
        oracle = FrozenAdaFace("adaface", s=16.0)
    expected = MultiLabelOracle(oracle, options.get("positives", "excluded"), options.get("label_reduction", "mean"))
    got = ranks(2, sharded_steps, margin, problem, [9, 3], 1, **options)
    assert_equal_steps(
        got, dense_steps(expected, problem, 1, centers), problem[0], 1e-6 if oracle.name == "adaface" else 1e-10
    )


class FrozenAdaFace(Oracle):
    """AdaFace after the statistics of the whole batch."""

    def margin(self, t, norm, cos):
        _, x, _ = several(3)
        norms = x.norm(dim=1).clip(0.001, 100)
        self.state = {
            "mean": 20 + 0.01 * (norms.mean().item() - 20),
            "std": 100 + 0.01 * (norms.std().item() - 100),
        }
        before = dict(self.state)
        phi, negatives, penalty = self._frozen(t, norm, cos)
        self.state = before
        return phi, negatives, penalty

    def _frozen(self, t, norm, cos):
        m, h = 0.4, 0.333
        safe = norm.detach().clip(0.001, 100)
        z = ((safe - self.state["mean"]) / (self.state["std"] + 1e-3) * h).clip(-1, 1)
        theta = (t.acos() - m * z).clip(1e-3, torch.pi - 1e-3)
        return theta.cos() - (m + m * z), cos, 0.0


@pytest.mark.parametrize("labels", [1, 3])
def test_mlcd_has_a_term_for_negatives_and_one_for_labels(ranks, labels):
    problem = several(3) if labels > 1 else make_problem()
    got = ranks(2, sharded_steps, plsc.MLCD(s=16.0, m=0.1), problem, [7, 5], 2)
    assert_equal_steps(got, dense_steps(SeparateOracle(16.0, 0.1), problem, 2), problem[0], 1e-10)


def weighted(mesh, problem, sizes, weights):
    head = make_head(mesh, problem, ARC)
    x, y = batch_of(problem, 0, mesh, sizes)
    x = x.clone().requires_grad_()
    loss = head(x, y, weights=weights.split(sizes)[mesh.rank])
    loss.backward()
    return loss.detach(), x.grad / mesh.world_size


def test_given_weights(ranks):
    problem = several(3)
    weights = torch.rand(12, 3, generator=torch.Generator().manual_seed(1)).double().round(decimals=1)
    got = ranks(2, weighted, problem, [7, 5], weights.float())
    _, x, y = problem
    x = x.clone().requires_grad_()
    loss = MultiLabelOracle(ORACLE, weights=weights.float()).loss(x, y, problem[0])
    loss.backward()
    assert relative_error(got[0][0], loss) < 1e-7
    assert relative_error(torch.cat([gradient for _, gradient in got]), x.grad) < 1e-6


def two_batches_then_a_step(mesh, problem, sizes, options):
    """Accumulates a batch of one label and one of several; the table and what was selected."""
    head = make_head(mesh, problem, ARC, **options)
    optimizer = plsc.HeadSGD(head, lr=LR)
    x, y = batch_of(problem, 0, mesh, sizes)
    for labels in (y, y[:, :1].clamp(min=0)[:, 0]):
        head(x, labels).backward()
    selected = [pending.selected for pending in head.softmax.pending.batches]
    optimizer.step()
    return head.weight.detach().clone(), selected, head.class_range


@pytest.mark.parametrize("placement", ["device", "host"])
def test_sampled_accumulated_batches_of_several_labels(ranks, placement):
    problem = several(3)
    options = {"sample_rate": 0.3, "placement": placement}
    got = ranks(2, two_batches_then_a_step, problem, [7, 5], options)
    weight = problem[0].clone().requires_grad_()
    total = 0.0
    for number, labels in enumerate((problem[2], problem[2][:, :1].clamp(min=0))):
        classes = torch.zeros(53, dtype=torch.bool)
        for _, selected, (first, _) in got:
            classes[selected[number] + first] = True
        positives = labels[labels >= 0]
        assert classes[positives].all()
        total = total + MultiLabelOracle(ORACLE).loss(problem[1], labels, weight, classes=classes)
    total.backward()
    expected = weight.detach() - LR * weight.grad
    assert relative_error(torch.cat([table for table, *_ in got]) - problem[0], expected - problem[0]) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("positives", ["excluded", "kept"])
def test_compiled_kernels_leave_out_every_label(dtype, positives):
    weight, x, y = several(8, 600, 40)
    weight, x = (
        torch.randn(600, 64, generator=torch.Generator().manual_seed(3)).to(dtype).double(),
        torch.randn(40, 64, generator=torch.Generator().manual_seed(4)).double(),
    )
    options = {"weight_dtype": dtype, "momentum_dtype": torch.float32, "positives": positives}
    got = sharded_steps(ONE, ARC, (weight, x, y), [40], **options)
    want = dense_steps(MultiLabelOracle(ORACLE, positives), (weight, x, y))
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    assert relative_error(got[0][0], want[0][0]) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert relative_error(got[0][1], want[0][1]) < limit
    if dtype == torch.float32:
        assert relative_error(got[0][2].double() - weight, want[0][2] - weight) < 1e-3  # of small float32 steps


@pytest.mark.parametrize("tile", ["straight", "flipped"])
def test_interpreted_kernels_leave_out_every_label(interpreter, tile):
    given = passes_problem(45, 7, 32, torch.float32)
    extra = torch.tensor([[3, 9], [-1, 1], [0, -1], [44, 5], [-1, -1], [7, 8], [10, 2]])
    position = torch.cat([given["batch"].position[:, None], extra], 1)
    given["batch"] = replace(given["batch"], position=position)
    given["target_grad"] = -torch.rand(7, 3, generator=torch.Generator().manual_seed(0))
    check(interpreter(by_kernels, given, tile), given, GRADIENTS[torch.float32])


def test_labels_drawn_for_a_step_are_drawn_anew_and_stay_labels():
    weight, x, y = several(8)
    losses = []
    for seed in (0, 0, 1):
        head = make_head(ONE, (weight, x, y), ARC, labels_per_step=2, seed=seed)
        optimizer = plsc.HeadSGD(head, lr=1e-30)
        steps = []
        for _ in range(3):
            loss = head(x.requires_grad_(), y)
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0] == losses[1]
    assert len({*losses[0], *losses[2]}) == 6
    # each is the mean of two labels' losses: all draws together have the mean of all
    full = make_head(ONE, (weight, x, y), ARC)(x, y).item()
    head = make_head(ONE, (weight, x, y), ARC, labels_per_step=2)
    optimizer = plsc.HeadSGD(head, lr=1e-30)
    drawn = []
    for _ in range(300):
        loss = head(x.requires_grad_(), y)
        loss.backward()
        optimizer.step()
        drawn.append(loss.item())
    assert sum(drawn) / len(drawn) == pytest.approx(full, rel=0.02)


def problems_of_labels(mesh):
    """What each rank is told of labels that do not fit, rank 1's being the ones that don't."""
    head = plsc.ShardedHead(8, 11, mesh)
    x, said = torch.ones(2, 8), []
    for mine, others in [
        (torch.tensor([[0, -2], [1, 2]]), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.tensor([[0, 11], [1, 2]]), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.zeros(2, 101, dtype=torch.int64), torch.zeros(2, 101, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.tensor([0, -1]), torch.tensor([0, 1])),
    ]:
        with pytest.raises((LabelError, UsageError)) as error:
            head(x, mine if mesh.rank else others)
        said.append(str(error.value))
    empty = (
        head(torch.ones(0, 8), torch.empty(0, dtype=torch.int64)) if mesh.rank else head(x, torch.zeros(2, 3).long())
    )
    return said, empty.item()


def test_labels_that_do_not_fit_are_named_on_every_rank(ranks):
    (first, loss), (second, other) = ranks(2, problems_of_labels)
    assert first == second
    assert loss == other
    for said, word in zip(first, ["label -2", "label 11", "K from 1 to 100", "[2, 3] labels", "(b, 1)"], strict=True):
        assert word in said


def test_what_means_nothing_together_is_refused():
    head = plsc.ShardedHead(8, 11, margin=plsc.CurricularFace())
    with pytest.raises(UsageError, match=r"CurricularFace compares negatives.* not \(2, 2\)"):
        head(torch.ones(2, 8), torch.zeros(2, 2, dtype=torch.int64))
    for options in ({"label_reduction": "sum"}, {"positives": "kept"}):
        with pytest.raises(UsageError, match=f"MLCD has one term for all labels.*{next(iter(options))}"):
            plsc.ShardedHead(8, 11, margin="mlcd", **options)
    head = plsc.ShardedHead(8, 11, margin=plsc.MLCD())
    with pytest.raises(UsageError, match="MLCD joins all labels"):
        head(torch.ones(2, 8), torch.zeros(2, 3, dtype=torch.int64), weights=torch.ones(2, 3))
    with pytest.raises(UsageError, match="positives must be excluded or kept"):
        plsc.ShardedHead(8, 11, positives="both")
    with pytest.raises(UsageError, match="weights must be"):
        plsc.ShardedHead(8, 11)(torch.ones(2, 8), torch.zeros(2, dtype=torch.int64), weights=torch.ones(2))
