"""Meeting in a store that still holds what the ranks of a former attempt wrote."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from plsc.errors import PlscError
from plsc.parallel.rendezvous import store_of_attempt

pytestmark = pytest.mark.live


def attempt(store: dist.Store, delays: list[float]) -> list[dist.Store]:
    """Every rank's part of ``store``; rank r comes after ``delays[r]`` seconds."""

    def join(rank: int) -> dist.Store:
        time.sleep(delays[rank])
        return store_of_attempt(store, rank, len(delays))

    with ThreadPoolExecutor(len(delays)) as ranks:
        return list(ranks.map(join, range(len(delays))))


@pytest.mark.parametrize("delays", [[0.0, 0.0, 0.0], [0.2, 0.0, 0.0], [0.0, 0.2, 0.1]])
def test_each_attempt_meets_apart_from_the_former(delays):
    store = dist.HashStore()
    first = attempt(store, [0.0, 0.0, 0.0])
    first[0].set("address", "of a process that has ended")
    second = attempt(store, delays)
    assert not second[1].check(["address"])
    second[2].set("address", "of one that lives")
    assert second[0].get("address") == b"of one that lives"
    assert first[1].get("address") == b"of a process that has ended"


def test_more_ranks_than_before_meet_too():
    store = dist.HashStore()
    attempt(store, [0.0, 0.0])
    stores = attempt(store, [0.1, 0.0, 0.0, 0.0])
    stores[3].set("key", "value")
    assert all(each.get("key") == b"value" for each in stores)


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(PlscError, match="rank 1 did not come to the rendezvous"):
        store_of_attempt(dist.HashStore(), 0, 2, timedelta(seconds=0.05))
    with pytest.raises(PlscError, match="rank 0 did not come to the rendezvous"):
        store_of_attempt(dist.HashStore(), 1, 2, timedelta(seconds=0.05))
