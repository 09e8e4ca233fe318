"""Head groups: a table sharded over some ranks and replicated over the others computes what one process does."""

import contextlib
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import Oracle, relative_error
from support.head_problems import (
    DECAY,
    HIGH,
    LIMIT,
    LOW,
    LR,
    MOMENTUM,
    ONE,
    Problem,
    assert_equal_steps,
    batch_of,
    dense_steps,
    everything,
    make_head,
    make_problem,
    same,
    sharded_steps,
    uneven,
)

import plsc
from plsc.errors import LabelError, UsageError
from plsc.head import replica_exchange, sharded_head
from plsc.parallel import Mesh, with_head_groups
from plsc.parallel.collectives import all_gather_rows, all_reduce_sum, broadcast_object

GROUPS = [(2, 1), (4, 1), (4, 2)]  # worlds, and ranks of a head group
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


@pytest.mark.parametrize(("world", "head_ranks"), [*GROUPS, (4, 4), (4, 0)])
@pytest.mark.parametrize("name", MARGINS)
def test_equal_to_the_oracle(ranks, world, head_ranks, name):
    margin, oracle = MARGINS[name]
    problem = make_problem()
    got = ranks(world, sharded_steps, margin, problem, uneven(12, world), 3, head_ranks=head_ranks)
    assert_equal_steps(got, dense_steps(oracle, problem, 3), problem[0], LIMIT[torch.float64])


@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_float32(ranks, world, head_ranks):
    margin, oracle = MARGINS["arcface"]
    problem = tuple(t.float().double() if t.is_floating_point() else t for t in make_problem())
    options = {"weight_dtype": torch.float32, "momentum_dtype": torch.float32}
    got = ranks(world, sharded_steps, margin, problem, uneven(12, world), 2, head_ranks=head_ranks, **options)
    assert_equal_steps(got, dense_steps(oracle, problem, 2), problem[0], LIMIT[torch.float32])


def test_a_group_without_samples_and_fewer_classes_than_ranks(ranks):
    problem = make_problem(classes=3)
    got = ranks(4, sharded_steps, plsc.ArcFace(), problem, [5, 7, 0, 0], 3, centers=1, chunk_classes=1, head_ranks=2)
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
    alone = sharded_steps(ONE, RANDOM[name], problem, [12], 3)
    got = ranks(world, sharded_steps, RANDOM[name], problem, uneven(12, world), 3, head_ranks=head_ranks)
    assert_equal_steps(got, alone, problem[0], 1e-11)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.7])
@pytest.mark.parametrize(("world", "head_ranks"), GROUPS)
def test_sampled_steps_are_those_of_as_many_ranks_as_a_group_has(ranks, world, head_ranks, rate):
    """A shard draws by its seed, step and first class: sampling is equal where shards are."""
    problem = make_problem(classes=101)
    whole = ranks(head_ranks, sharded_steps, plsc.ArcFace(), problem, uneven(12, head_ranks), 3, sample_rate=rate)
    alone = [
        (loss, torch.cat([rank[step][1] for rank in whole]), table) for step, (loss, _, table) in enumerate(whole[0])
    ]
    got = ranks(
        world, sharded_steps, plsc.ArcFace(), problem, uneven(12, world), 3, sample_rate=rate, head_ranks=head_ranks
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
    return everything(head, optimizer)


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
    arguments = 4, sharded_steps, plsc.ArcFace(), problem, uneven(12, 4), 3
    resident = ranks(*arguments, head_ranks=2, sample_rate=rate, chunk_classes=8)
    elsewhere = ranks(*arguments, head_ranks=2, sample_rate=rate, chunk_classes=8, **options)
    for rank, wanted in zip(elsewhere, resident, strict=True):
        assert all(same(got, want) for got, want in zip(rank, wanted, strict=True))


def head_on(mesh: Mesh, processors: list[str]) -> str:
    """What a head says whose ranks are these."""
    with patch.object(sharded_head, "_processor", lambda device: processors[mesh.rank]):
        try:
            plsc.ShardedHead(8, 12, mesh)
        except UsageError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("processors", "refused"), [("AABB", True), ("ABAA", True), ("ABAB", False), ("AAAA", False)])
