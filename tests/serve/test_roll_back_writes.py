"""A served collection is cut over, written to 1,000 times, and rolled back: every write is there, in the old space.

The oracle is a dict of persons with the seeds of their pictures, whose vectors by either model it makes itself, in
float64. Writes and answers go over HTTP.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.live_service import CONTRACT, SIZE, Linear, NextLinear, live_service, next_linear_embedder, picture
from support.live_service import NEXT_CONTRACT as NEW
from support.stores import Servers, units

from plsc.client import Client

NAME, WRITES, BEFORE, LATER = "staff", 1000, 60, "2990-01-01T00:00:00.000Z"
MODELS = {CONTRACT: Linear().weight.double().numpy(), NEW: NextLinear().weight.double().numpy()}
CLOSE = 1e-5  # a cosine of float32 embeddings against float64

pytestmark = pytest.mark.live


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of an empty store, as `plsc serve --store` takes it."""
    servers = Servers(tmp_path / "stores")
    found = servers.address(request.param)
    yield f"postgres:{found}" if request.param == "postgres" else found
    servers.close()


def vector(seed: int, contract_id: str) -> npt.NDArray[np.float64]:
    """The unit vector that a model makes of a picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return units(pixels.transpose(2, 0, 1).reshape(-1).astype(np.float64) @ MODELS[contract_id])


@dataclass(frozen=True)
class Known:
    """What was told of a person; ``faces`` are seeds of pictures by the faces' ids."""

    name: str | None
    number: int
    external_id: str | None
    expires: str | None
    faces: dict[int, int]


class Writer:
    """Writes at random, and knows what must be there: {id: person}, and the pictures of deleted faces."""

    def __init__(self, client: Client) -> None:
        self.client, self.people, self.gone = client, dict[int, Known](), list[int]()
        self._chance, self._seed = random.Random(0), 0

    def write(self) -> str:
        """Write once; returns how."""
        ways = [self.enrol, self.enrol, self.put, self.add_faces, self.rename, self.delete_face, self.delete]
        way = self._chance.choice(ways)
        way()
        return way.__name__

    def enrol(self) -> None:
        number, pictures = self._number(), self._pictures()
        expires = self._chance.choice([None, LATER])
        told: dict[str, Any] = {"metadata": {"n": number}, "faces": list(pictures.values()), "expires": expires}
        made = self.client.add_person(NAME, f"p{number}", external_id=f"E-{number}", **told)
        assert made.id not in self.people
        own = dict(zip(made.faces, pictures, strict=True))
        self.people[made.id] = Known(f"p{number}", number, f"E-{number}", expires, own)

    def put(self) -> None:
        id, before = self._somebody()
        number, pictures = self._number(), self._pictures()
        faces = list(pictures.values())
        made = self.client.upsert_person(
            NAME, str(before.external_id), f"put {number}", metadata={"n": number}, faces=faces
        )
        assert made.id == id
        self.gone += before.faces.values()
        own = dict(zip(made.faces, pictures, strict=True))
        self.people[id] = Known(f"put {number}", number, before.external_id, None, own)

    def add_faces(self) -> None:
        (id, before), pictures = self._somebody(), self._pictures()
        made = self.client.add_faces(NAME, id, list(pictures.values()))
        self.people[id] = replace(before, faces=before.faces | dict(zip(made, pictures, strict=True)))

    def rename(self) -> None:
        (id, before), number = self._somebody(), self._number()
        name, expires = self._chance.choice([None, f"renamed {number}"]), self._chance.choice([None, LATER])
        self.client.update_person(NAME, id, name=name, metadata={"n": number}, expires=expires)
        self.people[id] = replace(before, name=name, number=number, expires=expires)

    def delete_face(self) -> None:
        id, before = self._somebody()
        if len(before.faces) < 2:
            return self.delete()
        face = self._chance.choice([*before.faces])
        self.client.delete_face(NAME, id, face)
        self.gone.append(before.faces[face])
        self.people[id] = replace(before, faces={one: seed for one, seed in before.faces.items() if one != face})

    def delete(self) -> None:
        id, _ = self._somebody()
        self.client.delete_person(NAME, id)
        self.gone += self.people.pop(id).faces.values()

    def agree(self, contract_id: str) -> None:
        """Assert that the service holds just these people, and finds every face by the model's own vectors."""
        found = self.client.persons(NAME)
        told = {one.id: (one.name, dict(one.metadata), one.external_id, one.expires, one.faces) for one in found}
        assert told == {
            id: (one.name, {"n": one.number}, one.external_id, one.expires, tuple(one.faces))
            for id, one in self.people.items()
        }
        info = self.client.collection(NAME)
        count = sum(len(one.faces) for one in self.people.values())
        assert (info.contract_id, info.persons, info.faces) == (contract_id, len(self.people), count)
        own = {
            face: (id, vector(seed, contract_id)) for id, one in self.people.items() for face, seed in one.faces.items()
        }
        sought = [seed for one in self.people.values() for seed in one.faces.values()] + self.gone
        for start in range(0, len(sought), 32):
            self._search(sought[start : start + 32], own, contract_id)

    def _search(self, seeds: list[int], own: dict[int, tuple[int, npt.NDArray[np.float64]]], contract_id: str) -> None:
        found = self.client.search_many(NAME, [picture(seed) for seed in seeds], k=5)
        for seed, matches in zip(seeds, found, strict=True):
            query, best = vector(seed, contract_id), dict[int, float]()
            for id, row in own.values():
                best[id] = max(best.get(id, -2.0), float(row @ query))
            assert [one.score for one in matches] == pytest.approx(sorted(best.values(), reverse=True)[:5], abs=CLOSE)
            for one in matches:
                id, row = own[one.face]
                assert (id, pytest.approx(float(row @ query), abs=CLOSE)) == (one.person.id, one.score)

    def _somebody(self) -> tuple[int, Known]:
        return self._chance.choice([*self.people.items()])

    def _number(self) -> int:
        self._seed += 1
        return self._seed

    def _pictures(self) -> dict[int, bytes]:
        """One to three new pictures, by their seeds."""
        return {seed: picture(seed) for seed in (self._number() for _ in range(self._chance.randint(1, 3)))}


