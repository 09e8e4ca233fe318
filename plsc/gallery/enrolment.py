"""``plsc gallery enrol``: a folder of folders into a running service, a person per sub-folder by its name, over HTTP.

Nothing is kept here: who is enrolled, the service says by external id (the folder's name), and of which pictures by the
keys of the faces, each the digest of a picture's bytes (:func:`picture_key`). So the same call after an interruption, a
kill, or a change of the folder sends the pictures that the person has no face of, whatever their names and number are.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from plsc.client import Client, ServerError
from plsc.client_values import Collection, Known, NewPerson, Person, Picture
from plsc.data.codec import decode_image, encode_image
from plsc.data.folder import PictureFiles
from plsc.errors import DataError, UsageError
from plsc.gallery.validation import check_external_id
from plsc.progress import Progress, ask, counted, show
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
_ANSWERS: dict[str, OnKnown] = {"a": "add", "e": "enrol", "s": "skip", "": "skip"}
_CONFLICT, _UNSUPPORTED_TYPE = 409, 415
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
        several: of pictures with several faces, how many they show.
        why: the folder failed.
    """

    folder: str
    status: Status = "failed"
    id: int | None = None
    faces: int = 0
    known: Known | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    several: dict[str, int] = field(default_factory=dict)
    why: str | None = None


