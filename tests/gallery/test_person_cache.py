"""The cache of persons is never older than the last change, and never takes more memory than allowed."""

from plsc.gallery.sqlite.collection_state import PersonCache
from plsc.gallery.values import PersonSummary


class Truth:
    """Persons who can be read; remembers who was."""

    def __init__(self, count: int) -> None:
        self.names = {
            person: PersonSummary(person, f"person {person}", {"team": "x" * 100}) for person in range(1, count + 1)
        }
        self.asked: list[list[int]] = []

    def read(self, persons: list[int]) -> dict[int, PersonSummary]:
        """Those of ``persons`` that exist."""
        self.asked.append(persons)
        return {person: self.names[person] for person in persons if person in self.names}


def test_only_unknown_persons_are_read_and_all_are_given_in_the_order_asked_for() -> None:
    truth, cache = Truth(9), PersonCache()
    assert list(cache.get([5, 2], truth.read)) == [5, 2]
    assert cache.get([2, 7, 99, 5], truth.read) == {person: truth.names[person] for person in (2, 7, 5)}
    assert list(cache.get([7, 5], truth.read)) == [7, 5]
    assert truth.asked == [[5, 2], [7, 99]]


def test_a_changed_person_is_read_again() -> None:
    truth, cache = Truth(3), PersonCache()
    cache.get([1, 2], truth.read)
    truth.names[1] = PersonSummary(1, "Grace", {})
    cache.forget([1])
    assert cache.get([1, 2], truth.read)[1].name == "Grace"
    assert truth.asked == [[1, 2], [1]]


def test_what_was_read_before_a_change_and_comes_after_it_is_not_kept() -> None:
    truth, cache = Truth(3), PersonCache()

    def read_slowly(persons: list[int]) -> dict[int, PersonSummary]:
        found = truth.read(persons)
        truth.names[1] = PersonSummary(1, "Grace", {})
        cache.forget([1])
        return found

    cache.get([1], read_slowly)
    assert cache.get([1], truth.read)[1].name == "Grace"


def test_those_found_longest_ago_are_let_go_first() -> None:
    truth, cache = Truth(100), PersonCache(max_bytes=10_000)
    for person in range(1, 101):
        cache.get([1, person], truth.read)
    truth.asked.clear()
    cache.get([1, 2, 99, 100], truth.read)
    assert truth.asked == [[2]]
