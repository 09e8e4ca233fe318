"""What replicas and rows that stay add to a plan: each in one place, which the rest of the plan asks."""

from typing import TYPE_CHECKING

from plsc.head.class_table import OVERLAPPED_CHUNKS, overlapped_chunk_size
from plsc.head.kept_rows import COPIED_ROWS

if TYPE_CHECKING:
    from plsc.plan.devices import Links
    from plsc.plan.plan_config import PlanConfig  # which imports this module

_COPIES_OF_KEPT = 7  # of a row's state: copies made, read, chosen from, and stored


def kept_rows_memory(run: "PlanConfig", row: int) -> int:
    """Of rows that are updated beside ones that stay: copies of all that is stored of them, and the weights chosen."""
    if not run.config.keeps_rows:
        return 0
    return min(COPIED_ROWS, run.updated_rows) * (row + run.dim * run.weight_width)


def kept_rows_traffic(run: "PlanConfig", row: int) -> int:
    """Bytes that the update of a row of so many reads and writes more where others stay."""
    return _COPIES_OF_KEPT * row if run.config.keeps_rows else 0


def replicas_chunk(run: "PlanConfig", classes: int) -> tuple[int, int]:
    """(Classes of a chunk of pass 2, of ``classes`` without replicas; gradients of chunks that are there at a time).

    A chunk's gradient is summed over the replicas while the next one is computed, and the one before updated.
    """
    if run.replicas == 1 or run.placement != "device":
        return classes, 2
    return overlapped_chunk_size(classes, run.updated_rows // run.config.head.centers), 3


def replicas_sum(run: "PlanConfig", links: "Links", products: float) -> tuple[float, float]:
    """Seconds of a step's sums of a table's gradients over its replicas: (waited for, hidden).

    The second pass, which makes half of the ``products``, hides all but a chunk's.
    """
    copies = run.replicas
    passes = 2 if run.clips_head else 1  # the norm is that of the sum
    moved = passes * 8 * run.dim * run.updated_rows * (copies - 1) / copies
    seconds = links.seconds(moved, copies, run.per_node, collective="all_reduce", stride=run.head_ranks)
    hidden = min(seconds * (1 - 1 / OVERLAPPED_CHUNKS), products / 2) if run.placement == "device" else 0.0
    return seconds - hidden, hidden