class Enrolment:
    """Enrols sub-folders of ``folder`` into ``collection``; thread-safe.

    Args:
        info: the service's answer to ``GET /v1/info``.
        every_face: of a picture is the person's; else the largest alone.
    """

    def __init__(
        self, client: Client, collection: Collection, folder: Path, info: Mapping[str, Any], every_face: bool = False
    ) -> None:
        if every_face and not info["detector"]:
            raise UsageError("--faces all: the service looks for no faces; start it with --detector")
        self._every_face = every_face
        self._client, self._collection = client, collection.name
        self._folder, self._below = folder, folder.resolve()
        self._most = int(info["limits"]["inputs"])
        self._most_bytes = int((int(info["limits"]["body_bytes"]) - _BESIDE) * _JSON_SHARE)
        # Faces without keys are known again by their embeddings, where all of them are by a model of the service's own.
        self._knows_faces = collection.contract_id in (info["model"]["contract_id"], info["next_model"])

    def enrol(self, name: str, pictures: Sequence[str], on_known: OnKnown) -> Outcome:
        """Enrol one sub-folder.

        Args:
            name: of the sub-folder, which is the person's name and external id.
            pictures: paths below the folder.
            on_known: what to do where a picture matches somebody at or above the service's threshold.

        Raises:
            ServerError: nobody can be enrolled at the moment: the service is gone, full, or does not let this caller.
        """
        outcome, there = Outcome(name), _Faces()
        try:
            check_external_id(name)
            name.encode()
            if self._find(outcome, there) and self._has_all(there, pictures):
                return outcome
            for batch in self._batches(pictures, outcome, there):
                self._send(batch, outcome, there, on_known)
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

    def _find(self, outcome: Outcome, there: "_Faces") -> bool:
        """Look for who has the folder's external id, and for the faces of that person; False: nobody has it."""
        try:
            person = self._client.person_by_external_id(self._collection, outcome.folder)
        except ServerError as error:
            if error.status == 404:
                return False
            raise
        outcome.id, outcome.status = person.id, "there"
        there.add(person)
        return True

    def _has_all(self, there: "_Faces", pictures: Sequence[str]) -> bool:
        """True if a person, whose faces without keys cannot be told, has as many faces as there are pictures."""
        return not self._knows_faces and not there.keys and len(there.ids) >= len(pictures)

    def _batches(self, pictures: Sequence[str], outcome: Outcome, there: "_Faces") -> Iterator[dict[str, Picture]]:
        """The pictures by path that the person has no face of, as many at a time as a request may hold."""
        batch: dict[str, Picture] = {}
        size = 0  # bytes
        first: dict[str, str] = {}  # the path of each picture, by its key
        for path in pictures:
            try:
                data = read_bytes(self._folder / path, below=self._below)
            except DataError as error:
                outcome.left_out[path] = str(error)
                continue
            same = first.setdefault(picture_key(data), path)
            if same != path:
                outcome.left_out[path] = f"it is the same picture as {same}"
                continue
            for name, picture in self._faces_of(path, data, outcome).items():
                if picture.key in there.keys:
                    continue
                if len(data) > self._most_bytes:
                    outcome.left_out[path] = f"it has {len(data):,} bytes, more than a request may have"
                    break
                if batch and (len(batch) == self._most or size + len(data) > self._most_bytes):
                    yield batch
                    batch, size = {}, 0
                batch[name] = picture
                size += len(data)
        if batch:
            yield batch

    def _faces_of(self, path: str, data: bytes, outcome: Outcome) -> dict[str, Picture]:
        """What is sent of a picture, by name: itself, or each of its faces, whose numbers from 2 on are in the key."""
        count = 1
        if self._every_face:
            try:
                count = len(self._client.detect(data))
            except ServerError as error:
                if error.status not in _OF_PICTURES:  # of which the enrolment says what is wrong
                    raise
        whole = Picture(data, key=picture_key(data))
        if count == 1:
            return {path: whole}
        outcome.several[path] = count
        others = {f"{path}#{n}": Picture(data, key=f"{whole.key}#{n}", face=n) for n in range(2, count + 1)}
        return {path: replace(whole, face=1), **others}

    def _send(self, batch: dict[str, Picture], outcome: Outcome, there: "_Faces", on_known: OnKnown) -> None:
        """Send a batch; again with JPEG for a format that the service refuses, or without what it cannot use."""
        converted: set[str] = set()
        while batch:
            try:
                self._send_once(batch, outcome, there, on_known)
                return
            except ServerError as error:
                for name, faces in error.faces.items():
                    path = list(batch)[int(name[len("faces[") : -1])]
                    outcome.several[path] = len(faces)
                    batch[path] = replace(batch[path], face="largest")
                if error.faces:
                    continue
                found = _NAMED.match(str(error)) if error.status in _OF_PICTURES else None
                if found is None or int(found[1]) >= len(batch):
                    raise
                path = list(batch)[int(found[1])]
                if error.status == _UNSUPPORTED_TYPE and path not in converted:
                    with suppress(DataError):  # what the service says of it is said below
                        converted.add(path)
                        image = encode_image(decode_image(cast("bytes", batch[path].image), path), "jpeg")
                        batch[path] = replace(batch[path], image=image)
                        continue
                outcome.left_out[path] = str(error).removeprefix(found[0]).lstrip(": ")
                del batch[path]

    def _send_once(self, faces: Mapping[str, Picture], outcome: Outcome, there: "_Faces", on_known: OnKnown) -> None:
        """Send pictures once; those that the person has by now, who was found on the way, are left."""
        if outcome.id is None:
            try:
                self._enrol(faces, outcome, there, on_known)
                return
            except ServerError as error:
                if error.known is not None and on_known == "add":
                    there.add(self._client.person(self._collection, error.known.id))
                    outcome.id, outcome.status, outcome.known = error.known.id, "added", error.known
                elif error.known is not None:
                    outcome.status, outcome.known = "known", error.known
                    return
                elif error.status != _CONFLICT or not self._find(outcome, there):  # else enrolled at the same moment
                    raise
        assert outcome.id is not None, "else it was enrolled above"
        new = [face for face in faces.values() if face.key not in there.keys]
        if new:
            added = self._client.add_faces(self._collection, outcome.id, new)
            outcome.faces += len(set(added) - there.ids)  # one without a key was known by its embedding

    def _enrol(self, faces: Mapping[str, Picture], outcome: Outcome, there: "_Faces", on_known: OnKnown) -> None:
        person = NewPerson(outcome.folder, faces=list(faces.values()), external_id=outcome.folder)
        answer = self._client.enrol(self._collection, person, on_known="enrol" if on_known == "enrol" else "refuse")
        outcome.id, outcome.status, outcome.known = answer.id, "enrolled", answer.known
        outcome.faces = len(answer.faces)
        there.add(answer)


@dataclass
class _Faces:
    """The faces of the person who a folder's pictures go to, and their keys."""

    ids: set[int] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)

    def add(self, person: Person) -> None:
        self.ids |= set(person.faces)
        self.keys |= set(person.keys.values())


