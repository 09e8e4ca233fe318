"""The shape of Triton's passes, fused or with stored weights: computed, requested, measured, the same on all ranks."""

import json
import logging
import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from reference import relative_error

import plsc
from plsc.errors import UsageError
from plsc.head import backends
from plsc.head.backends import HeadShape, agree_on_shape, choose_backend, self_check, triton_shape
from plsc.head.backends.self_check import Deviation, Shard
from plsc.head.backends.torch_backend import TorchBackend
from plsc.head.backends.triton_backend import TritonBackend
from plsc.head.backends.triton_shape import COMPUTED, NEVER, RowKind, Threshold, computed
from plsc.parallel.mesh import Mesh

pytestmark = pytest.mark.slow

BF16 = RowKind(torch.bfloat16, 512, 1, "ieee")
ON_GPU = HeadShape(torch.device("cuda"), torch.bfloat16, 512, 1, plsc.ArcFace())
H100, A100 = ((9, 0), 227 << 10), ((8, 0), 163 << 10)


def backend(stored_from: Threshold | None = None) -> TritonBackend:
    return TritonBackend("tested", dim=512, with_passes=True, stored_from=stored_from)


def test_an_h100_stores_the_weights_of_large_batches_and_an_a100_none():
    """At D = 512 and bf16 a fused pass takes 6.6 ps for a logit of an H100, a stored one 3.8, and 0.3 ns for a row."""
    assert computed(*H100, BF16) == 128
    assert computed(*H100, replace(BF16, dim=256)) == 1024  # whose fused passes read less
    assert computed(*A100, BF16) == NEVER  # which has less of what stored weights take: bandwidth by FLOP


def described(variable: str | None, dtype: torch.dtype, dim: int) -> str:
    changed = {} if variable is None else {"PLSC_HEAD_SHAPE": variable}
    with patch.dict(os.environ, changed):
        return choose_backend(HeadShape(torch.device("cpu"), dtype, dim, 1, plsc.ArcFace())).describe()


def test_a_variable_chooses_the_shape(interpreter):
    assert interpreter(described, None, torch.bfloat16, 64) == "triton backend: on cpu"
    stored = "triton backend: on cpu; weights stored ({})"
    assert interpreter(described, "stored", torch.bfloat16, 64) == stored.format("PLSC_HEAD_SHAPE")
    assert interpreter(described, "stored", torch.float32, 40) == stored.format("D is no multiple of 32")
    assert interpreter(described, "fused", torch.float32, 40).endswith("passes by torch: D is no multiple of 32")
    with patch.dict(os.environ, {"PLSC_HEAD_SHAPE": "flat"}), pytest.raises(UsageError, match="PLSC_HEAD_SHAPE=flat"):
        triton_shape.threshold(torch.device("cpu"), BF16, None)


def trained(way: str) -> torch.Tensor:
    """The table's change in two steps of several chunks, accumulated once."""
    with patch.dict(os.environ, {"PLSC_HEAD_SHAPE": way} if way != "torch" else {"PLSC_HEAD_BACKEND": "torch"}):
        head = plsc.ShardedHead(64, 90, weight_dtype=torch.float32, centers=2, sample_rate=0.5, chunk_classes=16)
    optimizer = plsc.HeadSGD(head, lr=1.0, momentum=0.9)
    before = head.weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for micro_batches in (1, 2):
        for _ in range(micro_batches):
            x = torch.randn(11, 64, generator=generator)
            head(x, torch.randint(90, (11,), generator=generator)).backward()
        optimizer.step()
    return head.weight.detach() - before


def test_a_head_trains_alike_in_both_shapes(interpreter):
    expected = trained("torch")
    for way in ("fused", "stored"):
        assert relative_error(interpreter(trained, way), expected) < 1e-4


