"""Tables in host memory and in mapped files give the resident table's results, bit for bit."""

import contextlib
import errno
import mmap
import os
import re
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.head_problems import LOW, ONE, everything, same

import plsc
from plsc.errors import DataError, LabelError, PlscError, UsageError
from plsc.head import host_memory, staging, storage
from plsc.head.host_memory import HostMemory
from plsc.optim import clip_grad_norm_
from plsc.parallel import Mesh, tensor_shard

CLASSES, DIM, BATCH = 301, 16, 8
KINDS = {
    "f32": ({}, plsc.HeadSGD, 1),
    "bf16+int8, 2 micro-batches": (LOW, plsc.HeadSGD, 2),
    "bf16+int8, AdamW": (LOW, plsc.HeadAdamW, 1),
    "2 centers, AdamW, 3 micro-batches": ({"centers": 2}, plsc.HeadAdamW, 3),
}


@contextlib.contextmanager
def always_staged():
    """A table in host memory is copied to compute with even where the processor could read it in place."""
    with mock.patch("plsc.head.storage.is_staged", lambda placement, device: placement != "device"):
        yield


def batches(count: int, mesh: Mesh = ONE) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of some batches, of whose labels about half come back in the next batch."""
    generator = torch.Generator().manual_seed(1)
    whole = [
        (torch.randn(BATCH, DIM, generator=generator), torch.randint(20, (BATCH,), generator=generator) * 15)
        for _ in range(count)
    ]
    return [tuple(t.chunk(mesh.world_size)[mesh.rank] for t in pair) for pair in whole]


def make(mesh: Mesh, placement: str, kind: str = "f32", **options: object):
    given, optimizer, _ = KINDS[kind]
    head = plsc.ShardedHead(DIM, CLASSES, mesh, placement=placement, **{"chunk_classes": 37, **given, **options})
    extra = {"momentum": 0.9} if optimizer is plsc.HeadSGD else {}
    return head, optimizer(head, lr=0.1, weight_decay=0.01, **extra)


def trained(mesh: Mesh, placement: str, kind: str, rate: float, steps: int = 4, prefetch: bool = True) -> list:
    """Losses, embedding gradients, and all of the table and its state after some steps."""
    with always_staged():
        head, optimizer = make(mesh, placement, kind, sample_rate=rate)
        parts = KINDS[kind][2]
        given = batches(steps * parts + 1, mesh)
        out = []
        for number, (x, y) in enumerate(given[:-1]):
            x.requires_grad_()
            loss = head(x, y)
            if prefetch:
                head.prefetch(given[number + 1][1])
            (loss / parts).backward()
            out += [loss.detach(), x.grad]
            if (number + 1) % parts == 0:
                optimizer.step()
        return out + everything(head, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rate", [1.0, 0.15])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_resident_table(ranks, tmp_path, world, rate, kind):
    resident = ranks(world, trained, "device", kind, rate)
    for placement in ("host", f"mmap:{tmp_path}/table"):
        got = ranks(world, trained, placement, kind, rate)
        assert all(same(a, b) for a, b in zip(got, resident, strict=True)), placement
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("weight"))
    assert names == [f"table.rank{rank}-of-{world}.weight" for rank in range(world)]


def test_host_memory_is_read_in_place_by_the_processor():
    head, optimizer = make(ONE, "host")
    x, y = batches(1)[0]
    head(x, y).backward()
    optimizer.step()
    assert head.softmax.table.is_resident


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("forwarding", [True, False])
def test_rows_in_flight_are_forwarded(tmp_path, rate, forwarding):
    """The first update does not land before the second loss: without forwarding, that would read stale rows."""
    gate = threading.Event()
    store = staging._Lane.store

    def held_back(lane, rows, columns):
        assert gate.wait(60)
        store(lane, rows, columns)

    def run(placement: str) -> list[torch.Tensor]:
        head, optimizer = make(ONE, placement, sample_rate=rate, chunk_classes=200)
        given = batches(4)
        losses = []
        for number, (x, y) in enumerate(given[:-1]):
            loss = head(x, y)
            head.prefetch(given[number + 1][1])
            if number == 1:
                gate.set()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses + everything(head, optimizer)

    resident = run("device")
    gate.clear()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(staging._Lane, "store", held_back))
        if not forwarding:
            patches.enter_context(mock.patch.object(staging.Stage, "overwrite_from"))
        assert same(run(f"mmap:{tmp_path}/table"), resident) == forwarding


EVENTS = ["step", "prefetch", "announce another", "evaluate", "skip", "norm", "two", "write", "clip", "save", "load"]


@pytest.mark.live
@settings(max_examples=25, deadline=None)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=12), rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@example(events=["step", "prefetch", "write", "step", "prefetch", "write", "step"], rate=0.2)
@example(events=["step", "save", "prefetch", "step", "load", "step"], rate=0.2)
@example(events=["clip", "step"], rate=0.2)
def test_any_order_of_events(tmp_path_factory, events, rate):
    file, store = tmp_path_factory.mktemp("any") / "table", staging._Lane.store

    def slowly(lane, rows, columns):
        time.sleep(0.01)
        store(lane, rows, columns)

    with mock.patch.object(staging._Lane, "store", slowly):
        assert same(after(events, rate, f"mmap:{file}"), after(events, rate, "device"))


def after(events: list[str], rate: float, placement: str) -> list[torch.Tensor]:
    head, optimizer = make(ONE, placement, "bf16+int8, 2 micro-batches", sample_rate=rate)
    feed = iter(batches(30))
    x, y = next(feed)
    out, saved = [], head.weight.detach().clone()
    for event in events:
        if event == "prefetch":
            head.prefetch(y)
        elif event == "announce another":
            head.prefetch(y.flip(0))
        elif event == "evaluate":
            head.eval()
            out.append(head(x, y).detach())
            head.train()
        elif event == "norm":
            out.append(optimizer.gradient_norm())
        elif event == "clip":
            out.append(clip_grad_norm_([], 0.1, optimizer))
        elif event == "save":
            saved = head.state_dict()["weight"].clone()
            out.append(saved)
        elif event in ("write", "load"):
            optimizer.step()  # what waits for it would be refused
            if event == "load":
                head.load_state_dict({**head.state_dict(), "weight": saved})
            else:
                with torch.no_grad():
                    head.weight.mul_(torch.linspace(1, 3, CLASSES)[:, None])
        else:
            loss = head(x, y) * (float("inf") if event == "skip" else 1)
            loss.backward()
            out.append(loss.detach())
            x, y = next(feed)
            if event != "two":
                optimizer.step()
    optimizer.step()
    return out + everything(head, optimizer)


def test_a_loss_overtaken_by_another_step_is_refused(tmp_path):
    head, optimizer = make(ONE, f"mmap:{tmp_path}/t", sample_rate=0.2)
    (x, y), (x2, y2) = batches(2)
    late = head(x, y)
    head(x2, y2).backward()
    optimizer.step()
    late.backward()
    with pytest.raises(PlscError, match="written to"):
        optimizer.step()


def one_class(mesh: Mesh, placement: str) -> list[torch.Tensor]:
    with always_staged():
        head = plsc.ShardedHead(DIM, 1, mesh, sample_rate=0.5, placement=placement)
        optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
        head.prefetch(torch.zeros(2, dtype=torch.long))
        loss = head(torch.ones(2, DIM), torch.zeros(2, dtype=torch.long))
        loss.backward()
        optimizer.step()
        return [loss.detach(), head.weight.detach().clone()]


def test_a_rank_without_rows(ranks, tmp_path):
    got = ranks(2, one_class, f"mmap:{tmp_path}/t")
    assert all(same(a, b) for a, b in zip(got, ranks(2, one_class, "device"), strict=True))


def announce_wrong(mesh: Mesh, placement: str) -> str:
    head = plsc.ShardedHead(DIM, CLASSES, mesh, sample_rate=0.1, placement=placement)
    try:
        head.prefetch(torch.tensor([CLASSES if mesh.rank == 1 else 0]))
    except LabelError as error:
        return str(error)
    return ""


def test_announcing_a_label_out_of_range_is_refused_on_every_rank(ranks, tmp_path):
    messages = ranks(2, announce_wrong, f"mmap:{tmp_path}/t")
    assert messages[0] == messages[1]
    assert f"rank 1: label {CLASSES}" in messages[0]


def save(mesh: Mesh, folder: str, placement: str, piece: int) -> list[torch.Tensor]:
    with always_staged(), mock.patch.object(tensor_shard, "_PIECE_BYTES", piece):
        head, optimizer = make(mesh, placement, "bf16+int8, 2 micro-batches", sample_rate=0.3)
        for x, y in batches(3, mesh):
            head(x, y).backward()
            optimizer.step()
        state = {**head.sharded_state(), **optimizer.sharded_state()}
        dcp.save(state, checkpoint_id=folder, process_group=mesh.group, no_dist=mesh.world_size == 1)
        return stored(head, optimizer)


def load(mesh: Mesh, folder: str, placement: str) -> list[torch.Tensor]:
    with always_staged(), mock.patch.object(tensor_shard, "_PIECE_BYTES", 700):
        head, optimizer = make(mesh, placement, "bf16+int8, 2 micro-batches", seed=9)
        state = {**head.sharded_state(), **optimizer.sharded_state()}
        dcp.load(state, checkpoint_id=folder, process_group=mesh.group, no_dist=mesh.world_size == 1)
        return stored(head, optimizer)


def stored(head: plsc.ShardedHead, optimizer: plsc.HeadSGD) -> list[torch.Tensor]:
    """What a checkpoint holds: all but the norms."""
    weight, _, *state = everything(head, optimizer)
    return [weight, *state]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 700, 1 << 26], ids=["row by row", "pieces", "one item per shard"])
@pytest.mark.parametrize(("saved", "loaded"), [("device", "mmap"), ("mmap", "device"), ("host", "mmap")])
def test_checkpoints_in_pieces_go_from_any_placement_to_any_other(ranks, tmp_path, piece, saved, loaded):
    file = {"mmap": f"mmap:{tmp_path}/{{}}", "host": "host", "device": "device"}
    written = ranks(2, save, str(tmp_path / "saved"), file[saved].format("a"), piece)
    whole = [torch.cat(parts) for parts in zip(*written, strict=True)]
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    items = len(metadata.state_dict_metadata["weight"].chunks)
    assert items == {1: CLASSES, 700: 16, 1 << 26: 2}[piece]  # 700 bytes hold 21 rows; shards end at 151 and 301
    for world in (1, 3):
        read = ranks(world, load, str(tmp_path / "saved"), file[loaded].format("b"))
        assert same([torch.cat(parts) for parts in zip(*read, strict=True)], whole)


@pytest.mark.parametrize("wrong", ["gpu", "mmap", "mmap:", "host:x", "mmap:.."])
def test_an_unknown_placement_is_refused(wrong):
    with pytest.raises(UsageError, match="placement is"):
        plsc.ShardedHead(8, 4, placement=wrong)


def test_a_gradient_of_the_whole_table_is_refused():
    with pytest.raises(UsageError, match="fused"):
        plsc.ShardedHead(8, 4, placement="host", update="autograd")


def test_a_missing_folder_a_full_disk_and_a_file_in_the_way_are_named(tmp_path):
    with pytest.raises(UsageError, match="make its folder first"):
        plsc.ShardedHead(8, 4, placement=f"mmap:{tmp_path}/none/table")
    (tmp_path / "a.rank0-of-1.weight").mkdir()
    with pytest.raises(UsageError, match="choose another"):
        plsc.ShardedHead(8, 4, placement=f"mmap:{tmp_path}/a")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full), pytest.raises(DataError, match="name a larger disk"):
        plsc.ShardedHead(8, 4, placement=f"mmap:{tmp_path}/b")
    assert not Path(f"{tmp_path}/b.rank0-of-1.weight").exists()


def test_a_second_table_of_the_same_name_leaves_the_first_whole(tmp_path):
    first, optimizer = make(ONE, f"mmap:{tmp_path}/t", sample_rate=0.2)
    before = everything(first, optimizer)
    make(ONE, f"mmap:{tmp_path}/t", seed=5)
    assert same(everything(first, optimizer), before)


class Registrations:
    """CUDA's registrations of host memory, without a GPU: page-aligned, and no two of them share a page."""

    def __init__(self) -> None:
        self.pieces: dict[int, int] = {}
        self.made = 0

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert start % mmap.PAGESIZE == 0
        assert not any(start < other + length and other < start + size for other, length in self.pieces.items())
        self.pieces[start] = size
        self.made += 1
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.pieces[start]
        return 0

    def hold(self, values: torch.Tensor) -> bool:
        """True if one registration holds all of a contiguous tensor."""
        start, stop = values.data_ptr(), values.data_ptr() + values.nbytes
        return any(first <= start and stop <= first + size for first, size in self.pieces.items())


