"""Moves to another model while `plsc serve` is killed, for benchmarks/serve_durability.py --migrate.

The service has two models. Beside the callers who enrol and delete, one takes the steps of a move in a random order of
those that are possible: begin, pause, resume, pictures sent again, estimates, cut over, roll back, finish, cancel.
After each kill:

- the move stands where the steps that were acknowledged left it, or one further that was not answered, and the audit
  log names each of those steps, in their order;
- who surely had vectors of both models is not among those who miss one; a search by the picture of a face finds it in
  the searched space, and from time to time in the other one, after an exchange; nobody who was deleted or has expired
  is found in either;
- every few rounds: no file holds a vector, of either model, of who is not there, nor one of a model that no space has;
- now and then a snapshot is restored, and the trial goes on with the restored store: everybody is there who was there
  at its moment, with the move as it stood; of an encrypted store without those who were deleted since.
"""

import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from serve_durability_files import content_of
from serve_durability_load import Gallery, Work
from serve_durability_moving_people import Moves, MovingPerson, Stand
from serve_durability_people import COLLECTION, DIM
from serve_durability_trial import SAME, Trial

from plsc.embedding.embedder import contract_of, open_embedder
from plsc.errors import NotFoundError
from plsc.gallery.sqlite.backup import restore
from plsc.gallery.sqlite.store import SqliteStore
from plsc.serve.audit import parse_line, read_lines
from plsc.serve.audit_chain import log_files

MOVE, STAFF = f"/v1/migrations/{COLLECTION}", f"/v1/collections/{COLLECTION}"
FIGURES = ("steps", "exchanges", "pictures", "restored", "searched")
_OPERATIONS = {  # of the audit log
    "begin": "begin_migration",
    "pictures": "send_pictures",
    "cut-over": "cut_over",
    "roll-back": "roll_back",
    **{name: name for name in ("pause", "resume", "estimate", "finish", "cancel")},
}
_REFUSED = {"estimate": (409, 422), "cut-over": (409,), "roll-back": (409,)}
_QUERIES = 64  # of a request
_SENT = 8  # pictures, before an estimate
_GONE = 150  # people, the latest
_NEEDLE = slice(8, 40)  # the bytes of a vector that are looked for
_NEEDLES = 1500  # vectors, the latest


