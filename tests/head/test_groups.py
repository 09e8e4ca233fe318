"""Head groups: a table sharded over some ranks and replicated over the others computes what one process does."""

import contextlib
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import Oracle, relative_error

import plsc
from plsc.errors import LabelError, UsageError
from plsc.head import replicas
from plsc.optim import GradScaler, clip_grad_norm_
from plsc.parallel import Mesh, with_head_groups
from plsc.parallel.collectives import all_gather_rows, all_reduce_sum, broadcast_object

ONE = Mesh(0, 1, 0, torch.device("cpu"))
GROUPS = [(2, 1), (4, 1), (4, 2)]  # worlds, and ranks of a head group
LIMIT = {torch.float64: 1e-11, torch.float32: 2e-5}
LR, MOMENTUM, DECAY = 0.2, 0.9, 5e-4
MARGINS = {
    "arcface": (plsc.ArcFace(), Oracle("arcface", parameters={"m": 0.5})),
    "arcface_s100": (plsc.ArcFace(s=100.0), Oracle("arcface", s=100.0, parameters={"m": 0.5})),
    "adaface": (plsc.AdaFace(), Oracle("adaface")),
    "magface": (plsc.MagFace(), Oracle("magface")),
    "curricularface": (plsc.CurricularFace(), Oracle("curricularface")),
}
RANDOM = {
    "elasticface": plsc.ElasticFace(std=0.1),
    "elasticface+": plsc.ElasticFace(std=0.1, plus=True),
}
HIGH = {"weight_dtype": torch.float64, "momentum_dtype": torch.float64}
LOW = {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8}
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_problem(classes: int = 53, batch: int = 12, dim: int = 24, seed: int = 0) -> Step:
    """Weights (C, D), embeddings (B, D) of different norms, labels (B,) with repeats across all ranks."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    x *= torch.linspace(1, 8, batch, dtype=torch.float64)[:, None]
    y = torch.randint(classes, (batch,), generator=generator)
    y[-1] = y[0]
    return weight, x, y


def uneven(batch: int, world: int) -> list[int]:
    """Every rank's samples: unequal, and one rank has none where there are enough ranks."""
    return {1: [batch], 2: [batch - 3, 3], 4: [batch - 6, 1, 0, 5]}[world]