@contextmanager
def served(folder: Path, address: str) -> Iterator[Client]:
    """A client of a service over a store, which may be moved to the next model."""
    with (
        live_service(folder, next_embedder=next_linear_embedder(), store=address) as live,
        Client(str(live.http.base_url)) as client,
    ):
        yield client


def test_a_thousand_writes_after_the_cut_over_are_there_after_the_roll_back(tmp_path: Path, address: str) -> None:
    with served(tmp_path / "serve", address) as client:
        client.create_collection(NAME)
        writer = Writer(client)
        for _ in range(BEFORE):
            writer.enrol()
        client.begin_migration(NAME)
        for id, one in writer.people.items():
            assert client.send_pictures(NAME, id, [picture(seed) for seed in one.faces.values()]) == [*one.faces]
        writer.agree(CONTRACT)
        client.migrate(NAME, "cut-over", max_loss=1, threshold=0.5)
        before, ways = set(writer.people), set[str]()
        for number in range(WRITES):
            ways.add(writer.write())
            if number == WRITES // 2:
                client.compact(NAME)
        assert len(ways) == 6
        assert before - writer.people.keys(), "somebody of before was deleted"
        assert writer.people.keys() - before, "somebody came since"
        rolled = client.migrate(NAME, "roll-back")
        assert (rolled["contract_id"], rolled["lacking"], rolled["is_cut_over"]) == (CONTRACT, 0, False)
        writer.agree(CONTRACT)
    with served(tmp_path / "serve", address) as client:
        writer.client = client
        writer.agree(CONTRACT)
        client.compact(NAME)
        client.migrate(NAME, "cut-over", max_loss=1, threshold=0.5)
        writer.agree(NEW)
