"""Spark: embed a folder of pictures by mapInArrow, a job for each shard. Started again, it makes what is missing."""

import argparse
import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plsc

GIVEN = "key string, path string, label string"
MADE = "key string, label string, embedding array<float>, error string"


def main(argv: list[str] | None = None) -> int:
    """Write the shards that are missing, and one Parquet file of all; returns their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="as of plsc embed, on a path that all machines see; data and out too")
    parser.add_argument("--data", type=Path, required=True, help="a folder of pictures")
    parser.add_argument("--out", type=Path, required=True, help="a folder; OUT/embeddings.parquet is an embedding set")
    parser.add_argument("--master", default="local[2, 4]", help="two tasks at once, each of which may fail three times")
    parser.add_argument("--shard-rows", type=int, default=4096)
    args = parser.parse_args(argv)

    embed, data, out = plsc.Embedder(args.model), args.data.absolute(), args.out.absolute()
    images = plsc.open_images(data, image_size=112)  # nothing is decoded here
    names = [images.class_names[label] if label >= 0 else None for label in images.labels]
    rows = [(key := images.key(row), str(data / key), names[row]) for row in range(len(images))]
    starts = range(0, len(rows), args.shard_rows)
    shards = {out / f"shard-{start:09}": rows[start : start + args.shard_rows] for start in starts}
    missing = [folder for folder in shards if not (folder / "_SUCCESS").exists()]  # Spark's own mark of a whole one
    if missing:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers' Python is python3 otherwise
        spark = SparkSession.builder.master(args.master).config("spark.ui.enabled", "false").getOrCreate()
        for folder in missing:
            given = spark.createDataFrame(shards[folder], GIVEN).repartition(spark.sparkContext.defaultParallelism)
            given.mapInArrow(embed.arrow, MADE).write.mode("overwrite").parquet(str(folder))
        spark.stop()
    whole = [pq.read_table(folder).sort_by("key").replace_schema_metadata(embed.metadata) for folder in shards]
    unfinished = out / ".embeddings.parquet"
    with pq.ParquetWriter(unfinished, whole[0].schema) as writer:
        for table in whole:
            writer.write_table(table)
    unfinished.replace(out / "embeddings.parquet")
    return len(missing)


if __name__ == "__main__":
    main()