class Mover:
    """Takes steps of moves; the only one who does.

    Attributes:
        next_model: the contract id of the service's next model.
    """

    def __init__(self, gallery: Gallery[MovingPerson], moves: Moves, seed: int) -> None:
        self._gallery, self._moves, self._chance = gallery, moves, random.Random(seed)
        self.next_model = ""

    def work(self, http: httpx.Client) -> None:
        """Take a step that is possible, or wait."""
        stand, chance = self._moves.stand, self._chance
        time.sleep(0.1 * chance.random())
        if stand.second is None:
            if stand.searched != self.next_model:
                self.step(http, "begin", Stand(stand.searched, self.next_model))
            else:
                assert http.get(MOVE).status_code == 404
        elif (draw := chance.random()) < 0.3:
            self.send_picture(http)
        elif draw < 0.4:
            self.step(http, "resume" if stand.is_paused else "pause", stand._replace(is_paused=not stand.is_paused))
        elif draw < 0.5:
            self.step(http, "estimate", stand)
        elif draw < 0.8:
            if not self.exchange(http):
                self._complete(http)
        elif stand.is_cut_over or draw > 0.95:
            self.step(http, "finish" if stand.is_cut_over else "cancel", Stand(stand.searched))

    def _complete(self, http: httpx.Client) -> None:
        """Send pictures again and estimate the rest, so that an exchange is possible; and exchange."""
        for _ in range(_SENT):
            self.send_picture(http)
        if self.step(http, "estimate", self._moves.stand):
            self.exchange(http)

    def exchange(self, http: httpx.Client) -> bool:
        """Cut over, or roll back; returns False where faces lack a vector of the other model."""
        stand = self._moves.stand
        return self.step(http, "roll-back" if stand.is_cut_over else "cut-over", stand.exchanged())

    def step(self, http: httpx.Client, name: str, after: Stand) -> bool:
        """Take a step, by which the move stands as ``after``; returns False if it is refused, as it may be."""
        moves, before = self._moves, self._moves.stand
        if after.second is None:
            moves.epoch = None
        with self._gallery.lock:
            people = list(self._gallery.people.values())
        if name == "estimate":
            for person in people:
                if person.second_of != moves.epoch:
                    person.exact.discard(before.second)
        moves.states = {before, after}
        path, body = (f"{MOVE}/{name}", None) if name != "begin" else ("/v1/migrations", {"collection": COLLECTION})
        answer = self._post(http, path, body if name != "cut-over" else {"max_loss": 1, "threshold": 0.5}, name)
        moves.states = {after if answer.is_success else before}
        if name == "begin":
            moves.begin_epoch()
            for person in people:
                person.exact.add(self.next_model)  # the space is empty: there is no estimate
        if name in ("cut-over", "roll-back") and answer.is_success:
            self._gallery.count("exchanges")
        return answer.is_success

    def send_picture(self, http: httpx.Client) -> None:
        """Send the picture of somebody again who lacks a vector, or else of anybody: the face is known by it."""
        lacking = {one["id"] for one in missing(http)}
        with self._gallery.lock:
            among = [n for n, one in self._gallery.people.items() if one.id in lacking] or None
        with self._gallery.somebody(new=False, among=among) as person:
            if person is None or person.is_vector:
                return
            (state,) = person.states
            assert state is not None
            refused = () if self._moves.stand.searched in person.exact else (409, 422)  # an estimate is unlike it
            body = {"faces": [person.query(state.face)]}
            answer = self._post(http, f"{MOVE}/persons/{person.id}/pictures", body, "pictures", refused)
            if answer.is_success:
                assert len(answer.json()["faces"]) == 1, answer.text
                self._gallery.count("pictures")
                self._moves.note_own(person)

    def _post(self, http: httpx.Client, path: str, body: Any, name: str, refused: Sequence[int] = ()) -> httpx.Response:
        """Ask for a step, which the audit log has to name if it was done."""
        log = self._moves.log
        log.append((_OPERATIONS[name], None))
        answer = http.post(path, json=body)
        assert answer.is_success or answer.status_code in _REFUSED.get(name, refused), (path, answer.text)
        log[-1] = (_OPERATIONS[name], answer.is_success)
        self._gallery.count("steps")
        return answer


class Kept(NamedTuple):
    """A snapshot, and what was known when it was taken."""

    id: str
    people: dict[int, MovingPerson]
    stand: Stand
    epoch: int | None


