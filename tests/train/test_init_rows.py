"""The class table's first rows: head.init_rows."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from support.tiny_runs import refusal, run, run_until, stored

import plsc
from plsc.embedding.arrow_tables import write_table
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import DataError, UsageError
from plsc.parallel.collectives import all_gather_rows
from plsc.train.init_rows import set_first_rows


def first_rows(mesh, source, options):
    """The table of all ranks, and its 1/norms, after :func:`set_first_rows`; and the random one before."""
    head = plsc.ShardedHead(8, 7, mesh, **options)
    before = all_gather_rows(head.weight.detach().clone(), mesh)
    set_first_rows(head, str(source))
    norms = all_gather_rows(head.inverse_norms().reciprocal(), mesh)
    return before.float(), all_gather_rows(head.weight.detach().clone(), mesh).float(), norms


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_dtype": "bfloat16"}, {"placement": "mmap"}, {"centers": 2}],
    ids=lambda options: str(options),
)
def test_rows_begin_at_centres_with_the_norm_of_random_rows(ranks, tmp_path, options):
    centres = np.random.default_rng(0).normal(size=(7, 8)).astype(np.float32) * 5
    centres[3] = 0
    np.save(tmp_path / "centres.npy", centres)
    options = {name: f"mmap:{tmp_path}/table" if value == "mmap" else value for name, value in options.items()}
    before, after, norms = ranks(2, first_rows, tmp_path / "centres.npy", options)[0]
    count = options.get("centers", 1)
    expected = torch.from_numpy(centres / np.linalg.norm(centres, axis=1, keepdims=True).clip(1e-9)) * 0.01 * 8**0.5
    expected[3] = 0
    kept = before.view(7, count, 8)
    wanted = expected[:, None] + (kept / 10 if count > 1 else 0)
    wanted[3] = kept[3]
    torch.testing.assert_close(
        after.view(7, count, 8), wanted, rtol=2**-7 if "weight_dtype" in options else 1e-5, atol=1e-6
    )
    torch.testing.assert_close(norms.double(), after.double().norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("centers", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_rows_begin_at_those_of_a_table(ranks, tmp_path, centers, dtype):
    weight = torch.randn(7 * centers, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"weight": weight}, tmp_path / "t.safetensors", {"centers": str(centers)})
    before, after, _ = ranks(2, first_rows, tmp_path / "t.safetensors", {"centers": centers})[0]
    wanted = weight.double() / weight.double().norm(dim=1, keepdim=True) * 0.01 * 8**0.5
    torch.testing.assert_close(after.double(), wanted, rtol=1e-5, atol=1e-7)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", ["set.emb", "set.parquet", "set.lance"])
def test_rows_begin_at_the_means_of_a_sets_labels(ranks, tmp_path, name):
    generator = np.random.default_rng(1)
    rows, labels = generator.normal(size=(40, 8)).astype(np.float32), generator.integers(0, 6, 40)
    names = [str(number) for number in range(7)]
    made = write_embedding_set(tmp_path / "set.emb", rows, contract_id="c", labels=labels, class_names=names)
    if name != "set.emb":
        pytest.importorskip("pyarrow" if name == "set.parquet" else "lance")
        write_table(made, tmp_path / name)
    before, after, _ = ranks(2, first_rows, tmp_path / name, {})[0]
    unit = rows.astype(np.float64) / np.linalg.norm(rows, axis=1, keepdims=True)
    for label in range(6):
        mean = unit[labels == label].sum(0)
        assert np.allclose(after[label], mean / np.linalg.norm(mean) * 0.01 * 8**0.5, rtol=1e-5)
    assert torch.equal(after[6], before[6])


def test_a_run_starts_from_centres_and_says_so(ranks, tmp_path):
    np.save(tmp_path / "centres.npy", np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32))
    changes = {"head.init_rows": str(tmp_path / "centres.npy"), "data.train": "avatars:6x4", "embedding_dim": 16}
    ranks(1, run, tmp_path / "run", {**changes, "steps": 2, "epochs": None})
    assert "class table from head.init_rows" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("form", ["set", "table"])
def test_rows_of_other_people_are_refused_by_name(ranks, tmp_path, form):
    rows = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    names = [f"avatar-{number}" for number in range(7) if number != 2]
    if form == "set":
        write_embedding_set(tmp_path / "rows", rows, contract_id="c", labels=np.arange(6), class_names=names)
    else:
        np.save(tmp_path / "rows.npy", rows)
        (tmp_path / "rows.json").write_text(json.dumps({"classes": [[name] for name in names]}))
    source = str(tmp_path / ("rows" if form == "set" else "rows.npy"))
    changes = {"head.init_rows": source, "data.train": "avatars:6x4", "steps": 2, "epochs": None}
    message = f"head.init_rows = {source} is of other classes than the data: class 2 is 'avatar-3' there and 'avatar-2'"
    assert message in ranks(1, refusal, tmp_path / "run", changes)[0]
    tables = [{"name": "a", "data": {"train": "avatars:4x4"}}, {"name": "b", "data": {"train": "avatars:6x4"}}]
    tables[1]["head"] = {"init_rows": source}
    changes = {"table": tables, "steps": 2, "epochs": None}
    assert message in ranks(1, refusal, tmp_path / "run", changes)[0]
    tables[1]["data"] = {"train": "avatars:2x4"}
    tables[0]["data"] = {"train": "avatars:6x4"}
    assert "other classes" not in ranks(1, refusal, tmp_path / "run", changes)[0]


@pytest.mark.feature("frozen")
def test_frozen_rows_are_the_centres_of_a_run_that_was_stopped_and_goes_on(ranks, tmp_path):
    centres = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    np.save(tmp_path / "centres.npy", centres)
    changes = {
        "head.init_rows": str(tmp_path / "centres.npy"),
        "frozen.rows": "0:4",
        "negative_filter.cosine": 0.3,
        "data.train": "avatars:6x8",
        "data.batch_size": 4,
        "epochs": None,
        "steps": 4,
    }
    out = tmp_path / "run"
    ranks(2, run_until, out, changes, None, 2)
    ranks(1, run, out, {**changes, "data.batch_size": 8}, "auto")
    weight = ranks(1, stored, out, 4, "head.")[0]["weight"]
    expected = torch.from_numpy(centres / np.linalg.norm(centres, axis=1, keepdims=True)) * 0.01 * 16**0.5
    torch.testing.assert_close(weight[:4].float(), expected[:4], rtol=1e-5, atol=0)
    assert (weight[4:].float() - expected[4:]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, UsageError, "there is no head.init_rows"),
        (np.zeros((7, 9), np.float32), UsageError, r"is \(7, 9\), the class table \(7, 8\)"),
        (np.zeros((7, 8), np.int64), DataError, "no array"),
        (b"text", DataError, "is no .npy file"),
        (save({"weight": torch.ones(7, 9)}), UsageError, "7 classes of 1 x 9 numbers .* class table 7 of 1 x 8"),
        (save({"weight": torch.ones(14, 8)}, {"centers": "2"}), UsageError, "holds 7 classes of 2 x 8 numbers"),
        (save({"weight": torch.ones(7, 8)}, {"centers": "2"}), DataError, "holds 7 rows, which are no 2 for each"),
        (save({"fc": torch.ones(7, 8)}), DataError, "holds no class table"),
        (save({"weight": torch.ones(7, 8)})[:50], DataError, "holds no class table"),
    ],
)
def test_what_is_no_centres_is_refused(tmp_path, content, error, message):
    is_table = isinstance(content, bytes) and content != b"text"
    path = tmp_path / ("centres.safetensors" if is_table else "centres.npy")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(error, match=message):
        set_first_rows(plsc.ShardedHead(8, 7), str(path))