def test_several_labels_to_a_sample_are_left_to_pytorch():
    shard = Shard(torch.device("cpu"), torch.bfloat16, 64)
    rows = shard.rows()
    batch = shard.samples(rows)
    several = replace(batch, position=batch.position[:, None])
    with patch.object(TorchBackend, "first_pass") as plain:
        backend(Threshold(0, "tested")).first_pass(rows, several, 64, with_grad=True)
    plain.assert_called_once()


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU on which stored weights are faster from 512 samples on; the times that were asked for."""
    asked = []

    def milliseconds(run):
        features = run.args[2]
        asked.append(len(features))
        return 10.0 + len(features) / (100 if len(asked) % 2 else 200) - 2.0 * (len(asked) % 2)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(triton_shape, "_found", {})
    monkeypatch.setattr(triton_shape, "_MEASURED_CLASSES", 4096)
    monkeypatch.setattr(triton_shape, "_milliseconds", milliseconds)
    monkeypatch.setattr(triton_shape, "_place", lambda device, kind: ("head-shapes-H1.json", str(kind)))
    return asked


def test_a_measurement_is_made_once_and_kept(gpu, tmp_path):
    both, cpu = (backend(), (backend(), backend())), torch.device("cpu")
    small = replace(BF16, dim=32)
    assert triton_shape.measured(cpu, small, *both) == Threshold(512, "measured", is_wide=True)
    assert gpu == [128, 128, 256, 256, 512, 512, 1024, 1024]
    triton_shape._found.clear()  # another process
    assert triton_shape.measured(cpu, small, *both) == Threshold(512, "measured", is_wide=True)
    assert len(gpu) == 8
    file = tmp_path / "plsc" / "head-shapes-H1.json"
    assert json.loads(file.read_text()) == {str(small): [512, True]}
    triton_shape.measured(cpu, replace(small, centers=2), *both)
    assert gpu[8:] == [128, 128, 256, 256, 512, 512]  # no kernel multiplies such rows
    assert len(json.loads(file.read_text())) == 2


def steps_that_are_timed(dtype: torch.dtype, centers: int, later: float) -> tuple[int, bool, int]:
    """What is found where each step takes ``later`` more than the one before, and how many steps were taken."""
    kind, taken, both = RowKind(dtype, 32, centers, "ieee"), [], TritonBackend("tested", dim=32, with_passes=True)
    with (
        patch.multiple(triton_shape, _MEASURED_CLASSES=64, _MEASURED_BATCHES=(32,), _WIDE_BATCH=64),
        patch.object(triton_shape, "_milliseconds", lambda run: taken.append(run()) or later * len(taken)),
    ):
        cpu = torch.device("cpu")
        shapes = both.in_shape(stored=False), both.in_shape(stored=True), both.in_shape(stored=True, is_wide=True)
        found = triton_shape.measure(cpu, kind, *shapes)
    return *found, len(taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_both_shapes_are_timed(interpreter, dtype):
    assert interpreter(steps_that_are_timed, dtype, 2, later=1.0) == (NEVER, False, 2)
    assert interpreter(steps_that_are_timed, dtype, 1, later=-1.0) == (
        (32, True, 4) if dtype == torch.bfloat16 else (32, False, 2)
    )


def test_a_damaged_file_of_measurements_is_made_anew(gpu, tmp_path):
    file = tmp_path / "plsc" / "head-shapes-H1.json"
    file.parent.mkdir(mode=0o700)
    small = replace(BF16, dim=32)
    for damaged in ("[1, 2", "[1, 2]", "3", json.dumps({str(small): 512}), json.dumps({str(small): [512, 1]})):
        file.write_text(damaged)
        triton_shape._found.clear()
        assert triton_shape.measured(torch.device("cpu"), small, backend(), (backend(), backend())).samples == 512
        assert json.loads(file.read_text()) == {str(small): [512, True]}


def agreed(mesh: Mesh, sources: list[str]) -> list:
    """What each of the ranks' backends takes, where each would measure another number."""
    source = sources[mesh.rank]
    mine = TorchBackend("no kernels") if source == "torch" else backend(Threshold(100 + mesh.rank, source))
    if source == "disagrees":
        mine.stored_from = None
    with patch.object(backends, "measured", lambda *_: Threshold(640 + mesh.rank, "measured")):
        agree_on_shape(mine, ON_GPU, mesh)
    found = getattr(mine, "stored_from", None)
    return [] if found is None else [found.samples, found.source]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([COMPUTED, COMPUTED], [[640, "measured"]] * 2),
        ([COMPUTED, "disagrees"], [[640, "measured"], []]),
        (["torch", COMPUTED], [[], [101, COMPUTED]]),
        (["PLSC_HEAD_SHAPE", "PLSC_HEAD_SHAPE"], [[100, "PLSC_HEAD_SHAPE"]] * 2),
    ],
)
def test_all_ranks_take_what_the_first_one_measures(ranks, sources, expected):
    assert ranks(2, agreed, sources) == expected


def test_a_head_that_cannot_be_timed_takes_what_is_computed(monkeypatch, caplog):
    def fails(*_: object) -> Threshold:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(backends, "measured", fails)
    mine = backend(Threshold(768, COMPUTED))
    with caplog.at_level(logging.WARNING, "plsc"):
        agree_on_shape(mine, ON_GPU, Mesh(0, 1, 0, torch.device("cpu")))
    assert mine.stored_from == Threshold(768, COMPUTED)
    assert "could not be timed (OutOfMemoryError: no memory): weights stored from 768 samples on" in caplog.messages[0]


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_wide_blocks_are_checked_before_they_are_used(monkeypatch, caplog, error):
    def check(checked: TorchBackend, shard: Shard) -> list[Deviation]:
        return [Deviation("sums", error if "wide" in checked.name and shard.batch == 256 else 0.0, 0.1)]

    monkeypatch.setattr(self_check, "check_passes", check)
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(backends, "measured", lambda *_: Threshold(640, "measured", is_wide=True))
    mine = backend(Threshold(768, COMPUTED))
    with caplog.at_level(logging.WARNING, "plsc"):
        agree_on_shape(mine, ON_GPU, Mesh(0, 1, 0, torch.device("cpu")))
    assert mine.stored_from == Threshold(640, "measured", is_wide=error == 0)
    assert [
        line.endswith("wide blocks of the passes disagree with float64 here: sums 1 (bound 0.1)")
        for line in caplog.messages
    ] == [True] * int(error)


def test_passes_with_stored_logits_that_disagree_with_float64_are_not_used(monkeypatch, caplog):
    def check(checked: TorchBackend, shard: Shard) -> list[Deviation]:
        return [Deviation("sums", 1.0 if "stored" in checked.name else 0.0, 0.1)]

    monkeypatch.setattr(self_check, "check_passes", check)
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(backends, "select_backend", lambda *_: backend(Threshold(768, COMPUTED)))
    monkeypatch.setattr(backends, "_is_too_slow_to_check", lambda _: False)
    with caplog.at_level(logging.WARNING, "plsc"):
        assert choose_backend(replace(ON_GPU, device=torch.device("cpu"))).stored_from is None
    (line,) = caplog.messages
    assert line.endswith("passes with stored weights disagree with float64 here: sums 1 (bound 0.1)")
