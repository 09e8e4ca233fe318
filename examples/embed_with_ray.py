"""Ray Data: embed a folder of pictures shard by shard, on many workers. Started again, it makes what is missing."""

import argparse
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

import plsc


class WriteShard:
    """Embeds the pictures of a shard on a worker, and writes its Parquet file, which appears whole or not at all."""

    def __init__(self, embed: plsc.Embedder, data: Path, out: Path) -> None:
        self.embed, self.data, self.out = embed, data, out

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Write the shards of a batch."""
        for name, keys, labels in zip(batch["shard"], batch["keys"], batch["labels"], strict=True):
            columns = {"key": keys, "path": [str(self.data / key) for key in keys], "label": labels}
            unfinished = self.out / f".{name}.{os.getpid()}"
            pq.write_table(self.embed(pa.table(columns)), unfinished)
            unfinished.replace(self.out / name)  # a worker that dies before leaves no shard, and Ray asks another
        return {"shard": batch["shard"]}


def main(argv: list[str] | None = None) -> int:
    """Write the shards that are missing; returns their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="as of plsc embed, on a path that all machines see; data and out too")
    parser.add_argument("--data", type=Path, required=True, help="a folder of pictures")
    parser.add_argument("--out", type=Path, required=True, help="a folder of Parquet files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-rows", type=int, default=4096)
    args = parser.parse_args(argv)

    embed, data, out = plsc.Embedder(args.model), args.data.absolute(), args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    images = plsc.open_images(data, image_size=112)  # nothing is decoded here
    missing = []
    for start in range(0, len(images), args.shard_rows):
        rows = range(start, min(start + args.shard_rows, len(images)))
        labels = [images.class_names[label] if label >= 0 else None for label in images.labels[rows]]
        shard = {"shard": f"shard-{start:09}.parquet", "keys": [images.key(row) for row in rows], "labels": labels}
        missing += [] if (out / shard["shard"]).exists() else [shard]
    if missing:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(include_dashboard=False)  # a cluster's, where RAY_ADDRESS names one
        pool, given = ray.data.ActorPoolStrategy(size=args.workers), (embed, data, out)
        shards = ray.data.from_items(missing, override_num_blocks=len(missing))
        shards.map_batches(WriteShard, fn_constructor_args=given, batch_size=1, compute=pool, num_cpus=1).materialize()
    return len(missing)


if __name__ == "__main__":
    main()
