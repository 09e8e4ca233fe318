"""A gallery's collection as the registry in Milvus has it, and what readers may see of it (:mod:`milvus_store`)."""

from dataclasses import dataclass, replace
from typing import Any

from plsc.gallery.store import Collection, Person


@dataclass(frozen=True)
class State:
    """A row of the registry; ``intent`` is what is being done to the collection, or was when a process ended.

    An intent is {"do": "add", "first": id}, {"do": "delete", "person": id}, {"do": "unface", "face": id} or
    {"do": "update", "person": id, "old": [name, metadata, created]}.
    """

    name: str
    key: str
    about: Collection
    next_id: int
    intent: dict[str, Any] | None = None

    @property
    def faces(self) -> str:
        """The Milvus collection of the faces."""
        return f"plsc_faces_{self.key}"

    @property
    def persons(self) -> str:
        """The Milvus collection of the persons."""
        return f"plsc_persons_{self.key}"

    @property
    def changing(self) -> tuple[int, list[Any]] | None:
        """A person whose rows may be half replaced, and the name, metadata and time that hold until they are."""
        intent = self.intent or {}
        return (intent["person"], intent["old"]) if intent.get("do") == "update" else None

    def seen_persons(self, *more: str) -> str:
        """The expression of the persons' rows that readers may see, and that fit ``more``."""
        return self._seen("id", [], more)

    def seen_faces(self, *more: str) -> str:
        """The expression of the faces' rows that readers may see, and that fit ``more``."""
        intent = self.intent or {}
        return self._seen("person", [f"id != {intent['face']}"] if intent.get("do") == "unface" else [], more)

    def _seen(self, person: str, parts: list[str], more: tuple[str, ...]) -> str:
        intent = self.intent or {}
        parts = [f"id < {intent.get('first', self.next_id)}", *parts, *filter(None, more)]
        if intent.get("do") == "delete":
            parts.append(f"{person} != {intent['person']}")
        return " and ".join(f"({part})" for part in parts)

    def as_known(self, person: Person) -> Person:
        """``person`` as read, with what holds for a person who is being changed."""
        if self.changing is None or self.changing[0] != person.id:
            return person
        name, metadata, created = self.changing[1]
        return replace(person, name=name, metadata=metadata, created=created)

    def counted(self, persons: int, faces: int) -> "State":
        """With so many more persons and faces."""
        about = replace(self.about, persons=self.about.persons + persons, faces=self.about.faces + faces)
        return replace(self, about=about)

    def body(self) -> dict[str, Any]:
        """What the registry's row holds, as JSON."""
        about = self.about
        figures = [about.dim, about.contract_id, about.created, about.persons, about.faces]
        return {"key": self.key, "about": figures, "next": self.next_id, "intent": self.intent}

    @classmethod
    def read(cls, name: str, body: dict[str, Any]) -> "State":
        """The state in a row's body."""
        return cls(name, body["key"], Collection(name, *body["about"]), body["next"], body["intent"])