def test_replicas_on_processors_that_draw_other_numbers_are_refused(ranks, processors, refused):
    """Ranks 0 and 2 hold one shard, 1 and 3 the other: shards may lie on any kinds, all replicas of one on one."""
    said = ranks(4, head_on, list(processors), head_ranks=2)
    assert all(("replicas of a shard lie on A and B" in each) == refused for each in said)
    assert refused or said == [""] * 4


CHUNKED = {"chunk_classes": 8}


def tables_with_sums(mesh: Mesh, problem: Problem, in_turn: bool, options: dict) -> list[torch.Tensor]:
    """The table and its state after three steps, with the replicas' sums one after another or behind each other."""

    def summed_in_turn(chunks, replicas):
        return ((chunk, all_reduce_sum(gradient, replicas)) for chunk, gradient in chunks)

    with contextlib.ExitStack() as patches:
        if in_turn:
            patches.enter_context(patch.object(replica_exchange, "_summed_asynchronously", summed_in_turn))
        head = make_head(mesh, problem, **{**CHUNKED, **options})
        optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        norms = []
        for step in range(3):
            x, y = batch_of(problem, step, mesh, uneven(12, mesh.world_size))
            head(x.to(torch.promote_types(head.weight.dtype, torch.float32)), y).backward()
            norms.append(optimizer.gradient_norm())
            optimizer.step()
    return [*everything(head, optimizer), torch.stack(norms)]