class MovingTrial(Trial):
    """A trial whose collection moves between two models."""

    gallery: Gallery[MovingPerson]

    def __init__(self, folder: Path, seed: int, encrypt: bool) -> None:
        super().__init__(folder, seed, encrypt)
        paths = [folder / "model.safetensors", self.save_model("next.safetensors", DIM + 8, seed=1)]
        embedders = [open_embedder(str(path)) for path in paths]
        self._models = {contract_of(one, False): path for one, path in zip(embedders, paths, strict=True)}
        dims = {name: one.embedding_dim for name, one in zip(self._models, embedders, strict=True)}
        self._moves.dims.update(dims)
        self._moves.states = {Stand(next(iter(self._models)))}
        self._mover = Mover(self.gallery, self._moves, seed)
        self._kept: Kept | None = None
        self._is_restored = False
        self._needles: dict[tuple[int, int, str], set[bytes]] = {}  # of a number's face by a model

    def new_gallery(self, seed: int) -> Gallery[MovingPerson]:
        """What callers know before they begin."""
        self._moves = Moves(set(), {})
        return Gallery(seed, lambda number: MovingPerson(number, self._moves), FIGURES)

    def options(self) -> list[str | Path]:
        """Either model may be the service's own, mostly the searched one."""
        stand, chance = self._moves.stand, self.gallery.chance
        is_known = stand.searched in self._models and self.gallery.people
        own = stand.searched if not is_known or chance.random() < 0.8 else self._moves.other(stand.searched)
        self._mover.next_model = self._moves.other(own)
        options: list[str | Path] = ["--model", self._models[own], "--next-model", self._models[self._mover.next_model]]
        options += ["--keep-pictures"] if chance.random() < 0.75 else []
        return options + (["--encrypt", self.keys[-1]] if self.keys else [])

    def works(self, seed: int) -> Sequence[Work]:
        """The callers, and who moves the collection."""
        return [*super().works(seed), self._mover.work]

    def verify(self, http: httpx.Client, *, files: bool) -> None:
        """Compare the service with what it acknowledged, and keep a snapshot from time to time."""
        if self._is_restored:  # the copied pictures of who came after the snapshot go
            assert http.post(f"{STAFF}/compact").is_success
            self._is_restored = False
        self._verify_stand(http)
        super().verify(http, files=files)
        verify_log(self.store, self._moves.log)
        if self._kept is None or self.gallery.chance.random() < 0.3:
            self._keep_snapshot(http)

    def _verify_stand(self, http: httpx.Client) -> None:
        moves, answer = self._moves, http.get(MOVE)
        if answer.status_code == 404:
            stand = Stand(http.get(STAFF).json()["contract_id"])
        else:
            view = answer.json()
            names = ("contract_id", "second_contract_id", "is_cut_over", "is_paused")
            stand = Stand(*(view[name] for name in names))
        assert stand in moves.states, f"the move stands as {stand}, and may be {moves.states}"
        moves.states = {stand}
        if stand.second is None:
            moves.epoch = None
        elif moves.epoch is None:
            moves.begin_epoch()

    def verify_searches(self, http: httpx.Client) -> None:
        """Who is there is found by the own picture in both spaces, and who is gone in none."""
        self._verify_missing(http)
        self._verify_space(http)
        stand, chance = self._moves.stand, self.gallery.chance
        if stand.second is None or http.get(MOVE).json()["lacking"] or chance.random() < 0.5:
            return
        assert self._mover.exchange(http), "no face lacks a vector"
        self._verify_space(http)
        if chance.random() < 0.5:
            assert self._mover.exchange(http), "no face lacks a vector"

    def _verify_missing(self, http: httpx.Client) -> None:
        """Nobody misses a vector who surely had both; notes who else has them."""
        stand, epoch = self._moves.stand, self._moves.epoch
        if stand.second is None:
            return
        lacking = {one["id"] for one in missing(http)}
        for person in self.gallery.living.values():
            if person.id in lacking:
                assert person.second_of != epoch, f"person {person.number} had a vector of {stand.second}, and lacks it"
            else:
                self._moves.note_own(person)

    def _verify_space(self, http: httpx.Client) -> None:
        searched, people = self._moves.stand.searched, self.gallery.people.values()
        gone = [one for one in people if one.states == {None} or one.is_expired][-_GONE:]
        living = [one for one in self.gallery.living.values() if one.is_settled and searched in one.exact]
        wanted: list[tuple[MovingPerson, int, list[int | None]]]
        wanted = [(one, face, []) for one in gone for face in range(one.faces)]
        wanted += [(one, state.face, [one.id]) for one in living for state in one.states if state is not None]
        wanted = [(one, face, ids) for one, face, ids in wanted if one.is_found_in(searched, face)]
        for start in range(0, len(wanted), _QUERIES):
            part = wanted[start : start + _QUERIES]
            body = {"queries": [one.query(face) for one, face, _ in part], "k": 1}
            answer = http.post(f"{STAFF}/search", json=body)
            assert answer.is_success, answer.text
            assert answer.json()["contract_id"] == searched
            for (one, face, ids), result in zip(part, answer.json()["results"], strict=True):
                same = [match["person"]["id"] for match in result["matches"] if match["score"] > SAME]
                assert same == ids, f"face {face} of person {one.number}, {one.states}: {result['matches']}"
        self.gallery.figures["searched"] += len(wanted)

    def gone_vectors(self) -> Sequence[bytes]:
        """Of the vectors that were seen in the store, those of no face, and those of a model that no space has."""
        stand, gone = self._moves.stand, list[bytes]()
        for (number, face, model), needles in self._needles.items():
            faces = {state.face for state in self.gallery.people[number].states if state is not None}
            if self.keys or face not in faces or model not in (stand.searched, stand.second):
                gone += needles
        return gone[-_NEEDLES:]

    def after_kill(self, *, files: bool) -> None:
        """Look at the store that a kill left, and restore a snapshot now and then."""
        super().after_kill(files=files)
        if files:
            self._see_vectors()
        if self._kept is not None and self.gallery.chance.random() < 0.2:
            self._restore(self._kept)

    def _see_vectors(self) -> None:
        """Note the vectors that the store holds; the files of a plain one hold them all."""
        store = SqliteStore(self.store, key_file=self.key)
        seen = list[bytes]()
        try:
            models = [store.collection(COLLECTION).contract_id]
            if (migration := store.migration(COLLECTION)) is not None:
                models.append(migration.contract_id)
            for person in store.persons(COLLECTION, limit=1000):
                number, text = int(person.metadata["number"]), int(str(person.name).split("-")[2])
                with suppress(NotFoundError):  # it has expired
                    rows = [store.vectors(COLLECTION, person.id)[0]]
                    if migration is not None:
                        (both,) = store.face_vectors(COLLECTION, person.id).values()
                        rows += [] if both.second is None else [both.second.vector]
                    states = self.gallery.people[number].states
                    (face,) = {state.face for state in states if state is not None and state.text == text}
                    for model, row in zip(models, rows, strict=False):
                        needle = row.tobytes()[_NEEDLE]
                        self._needles.setdefault((number, face, model), set()).add(needle)
                        seen.append(needle)
        finally:
            store.close()
        found = content_of(self.store, seen)[1]
        assert found == (set() if self.keys else {*seen}), "the vectors of the living are the control"

    def _keep_snapshot(self, http: httpx.Client) -> None:
        """Take a snapshot in place of the former one, while nobody changes anything."""
        if self._kept is not None:
            assert http.delete(f"/v1/snapshots/{self._kept.id}").is_success
        people = {number: person.kept() for number, person in self.gallery.people.items()}
        answer = http.post("/v1/snapshots")
        assert answer.is_success, answer.text
        self._kept = Kept(answer.json()["id"], people, self._moves.stand, self._moves.epoch)

    def _restore(self, kept: Kept) -> None:
        """Go on with the store that is restored from a snapshot, with a copy of the pictures or without any."""
        new, now = self.folder / "restored", self.gallery.people
        restore(self.store / "snapshots" / kept.id, new, key_file=self.key)
        pictures = self.store / "thumbnails"
        if pictures.exists() and self.gallery.chance.random() < 0.5:
            shutil.copytree(pictures, new / pictures.name)
        shutil.rmtree(self.store)
        new.rename(self.store)
        for number, person in now.items():
            if number in kept.people:
                kept.people[number].restored(person, bool(self.keys))
            else:
                person.states, person.is_new = {None}, False
        now.update(kept.people)
        self._moves.states, self._moves.epoch = {kept.stand}, kept.epoch
        self._moves.log.clear()
        self._kept, self._is_restored = None, True
        self.gallery.count("restored")


def missing(http: httpx.Client) -> list[dict[str, Any]]:
    """Who lacks a vector of the other model."""
    found, after = list[dict[str, Any]](), 0
    while after is not None:
        answer = http.get(f"{MOVE}/missing", params={"after": after, "limit": 1000})
        assert answer.is_success, answer.text
        found += answer.json()["persons"]
        after = answer.json()["next"]
    return found


def verify_log(store: Path, steps: Sequence[tuple[str, bool | None]]) -> None:
    """The audit log has the ``steps`` that were done, in their order, and perhaps those that were not answered."""
    done = list[str]()
    for _, _, line in read_lines(log_files(store / "audit.jsonl")):
        entry = parse_line(line.rstrip(b"\n")) or {}
        if entry.get("operation") in _OPERATIONS.values() and entry["status"] < 300:
            done.append(entry["operation"])
    places = {0}  # in ``done``, where the steps so far may end
    for operation, is_done in steps:
        further = (
            {place + 1 for place in places if done[place : place + 1] == [operation]} if is_done is not False else set()
        )
        places = further if is_done else further | places
    assert len(done) in places, f"the audit log's steps are {done}, and {steps} were asked for"
