"""The scan that points search in: by Triton's kernels, interpreted, the bits of the CPU; and when a GPU is taken."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from plsc.cluster import balanced, folder, scan
from plsc.cluster.assignment import Assigner, Points, nearest
from plsc.cluster.balanced import balanced_labels
from plsc.cluster.graph import neighbour_graph
from plsc.cluster.kmeans import KMeans, KMeansOptions
from plsc.cluster.means import Sums
from plsc.cluster.scan import Scan, SearchDevice
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import DataError
from plsc.index import triton_scan
from plsc.index.scan import ExactScan
from plsc.parallel import init, mesh
from plsc.tools.entry import main

CENTRES, DIM = 80, 16  # two groups of the kernels


def drawn(count, seed=0):
    """Rows in groups: some are equal, and some nearly so."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((40, DIM))[random.integers(0, 40, count)] + 0.5 * random.standard_normal((count, DIM))
    rows[6::7] = rows[5 : len(rows) - 1 : 7][: len(rows[6::7])]
    rows[3::11] = rows[0] + 1e-5 * random.standard_normal(rows[3::11].shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def found(work) -> tuple[Any, int]:
    """What ``work`` finds, whatever is large enough for a GPU, and how many queries the kernels answered."""
    answered = []
    search = Scan.search

    def counted(self, queries, *rest, **options):
        answered.append(len(queries) if self.is_on_gpu else 0)
        return search(self, queries, *rest, **options)

    with (
        patch.object(scan, "LEAST_PRODUCTS", 0),
        patch.object(triton_scan, "_LEAST_GROUPS", 1),
        patch.object(scan, "_GPU_QUERIES", 16),  # of a first search, whose answer nobody wants
        patch.object(Scan, "search", counted),
    ):
        return work(), sum(answered)


def assigned():
    """Labels, cosines and centres of two iterations, the first of which has equal centres; then the two nearest."""
    points = Points.of(drawn(60, 1))
    centres = drawn(CENTRES)
    assigner, sums, each = Assigner(points), Sums(CENTRES, DIM), []
    for _ in range(2):
        changed, former = assigner.assign(centres)
        sums.move(points, changed, former, assigner.labels)
        each += [assigner.labels.copy(), assigner.cosines.copy(), centres]
        centres = sums.centres(centres)
    return [*each, *nearest(points, centres, 2)]


def kept_small():
    """Balanced labels, for which points have two candidates."""
    with patch.object(balanced, "_CANDIDATES", 2):
        return [balanced_labels(Points.of(drawn(40, 1)), drawn(CENTRES), 1.0, init("cpu"))]


def graph():
    """The nearest neighbour of each point, of which some have copies."""
    edges = neighbour_graph(Points.of(drawn(CENTRES)), 1)
    return [edges.pairs, edges.cosines]


@pytest.mark.parametrize("work", [assigned, kept_small, graph])
def test_the_kernels_find_the_bits_of_the_cpu(interpreter, work):
    mine, on_gpu = interpreter(found, work)
    expected, on_cpu = found(work)
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert on_gpu >= 40
    assert on_cpu == 0


# The choice ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that has the kernels, as far as is asked; of :class:`ExactScan` the test says what it does there."""
    monkeypatch.setattr(scan, "runs_on", lambda device: device.type == "cuda")
    return SearchDevice("cuda:1")


def stand_in(searches, backend="triton"):
    """An ExactScan that answers so many searches on a GPU, and has no memory for more; None: none to be made in."""

    def make(rows, *, precision, device="cpu"):
        exact = ExactScan(rows, precision="fp32" if device != "cpu" else precision)
        if device == "cpu":
            return exact
        assert (precision, device) == ("fp32", "cuda:1")
        left = iter(range(searches or 0))

        def search(*args, **options):
            if next(left, None) is None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return kept(*args, **options)

        if searches is None:
            raise torch.AcceleratorError("CUDA error: out of memory")
        kept, exact.search, exact.backend = exact.search, search, backend
        return exact

    return patch.object(scan, "ExactScan", make)


@pytest.mark.parametrize(
    ("rows", "k", "queries", "is_taken"),
    [(1 << 15, 2, 1 << 15, True), (1 << 15, 2, 1 << 14, False), (449, 2, 1 << 22, True), (448, 2, 1 << 22, False)],
)
def test_few_products_and_few_rows_are_left_to_the_cpu(gpu, rows, k, queries, is_taken):
    vectors = np.broadcast_to(drawn(1), (rows, DIM))
    assert gpu.takes(vectors, k, queries) == is_taken
    assert not SearchDevice().takes(vectors, k, queries)


def test_kernels_that_are_not_trusted_leave_the_search_to_the_cpu(gpu, monkeypatch):
    """For torch would list candidates there, and the host rank them, one query after another."""
    monkeypatch.setattr(scan, "LEAST_PRODUCTS", 0)
    with stand_in(9, backend="torch"):
        assert not Scan(drawn(600), 2, 100, gpu).is_on_gpu
    assert gpu.device.type == "cuda"


@pytest.mark.parametrize("searches", [None, 0, 1, 2])
def test_a_gpu_whose_memory_is_full_leaves_the_search_to_the_cpu_and_says_so_once(gpu, monkeypatch, caplog, searches):
    monkeypatch.setattr(scan, "LEAST_PRODUCTS", 0)
    centres, vectors = drawn(600), drawn(10_000, 1)
    expected = nearest(Points.of(vectors), centres, 2)
    with stand_in(searches):
        for mine, theirs in zip(nearest(Points.of(vectors, gpu), centres, 2), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert not Scan(centres, 2, len(vectors), gpu).is_on_gpu
    assert gpu.device.type == "cpu"
    assert [record.getMessage() for record in caplog.records] == [
        "600 rows of 16 and a search of them do not fit into the memory of cuda:1; the CPU searches instead"
    ]


def test_other_errors_of_a_gpu_are_told(gpu, monkeypatch):
    def fail(*_, **__):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(scan, "LEAST_PRODUCTS", 0)
    with patch.object(scan, "ExactScan", fail), pytest.raises(RuntimeError, match="illegal memory access"):
        Scan(drawn(600), 2, 100, gpu)


def test_each_process_of_the_command_takes_the_gpu_of_its_number(tmp_path, monkeypatch, capsys):
    gpus, taken = [2], []

    def cluster(*_, where, **__):
        taken.append(where.device)
        raise DataError("that is all")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus[-1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU as {device}")
    monkeypatch.setattr(mesh, "init", lambda device: mesh.Mesh(0, 1, 1, torch.device(device)))
    monkeypatch.setattr(folder, "cluster", cluster)
    write_embedding_set(tmp_path / "set.emb", drawn(50), contract_id="c")
    arguments = ["cluster", str(tmp_path / "set.emb"), "--k", "3", "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert taken == [torch.device("cuda", 1)]
    assert "cluster: large searches run on a GPU as cuda:1\n" in capsys.readouterr().err
    gpus.append(1)
    assert main(arguments) == 2
    assert "local rank 1 has no GPU (1 here); start fewer ranks, or hide the GPUs" in capsys.readouterr().err


def test_all_parts_of_k_means_search_on_the_device_that_they_are_given(tmp_path):
    """Also those that make points of their own: the cells of the first centres, and mini-batches."""
    random, where, asked = np.random.default_rng(0), SearchDevice(), []

    def takes(self, rows, k, queries):
        asked.append((len(rows), queries))
        assert self is where
        return False

    write_embedding_set(tmp_path / "set.emb", random.standard_normal((1100, 8)).astype(np.float32), contract_id="c")
    source = EmbeddingSet(tmp_path / "set.emb")
    options = KMeansOptions(1001, iterations=1, mini_batch=200)
    with patch.object(SearchDevice, "takes", takes):
        KMeans(Points(source, where=where), source, options, tmp_path, init("cpu"), quiet=True).fit()
    assert {(32, 1100), (1001, 200), (1001, 1100)} <= set(asked)
