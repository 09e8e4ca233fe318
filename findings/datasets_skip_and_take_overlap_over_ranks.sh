#!/usr/bin/env bash
# datasets 5.2.0: skip(n) and take(n) of a stream overlap as soon as one of them is split over ranks or workers, so that
# validation samples are trained on.
#
# Guess before running: take(800) is the first 800 samples and skip(800) all others, whoever reads them. Splitting over
# ranks deals out the samples of a stream, and does not change which samples it has.
# Seen: a stream of 16 files, 1,000 samples each, validation by take(800) in one process, training by skip(800). With 1
# rank no validation sample is trained on. With 2 ranks 400 of the 800 are, with 4 ranks 600, with 8 ranks 700, with 16
# ranks 750. As many others are in neither part. With shuffle() after skip() it is the same. With 3 or 32 ranks it is
# none, for 16 files cannot be dealt out evenly there, and single samples are.
# A split of both over 4 ranks does not overlap, but training over 8 ranks and validation over 2 does, by 600.
# Why: where files are dealt out, each rank skips n / ranks samples at the start of its own files, and takes as many. So the
# cut lies elsewhere for each number of ranks. Workers of a DataLoader go the same way: with 4 it was 600 (run apart).
# Consequence: validation accuracy is too high, the more so the more ranks train. One process and a few files show
# nothing, and no count differs. Cut by whole files with shard(), as is shown here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1
"$folder/venv/bin/python" - <<'PY'
from collections import Counter

from datasets import IterableDataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node

FILES, SAMPLES, HELD_OUT = 16, 1000, 800
EVERY = set(range(FILES * SAMPLES))


def samples_of(files):
    for file in files:
        for at in range(SAMPLES):
            yield {"sample": file * SAMPLES + at}


def stream():
    return IterableDataset.from_generator(samples_of, gen_kwargs={"files": list(range(FILES))})


def read(part, ranks):
    seen = Counter(one["sample"] for rank in range(ranks) for one in split_dataset_by_node(part, rank=rank, world_size=ranks))
    assert max(seen.values()) == 1, "a sample was read twice"
    return set(seen)


validation = {one["sample"] for one in stream().take(HELD_OUT)}
assert validation == set(range(HELD_OUT))
for name, part in (("skip", stream().skip(HELD_OUT)), ("skip and shuffle", stream().skip(HELD_OUT).shuffle(seed=0))):
    both = {}
    for ranks in (1, 2, 3, 4, 8, 16, 32):
        training = read(part, ranks)
        both[ranks] = len(training & validation)
        neither = len(EVERY - training - validation)
        print(f"{name}, {ranks} ranks: {len(training)} trained on; {both[ranks]} of {HELD_OUT} held out are among them; {neither} in neither")
        assert len(training) == FILES * SAMPLES - HELD_OUT and neither == both[ranks]
    wanted = {ranks: HELD_OUT - HELD_OUT // ranks if FILES % ranks == 0 else 0 for ranks in both}
    assert both == wanted, f"changed: {both}"

training = {ranks: read(stream().skip(HELD_OUT), ranks) for ranks in (4, 8)}
equal = len(training[4] & read(stream().take(HELD_OUT), 4))
other = len(training[8] & read(stream().take(HELD_OUT), 2))
print(f"both split over 4 ranks: {equal} in both; trained over 8 ranks and validated over 2: {other} in both")
assert equal == 0 and other == 600, f"changed: {equal}, {other}"

whole = [stream().shard(num_shards=FILES, index=file) for file in range(FILES)]
held_out, rest = {one["sample"] for one in whole[0]}, concatenate_datasets(whole[1:])
for ranks in (1, 3, 4, 5, 15):
    assert read(rest, ranks) == EVERY - held_out
print("cut by whole files: none in both, none in neither, over 1, 3, 4, 5 and 15 ranks")
print("as described")
PY
