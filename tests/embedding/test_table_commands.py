"""Commands that take embedding sets take tables of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from plsc.embedding.arrow_tables import write_table
from plsc.embedding.set_writer import write_embedding_set
from plsc.tools.entry import main

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
lance = pytest.importorskip("lance")

ROWS = 70
NAMES = ["Zoë", "Ada", "陳"]


@pytest.mark.parametrize("name", ["x.parquet", "x.lance"])
def test_commands_take_a_table(tmp_path: Path, name: str) -> None:
    rows = np.random.default_rng(0).standard_normal((ROWS, 8)).astype(np.float32)
    keys = [f"é {row}.jpg" for row in range(ROWS)]
    about = {"contract_id": "a", "labels": np.arange(ROWS) % 4 - 1, "class_names": NAMES, "keys": keys}
    write_table(write_embedding_set(tmp_path / "set", rows, **about), path := tmp_path / name)
    assert main(["index", "build", str(path), "--out", str(tmp_path / "x.idx")]) == 0
    assert main(["index", "search", str(tmp_path / "x.idx"), "--query", str(path), "--json", str(tmp_path / "m")]) == 0
    found = json.loads((tmp_path / "m").read_text())["queries"]
    assert [query["matches"][0]["key"] for query in found] == keys
    assert main(["gallery", "import", str(tmp_path / "store"), "people", str(path)]) == 0
    assert main(["cluster", str(path), "--out", str(tmp_path / "clusters"), "--k", "3"]) == 0
    assert main(["eval", "--probe", "knn", "--data", str(path)]) == 0


@pytest.mark.parametrize("name", ["x.parquet", "x.lance"])
def test_a_table_without_vectors_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if path.suffix == ".lance":
        lance.write_dataset(pa.table({"n": [1]}), path)
    else:
        parquet.write_table(pa.table({"n": [1]}), path)
    assert main(["index", "build", str(path), "--out", str(tmp_path / "x.idx")]) == 2
    assert f"{path} has no column of embeddings" in capsys.readouterr().err
