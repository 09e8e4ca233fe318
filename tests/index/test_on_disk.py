"""Building within an amount of memory: less is allocated than the vectors take, and what is found is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.clusters import clustered, write_set

from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import IntegrityError, UsageError
from plsc.index import Index, ann
from plsc.index.build import build
from plsc.index.index import check
from plsc.index.on_disk import LISTS_FILE, MemoryBudget
from plsc.index.tuning import BuildOptions

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LONG = "PLSC_TEST_LONG" in os.environ


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """What 4,000 rows of 32 numbers do not fit into, with buffers as small."""
    monkeypatch.setattr("plsc.index.on_disk.FIXED_BYTES", 0)
    monkeypatch.setattr("plsc.index.on_disk.LEAST_BYTES", 1)
    monkeypatch.setattr("plsc.index.on_disk._TRAINED_AT_ONCE", 64)
    return 4000 * 96 + 400_000


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[EmbeddingSet]:
    folder = tmp_path_factory.mktemp("sets")
    keys = [[f"s{n}/{row}" for row in range(1000)] for n in range(4)]
    return [write_set(folder / f"s{n}", *clustered(100, 10, 32, n), keys=keys[n]) for n in range(4)]


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: its limits and its /proc")
def test_a_build_takes_less_memory_than_the_vectors(tmp_path: Path) -> None:
    """100 MB of vectors in four sets are built into an IVF index within 32 MiB; without a limit they all are held."""
    sets = [str(write_set(tmp_path / f"s{n}", *clustered(1250, 10, 512, n)).folder) for n in range(4)]

    def peak(memory: int) -> int:
        script = [sys.executable, str(ROOT / "tests" / "support" / "watched_build.py")]
        arguments = [str(memory), "ivf", str(tmp_path / "idx"), *sets]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*script, *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["peak"])

    assert peak(32 * MIB) < 32 * MIB
    index = Index.open(tmp_path / "idx", verify=False)
    assert len(index) == 50_000
    assert index.search(index.vectors[::1000], 1).rows[:, 0].tolist() == list(range(0, 50_000, 1000))
    if LONG:
        assert peak(0) > 100 * 10**6, "the measure tells"


@pytest.mark.parametrize("kind", ["ivf", "pq"])
def test_a_structure_merged_on_disk_finds_the_same(sets, tmp_path, small, kind, monkeypatch, capfd):
    monkeypatch.setitem(ann.MIN_ROWS, "pq", 3000)
    limit = small if kind == "ivf" else 4000 * 96 + 150_000
    made = build(sets, tmp_path / "idx", BuildOptions(kind=kind, recall=0.9, memory=limit, quiet=True))
    assert capfd.readouterr().out == ""
    assert (tmp_path / "idx" / LISTS_FILE).stat().st_size > 3600 * 8
    assert sorted(made["files"]) == sorted(p.name for p in (tmp_path / "idx").iterdir() if p.name != "manifest.json")
    assert made["recall"]["recall@10"] >= 0.9
    (tmp_path / "idx").rename(tmp_path / "moved")
    index, plain = Index.open(tmp_path / "moved"), Index.build(sets, tmp_path / "plain", kind="exact", quiet=True)
    assert index.structure.ntotal == 3600
    assert sorted(index.ids.tolist()) == list(range(4000))
    queries = sets[2].rows(0, 300)
    found, truth = index.search(queries, 10), plain.search(queries, 10)
    assert (found.scores >= truth.scores[:, -1:] - 1e-5).mean() >= 0.85
    best = index.search(queries, 1)
    known = [index.keys[row] == f"s2/{n}" for n, row in enumerate(best.rows[:, 0])]
    assert np.mean(known) >= (1 if kind == "ivf" else 0.9)
    np.testing.assert_allclose(best.scores[known], 1, atol=1e-5)
    assert capfd.readouterr().out == ""
    assert check(tmp_path / "moved")["recall"] == made["recall"]


def test_an_exact_index_within_memory_is_the_same_file_for_file(sets, tmp_path, small):
    for name, memory in (("with", small), ("without", None)):
        build(sets, tmp_path / name, BuildOptions(kind="exact", memory=memory, quiet=True))
    names = sorted(path.name for path in (tmp_path / "with").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "without").iterdir())
    for name in set(names) - {"manifest.json"}:
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()


def test_a_flipped_bit_in_the_cells_is_named(sets: list[EmbeddingSet], tmp_path: Path, small: int) -> None:
    build(sets, tmp_path / "idx", BuildOptions(kind="ivf", recall=0.5, memory=small, quiet=True))
    path = tmp_path / "idx" / LISTS_FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for verify in (True, False):
        with pytest.raises(IntegrityError, match=LISTS_FILE):
            Index.open(tmp_path / "idx", verify=verify)


@pytest.mark.parametrize("name", [LISTS_FILE, "vectors.npy", "labels.npy"])
def test_an_open_index_whose_file_is_cut_answers_with_its_name(
    sets: list[EmbeddingSet], tmp_path: Path, small: int, name: str
) -> None:
    """To read what was cut off of a mapped file would end the process, by SIGBUS."""
    build(sets, tmp_path / "idx", BuildOptions("ivf", memory=small, quiet=True))
    index = Index.open(tmp_path / "idx")
    query = np.array(index.vectors[:1])
    (tmp_path / "idx").rename(tmp_path / "moved")  # by its former name nobody writes to it
    assert index.search(query, 1).rows.tolist() == [[0]]
    (tmp_path / "moved").rename(tmp_path / "idx")
    os.truncate(tmp_path / "idx" / name, 200)
    with pytest.raises(IntegrityError, match=f"{name} was cut, or written over, while it was in use"):
        index.search(query, 1)


def test_what_auto_gives_up_leaves_no_cells(sets, tmp_path, small, monkeypatch):
    monkeypatch.setattr("plsc.index.build.EXACT_UP_TO", 1000)
    monkeypatch.setattr("plsc.index.tuning._speed_over_exact", lambda *_: 0.5)
    assert build(sets, tmp_path / "idx", BuildOptions(memory=small, recall=0.5, quiet=True))["kind"] == "exact"
    assert not (tmp_path / "idx" / LISTS_FILE).exists()
    check(tmp_path / "idx")


def test_amounts_that_cannot_be(sets: list[EmbeddingSet], tmp_path: Path, small: int) -> None:
    with pytest.raises(UsageError, match="hnsw keeps all 3,600 rows in memory"):
        build(sets, tmp_path / "idx", BuildOptions(kind="hnsw", memory=small, quiet=True))
    with pytest.raises(UsageError, match=r"too little for 4,000 rows of 32: at least \d+ MB"):
        build(sets, tmp_path / "idx", BuildOptions(kind="ivf", memory=1000, quiet=True))
    assert list(tmp_path.iterdir()) == []
    assert MemoryBudget(4 * 10**9, 10**6, 512, tmp_path).holds("pq")
    assert not MemoryBudget(4 * 10**9, 2 * 10**6, 512, tmp_path).holds("ivf")


@pytest.mark.live
@pytest.mark.slow
def test_a_killed_build_leaves_the_former_index_and_the_next_one_succeeds(sets, tmp_path):
    build(sets[:1], tmp_path / "idx", BuildOptions(kind="exact", quiet=True))
    script = (
        "import sys, time, plsc.index.on_disk as m; from pathlib import Path\n"
        "m.FIXED_BYTES, m.LEAST_BYTES, m._TRAINED_AT_ONCE = 0, 1, 64\n"
        "add = m.ann.add_rows\n"
        "def slow(*more): add(*more); print('added', flush=True); time.sleep(60 if more[2].start else 0)\n"
        "m.ann.add_rows = slow\n"
        "from plsc.index.build import build\n"
        "from plsc.index.tuning import BuildOptions\n"
        "options = BuildOptions(kind='ivf', recall=0.5, memory=4000 * 96 + 400_000, quiet=True)\n"
        "build(sys.argv[2:], Path(sys.argv[1]), options, overwrite=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "idx"), *(str(one.folder) for one in sets)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["added\n"] * 2
        process.kill()
    assert len(Index.open(tmp_path / "idx")) == 1000
    left = [path.name for path in tmp_path.iterdir()]
    assert sorted(left) == [".idx.building", "idx"], "the cut build is apart, and the next one takes its place"
    with pytest.raises(UsageError, match="exists already: give --overwrite"):
        build(sets, tmp_path / "idx", BuildOptions(kind="exact", quiet=True))
    build(sets, tmp_path / "idx", BuildOptions(kind="exact", quiet=True), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["idx"]
    assert len(Index.open(tmp_path / "idx")) == 4000
