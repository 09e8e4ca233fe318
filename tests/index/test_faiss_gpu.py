"""faiss on a GPU, by a fake of its GPU functions: what runs there, and that indexes are those of the CPU."""

from collections import Counter
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from plsc.doctor import kernels
from plsc.index import Index, faiss_gpu, scan
from plsc.index.on_disk import ROW_BYTES

DIM = 32


def unit(count: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, DIM), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Resources:
    def setTempMemory(self, size: int) -> None:
        assert size == 256 << 20

    def setPinnedMemory(self, size: int) -> None:
        assert size == 32 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Has faiss see a GPU, whose indexes are copies on the CPU; counts what is asked of it."""
    used: Counter[str] = Counter()

    def to_gpu(resources: Resources, device: int, index: faiss.Index) -> faiss.Index:
        assert isinstance(resources, Resources)
        assert device == 0
        used[f"{type(index).__name__} of {index.d}, {'filled' if index.ntotal else 'empty'}"] += 1
        return faiss.clone_index(index)

    def knn_gpu(resources, queries, base, k, *, metric, device, **limits):
        assert set(limits) == {"vectorsMemoryLimit", "queriesMemoryLimit"}
        used["knn"] += 1
        return faiss.knn(queries, base, k, metric=metric)

    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_gpu, raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu)
    faiss_gpu._resources.cache_clear()
    yield used
    faiss_gpu._resources.cache_clear()


def files_of(index: Index) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in index.manifest["files"].items()}


@pytest.mark.first_ring("ivf-3000")
@pytest.mark.parametrize(("kind", "rows"), [("ivf", 3000), ("pq", 10_500)])
def test_an_index_built_with_a_gpu_is_the_cpu_s(request, tmp_path: Path, kind: str, rows: int) -> None:
    vectors = unit(rows, 0)
    on_cpu = Index.build(vectors, tmp_path / "cpu", kind=kind, recall=0.5, quiet=True)
    used = request.getfixturevalue("gpu")
    on_gpu = Index.build(vectors, tmp_path / "gpu", kind=kind, recall=0.5, quiet=True)
    cells = {f"IndexFlatIP of {DIM}, empty": 1, f"IndexFlatIP of {DIM}, filled": 1}  # to train, and to add
    assert used == cells | ({"IndexFlatL2 of 4, empty": 1} if kind == "pq" else {})
    assert files_of(on_gpu) == files_of(on_cpu)
    assert on_gpu.structure.clustering_index is None


def test_parts_that_are_merged_on_disk_find_their_cells_on_the_gpu(gpu, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("plsc.index.on_disk.FIXED_BYTES", 0)
    monkeypatch.setattr("plsc.index.on_disk.LEAST_BYTES", 0)
    monkeypatch.setattr("plsc.index.on_disk._TRAINED_AT_ONCE", 64)
    vectors = unit(3000, 0)
    memory = 3000 * ROW_BYTES + vectors.nbytes // 2
    index = Index.build(vectors, tmp_path / "idx", kind="ivf", recall=0.5, memory=memory, quiet=True)
    assert gpu[f"IndexFlatIP of {DIM}, filled"] > 1  # a copy of the cells for each part
    found = index.search(vectors[:50], 1)
    np.testing.assert_array_equal(found.ids[:, 0], np.arange(50))


def test_a_large_exact_search_goes_to_the_gpu_and_others_do_not(gpu, monkeypatch) -> None:
    vectors, queries = unit(2500, 0), unit(20, 1)
    want = scan.knn(queries, vectors, 5)
    assert not gpu
    monkeypatch.setattr(faiss_gpu, "LEAST_PRODUCTS", 20 * vectors.size)
    for search in (lambda: scan.knn(queries, vectors, 5), lambda: scan.ExactSearch(vectors).search(queries, 5)):
        scores, rows = search()
        np.testing.assert_array_equal(scores, want[0])
        np.testing.assert_array_equal(rows, want[1])
    assert gpu == {"knn": 2}
    scan.knn(queries, vectors, 2049)  # more than faiss selects there
    scan.knn(queries[:19], vectors, 5)
    assert gpu == {"knn": 2}


def test_rows_scored_again_by_torch_have_the_same_scores() -> None:
    vectors, queries, generator = unit(300, 0), unit(7, 1), np.random.default_rng(2)
    positions, numbers = generator.integers(300, size=90), generator.integers(7, size=90)
    want = faiss_gpu.pair_scores(vectors, positions, queries, numbers)
    got = faiss_gpu._pair_scores_on(torch.device("cpu"), vectors, positions, queries, numbers)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(want[0], vectors[positions[0]] @ queries[numbers[0]], atol=1e-6)


def test_doctor_says_where_indexes_are_built_and_why(request, monkeypatch) -> None:
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    text = "by faiss on the CPU: faiss-cpu is installed, and the extra [gpu] brings faiss for GPUs"
    assert kernels._index_building().text == text
    request.getfixturevalue("gpu")
    assert kernels._index_building().text == "by faiss on the GPU"
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    assert kernels._index_building().text == "by faiss on the CPU: faiss sees no GPU"