@contextlib.contextmanager
def registrations():
    """Host memory is pinned as for a GPU, in pieces of a few pages."""
    made = Registrations()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.cuda, "cudart", return_value=made))
        patches.enter_context(mock.patch.object(torch.cuda, "check_error"))
        patches.enter_context(mock.patch.object(host_memory, "_PIN_BYTES", 3 * mmap.PAGESIZE))
        patches.enter_context(mock.patch.object(storage, "HostMemory", lambda *where, pinned: HostMemory(*where, True)))
        yield made


@given(st.sampled_from([1, 24, 1000, 4096, 5000]), st.integers(1, 700), st.data())
@settings(max_examples=50, deadline=None)
def test_no_copy_crosses_two_registrations_of_pinned_memory(row_bytes, rows, data):
    with registrations() as made:
        column = HostMemory(None, 0, 1, pinned=True).table("weight", rows, row_bytes, torch.uint8)
    assert sum(made.pieces.values()) == column.values.nbytes
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    parts = list(column.pinned_parts(slice(start, stop)))
    assert [row for part, _ in parts for row in range(part.start, part.stop)] == list(range(start, stop))
    assert all(part.start - at.start == part.stop - at.stop == start for part, at in parts)
    assert all(made.hold(column.values[part]) for part, _ in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_pinned_memory_equal_the_resident_table_s(kind):
    resident = trained(ONE, "device", kind, 1.0)
    with registrations() as made:
        assert same(trained(ONE, "host", kind, 1.0), resident)
    assert made.made > 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_forked_workers_do_not_inherit_pinned_memory():
    with registrations():
        column = HostMemory(None, 0, 1, pinned=True).table("weight", 4096, 64, torch.uint8)
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= column.values.data_ptr() < int(area[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert "dc" in flags  # proc(5): do not copy the area on fork