def picture_key(data: bytes) -> str:
    """The key of a picture's face: the first half of the SHA-256 of the file, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:32]


def _folders(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
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


def enrol_folder(
    client: Client,
    folder: Path,
    collection: str,
    on_known: OnKnown | Literal["ask"],
    parallel: int,
    every_face: bool = False,
) -> dict[str, Any]:
    """Enrol a person for each sub-folder of ``folder``, print what becomes of them, and return the report.

    Args:
        collection: is made if there is none.
        on_known: "ask" asks on the terminal, once all others are enrolled.
        every_face: as :class:`Enrolment` takes it.
    """
    people, empty = _folders(folder)
    info = client.info()
    try:
        found = client.collection(collection)
    except ServerError as error:
        if error.status != 404:
            raise
        found = client.create_collection(collection)
    enrolment = Enrolment(client, found, folder, info, every_face)
    report = _Report(len(people))
    report.stopped = _run(enrolment, people, "skip" if on_known == "ask" else on_known, parallel, report)
    if on_known == "ask" and report.stopped is None:
        for outcome in [outcome for outcome in report.in_order() if outcome.status == "known"]:
            choice = _ask(outcome)
            if choice != "skip" and report.stopped is None:
                one = {outcome.folder: people[outcome.folder]}
                report.stopped = _run(enrolment, one, choice, 1, report)
    return {"collection": collection, "folder": str(folder), **report.end(empty)}


def _run(
    enrolment: Enrolment, people: dict[str, list[str]], on_known: OnKnown, parallel: int, report: "_Report"
) -> str | None:
    """Enrol ``people``, ``parallel`` at a time; returns why the run ended before its end, None where it did not."""
    waiting = iter(people.items())
    try:
        with ThreadPoolExecutor(parallel, "plsc-enrol") as threads:  # those that are in progress end first
            running: set[Future[Outcome]] = set()
            while True:
                for name, pictures in islice(waiting, parallel - len(running)):
                    running.add(threads.submit(enrolment.enrol, name, pictures, on_known))
                if not running:
                    return None
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    report.add(future.result())
    except ServerError as error:
        return str(error)


class _Report:
    """What became of each folder; a line for whatever was not just enrolled."""

    def __init__(self, total: int) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.stopped: str | None = None
        self._progress = Progress("enrolling", total, "people")

    def add(self, outcome: Outcome) -> None:
        is_new = outcome.folder not in self.outcomes  # else somebody was asked about it
        self.outcomes[outcome.folder] = outcome
        for path, why in outcome.left_out.items():
            show(f"{path}: left out: {why}")
        for path, count in outcome.several.items():
            show(f"{path}: it shows {count} faces")
        if outcome.known is not None:
            show(f"{outcome.folder}: {STATUSES[outcome.status]}: {_who(outcome)}")
        if outcome.why is not None:
            show(f"{outcome.folder}: {STATUSES[outcome.status]}: {outcome.why}")
        self._progress.advance(int(is_new))

    def end(self, empty: dict[str, str]) -> dict[str, Any]:
        """Print the summary, and return it with all outcomes."""
        self._progress.finish()
        for name, held in empty.items():
            show(f"{name}: no picture in it, but {held}")
        counts = Counter(outcome.status for outcome in self.outcomes.values())
        totals: dict[str, int] = {
            **{str(status): counts[status] for status in STATUSES},
            "faces": sum(outcome.faces for outcome in self.outcomes.values()),
            "left_out": sum(len(outcome.left_out) for outcome in self.outcomes.values()),
            "several": sum(len(outcome.several) for outcome in self.outcomes.values()),
        }
        told = ", ".join(f"{counts[status]:,} {text}" for status, text in STATUSES.items() if counts[status])
        pictures = f"{counted(totals['faces'], 'face')} enrolled, {counted(totals['left_out'], 'picture')} left out"
        several = f", {counted(totals['several'], 'picture')} with several faces" if totals["several"] else ""
        show(f"{told or 'nobody enrolled'}; {pictures}{several}")
        if self.stopped is not None:
            show(f"stopped: {self.stopped}; the same command goes on from here")
        people = [asdict(outcome) for outcome in self.in_order()]
        return {**totals, "stopped": self.stopped, "empty": empty, "people": people}

    def in_order(self) -> list[Outcome]:
        """The outcomes by the folders' names: they came as they were done."""
        return [self.outcomes[name] for name in sorted(self.outcomes)]


def _ask(outcome: Outcome) -> OnKnown:
    question = f"{outcome.folder} matches {_who(outcome)}: [a]dd there, [e]nrol as somebody else, [s]kip? "
    while True:
        try:
            answer = ask(question).strip().lower()[:1]
        except EOFError:
            return "skip"
        if answer in _ANSWERS:
            return _ANSWERS[answer]


def _who(outcome: Outcome) -> str:
    assert outcome.known is not None
    return f"{outcome.known.name or 'person'} (#{outcome.known.id}) at {outcome.known.score:.2f}"
