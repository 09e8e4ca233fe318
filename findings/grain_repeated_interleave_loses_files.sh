#!/usr/bin/env bash
# grain 0.2.18: RepeatIterDataset over InterleaveIterDataset reads the first files no more from the third epoch on. A
# checkpoint of its second epoch, or a later one, loses the rest of the epoch, and so it does over mp_prefetch.
#
# Guess before running: every epoch holds each sample once, for the repeat returns to the state of the start. A saved
# state given to a new iterator goes on where the old one was, as it does in the first epoch.
# Seen: six files of 100 samples, two open at a time, five epochs. Epochs 1 and 2 are right. Epochs 3, 4 and 5 read the
# last two files twice and the first two never, and have 600 samples as they should. With all six files open, each epoch is
# right. But nothing of epoch 2 follows a checkpoint after 650, 900 or 1,150 samples: 50 to 550 samples are lost, and
# the next epoch begins. In the last epoch the iterator just ends. A range of 600 by mp_prefetch with two workers loses
# 300 after 900, too. Checkpoints of the first epoch are right. Without any repeat, a third pass after set_state to the
# first state reads wrong files as well.
# Why: set_state of the interleave takes over the list of open files that is in the state, and writes into it as it goes
# on. So the repeat's remembered start becomes the end of the second epoch. It also leaves the marks of exhausted files
# as they are, so that get_state calls files exhausted that are open. mp_prefetch is an interleave of its workers.
# Consequence: with files by class or by source, whole classes vanish after two epochs, and no count of steps shows it.
# Interleave a list that names each file once an epoch, or repeat() the MapDataset before mp_prefetch, as is shown here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
cat > "$folder/see.py" <<'PY'
import json
from collections import Counter

import grain

FILES, SAMPLES, EPOCHS = 6, 100, 5
EPOCH = FILES * SAMPLES
CUTS = (50, 300, 650, 900, 1150, EPOCH * EPOCHS - 500)
WORKERS = grain.MultiprocessingOptions(num_workers=2)


def files(times=1):
    one = [grain.MapDataset.range(SAMPLES * file, SAMPLES * (file + 1)) for file in range(FILES)]
    return [part.to_iter_dataset() for _ in range(times) for part in one]


def repeated(opened):
    interleaved = grain.experimental.InterleaveIterDataset(files(), cycle_length=opened)
    return grain.experimental.RepeatIterDataset(interleaved, EPOCHS)


def written_out(opened):
    return grain.experimental.InterleaveIterDataset(files(EPOCHS), cycle_length=opened)


def by_workers():
    return grain.experimental.RepeatIterDataset(grain.MapDataset.range(EPOCH).to_iter_dataset().mp_prefetch(WORKERS), EPOCHS)


def by_workers_repeated_before():
    return grain.MapDataset.range(EPOCH).repeat(EPOCHS).to_iter_dataset().mp_prefetch(WORKERS)


def files_read(samples):
    return [sorted(Counter(one // SAMPLES for one in samples[at : at + EPOCH]).items()) for at in range(0, len(samples), EPOCH)]


def lost(dataset, cut):
    """How many samples are missing when the iterator is saved as JSON after `cut` samples and a new one goes on."""
    first = iter(dataset)
    seen = [int(next(first)) for _ in range(cut)]
    saved = json.dumps(first.get_state())
    first.close()
    second = iter(dataset)
    second.set_state(json.loads(saved))
    seen += [int(one) for one in second]
    second.close()
    return sum((Counter(list(range(EPOCH)) * EPOCHS) - Counter(seen)).values())


def main():
    right = [(file, SAMPLES) for file in range(FILES)]
    shifted = [(file, SAMPLES) for file in range(2, FILES - 2)] + [(file, 2 * SAMPLES) for file in range(FILES - 2, FILES)]
    for opened in (2, FILES):
        epochs = files_read([int(one) for one in repeated(opened)])
        print(f"{opened} files open at a time: (file, samples read) by epoch")
        for number, counts in enumerate(epochs, 1):
            print(f"    epoch {number}: {counts}")
        assert len(epochs) == EPOCHS and epochs[:2] == [right] * 2
        assert epochs[2:] == [shifted if opened == 2 else right] * (EPOCHS - 2), "changed: the later epochs"
    rewound = iter(grain.experimental.InterleaveIterDataset(files(), cycle_length=2))
    start, passes = rewound.get_state(), []
    for _ in range(3):
        rewound.set_state(start)
        passes += files_read([int(one) for one in rewound])
    print(f"rewound to the first state, third pass: {passes[-1]}")
    assert passes[0] == right and passes[-1] == shifted, f"changed: {passes}"
    assert Counter(int(one) for one in written_out(2)) == Counter(list(range(EPOCH)) * EPOCHS)
    for name, make, cuts in (("interleave", lambda: repeated(FILES), CUTS), ("mp_prefetch", by_workers, (300, 900))):
        losses = {cut: lost(make(), cut) for cut in cuts}
        print(f"{name}: samples lost by a checkpoint after so many: {losses}")
        wanted = {cut: 0 if cut <= EPOCH else EPOCH - cut % EPOCH for cut in cuts}
        assert losses == wanted, f"changed: {losses}"
    for name, make in (("the list written out", lambda: written_out(2)), ("repeat() before", by_workers_repeated_before)):
        losses = {900: lost(make(), 900)}
        print(f"{name}: samples lost by a checkpoint after so many: {losses}")
        assert not any(losses.values()), f"{name}: {losses}"
    print("as described")


if __name__ == "__main__":
    main()
PY
"$folder/venv/bin/python" "$folder/see.py" 2>&1 | grep -v "jax profiler"
