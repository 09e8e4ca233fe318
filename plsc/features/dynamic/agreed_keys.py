"""What ranks tell each other of keys: that they name the same ones, and whether any batch has keys without a row."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.features.dynamic.key_map import Keys
from plsc.parallel.collectives import all_gather_numbers
from plsc.parallel.mesh import Mesh

_NO_LABEL = -1
_MALFORMED, _NEGATIVE = -2, -1  # what a rank tells of its keys in place of a number


def same_keys(mesh: Mesh, keys: Tensor | Sequence[int]) -> Keys:
    """``keys`` as an array; UsageError unless they are keys, and every rank's the same. Every rank calls."""
    listed = np.asarray(keys.cpu() if isinstance(keys, Tensor) else keys)
    is_list = listed.ndim == 1 and (not listed.size or (listed.dtype.kind in "iu" and int(listed.min()) >= 0))
    found = listed.astype(np.int64) if is_list else np.empty(0, np.int64)
    facts = all_gather_numbers([is_list, zlib.crc32(found.tobytes()), len(found)], mesh)
    if not all(fact[0] for fact in facts):
        given = "" if is_list else f", not {listed.dtype} {listed.shape}: {listed.reshape(-1)[:3].tolist()}"
        raise UsageError(f"keys of classes are a list of integers from 0 on{given}")
    if facts.count(facts[0]) != len(facts):
        raise UsageError("ranks name other keys: every rank calls with the same ones")
    return found


def any_lack(keys: Keys | None, lacking: int, mesh: Mesh) -> bool:
    """Whether any rank has keys without a row. Every rank calls.

    Args:
        keys: of this rank's batch, (b,) or (b, K) with -1 for none; None: the batch is none.
        lacking: how many of them have no row.
        mesh: the ranks.

    Raises:
        UsageError: a rank has a negative key; on every rank.
    """
    if keys is None:
        fact = _MALFORMED
    elif keys.size and keys.min() < (0 if keys.ndim == 1 else _NO_LABEL):
        fact = _NEGATIVE
    else:
        fact = lacking
    facts = [fact for (fact,) in all_gather_numbers([fact], mesh)]
    if _NEGATIVE in facts:
        raise UsageError(
            f"rank {facts.index(_NEGATIVE)}: labels are keys from 0 on, or places in the names of use_names(); "
            "where samples may lack a label, give them as (b, 1), with -1 for none"
        )
    return _MALFORMED not in facts and any(facts)


def are_fit(embeddings: Any, labels: Any) -> bool:
    """Whether a head takes such embeddings and labels at all."""
    if not isinstance(embeddings, Tensor) or not isinstance(labels, Tensor) or labels.dim() not in (1, 2):
        return False
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return False
    return embeddings.dim() == 2 and embeddings.is_floating_point() and len(embeddings) == len(labels)
