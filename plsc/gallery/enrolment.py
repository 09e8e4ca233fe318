"""Enrol a folder of folders into a running service: a person per sub-folder, by its name, over HTTP.

Nothing is kept here: who is enrolled, the service says by external id (the folder's name) and by idempotency keys made
of the pictures. So the same call after an interruption, or a kill, goes on where the first one ended.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from plsc.client import Client, ServerError
from plsc.client_values import Known, NewPerson
from plsc.data.codec import decode_image, encode_image
from plsc.data.folder import PictureFiles
from plsc.errors import DataError, UsageError
from plsc.gallery.validation import check_external_id
from plsc.regular_files import read_bytes

OnKnown = Literal["skip", "add", "enrol"]
Status = Literal["enrolled", "added", "known", "there", "failed"]
STATUSES: dict[Status, str] = {
    "enrolled": "enrolled",
    "added": "added to somebody known",
    "known": "known and skipped",
    "there": "there already",
    "failed": "failed",
}
_ON_KNOWN = {"skip": "refuse", "add": "add", "enrol": "enrol"}
_UNSUPPORTED_TYPE = 415
# Statuses of a request that one of its pictures spoils, which the message names first.
_OF_PICTURES = (413, _UNSUPPORTED_TYPE, 422)
_NAMED = re.compile(r"faces\[(\d+)\]")
_OF_PERSON = (400, 404, 409, 412, 504)  # statuses by which this person fails; others end the run
_JSON_SHARE, _BESIDE = 0.74, 65_536  # of a body: base64 is 4/3 of the pictures; and what stands beside them


@dataclass
class Outcome:
    """What became of one folder.

    Attributes:
        id: of the person who has the faces.
        faces: how many this call added.
        known: who was enrolled already, and how much alike.
        left_out: pictures that were not used, and why.
        why: the folder failed.
    """

    folder: str
    status: Status = "failed"
    id: int | None = None
    faces: int = 0
    known: Known | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    why: str | None = None


class Enrolment:
    """Enrols sub-folders of ``folder`` into ``collection``; thread-safe.

    Args:
        limits: the service's, as ``GET /v1/info`` gives them.
    """

    def __init__(self, client: Client, collection: str, folder: Path, limits: dict[str, Any]) -> None:
        self._client, self._collection = client, collection
        self._folder, self._below = folder, folder.resolve()
        self._most = int(limits["inputs"])
        self._most_bytes = int((int(limits["body_bytes"]) - _BESIDE) * _JSON_SHARE)

    def enrol(self, name: str, pictures: Sequence[str], on_known: OnKnown) -> Outcome:
        """Enrol one sub-folder.

        Args:
            name: of the sub-folder, which is the person's name and external id.
            pictures: paths below the folder.
            on_known: what to do where a picture matches somebody at or above the service's threshold.

        Raises:
            ServerError: nobody can be enrolled at the moment: the service is gone, full, or does not let this caller.
        """
        outcome = Outcome(name)
        try:
            check_external_id(name)
            name.encode()
            skipped = self._find(outcome, len(pictures))
            for batch in self._batches(pictures, outcome, skipped):
                self._send(batch, outcome, on_known)
                if outcome.status == "known":
                    return outcome
            if outcome.status == "failed":
                outcome.why = "no picture can be used"
        except (UsageError, UnicodeEncodeError) as error:
            outcome.why = f"its name is no external id: {error}"
        except ServerError as error:
            if error.status not in _OF_PERSON:
                raise
            outcome.status, outcome.why = "failed", str(error)
        return outcome

    def _find(self, outcome: Outcome, pictures: int) -> int | None:
        """Look for who has the folder's external id; returns how many batches that person has for sure, None: all."""
        try:
            person = self._client.person_by_external_id(self._collection, outcome.folder)
        except ServerError as error:
            if error.status == 404:
                return 0
            raise
        outcome.id, outcome.status = person.id, "there"
        return None if len(person.faces) >= pictures else 1  # the others have keys, and are done once

    def _batches(self, pictures: Sequence[str], outcome: Outcome, skipped: int | None) -> Iterator[dict[str, bytes]]:
        """The pictures by path, as many at a time as a request may hold, but for the first ``skipped`` times."""
        yield from islice(self._all_batches(pictures, outcome), skipped, None) if skipped is not None else ()

    def _all_batches(self, pictures: Sequence[str], outcome: Outcome) -> Iterator[dict[str, bytes]]:
        batch: dict[str, bytes] = {}
        for path in pictures:
            try:
                data = read_bytes(self._folder / path, below=self._below)
            except DataError as error:
                outcome.left_out[path] = str(error)
                continue
            if len(data) > self._most_bytes:
                outcome.left_out[path] = f"it has {len(data):,} bytes, more than a request may have"
                continue
            if batch and (len(batch) == self._most or sum(map(len, batch.values())) + len(data) > self._most_bytes):
                yield batch
                batch = {}
            batch[path] = data
        if batch:
            yield batch

    def _send(self, batch: dict[str, bytes], outcome: Outcome, on_known: OnKnown) -> None:
        """Send a batch; again with JPEG for a format that the service refuses, or without what it cannot use."""
        converted: set[str] = set()
        while batch:
            try:
                self._send_once(batch, outcome, on_known)
                return
            except ServerError as error:
                found = _NAMED.match(str(error)) if error.status in _OF_PICTURES else None
                if found is None or int(found[1]) >= len(batch):
                    raise
                path = list(batch)[int(found[1])]
                if error.status == _UNSUPPORTED_TYPE and path not in converted:
                    converted.add(path)
                    with suppress(DataError):  # what the service says of it is said below
                        batch[path] = encode_image(decode_image(batch[path], path), "jpeg")
                        continue
                outcome.left_out[path] = str(error).removeprefix(found[0]).strip()
                del batch[path]

    def _send_once(self, batch: dict[str, bytes], outcome: Outcome, on_known: OnKnown) -> None:
        faces, key = list(batch.values()), self._key(outcome.folder, batch, on_known)
        if outcome.id is not None:
            added = self._client.add_faces(self._collection, outcome.id, faces, idempotency_key=key)
            outcome.faces += len(added)
            return
        person = NewPerson(outcome.folder, faces=faces, external_id=outcome.folder)
        try:
            enrolled = self._client.enrol(self._collection, person, on_known=_ON_KNOWN[on_known], idempotency_key=key)
        except ServerError as error:
            if error.known is None:
                raise
            outcome.status, outcome.known = "known", error.known
            return
        outcome.id, outcome.faces, outcome.known = enrolled.id, len(batch), enrolled.known
        outcome.status = "added" if enrolled.external_id != outcome.folder else "enrolled"

    def _key(self, name: str, batch: dict[str, bytes], on_known: OnKnown) -> str:
        digest = hashlib.sha256(f"{self._collection}\0{name}\0{on_known}".encode())
        for data in batch.values():
            digest.update(hashlib.sha256(data).digest())
        return f"enrol-{digest.hexdigest()[:40]}"


def folders(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The pictures of each sub-folder; and of sub-folders without any, what they hold.

    Raises:
        UsageError: there is no picture in any sub-folder.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    files = PictureFiles(folder)
    found, empty = files.by_identity()
    if not found:
        raise UsageError(f"{folder} has no picture in any sub-folder; give each person a folder of their own")
    files.report()
    return found, {name: content or "nothing" for name, content in empty.items()}


def enrol_all(
    enrolment: Enrolment,
    people: dict[str, list[str]],
    on_known: OnKnown,
    parallel: int,
    done: Callable[[Outcome], None],
) -> None:
    """Enrol many sub-folders, ``parallel`` at a time; ``done`` is called in this thread with each outcome.

    Raises:
        ServerError: as :meth:`Enrolment.enrol`; those that are in progress then end first.
    """
    waiting = iter(people.items())
    with ThreadPoolExecutor(parallel, "plsc-enrol") as threads:
        running: set[Future[Outcome]] = set()
        while True:
            for name, pictures in islice(waiting, parallel - len(running)):
                running.add(threads.submit(enrolment.enrol, name, pictures, on_known))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done(future.result())