def batch_of(problem: Step, step: int, mesh: Mesh, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step."""
    _, x, y = problem
    return (x * (1 + 0.1 * step)).roll(step, 0).split(sizes)[mesh.rank], y.roll(step, 0).split(sizes)[mesh.rank]


def make_head(
    mesh: Mesh, problem: Step, margin: plsc.losses.Margin | None = None, **options: object
) -> plsc.ShardedHead:
    """A head that starts from the problem's weights."""
    weight = problem[0]
    head = plsc.ShardedHead(weight.shape[1], len(weight), mesh, margin, **{**HIGH, **options})
    with torch.no_grad():
        head.weight.copy_(weight[slice(*head.class_range)])
    return head


def steps_in_groups(
    mesh: Mesh,
    margin: plsc.losses.Margin,
    problem: Step,
    sizes: list[int],
    steps: int,
    **options: object,
) -> list[Step]:
    """Some steps of HeadSGD: loss, the embeddings' gradient here, and the table of this rank's group, after each."""
    head = make_head(mesh, problem, margin, **options)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    out = []
    for step in range(steps):
        x, y = batch_of(problem, step, mesh, sizes)
        x = x.to(head.weight.dtype).requires_grad_()
        loss = head(x, y)
        loss.backward()
        optimizer.step()
        table = all_gather_rows(head.weight.detach(), mesh.head).clone()
        out.append((loss.detach(), x.grad / mesh.world_size, table))
    return out


def dense_steps(oracle: Oracle, problem: Step, steps: int) -> list[Step]:
    """The same steps by the oracle, in one process."""
    oracle = Oracle(oracle.name, oracle.s, oracle.gradient, oracle.parameters)
    weight = problem[0].clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    out = []
    for step in range(steps):
        x, y = batch_of(problem, step, ONE, [len(problem[1])])
        x = x.clone().requires_grad_()
        loss = oracle.loss(x, y, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append((loss.detach(), x.grad, weight.detach().clone()))
    return out


def assert_equal_steps(got: list[list[Step]], want: list[Step], start: torch.Tensor, limit: float) -> None:
    """Compare with one process: losses equal on all ranks, gradients, and the change of every group's table."""
    for step, (loss, gradient, table) in enumerate(want):
        assert all(torch.equal(rank[step][0], got[0][step][0]) for rank in got)
        assert all(torch.equal(rank[step][2], got[0][step][2]) for rank in got)
        assert relative_error(got[0][step][0], loss) <= limit
        assert relative_error(torch.cat([rank[step][1] for rank in got]), gradient) <= limit
        assert relative_error(got[0][step][2].double() - start, table.double() - start) <= max(limit, 1e-12)


@pytest.mark.parametrize(("world", "head_ranks"), [*GROUPS, (4, 4), (4, 0)])
@pytest.mark.parametrize("name", MARGINS)
def test_equal_to_the_oracle(ranks, world, head_ranks, name):
    margin, oracle = MARGINS[name]
    problem = make_problem()
    got = ranks(world, steps_in_groups, margin, problem, uneven(12, world), 3, head_ranks=head_ranks)
    assert_equal_steps(got, dense_steps(oracle, problem, 3), problem[0], LIMIT[torch.float64])


@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_float32(ranks, world, head_ranks):
    margin, oracle = MARGINS["arcface"]
    problem = tuple(t.float().double() if t.is_floating_point() else t for t in make_problem())
    options = {"weight_dtype": torch.float32, "momentum_dtype": torch.float32}
    got = ranks(world, steps_in_groups, margin, problem, uneven(12, world), 2, head_ranks=head_ranks, **options)
    assert_equal_steps(got, dense_steps(oracle, problem, 2), problem[0], LIMIT[torch.float32])


def test_a_group_without_samples_and_fewer_classes_than_ranks(ranks):
    problem = make_problem(classes=3)
    got = ranks(4, steps_in_groups, plsc.ArcFace(), problem, [5, 7, 0, 0], 3, centers=1, chunk_classes=1, head_ranks=2)
    assert_equal_steps(got, dense_steps(MARGINS["arcface"][1], problem, 3), problem[0], 1e-11)


def chunks_of_the_update(mesh: Mesh) -> list[tuple[int, int]]:
    head = plsc.ShardedHead(24, 53, mesh)
    head.softmax.chunk_size = lambda batch: max(batch, 1)  # as many classes as the batch has samples
    head(*batch_of(make_problem(), 0, mesh, uneven(12, mesh.world_size))).backward()
    return [(chunk.start, chunk.stop) for chunk, _ in head.softmax.gradient_chunks(head.softmax.pending.batches)]


def test_replicas_visit_the_same_chunks_whatever_their_batches(ranks):
    assert ranks(2, chunks_of_the_update, head_ranks=1) == [[(n, min(n + 9, 53)) for n in range(0, 53, 9)]] * 2


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_random_margins_are_those_of_one_process(ranks, world, head_ranks, name):
    problem = make_problem()
    alone = steps_in_groups(ONE, RANDOM[name], problem, [12], 3)
    got = ranks(world, steps_in_groups, RANDOM[name], problem, uneven(12, world), 3, head_ranks=head_ranks)
    assert_equal_steps(got, alone, problem[0], 1e-11)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.7])
@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_sampled_steps_are_those_of_as_many_ranks_as_a_group_has(ranks, world, head_ranks, rate):
    """A shard draws by its seed, step and first class: sampling is equal where shards are."""
    problem = make_problem(classes=101)
    whole = ranks(head_ranks, steps_in_groups, plsc.ArcFace(), problem, uneven(12, head_ranks), 3, sample_rate=rate)
    alone = [
        (loss, torch.cat([rank[step][1] for rank in whole]), table) for step, (loss, _, table) in enumerate(whole[0])
    ]
    got = ranks(
        world, steps_in_groups, plsc.ArcFace(), problem, uneven(12, world), 3, sample_rate=rate, head_ranks=head_ranks
    )
    assert_equal_steps(got, alone, problem[0], 1e-11)


