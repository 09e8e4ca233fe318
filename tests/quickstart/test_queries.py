"""Which pictures a quickstart leaves to search by, of trials whose scores are given."""

import pytest

from plsc.gallery.values import Match
from plsc.quickstart.queries import MARGIN, Outcome, Trial, choose_queries, write_queries

THRESHOLD = 0.5
NEAR = MARGIN * 0.9


def trial(person: int | None, *matches: tuple[int, float]) -> Trial:
    name = f"person-{person}" if person is not None else "nobody"
    return Trial(name.encode(), name, person, [Match(found, 0, score) for found, score in matches])


@pytest.mark.parametrize(
    ("person", "matches", "outcome"),
    [
        (1, [(1, 0.8), (2, 0.3)], Outcome.FOUND),
        (1, [(1, 0.8)], Outcome.FOUND),
        (1, [(1, 0.8), (2, 0.6)], Outcome.UNSUITABLE),  # and somebody else
        (1, [(2, 0.8), (1, 0.3)], Outcome.UNSUITABLE),  # somebody else alone
        (1, [(1, 0.5 + NEAR), (2, 0.3)], Outcome.UNSUITABLE),
        (1, [(1, 0.8), (2, 0.5 - NEAR)], Outcome.UNSUITABLE),
        (1, [(1, 0.5 - NEAR), (2, 0.3)], Outcome.UNSUITABLE),
        (1, [(1, 0.4), (2, 0.3)], Outcome.REFUSED),
        (None, [(2, 0.4), (1, 0.3)], Outcome.REFUSED),
        (None, [(2, 0.8), (1, 0.3)], Outcome.UNSUITABLE),
        (None, [], Outcome.REFUSED),
    ],
)
def test_a_trial_counts_a_margin_away_from_the_threshold(person, matches, outcome):
    assert trial(person, *matches).outcome(THRESHOLD) is outcome


def test_ten_are_left_that_are_spread_over_those_that_pass():
    known = [trial(person, (person, 0.9 if person % 2 else 0.4), (0, 0.1)) for person in range(1, 100)]
    files, figures = choose_queries(known, [trial(None, (1, score)) for score in (0.7, 0.1, 0.2, 0.3)], THRESHOLD)
    passed = [person for person in range(1, 100) if person % 2]
    chosen = [int(name.removeprefix("person-")) for name in files if name.startswith("person-")]
    assert len(chosen) == 10
    assert set(chosen) <= set(passed)
    assert (chosen[0], chosen[-1]) == (1, 99)
    assert [files[f"stranger-{number}"].matches[0].score for number in (1, 2)] == [0.1, 0.2]
    expected = {"tried": 99, "passed": 50, "found": 10, "strangers_tried": 4, "strangers_refused": 3, "queries": 13}
    assert expected.items() <= figures.items()


def test_the_hard_one_shows_the_person_that_comes_nearest_to_the_threshold():
    known = [trial(1, (1, 0.2)), trial(2, (2, 0.4)), trial(3, (1, 0.45)), trial(4, (4, 0.5 - NEAR)), trial(5, (5, 0.3))]
    files, figures = choose_queries(known, [], THRESHOLD)
    assert files == {"hard-1": known[1]}  # nobody passes: no picture is called one that does
    assert (figures["hard"], figures["found"], figures["passed"]) == ("person-2", 0, 0)


def test_fewer_than_ten_are_left_where_fewer_pass_and_former_files_go(tmp_path):
    known = [trial(person, (person, 0.9), (0, 0.1)) for person in (1, 2, 3)]
    files, figures = choose_queries(known, [], THRESHOLD)
    assert (figures["found"], figures["hard"], figures["queries"]) == (3, None, 3)
    folder = tmp_path / "queries"
    folder.mkdir()
    (folder / "avatar-9.jpg").write_bytes(b"former")
    write_queries(folder, files)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        f"person-{person}.jpg": f"person-{person}".encode() for person in (1, 2, 3)
    }
