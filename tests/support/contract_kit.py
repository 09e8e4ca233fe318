"""What the suites over all stores share: vectors, persons, and answers against float64."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from plsc.gallery.store import NewPerson, Person, Store
from support.memory_store import MemoryStore

DIM, MODEL = 8, "model-1"
CLOSE = 2e-6  # a cosine in float32 against float64
GALLERY = "people"
ODD_NAMES = [
    "",
    "O'Hara",
    'say "hi"',
    "a\\b",
    "%s {0} $1 :x ?",
    "; DROP TABLE persons; --",
    "Ünïcödé 李小龙 🙂",
    "a\nb\t",
    "x" * 1024,
    "\u202eabc",
    "null",
    "é" * 1024,
]
ODD_METADATA: list[dict[str, Any]] = [
    {},
    {"a": 1, "b": 1.0, "c": True, "d": False, "e": "1", "f": ""},
    {"large": 2**63 - 1, "small": -(2**63), "next": 2**53 + 1, "zero": 0, "minus": -0.0},
    {"tiny": 5e-324, "huge": 1.7976931348623157e308, "third": 1 / 3, "big": 1e18, "bigger": 1234567890123456768.0},
    {"O'Hara": "O'Hara", 'a"b': 'c"d', "a\\b": "c\\d", "a.b[0]": "x", "$": "$", "ключ": "значение", "🙂": "🙂"},
    {"true": "true", "null": "null", "%s": "%s", "{x}": "{x}", "a\nb": "a\nb", " ": " ", "id": 7, "person": "x"},
    {"long": "x" * 1024, "k" * 1024: 1},
    {f"key {n}": n for n in range(63)},
]


def faces(count: int, seed: int = 0, dim: int = DIM) -> npt.NDArray[np.float32]:
    """(count, dim) of different lengths."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((count, dim)) * generator.uniform(0.01, 100, (count, 1))).astype(np.float32)


def units(vectors: npt.ArrayLike) -> npt.NDArray[np.float64]:
    wide = np.asarray(vectors, dtype=np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=-1, keepdims=True))


def enrol(store: Store, count: int, seed: int = 0, **metadata: Any) -> list[Person]:
    new = [NewPerson(vector[None], f"p{n}", {"n": n, **metadata}) for n, vector in enumerate(faces(count, seed))]
    return store.add_persons(GALLERY, new, MODEL)


def everyone(store: Store, collection: str) -> list[Person]:
    found: list[Person] = []
    while page := store.persons(collection, after=found[-1].id if found else 0, limit=7):
        assert not found or page[0].id > found[-1].id, "pages do not overlap"
        found += page
    return found


def dump(store: Store) -> dict[str, Any]:
    """All that a store holds."""
    return {
        about.name: (about, [(one, store.vectors(about.name, one.id).tobytes()) for one in everyone(store, about.name)])
        for about in store.collections()
    }


def same_type(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def agree(store: Store, oracle: MemoryStore, collection: str, queries: Any, **asked: Any) -> None:
    """The store's answers are the oracle's, save for rounding and the order of ties."""
    asked = {"k": 10, "threshold": -1.0, "filter": None, **asked}
    found = store.search(collection, queries, **asked)
    assert len(found) == len(queries)
    every = oracle.search(collection, queries, k=10**9, filter=asked["filter"])
    for matches, truth, query in zip(found, every, units(queries), strict=True):
        scores = [match.score for match in matches]
        best = {match.person: match.score for match in truth}
        assert scores == sorted(scores, reverse=True)
        assert all(-1 <= score <= 1 and score >= asked["threshold"] for score in scores)
        assert len({match.person for match in matches}) == len(matches)
        for match in matches:
            person = oracle.person(collection, match.person)
            vector = units(oracle.vectors(collection, person.id))[person.faces.index(match.face)]
            assert match.score == pytest.approx(vector @ query, abs=CLOSE)
            assert match.score == pytest.approx(best[match.person], abs=CLOSE), "the best face"
        surely = sum(score >= asked["threshold"] + CLOSE for score in best.values())
        perhaps = sum(score >= asked["threshold"] - CLOSE for score in best.values())
        assert min(asked["k"], surely) <= len(matches) <= min(asked["k"], perhaps)
        expected = [match.score for match in truth[: len(matches)]]
        np.testing.assert_allclose(scores, expected, atol=CLOSE)


def twin(store: Store) -> MemoryStore:
    """An oracle that holds what ``store`` holds, under the same ids."""
    oracle = MemoryStore()
    for about in store.collections():
        oracle.create_collection(about.name, about.dim, about.contract_id)
        rows = oracle._of(about.name)
        for one in everyone(store, about.name):
            rows.persons[one.id] = one
            rows.vectors |= dict(zip(one.faces, units(store.vectors(about.name, one.id)), strict=True))
    return oracle
