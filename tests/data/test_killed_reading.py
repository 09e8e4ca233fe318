"""Runs that are killed with -9 at any write, scan or read of a source, and go on at another number of ranks."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from support.killed_writes import kill_at_write
from support.source_kinds import KINDS, PICTURES

from plsc.data import TrainLoader, open_dataset, readers, shard_index
from plsc.data.dataset import FileDataset
from plsc.data.sharded import ShardedDataset
from plsc.files import read_json, write_json

pytestmark = [pytest.mark.live, pytest.mark.slow]

EPOCHS, BATCH = 3, 12  # pictures of a step, at any number of ranks
KILLS = 3
WORLDS = (3, 1, 4, 2)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"folder", "list"}))
def test_every_picture_is_seen_once_an_epoch_whatever_is_killed(kind: str, tmp_path: Path) -> None:
    source, state = KINDS[kind](tmp_path), tmp_path / "state.json"
    chance, kills = random.Random(kind), 0
    for attempt in count():
        # Some are killed while the source is opened, others after some steps; the last one runs to its end.
        events = chance.choice([3, 9, 30, 80]) if attempt < KILLS else 10**9
        run = [sys.executable, __file__, source, str(state), str(WORLDS[attempt % 4]), str(chance.randint(0, events))]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(run, capture_output=True, text=True, check=False, env=found)
        if ended.returncode != -signal.SIGKILL:
            assert ended.returncode == 0, ended.stderr
            break
        kills += 1
    assert kills, "nothing was killed"
    seen = Counter(tuple(one) for one in read_json(state)["seen"])
    assert seen == Counter({(epoch, name): 1 for epoch in range(EPOCHS) for name in PICTURES})


def main(source: str, state: Path, world: int, kill_at: int) -> None:
    """Read epochs on all ranks; after each step, what was seen and the position are kept together."""
    shard_index.KEPT_FROM = 0
    scans = [(reader.shard_format, "scan") for reader in readers.SHARDS.values()]
    kill_at_write(kill_at, [*scans, (ShardedDataset, "encoded"), (FileDataset, "encoded")])
    data = open_dataset(source, image_size=32)
    kept = read_json(state) if state.exists() else {"loader": {"epoch": 0, "consumed": 0, "order": 2}, "seen": []}
    ranks = [
        TrainLoader(data, batch_size=BATCH // world, rank=rank, world_size=world, seed=5, augment="none", cache=None)
        for rank in range(world)
    ]
    for loader in ranks:
        loader.load_state_dict(kept["loader"])
    while ranks[0].epoch < EPOCHS and kept["loader"] != {"epoch": EPOCHS - 1, "consumed": len(data), "order": 2}:
        epoch = ranks[0].state_dict()["epoch"] + (ranks[0].state_dict()["consumed"] == len(data))
        for _ in zip(*ranks, strict=True):
            new = [(epoch, data.key(index)) for loader in ranks for index in loader.indices]
            kept = {"loader": ranks[0].state_dict(), "seen": [*kept["seen"], *new]}
            write_json(state, kept)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
