"""Assignments with a bound on the sizes of clusters: a stable matching of points with centres of limited room.

Each point asks its nearest centre; a centre keeps those nearest to it, as many as it has room for, and the others ask
their next nearest (Gale & Shapley, "College admissions and the stability of marriage", 1962). So where a point would
lie nearer to another of its candidates, that one is full of points that are nearer still. Points that none of their 16
nearest centres keeps are matched in the same way with the room that is left.
"""

import math
from fractions import Fraction

import numpy as np
import torch

from plsc.cluster.assignment import Points
from plsc.cluster.scan import Scan
from plsc.embedding.columns import Float32, Int64
from plsc.parallel.collectives import all_gather_rows
from plsc.parallel.mesh import Mesh

_CANDIDATES = 16


def balanced_labels(points: Points, centres: Float32, ratio: float, mesh: Mesh) -> Int64:
    """Labels (n,) of this rank's points; over all ranks no centre has more than ratio · total / k, rounded up.

    Every rank holds 16 candidates of every point meanwhile.
    """
    labels = np.full(points.total, -1, dtype=np.int64)
    most = math.ceil(Fraction(str(ratio)) * points.total / len(centres))  # 1.1 of 10 is 11, which floats make more
    room = np.full(len(centres), most, dtype=np.int64)
    waiting, scan = np.arange(points.total), Scan(centres, min(_CANDIDATES, len(centres)), len(points), points.where)
    while len(waiting):
        own = waiting[(waiting >= points.start) & (waiting < points.start + len(points))] - points.start
        is_open = room > 0
        width = min(_CANDIDATES, int(is_open.sum()))
        cosines, found = np.empty((len(own), width), np.float32), np.empty((len(own), width), np.int64)
        block = scan.block
        for start in range(0, len(own), block):
            part = slice(start, start + block)
            cosines[part], found[part] = scan.search(points.take(own[part]), width, allowed=is_open)
        all_cosines, all_found = (all_gather_rows(torch.from_numpy(own), mesh).numpy() for own in (cosines, found))
        matched = match(all_cosines, all_found, room)
        labels[waiting] = matched
        room -= np.bincount(matched[matched >= 0], minlength=len(room))
        waiting = waiting[matched < 0]
    return labels[points.start : points.start + len(points)]


def match(cosines: Float32, candidates: Int64, room: Int64) -> Int64:
    """Match points with candidates (n, C), best first, of ``room`` (k,): the centre (n,) of each, -1 for none."""
    turn = np.zeros(len(candidates), dtype=np.int64)
    held = np.full(len(candidates), -1, dtype=np.int64)
    while len(asking := np.flatnonzero((held < 0) & (turn < candidates.shape[1]))):
        held[asking] = candidates[asking, turn[asking]]
        at = np.flatnonzero(held >= 0)
        at = at[np.lexsort((at, -cosines[at, turn[at]], held[at]))]
        first = np.searchsorted(held[at], held[at], side="left")
        refused = at[np.arange(len(at)) - first >= room[held[at]]]
        held[refused] = -1
        turn[refused] += 1
    return held
