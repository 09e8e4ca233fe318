"""Embedding in Ray Data and Spark: with the rows of plsc embed, none twice, though a worker is killed on the way."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from plsc import models
from plsc.data.codec import encode_image
from plsc.embedding.arrow_tables import write_table
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.index import Index
from plsc.tools.entry import main

ROOT = Path(__file__).parents[2]
COUNT, SHARD_ROWS, BROKEN, STRUCK = 40, 16, 3, 20
pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingSet:
    """What plsc embed makes of pictures, which lie beside it with their model."""
    folder = tmp_path_factory.mktemp("engines")
    torch.manual_seed(0)
    models.save_model(models.create("resnet8", embedding_dim=16, image_size=32), folder / "model.safetensors")
    for number in range(COUNT):
        path = folder / "photos" / f"c{number // 25}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (3, 40, 40), generator=torch.Generator().manual_seed(number)).byte()
        path.write_bytes(b"broken" if number == BROKEN else encode_image(pixels, "png"))
    command = ["embed", str(folder / "model.safetensors"), "--data", str(folder / "photos"), "--workers", "0"]
    assert main([*command, "--out", str(folder / "set")]) == 0
    return EmbeddingSet(folder / "set")


def run(name: str, made: EmbeddingSet, out: Path) -> int:
    """Run an example of two workers; returns how many shards it made."""
    folder = made.folder.parent
    paths = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"STRIKE": str(out.with_name("strike")), "STRIKE_AT": f"{STRUCK}.png"}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "RAY_USAGE_STATS_ENABLED": "0", "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, str(Path(__file__).with_name("striking.py")), str(ROOT / "examples" / f"{name}.py")]
    command += [str(folder / "model.safetensors"), "--data", str(folder / "photos"), "--out", str(out)]
    command += ["--shard-rows", str(SHARD_ROWS)]
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return int(done.stdout.split()[-1])


READ_BY_SPARK = """
import sys
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
table = spark.read.parquet(sys.argv[1])
pq.write_table(table.orderBy("id").toArrow(), sys.argv[2])
table.write.parquet(sys.argv[3])
"""


def assert_rows(made: EmbeddingSet, files: list[Path]) -> None:
    """The files hold the rows of plsc embed, each once."""
    expected = {key: (row.tobytes(), label) for key, row, label in rows_of(made)}
    found = [(key, (row.tobytes(), label)) for file in files for key, row, label in rows_of(EmbeddingSet(file))]
    assert Counter(key for key, _ in found) == Counter(made.keys)
    assert dict(found) == expected
    errors = [EmbeddingSet(file).keys[row] for file in files for row in EmbeddingSet(file).errors]
    assert errors == [made.keys[BROKEN]]
    assert {EmbeddingSet(file).contract_id for file in files} == {made.contract_id}


def rows_of(read: EmbeddingSet) -> list[tuple[str, np.ndarray, str]]:
    names = [read.class_names[label] for label in read.labels]
    return list(zip(read.keys, read.rows(0, len(read)), names, strict=True))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data]")
def test_ray_asks_another_worker_for_the_shard_of_one_that_was_killed(made: EmbeddingSet, tmp_path: Path) -> None:
    out, strike = tmp_path / "out", tmp_path / "strike"
    strike.touch()
    assert run("embed_with_ray", made, out) == 3
    assert not strike.exists()  # a worker was killed
    files = sorted(out.iterdir())
    assert [file.name for file in files] == [f"shard-{start:09}.parquet" for start in (0, 16, 32)]
    assert_rows(made, files)
    kept = {file: file.stat().st_ino for file in files[1:]}
    files[0].unlink()
    assert run("embed_with_ray", made, out) == 1
    assert_rows(made, files)
    assert {file: file.stat().st_ino for file in files[1:]} == kept
    assert main(["index", "build", *map(str, files), "--out", str(tmp_path / "idx")]) == 0


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="needs pyspark")
@pytest.mark.skipif(shutil.which("java") is None, reason="needs java (apt-get install default-jre-headless)")
def test_spark_tries_a_task_again_whose_worker_was_killed(made: EmbeddingSet, tmp_path: Path) -> None:
    out, strike = tmp_path / "out", tmp_path / "strike"
    strike.touch()
    assert run("embed_with_spark", made, out) == 3
    assert not strike.exists()  # a worker was killed
    assert_rows(made, [out / "embeddings.parquet"])
    kept = {file: file.stat().st_ino for file in out.glob("shard-00000001*/*.parquet")}
    assert kept
    shutil.rmtree(out / "shard-000000032")
    assert run("embed_with_spark", made, out) == 1
    assert_rows(made, [out / "embeddings.parquet"])
    assert {file: file.stat().st_ino for file in out.glob("shard-00000001*/*.parquet")} == kept
    assert main(["index", "build", str(out / "embeddings.parquet"), "--out", str(tmp_path / "idx")]) == 0


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="needs pyspark")
@pytest.mark.skipif(shutil.which("java") is None, reason="needs java (apt-get install default-jre-headless)")
def test_spark_reads_an_exported_set_and_what_it_writes_is_indexed(made: EmbeddingSet, tmp_path: Path) -> None:
    exported, read, written = (str(tmp_path / name) for name in ("set.parquet", "read.parquet", "written"))
    write_table(made, Path(exported))
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", READ_BY_SPARK, exported, read, written]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    told, found = (pq.read_table(path).to_pydict() for path in (exported, read))
    vectors = [np.array(columns.pop("embedding"), np.float32).view(np.uint32) for columns in (told, found)]
    assert np.array_equal(*vectors)
    assert found == told
    files = sorted(Path(written).glob("*.parquet"))
    rows = {key: row.tobytes() for file in files for key, row, _ in rows_of(EmbeddingSet(file))}
    assert rows == {key: row.tobytes() for key, row, _ in rows_of(made)}
    assert main(["index", "build", *map(str, files), "--out", str(tmp_path / "idx")]) == 0
    assert len(Index.open(tmp_path / "idx")) == COUNT - 1