def low_precision_tables(mesh: Mesh, options: dict[str, object]) -> list[torch.Tensor]:
    """Weights, norms, momentum and its scales of this rank's shard after some steps."""
    head = plsc.ShardedHead(64, 53, mesh, **LOW, **options)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for step in range(4):
        x, y = batch_of(make_problem(dim=64), step, mesh, uneven(12, mesh.world_size))
        head(x, y).backward()
        optimizer.step()
    return [head.weight.detach(), head.inverse_norms(), *optimizer.tables["momentum"].tensors("momentum").values()]


@pytest.mark.parametrize(
    "options", [{}, {"sample_rate": 0.3}, {"margin": plsc.AdaFace()}], ids=["exact", "sampled", "adaface"]
)
@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_low_precision_replicas_are_the_same_bits(ranks, world, head_ranks, options):
    tables = ranks(world, low_precision_tables, options, head_ranks=head_ranks)
    for rank, (weight, *others) in enumerate(tables):
        first_weight, *first_others = tables[rank % head_ranks]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.view(torch.int16), first_weight.view(torch.int16))
        assert all(torch.equal(mine, first) for mine, first in zip(others, first_others, strict=True))
        assert others[1].any()
    if "sample_rate" not in options:  # what is drawn hangs on the shards
        alone = low_precision_tables(ONE, options)[0]
        together = torch.cat([weight for weight, *_ in tables[:head_ranks]])
        assert torch.isclose(together.float(), alone.float(), rtol=1e-2, atol=1e-5).float().mean() > 0.99


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("options", [{"placement": "host"}, {"placement": "mmap"}], ids=["host", "mmap"])
def test_tables_that_are_not_on_the_device(ranks, tmp_path, options, rate):
    problem = make_problem(classes=101)
    if options["placement"] == "mmap":
        options = {"placement": f"mmap:{tmp_path / 'table'}"}
    arguments = 4, steps_in_groups, plsc.ArcFace(), problem, uneven(12, 4), 3
    resident = ranks(*arguments, head_ranks=2, sample_rate=rate, chunk_classes=8)
    elsewhere = ranks(*arguments, head_ranks=2, sample_rate=rate, chunk_classes=8, **options)
    for rank, wanted in zip(elsewhere, resident, strict=True):
        for got, want in zip(rank, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


CHUNKED = {"chunk_classes": 8}


def tables_with_sums(mesh: Mesh, problem: Step, in_turn: bool, options: dict) -> list[torch.Tensor]:
    """The table and its state after three steps, with the replicas' sums one after another or behind each other."""

    def summed_in_turn(chunks, replicas):
        return ((chunk, all_reduce_sum(gradient, replicas)) for chunk, gradient in chunks)

    with contextlib.ExitStack() as patches:
        if in_turn:
            patches.enter_context(patch.object(replicas, "_summed_asynchronously", summed_in_turn))
        head = make_head(mesh, problem, **{**CHUNKED, **options})
        optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        norms = []
        for step in range(3):
            x, y = batch_of(problem, step, mesh, uneven(12, mesh.world_size))
            head(x.to(torch.promote_types(head.weight.dtype, torch.float32)), y).backward()
            norms.append(optimizer.gradient_norm())
            optimizer.step()
    state = [shard.blocks[0].local for shard in optimizer.sharded_state().values()]
    return [head.weight.detach().clone(), head.inverse_norms().clone(), *state, torch.stack(norms)]


@pytest.mark.parametrize(("world", "head_ranks"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(
    "options", [{}, LOW, {**LOW, "backend": "torch"}, {"sample_rate": 0.3}, {"chunk_classes": 200}]
)
def test_sums_that_overlap_give_the_bits_of_sums_in_turn(ranks, world, head_ranks, options):
    problem = make_problem(classes=101)
    overlapped, in_turn = (
        ranks(world, tables_with_sums, problem, alone, options, head_ranks=head_ranks) for alone in (False, True)
    )
    for got, want in zip(overlapped, in_turn, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def events_of_a_step(mesh: Mesh, problem: Step) -> list[str]:
    """Gradients computed, sums begun and waited for, and updates, in order."""
    head = make_head(mesh, problem, **CHUNKED, backend="torch")
    optimizer = plsc.HeadSGD(head, lr=LR)
    events: list[str] = []
    second_pass, begin, update = head.backend.second_pass, replicas.all_reduce_sum_async, optimizer._updater

    def noted_pass(inputs):
        for chunk, gradient in second_pass(inputs):
            events.append("gradient")
            yield chunk, gradient

    class NotedWork:
        def __init__(self, *args):
            self.work = begin(*args)
            events.append("sum")

        def wait(self):
            events.append("wait")
            self.work.wait()

    def noted_update(*args):
        events.append("update")
        update(*args)

    optimizer._updater, head.backend.second_pass = noted_update, noted_pass
    with patch.object(replicas, "all_reduce_sum_async", NotedWork):
        x, y = batch_of(problem, 0, mesh, [6, 6])
        head(x, y).backward()
        optimizer.step()
    return events


def test_a_chunk_is_summed_while_the_next_is_computed(ranks):
    begin, end = ["gradient", "sum"], ["wait", "update"]
    expected = [*begin, *begin, *end, *begin, *end, *end]
    for events in ranks(2, events_of_a_step, make_problem(classes=20), head_ranks=1):
        assert events == expected


def accumulated(mesh: Mesh, problem: Step, rate: float, micro: list[list[int]]) -> Step:
    """One step over micro-batches whose sizes differ by rank; the table of this rank's group."""
    head = make_head(mesh, problem, sample_rate=rate, seed=3)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for _ in range(2):
        for step, sizes in enumerate(micro):
            x, y = batch_of(problem, step, mesh, sizes)
            (head(x, y) / len(micro)).backward()
        optimizer.step()
    return all_gather_rows(head.weight.detach(), mesh.head).clone()


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_accumulation(ranks, rate):
    problem = make_problem(classes=101)
    whole = ranks(2, accumulated, problem, rate, [[6, 6], [8, 4]])[0]
    for table in ranks(4, accumulated, problem, rate, [[6, 1, 0, 5], [1, 1, 9, 1]], head_ranks=2):
        assert relative_error(table - problem[0], whole - problem[0]) <= 1e-11


def clipped(mesh: Mesh, problem: Step, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm that a clipped step found, and its group's table after it."""
    head = make_head(mesh, problem, momentum_dtype=None)
    optimizer = plsc.HeadSGD(head, lr=1.0)
    head(*batch_of(problem, 0, mesh, sizes)).backward()
    norm = clip_grad_norm_([], 0.5, optimizer)
    optimizer.step()
    return norm, all_gather_rows(head.weight.detach(), mesh.head)


@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_the_norm_counts_each_shard_once(ranks, world, head_ranks):
    problem = make_problem()
    norm, table = clipped(ONE, problem, [12])
    assert norm > 0.5
    for got in ranks(world, clipped, problem, uneven(12, world), head_ranks=head_ranks):
        assert relative_error(got[0], norm) <= 1e-11
        assert relative_error(got[1] - problem[0], table - problem[0]) <= 1e-11


def autograd_step(mesh: Mesh, problem: Step, sizes: list[int]) -> torch.Tensor:
    head = make_head(mesh, problem, update="autograd", chunk_classes=7)
    head(*batch_of(problem, 0, mesh, sizes)).backward()
    return all_gather_rows(head.weight.grad, mesh.head)


@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_autograd_gives_the_summed_gradient(ranks, world, head_ranks):
    problem = make_problem()
    weight = problem[0].clone().requires_grad_()
    MARGINS["arcface"][1].loss(problem[1], problem[2], weight).backward()
    for gradient in ranks(world, autograd_step, problem, uneven(12, world), head_ranks=head_ranks):
        assert relative_error(gradient, weight.grad) <= 1e-11


def adamw_step(mesh: Mesh, problem: Step, sizes: list[int]) -> torch.Tensor:
    head = make_head(mesh, problem)
    optimizer = plsc.HeadAdamW(head, lr=0.01)
    for step in range(2):
        head(*batch_of(problem, step, mesh, sizes)).backward()
        optimizer.step()
    return all_gather_rows(head.weight.detach(), mesh.head)


def test_adamw(ranks):
    problem = make_problem()
    alone = adamw_step(ONE, problem, [12])
    for table in ranks(4, adamw_step, problem, uneven(12, 4), head_ranks=2):
        assert relative_error(table - problem[0], alone - problem[0]) <= 1e-8  # it divides by roots near 0


def wrong_input(mesh: Mesh, what: str) -> str:
    head = plsc.ShardedHead(24, 53, mesh)
    x, y = batch_of(make_problem(), 0, mesh, [3] * 4)
    if mesh.rank == 3:
        y = y.clone()
        y[1], x = (99, x) if what == "label" else (y[1], x[:, :5])
    try:
        head(x, y)
    except (LabelError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "error"), [("label", "LabelError: rank 3: label 99"), ("shape", "UsageError: rank 3:")]
)
@pytest.mark.parametrize("head_ranks", [1, 2])
def test_bad_input_in_one_group_is_raised_in_all(ranks, head_ranks, what, error):
    messages = ranks(4, wrong_input, what, head_ranks=head_ranks)
    assert messages[0].startswith(error)
    assert messages == [messages[0]] * 4


def poisoned(mesh: Mesh, what: str) -> tuple[bool, bool, bool]:
    """A step that one group alone finds not finite: whether it was announced, skipped, and left every bit."""
    head = plsc.ShardedHead(24, 53, mesh, **LOW)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM)
    before = head.weight.detach().clone()
    x, y = batch_of(make_problem(), 0, mesh, [3] * 4)
    if mesh.rank == 2 and what == "embedding":
        x = torch.full_like(x, float("nan"))
    loss = head(x, y)
    loss.backward()
    if mesh.rank == 1 and what == "found_inf":
        optimizer.found_inf = torch.tensor(1.0)
    finite = optimizer.gradients_are_finite()
    optimizer.step()
    return finite, optimizer.skipped, torch.equal(head.weight, before)


@pytest.mark.parametrize("what", ["embedding", "found_inf"])
def test_all_ranks_skip_what_one_group_finds_not_finite(ranks, what):
    assert ranks(4, poisoned, what, head_ranks=2) == [(False, True, True)] * 4
    assert ranks(4, poisoned, "nothing", head_ranks=2) == [(True, False, False)] * 4


def scaled(mesh: Mesh, overflow_rank: int) -> tuple[bool, float, bool]:
    head = plsc.ShardedHead(24, 53, mesh)
    net = torch.nn.Linear(24, 24, bias=False).double()
    before = head.weight.detach().clone()
    optimizers = torch.optim.SGD(net.parameters(), lr=0.1), plsc.HeadSGD(head, lr=0.1)
    scaler = GradScaler(mesh, init_scale=1024.0)
    x, y = batch_of(make_problem(), 0, mesh, [3] * 4)
    scaler.scale(head(net(x), y)).backward()
    if mesh.rank == overflow_rank:
        net.weight.grad[0, 0] = float("inf")
    scaler.unscale_all(*optimizers)
    stepped = not scaler.step_both(*optimizers).skipped
    scaler.update()
    return stepped, scaler.get_scale(), torch.equal(head.weight, before)


def test_an_overflow_in_one_group_skips_every_step(ranks):
    assert ranks(4, scaled, 3, head_ranks=2) == [(False, 512.0, True)] * 4
    assert ranks(4, scaled, -1, head_ranks=2) == [(True, 1024.0, False)] * 4


def save(mesh: Mesh, folder: str, options: dict[str, object]) -> tuple[dict, dict]:
    head, optimizer = trained(mesh, range(3), options)
    state = {**head.sharded_state(), **optimizer.sharded_state()}
    dcp.save(state, checkpoint_id=folder, process_group=mesh.group)
    return head.get_extra_state(), optimizer.state_dict()


def resume(mesh: Mesh, folder: str, small: tuple[dict, dict], options: dict[str, object]) -> torch.Tensor:
    """The table after two more steps than were saved."""
    head, optimizer = trained(mesh, range(0), options)
    state = {**head.sharded_state(), **optimizer.sharded_state()}
    dcp.load(state, checkpoint_id=folder, process_group=mesh.group, no_dist=mesh.world_size == 1)
    head.set_extra_state(small[0])
    optimizer.load_state_dict(small[1])
    return further(mesh, head, optimizer, range(3, 5))


def trained(mesh: Mesh, steps: range, options: dict[str, object]) -> tuple[plsc.ShardedHead, plsc.HeadSGD]:
    head = plsc.ShardedHead(24, 53, mesh, plsc.CurricularFace(s=16.0), **options)
    optimizer = plsc.HeadSGD(head, lr=0.5, momentum=MOMENTUM, weight_decay=DECAY)
    further(mesh, head, optimizer, steps)
    return head, optimizer


def further(mesh: Mesh, head: plsc.ShardedHead, optimizer: plsc.HeadSGD, steps: range) -> torch.Tensor:
    for step in steps:
        head(*batch_of(make_problem(), step, mesh, [12 // mesh.world_size] * mesh.world_size)).backward()
        optimizer.step()
    return all_gather_rows(head.weight.detach(), mesh.head).clone()


def never_stopped(mesh: Mesh, options: dict[str, object]) -> torch.Tensor:
    head, _ = trained(mesh, range(5), options)
    return all_gather_rows(head.weight.detach(), mesh.head).clone()


@pytest.mark.slow
@pytest.mark.parametrize("options", [HIGH, LOW], ids=["f64", "bf16+int8"])
def test_saved_by_groups_and_resumed_by_any_number_of_ranks(ranks, tmp_path, options):
    small = ranks(4, save, str(tmp_path), options, head_ranks=2)[0]
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    for name, stored in metadata.state_dict_metadata.items():  # two shards, of which each is there once
        assert [chunk.sizes[0] for chunk in stored.chunks] == [27, 26], name
    written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    table = 53 * 24 * (8 + 8 if options is HIGH else 2 + 1)
    assert table <= written < 2 * table + 16_000
    whole = ranks(4, never_stopped, options, head_ranks=2)[0]
    for world, head_ranks in ((4, 2), (4, 1), (3, 3), (1, 1)):
        resumed = ranks(world, resume, str(tmp_path), small, options, head_ranks=head_ranks)
        if (world, head_ranks) == (4, 2):
            assert all(torch.equal(table, whole) for table in resumed)
        elif options is HIGH:
            assert all(relative_error(table, whole) <= 1e-12 for table in resumed)
        else:
            assert torch.isclose(resumed[0].float(), whole.float(), rtol=1e-2, atol=1e-6).float().mean() > 0.99


def group_facts(mesh: Mesh) -> tuple[float, ...]:
    last = broadcast_object(mesh.rank, mesh.head, source=1), broadcast_object(mesh.rank, mesh.replicas, source=1)
    head = plsc.ShardedHead(8, 5, mesh)
    places = mesh.head.rank, mesh.head.world_size, mesh.replicas.rank
    return *places, *last, *head.class_range, round(head.mean_norm(), 9)


def test_groups_are_of_consecutive_ranks(ranks):
    norm = round(plsc.ShardedHead(8, 5).mean_norm(), 9)
    assert ranks(4, group_facts, head_ranks=2) == [
        (0, 2, 0, 1, 2, 0, 3, norm),
        (1, 2, 0, 1, 3, 3, 5, norm),
        (0, 2, 1, 3, 2, 0, 3, norm),
        (1, 2, 1, 3, 3, 3, 5, norm),
    ]


@pytest.mark.parametrize("head_ranks", [-1, 3, 8])
def test_groups_must_divide_the_ranks(head_ranks):
    with pytest.raises(UsageError, match=f"head_ranks = {head_ranks} does not divide .* 4; give 1, 2, 4,"):
        with_head_groups(Mesh(0, 4, 0, torch.device("cpu")), head_ranks)


def test_init_refuses_before_it_waits_for_other_ranks(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="head_ranks = 3"):
        plsc.init("cpu", head_ranks=3)


def test_one_process_is_one_group():
    mesh = plsc.init("cpu", head_ranks=1)
    assert mesh.head is mesh
    assert mesh.replicas.world_size == 1
