"""Every store alike: what is found, against float64."""

import random
from typing import Any

import numpy as np
import pytest
from support.stores import CLOSE, DIM, GALLERY, MODEL, agree, enrol, faces, twin, units

from plsc.gallery.filters import MAX_CONDITIONS, Filter
from plsc.gallery.store import Store
from plsc.gallery.values import NewPerson
from plsc.serve.searching import filter_warnings


def test_an_empty_collection_answers(store: Store) -> None:
    assert store.search(GALLERY, faces(3), k=5) == [[], [], []]
    assert store.search(GALLERY, faces(1), filter=Filter.parse({"a": 1})) == [[]]
    store.add_persons(GALLERY, [NewPerson([])], MODEL)
    assert store.search(GALLERY, faces(2), k=5) == [[], []]
    assert store.search(GALLERY, np.empty((0, DIM))) == []


def test_the_threshold_is_inclusive(store: Store) -> None:
    basis = np.eye(DIM)
    new = [NewPerson(basis[:1]), NewPerson(basis[1:2]), NewPerson(-basis[:1])]
    new += [NewPerson((basis[:1] + 3**0.5 * basis[n : n + 1]) / 2) for n in (2, 3)]
    new += [NewPerson(faces(40, 9))]
    made = [one.id for one in store.add_persons(GALLERY, new, MODEL)]
    for threshold, at_least in ((1.0, made[:1]), (0.0, made[:2]), (-1.0, made)):
        found = {match.person for match in store.search(GALLERY, basis[:1], threshold=threshold)[0]}
        assert found >= set(at_least)
        assert (made[2] in found) == (threshold == -1.0)
    assert len(store.search(GALLERY, 1e-3 * basis[:1], k=10**6, threshold=-np.inf)[0]) == len(made)
    assert store.search(GALLERY, basis[:1], threshold=np.inf) == [[]]
    for match in store.search(GALLERY, basis[:1])[0]:
        reached = {one.person for one in store.search(GALLERY, basis[:1], threshold=match.score)[0]}
        assert match.person in reached, "a score that was answered is reached as a threshold"
        if match.score < 1:
            above = store.search(GALLERY, basis[:1], threshold=float(np.nextafter(match.score, 2)))[0]
            assert match.person not in {one.person for one in above}


def test_opposite_and_equal_directions_are_found_in_spite_of_rounding(store: Store) -> None:
    vectors = faces(30, 3)
    made = store.add_persons(GALLERY, [NewPerson(-vectors[n : n + 1]) for n in range(30)], MODEL)
    for matches, opposite in zip(store.search(GALLERY, vectors, k=30), made, strict=True):
        assert len(matches) == 30, "a cosine is never below -1"
        assert matches[-1].person == opposite.id
        assert matches[-1].score >= -1
    for matches in store.search(GALLERY, -vectors, k=1):
        assert matches[0].score <= 1


def test_a_person_is_found_once_by_the_best_face(store: Store) -> None:
    """One person's many faces do not push the others out."""
    centre = faces(1, 1)
    crowd = centre / np.linalg.norm(centre) + 0.01 * np.random.default_rng(2).standard_normal((400, DIM))
    (many,) = store.add_persons(GALLERY, [NewPerson(crowd)], MODEL)
    others = enrol(store, 6, seed=4)
    (matches,) = store.search(GALLERY, centre, k=7)
    assert {match.person for match in matches} == {many.id, *(one.id for one in others)}
    assert len(matches) == 7
    best = int(np.argmax(units(crowd) @ units(centre)[0]))
    assert matches[0].score == pytest.approx(float((units(crowd) @ units(centre)[0])[best]), abs=CLOSE)
    agree(store, twin(store), GALLERY, faces(4, 11), k=5)


VALUES: list[Any] = [
    0, 1, -1, 1.0, 0.5, -0.0, True, False, "", "0", "1", "a", "A", "true", "é", "z", "\U0001f642", "\uffee",
    2**53, 2**53 + 1, float(2**53), 2**63 - 1, float(2**63), -(2**63), 1e300, 5e-324, 1234567890123456790,
    1234567890123456768.0, "O'H", 'a"b', "a\\", "%", "_", "x" * 1024,
]  # fmt: skip
KEYS = ["k", "a.b", "O'H", 'q"q', "b\\", "$x", "ключ", "[0]", "id", "x" * 1024]


@pytest.mark.slow
def test_filters_mean_the_same_in_every_store(store: Store) -> None:
    pick = random.Random(7)
    new = [
        NewPerson(row[None], None, {} if n % 11 == 0 else {KEYS[0]: VALUES[n % len(VALUES)]})
        for n, row in enumerate(faces(2 * len(VALUES), 3))
    ]
    new += [
        NewPerson(row[None], None, {pick.choice(KEYS): pick.choice(VALUES) for _ in range(pick.randrange(3))})
        for row in faces(40, 8)
    ]
    store.add_persons(GALLERY, new, MODEL)
    model = twin(store)
    asked: list[dict[str, Any]] = []
    for operator in ("eq", "ne", "gt", "gte", "lt", "lte"):
        values = [value for value in VALUES if operator in ("eq", "ne") or not isinstance(value, bool)]
        asked += [{KEYS[0]: {operator: value}} for value in pick.sample(values, 12)]
    asked += [{pick.choice(KEYS): {"in": pick.sample(VALUES, pick.randrange(6))}} for _ in range(12)]
    asked += [{key: {"exists": truth}} for key in KEYS for truth in (True, False)]
    asked += [{key: pick.choice(VALUES), KEYS[0]: {"ne": pick.choice(VALUES)}} for key in KEYS[1:]]
    for filter in asked:
        where = Filter.parse(filter)
        truth = list(model.living(GALLERY, filter))
        assert [one.id for one in store.persons(GALLERY, limit=10**6, filter=where)] == truth, filter
        found = store.search(GALLERY, faces(1, 2), k=10**6, filter=where)[0]
        assert sorted(match.person for match in found) == truth, filter


@pytest.mark.parametrize(
    ("filter", "warnings"),
    [
        ({"set lfw": "x"}, ['nothing here has a field "set lfw"; fields: city, member, n']),
        ({"n": {"gt": "tall"}}, ['the field "n" is never text, and is compared with "tall"']),
        ({"city": {"lt": 3}}, ['the field "city" is never a number, and is compared with 3']),
        ({"city": True}, ['the field "city" is never true or false, and is compared with true']),
        ({"n": {"gt": 5}, "city": "Rome", "member": False}, []),
        # the first four fields alone: each costs a look at every person
        (
            {f"x{number}": number for number in range(MAX_CONDITIONS)},
            ['nothing here has a field "x0" or "x1" or "x2" or "x3"; fields: city, member, n'],
        ),
    ],
)
def test_a_filter_that_finds_nobody_is_explained(store: Store, filter: dict[str, Any], warnings: list[str]) -> None:
    enrol(store, 2, n=-5, city="Bern", member=True)
    assert filter_warnings(store, GALLERY, Filter.parse(filter)) == warnings
