"""Doing what may fail on one rank: the failure is raised on all, so that none waits for ever."""

from collections.abc import Callable
from typing import TypeVar

from plsc.errors import PlscError
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object

T = TypeVar("T")


def on_every_rank(mesh: Mesh, function: Callable[[], T]) -> T:
    """This rank's ``function()``; where it fails on any rank, the first rank's failure is raised on all.

    ``function`` holds no collective. Only failures that a person can mend (PlscError, OSError) are shared;
    another is a defect and goes its way.
    """
    results: list[T] = []
    failure: PlscError | OSError | None = None
    try:
        results.append(function())
    except (PlscError, OSError) as error:
        failure = error
    for shared in all_gather_object(failure, mesh):
        if shared is not None:
            raise shared
    return results[0]
