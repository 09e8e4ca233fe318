"""The loss of a lower precision against the most that is allowed, both decimals."""

from types import SimpleNamespace

import numpy as np
import pytest

from plsc.errors import DataError
from plsc.evaluation.precision_loss import JudgedPictures
from plsc.evaluation.roc import roc_from_scores

SAME_PAIRS = 10


def judged(accepted: dict[str, int]) -> JudgedPictures:
    """Pictures of which each engine accepts so many of the ten same pairs, with 1,000 different ones."""

    def roc(count: int):
        scores = np.concatenate([np.full(count, 0.9), np.full(SAME_PAIRS - count, 0.1), np.linspace(0.2, 0.5, 1000)])
        return roc_from_scores(scores, np.arange(len(scores)) < SAME_PAIRS)

    pictures = JudgedPictures.__new__(JudgedPictures)
    pictures._judged = SimpleNamespace(name="set")
    pictures._evaluated = lambda engine, quiet: (None, roc(accepted[engine.precision]))
    return pictures


@pytest.mark.parametrize(("before", "after"), [(8, 7), (4, 3), (10, 9), (3, 2)])
def test_a_loss_of_exactly_the_most_is_allowed(before, after):
    pictures = judged({"fp32": before, "int8": after})
    engines = SimpleNamespace(precision="fp32"), SimpleNamespace(precision="int8")
    found = pictures.loss(*engines, 0.1)
    assert (found.far, found.reference.tmr, found.reduced.tmr) == (1e-2, before / 10, after / 10)
    with pytest.raises(DataError, match=r"it loses 0\.2000 of TAR"):
        judged({"fp32": before, "int8": before - 2}).loss(*engines, 0.1)


def test_as_many_same_pairs_as_tell_the_loss_are_enough():
    engines = SimpleNamespace(precision="fp32"), SimpleNamespace(precision="int8")
    assert judged({"fp32": 8, "int8": 8}).loss(*engines, 0.1).tar_lost == 0
    with pytest.raises(DataError, match=r"10 same pairs cannot tell a loss of 0\.09"):
        judged({"fp32": 8, "int8": 8}).loss(*engines, 0.09)