@pytest.mark.parametrize(("world", "head_ranks"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(
    "options", [{}, LOW, {**LOW, "backend": "torch"}, {"sample_rate": 0.3}, {"chunk_classes": 200}]
)
def test_sums_that_overlap_give_the_bits_of_sums_in_turn(ranks, world, head_ranks, options):
    problem = make_problem(classes=101)
    overlapped, in_turn = (
        ranks(world, tables_with_sums, problem, alone, options, head_ranks=head_ranks) for alone in (False, True)
    )
    assert all(same(got, want) for got, want in zip(overlapped, in_turn, strict=True))


def events_of_a_step(mesh: Mesh, problem: Problem) -> list[str]:
    """Gradients computed, sums begun and waited for, and updates, in order."""
    head = make_head(mesh, problem, **CHUNKED, backend="torch")
    optimizer = plsc.HeadSGD(head, lr=LR)
    events: list[str] = []
    second_pass, begin, update = head.backend.second_pass, replica_exchange.all_reduce_sum_async, optimizer._updater

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
    with patch.object(replica_exchange, "all_reduce_sum_async", NotedWork):
        x, y = batch_of(problem, 0, mesh, [6, 6])
        head(x, y).backward()
        optimizer.step()
    return events


def test_a_chunk_is_summed_while_the_next_is_computed(ranks):
    begin, end = ["gradient", "sum"], ["wait", "update"]
    expected = [*begin, *begin, *end, *begin, *end, *end]
    for events in ranks(2, events_of_a_step, make_problem(classes=20), head_ranks=1):
        assert events == expected


def accumulated(mesh: Mesh, problem: Problem, rate: float, micro: list[list[int]]) -> torch.Tensor:
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


def autograd_step(mesh: Mesh, problem: Problem, sizes: list[int]) -> torch.Tensor:
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


def adamw_step(mesh: Mesh, problem: Problem, sizes: list[int]) -> torch.Tensor:
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


def wrong_input(mesh: Mesh, label: int | None) -> str:
    head = plsc.ShardedHead(24, 53, mesh)
    x, y = batch_of(make_problem(), 0, mesh, [3] * 4)
    if mesh.rank == 3:
        y = y.clone()
        y[1], x = (y[1], x[:, :5]) if label is None else (label, x)
    try:
        head(x, y)
    except (LabelError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("label", [53, 10**12, -1, None])
@pytest.mark.parametrize("head_ranks", [0, 1, 2])
def test_bad_input_on_one_rank_is_raised_on_all(ranks, head_ranks, label):
    messages = ranks(4, wrong_input, label, head_ranks=head_ranks)
    assert messages[0].startswith("UsageError: rank 3:" if label is None else f"LabelError: rank 3: label {label} lies")
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


def save(mesh: Mesh, folder: str, options: dict[str, object]) -> tuple[dict, dict]:
    head, optimizer, _ = trained(mesh, range(3), options)
    state = {**head.sharded_state(), **optimizer.sharded_state()}
    dcp.save(state, checkpoint_id=folder, process_group=mesh.group)
    return head.get_extra_state(), optimizer.state_dict()


def resume(mesh: Mesh, folder: str, small: tuple[dict, dict], options: dict[str, object]) -> torch.Tensor:
    """The table after two more steps than were saved."""
    head, optimizer, _ = trained(mesh, range(0), options)
    with torch.no_grad():
        head.weight.fill_(1.0)
    state = {**head.sharded_state(), **optimizer.sharded_state()}
    dcp.load(state, checkpoint_id=folder, process_group=mesh.group, no_dist=mesh.world_size == 1)
    head.set_extra_state(small[0])
    optimizer.load_state_dict(small[1])
    return further(mesh, head, optimizer, range(3, 5))


def trained(
    mesh: Mesh, steps: range, options: dict[str, object]
) -> tuple[plsc.ShardedHead, plsc.HeadSGD, torch.Tensor]:
    head = plsc.ShardedHead(24, 53, mesh, plsc.CurricularFace(s=16.0), **options)
    optimizer = plsc.HeadSGD(head, lr=0.5, momentum=MOMENTUM, weight_decay=DECAY)
    return head, optimizer, further(mesh, head, optimizer, steps)


def further(mesh: Mesh, head: plsc.ShardedHead, optimizer: plsc.HeadSGD, steps: range) -> torch.Tensor:
    for step in steps:
        head(*batch_of(make_problem(), step, mesh, [12 // mesh.world_size] * mesh.world_size)).backward()
        optimizer.step()
    return all_gather_rows(head.weight.detach(), mesh.head).clone()


def never_stopped(mesh: Mesh, options: dict[str, object]) -> torch.Tensor:
    return trained(mesh, range(5), options)[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "head_ranks"),
    [(HIGH, 2), (LOW, 2), ({"seed": 4, **LOW}, 4), ({"centers": 2, **HIGH}, 4)],
    ids=["f64", "bf16+int8", "whole", "centers"],
)
def test_saved_by_groups_and_resumed_by_any_number_of_ranks(ranks, tmp_path, options, head_ranks):
    small = ranks(4, save, str(tmp_path), options, head_ranks=head_ranks)[0]
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    rows = 53 * options.get("centers", 1)
    for name, stored in metadata.state_dict_metadata.items():  # every shard is there once
        assert (len(stored.chunks), sum(chunk.sizes[0] for chunk in stored.chunks)) == (head_ranks, rows), name
    written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    exact = options["weight_dtype"] == torch.float64
    table = rows * 24 * (8 + 8 if exact else 2 + 1)
    assert table <= written < 2 * table + 16_000
    whole = ranks(4, never_stopped, options, head_ranks=head_ranks)[0]
    for world, groups_of in {(4, head_ranks), (4, 1), (3, 3), (1, 1)}:
        resumed = ranks(world, resume, str(tmp_path), small, options, head_ranks=groups_of)
        if (world, groups_of) == (4, head_ranks):
            assert all(torch.equal(table, whole) for table in resumed)
        elif exact:  # sums over shards come in another order
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
