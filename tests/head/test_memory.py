"""How much memory a table takes, and how little comes on top of it: in steps, creation, saving and loading.

Peaks are the kernel's own count (VmHWM) in a fresh process, after a warm-up step on a small table.
"""

import ctypes
import gc
import multiprocessing as mp
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import plsc
from plsc.head.class_table import ClassRows, renew_norms
from plsc.head.host_memory import HostMemory
from plsc.parallel import tensor_shard

pytestmark = pytest.mark.exhaustive

MIB = 2**20
LOW = {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8}


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a process that does nothing else."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "plsc.train", "support.tiny_runs"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result(timeout=300)


def status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def peak_of(action: Callable[[], Any]) -> float:
    """MiB that this process's memory rises above where it is, at most, during ``action``."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    kept = action()
    peak = status("VmHWM") - before
    del kept
    return peak


def make(classes: int, dim: int, placement: str = "device", rate: float = 1.0) -> tuple:
    head = plsc.ShardedHead(dim, classes, sample_rate=rate, placement=placement, **LOW)
    return head, plsc.HeadSGD(head, lr=0.1, momentum=0.9, weight_decay=5e-4)


def step(head: plsc.ShardedHead, optimizer: plsc.HeadSGD, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, head.dim, generator=generator, requires_grad=True)
    head(x, torch.randint(head.num_classes, (batch,), generator=generator)).backward()
    optimizer.step()


def prepare(dim: int, batch: int) -> None:
    """Load and allocate what is there once, however large the table."""
    torch.set_num_threads(1)
    for rate in (1.0, 0.1):
        step(*make(2000, dim, rate=rate), batch)


def peaks_of_steps(batch: int) -> dict[tuple[float, int], float]:
    """The peak of a step by sampling rate and number of classes, D = 512."""
    prepare(512, batch)
    peaks = {}
    for rate in (1.0, 0.3):
        for classes in (16_384, 65_536):
            head, optimizer = make(classes, 512, rate=rate)
            step(head, optimizer, batch)
            peaks[rate, classes] = peak_of(lambda head=head, optimizer=optimizer: step(head, optimizer, batch))
    return peaks


@pytest.mark.slow
def test_a_step_needs_a_chunk_above_the_state_however_many_classes_and_samples():
    """All logits would take 64 MiB at 65,536 classes and 256 samples, the table's gradient 128 MiB."""
    peaks = in_a_process(peaks_of_steps, 256)
    assert max(peaks.values()) < 30, peaks
    assert all(peaks[rate, 65_536] - peaks[rate, 16_384] < 12 for rate in (1.0, 0.3)), peaks


def peaks_of_a_life(folder: str, placement: str, classes: int) -> dict[str, float]:
    """Peaks of creation, steps, saving, loading and the mean norm, D = 128, in MiB."""
    prepare(128, 64)
    life: dict[str, Any] = {}

    def create() -> None:
        life["head"], life["optimizer"] = make(classes, 128, placement, 0.02)
        life["head"].inverse_norms()

    def tensors() -> dict[str, Any]:
        return {**life["head"].sharded_state(), **life["optimizer"].sharded_state()}

    def train() -> None:
        for _ in range(3):
            step(life["head"], life["optimizer"], 64)

    with mock.patch.object(tensor_shard, "_PIECE_BYTES", 2 * MIB):
        dcp.save({"w": make(3000, 128)[0].sharded_state()["weight"]}, checkpoint_id=f"{folder}/first", no_dist=True)
        return {
            "creation": peak_of(create),
            "training": peak_of(train),
            "saving": peak_of(lambda: dcp.save(tensors(), checkpoint_id=f"{folder}/saved", no_dist=True)),
            "loading": peak_of(lambda: dcp.load(tensors(), checkpoint_id=f"{folder}/saved", no_dist=True)),
            "mean norm": peak_of(life["head"].mean_norm),
        }


CLASSES = 500_000  # 122 MiB of weights, 61 of momentum
STATE = CLASSES * (128 * 3 + 8) / MIB


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")
def test_a_resident_table_is_created_saved_and_loaded_without_a_second_copy(tmp_path):
    peaks = in_a_process(peaks_of_a_life, str(tmp_path), "device", CLASSES)
    assert peaks["creation"] < STATE + 90, peaks  # a second copy of the weights would be 122
    assert max(peaks[part] for part in ("training", "saving", "loading", "mean norm")) < 40, peaks


@pytest.mark.slow
def test_a_mapped_table_never_comes_into_memory(tmp_path):
    peaks = in_a_process(peaks_of_a_life, str(tmp_path), f"mmap:{tmp_path}/table", CLASSES)
    assert max(peaks.values()) < 120, peaks  # of creation: the norms of 65,536 rows at a time
    assert max(peaks[part] for part in ("training", "saving", "loading")) < 60, peaks


ROWS = 4_200_000  # of 512 numbers: row 4,194,304 begins at element 2³¹
FAR = torch.tensor([0, 1, 4_194_303, 4_194_304, 4_194_305, 4_199_999])


@pytest.mark.slow
def test_rows_beyond_element_2_to_31_are_updated_and_their_neighbours_are_not():
    """The table is 4.3 GB of memory that the system gives out only where it is written to."""
    with mock.patch("plsc.head.class_table.fill_normal", side_effect=lambda weight, *_: None):
        head, optimizer = make(ROWS, 512, rate=0.0)
    values = torch.randn(len(FAR), 512).bfloat16()
    with torch.no_grad():
        head.weight[FAR] = values
    head.softmax.table._inverse_norm = torch.zeros(ROWS)
    renew_norms(ClassRows(head.weight.detach(), head.softmax.table._inverse_norm), FAR)
    head.softmax.table.norms_are_current()
    small, small_optimizer = make(len(FAR), 512, rate=0.0)
    with torch.no_grad():
        small.weight.copy_(values)
    x = torch.randn(len(FAR), 512)
    for table, opt, labels in ((head, optimizer, FAR), (small, small_optimizer, torch.arange(len(FAR)))):
        table(x, labels).backward()
        opt.step()
    state = optimizer.tables["momentum"]
    assert (small.weight != values).any(1).all()
    close = torch.isclose(head.weight[FAR].float(), small.weight.float(), rtol=2**-7, atol=1e-6)
    assert close.all()  # but for the rounding, whose bits hang on the row's number
    assert state.values[FAR].bool().any(1).all()
    neighbours = torch.tensor([2, 4_194_302, 4_194_306, 4_199_998])
    assert not head.weight[neighbours].any()
    assert not state.values[neighbours].any()


def test_host_memory_beyond_element_2_to_31():
    column = HostMemory(None, 0, 1, pinned=False).table("weight", ROWS, 512, torch.bfloat16)
    values = torch.randn(len(FAR), 512).bfloat16()
    column.write(FAR, values)
    out = torch.empty_like(values)
    column.read(FAR, out)
    assert torch.equal(out, values)
    column.read(slice(4_194_303, 4_194_306), out[:3])
    assert torch.equal(out[:3], values[2:5])
    assert not column.values[torch.tensor([2, 4_194_302, 4_194_306, 4_199_998])].any()
