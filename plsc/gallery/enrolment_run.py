"""``plsc gallery enrol``: progress, questions about people who are known, and the report."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from plsc.client import Client, ServerError
from plsc.gallery.enrolment import STATUSES, Enrolment, OnKnown, Outcome, enrol_all, folders
from plsc.progress import Progress, ask, counted, show

_ANSWERS: dict[str, OnKnown] = {"a": "add", "e": "enrol", "s": "skip", "": "skip"}


def enrol_folder(
    client: Client, folder: Path, collection: str, on_known: OnKnown | Literal["ask"], parallel: int
) -> dict[str, Any]:
    """Enrol a person for each sub-folder of ``folder``, print what becomes of them, and return the report.

    Args:
        collection: is made if there is none.
        on_known: "ask" asks on the terminal, once all others are enrolled.
    """
    people, empty = folders(folder)
    enrolment = Enrolment(client, collection, folder, client.info()["limits"])
    _make(client, collection)
    report = _Report(len(people))
    report.stopped = _run(enrolment, people, "skip" if on_known == "ask" else on_known, parallel, report)
    if on_known == "ask" and report.stopped is None:
        for outcome in [outcome for outcome in report.in_order() if outcome.status == "known"]:
            choice = _ask(outcome)
            if choice != "skip" and report.stopped is None:
                one = {outcome.folder: people[outcome.folder]}
                report.stopped = _run(enrolment, one, choice, 1, report)
    return {"collection": collection, "folder": str(folder), **report.end(empty)}


def _make(client: Client, collection: str) -> None:
    try:
        client.collection(collection)
    except ServerError as error:
        if error.status != 404:
            raise
        client.create_collection(collection)


def _run(
    enrolment: Enrolment, people: dict[str, list[str]], on_known: OnKnown, parallel: int, report: "_Report"
) -> str | None:
    """Enrol ``people``; returns why the run ended before its end, None where it did not."""
    try:
        enrol_all(enrolment, people, on_known, parallel, report.add)
    except ServerError as error:
        return str(error)
    return None


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
        }
        told = ", ".join(f"{counts[status]:,} {text}" for status, text in STATUSES.items() if counts[status])
        pictures = f"{counted(totals['faces'], 'face')} enrolled, {counted(totals['left_out'], 'picture')} left out"
        show(f"{told or 'nobody enrolled'}; {pictures}")
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
