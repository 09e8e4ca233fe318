"""How tensor and pipeline parallelism cut a backbone, in names and numbers; ``plsc plan`` reads them too."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from plsc.parallel.strategies.layout import STAGES_OF_A_RANK

COLUMNS, ROWS = ("attn.qkv", "mlp.fc1"), ("attn.proj", "mlp.fc2")  # layers of a block, by how a group cuts them
ENDING = "feature.0"  # of plsc's ViTs, cut by rows


def token_counts(backbone: Any) -> tuple[int, ...]:
    """(Tokens of an image, those that the blocks take in training) of plsc's ViTs; () of others."""
    return (backbone.tokens, backbone.tokens_in_training) if hasattr(backbone, "tokens_in_training") else ()


def splits_tokens(counts: tuple[int, ...], tp: int) -> bool:
    """Return whether ``tp`` ranks split the tokens between the layers of a backbone with these :func:`token_counts`."""
    return len(counts) > 0 and all(count % tp == 0 for count in counts)


def cut_dimension(name: str) -> int | None:
    """The dimension along which the ranks of a group cut the weight of this name; None: each has the whole."""
    layer, _, kind = name.rpartition(".")
    if layer.endswith(COLUMNS):
        return 0
    return 1 if layer.endswith((*ROWS, ENDING)) and kind == "weight" else None


def balanced(blocks: int, stages: int) -> list[range]:
    """Cut so many blocks into consecutive stages; the first ones hold one more where they cannot be equal."""
    size, larger = divmod(blocks, stages)
    starts = [number * size + min(number, larger) for number in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def stage_of(name: str, spans: Sequence[range], embedding: Sequence[str]) -> int:
    """The stage that has a weight or buffer of this name; ``embedding`` are names of what comes before the blocks."""
    first, _, rest = name.partition(".")
    if first == "blocks":
        block = int(rest.partition(".")[0])
        return next(number for number, span in enumerate(spans) if block in span)
    return 0 if first in embedding else len(spans) - 1


def batches_held(schedule: str, rank: int, ranks: int, micro_batches: int) -> Fraction:
    """Micro-batches whose activations a rank holds at a time, for ``plsc plan``; ``rank`` in the forward direction.

    An interleaved one warms up with 2·(K − 1 − rank) + (v − 1)·K passes of its v parts, and adds one (Narayanan et
    al., 2021, section 2.2; torch's ScheduleInterleaved1F1B): each holds a v-th of a micro-batch's activations.
    """
    if schedule == "gpipe":
        return Fraction(micro_batches)
    parts = STAGES_OF_A_RANK[schedule]
    passes = 2 * (ranks - 1 - rank) + (parts - 1) * ranks + 1 if parts > 1 else ranks - rank
    return min(Fraction(passes, parts), Fraction(micro_batches))
