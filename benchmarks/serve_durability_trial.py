"""A trial of benchmarks/serve_durability.py: the service's options, who loads it, and what has to hold after a kill."""

import base64
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from serve_durability_files import await_forgotten, verify_audit, verify_store, verify_thumbnails
from serve_durability_load import CALLERS, Caller, Gallery, Work
from serve_durability_people import COLLECTION, DIM, PICTURE_SIZE, Person, vector

from plsc.models import create, save_model

SAME = 0.9999  # cosine of two embeddings of one picture


class Trial:
    """A store in ``folder``, the service's model beside it, and what callers know of it.

    Args:
        folder: an empty one.
        seed: of what is done.
        encrypt: an encrypted store.
    """

    def __init__(self, folder: Path, seed: int, encrypt: bool) -> None:
        self.folder, self.store = folder, folder / "store"
        self.gallery: Gallery[Any] = self.new_gallery(seed)
        self.keys = [new_key(folder / "gallery.key")] if encrypt else []
        self.slowest = 0.0  # seconds until what was deleted was in no file
        self.save_model("model.safetensors", DIM, seed=0)

    def new_gallery(self, seed: int) -> Gallery[Any]:
        """What callers know before they begin."""
        return Gallery(seed, Person)

    def save_model(self, name: str, dim: int, *, seed: int) -> Path:
        """Write a model of ``dim`` numbers that was never trained."""
        torch.manual_seed(seed)
        path = self.folder / name
        save_model(create("resnet8", embedding_dim=dim, image_size=PICTURE_SIZE), path)
        return path

    def options(self) -> list[str | Path]:
        """The options of the service in the next round."""
        kept = ["--encrypt", self.keys[-1]] if self.keys else ["--keep-thumbnails"]
        return ["--model", self.folder / "model.safetensors", *kept]

    def works(self, seed: int) -> Sequence[Work]:
        """What is done, each in a thread, while the service is under load."""
        return [Caller(self.gallery, 1000 * seed + number).work for number in range(CALLERS)]

    def verify(self, http: httpx.Client, *, files: bool) -> None:
        """Compare the service with what it acknowledged, and take over what was done without an answer."""
        verify_people(self.gallery, http)
        self.verify_searches(http)
        verify_audit(self.store)
        verify_thumbnails(self.store, lambda: everybody(http).values())
        if files:
            people = list(self.gallery.people.values())
            self.slowest = max(self.slowest, await_forgotten(self.store, people, bool(self.keys), self.gone_vectors()))

    def gone_vectors(self) -> Sequence[bytes]:
        """Parts of further vectors that no file may hold."""
        return []

    def verify_searches(self, http: httpx.Client) -> None:
        """Who is there is found by the own vector, and who was deleted last by none."""
        people = self.gallery.people.values()
        gone = [person for person in people if person.states == {None}][-150:]
        for person in [*self.gallery.living.values(), *gone]:
            (state,) = person.states
            if person.has_picture:
                continue
            faces = [state.face] if state is not None else range(person.faces)
            for face in faces:
                query = {"query": {"vector": vector(person.number, face)}, "k": 1}
                matches = http.post(f"/v1/collections/{COLLECTION}/search", json=query).json()["results"][0]["matches"]
                same = [match["person"]["id"] for match in matches if match["score"] > SAME]
                assert same == ([] if state is None else [person.id]), f"person {person.number}: {matches}, {state}"

    def after_kill(self, *, files: bool) -> None:
        """Look at the store that a kill left, and rotate its key."""
        if files:
            if self.keys:
                self.keys.append(rotate(self.store, self.keys[-1], self.gallery))
            verify_store(self.store, self.key)

    @property
    def key(self) -> Path | None:
        """The key file that the store is under."""
        return self.keys[-1] if self.keys else None


def verify_people(gallery: Gallery[Any], http: httpx.Client) -> None:
    """Everybody is in a state that is possible; takes over which."""

    def ask(method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        answer = http.request(method, path, json=body, headers={} if key is None else {"Idempotency-Key": key})
        assert answer.status_code < 300 or answer.status_code == 409, (method, path, answer.text)
        return answer

    for person in gallery.people.values():
        if person.is_to_repeat:  # as a caller does who got no answer
            person.enrol(ask)
            gallery.count("repeated")
    found = everybody(http)
    for number, person in list(gallery.people.items()):
        gallery.figures["unanswered"] += len(person.states) > 1
        person.settle(found.pop(number, None))
    assert not found, f"nobody enrolled {sorted(found)[:5]}"


def everybody(http: httpx.Client) -> dict[int, dict[str, Any]]:
    """All persons of the service, by their numbers; nobody is there twice."""
    found: dict[int, dict[str, Any]] = {}
    after: int | None = 0
    while after is not None:
        page = http.get(f"/v1/collections/{COLLECTION}/persons", params={"after": after, "limit": 1000}).json()
        for view in page["persons"]:
            number = view["metadata"]["number"]
            assert number not in found, f"person {number} is there twice"
            found[number] = view
        after = page.get("next")
    return found


def new_key(path: Path) -> Path:
    """Write a new key file."""
    path.write_bytes(base64.b64encode(os.urandom(32)))
    path.chmod(0o600)
    return path


def rotate(store: Path, old: Path, gallery: Gallery[Any]) -> Path:
    """Change the key, in a process that may be killed meanwhile; returns the key file that the store is under then."""
    new = new_key(store.parent / f"gallery-{gallery.figures['rotations']}.key")
    command = [sys.executable, "-m", "plsc.tools.entry", "gallery", "rotate-key", str(store)]
    command += ["--encrypt", str(old), "--new-key", str(new)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(gallery.chance.choice([0.5, 1.0, 1.5, 60.0]))
    process.kill()
    _, told = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), told
    gallery.count("rotations")
    return next(key for key in (new, old) if opens(store, key))


def opens(store: Path, key: Path) -> bool:
    """True if the store's keys are under this key file."""
    from plsc.errors import UsageError
    from plsc.gallery.sqlite import KEYS
    from plsc.gallery.sqlite.keys import KeyTable, read_key_file

    try:
        KeyTable(store / KEYS, read_key_file(key), writable=False).close()
    except UsageError:
        return False
    return True
