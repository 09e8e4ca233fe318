"""Clusters on a GPU: the bits of the CPU, also where the GPU's memory is full."""

import numpy as np
import pytest
import torch

from plsc.cluster import scan
from plsc.cluster.assignment import Assigner, Points
from plsc.cluster.graph import neighbour_graph
from plsc.cluster.means import Sums
from plsc.cluster.scan import Scan, SearchDevice

pytestmark = pytest.mark.gpu


def drawn(count, dim, seed=0):
    random = np.random.default_rng(seed)
    rows = random.standard_normal((300, dim))[random.integers(0, 300, count)] + random.standard_normal((count, dim))
    rows[6::7] = rows[5 : len(rows) - 1 : 7][: len(rows[6::7])]  # ties
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def where(monkeypatch):
    """The GPU, which takes searches of any size."""
    monkeypatch.setattr(scan, "LEAST_PRODUCTS", 0)
    device = SearchDevice("cuda")
    if not Scan(drawn(600, 64), 2, 1, device).is_on_gpu:
        pytest.skip("this GPU has no kernels for searches")
    return device


def assigned(where):
    points = Points.of(drawn(30_000, 200, 1), where)
    centres = points.take(np.arange(2000))
    assigner, sums, found = Assigner(points), Sums(2000, 200), []
    for _ in range(5):
        changed, former = assigner.assign(centres)
        sums.move(points, changed, former, assigner.labels)
        found += [assigner.labels.copy(), assigner.cosines.copy()]
        centres = sums.centres(centres)
    return found


def graph(where):
    edges = neighbour_graph(Points.of(drawn(20_000, 200), where), 10)
    return [edges.pairs, edges.cosines]


@pytest.mark.parametrize("work", [assigned, graph])
def test_a_gpu_finds_the_bits_of_the_cpu(where, work):
    for mine, theirs in zip(work(where), work(SearchDevice()), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert where.device.type == "cuda"


def test_where_its_memory_is_full_the_cpu_searches(where, caplog):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        found = graph(where)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for mine, theirs in zip(found, graph(SearchDevice()), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert where.device.type == "cpu"
    assert "do not fit into the memory of cuda; the CPU searches instead" in caplog.text
