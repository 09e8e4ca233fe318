"""A key of a strict TOML schema: its type, limits and choices, and values as TOML and text write them.

Scalars are bool, int, float and str, each also ``| None`` (unset), and tuples of them, or a scalar ``|`` a tuple of it,
or a number ``| str``: one of the choices in place of a number.
"""

import dataclasses
import inspect
import json
import keyword
import math
import pkgutil
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plsc.errors import UsageError
from plsc.extensions import Registry
from plsc.nearest import did_you_mean
from plsc.text_files import parse_toml

_Options = typing.TypeVar("_Options")


def key(default: Any, choices: Sequence[str] = (), **options: Any) -> Any:
    """A field of a schema, whose meaning its class's docstring says under "Attributes:".

    Args:
        default: of the key.
        choices: the values that it takes, or the registry that has them, as "MODULE:NAME", which is imported when they
            are first needed. One that ends in PATH stands for every text that goes on in its place.
        options: other attributes of :class:`Key`.
    """
    return dataclasses.field(default=default, metadata={"entry": Key(default, choices, **options)})


@dataclass(frozen=True)
class Key:
    """One key of a schema.

    Attributes:
        default: its value where none is given.
        choices_or_registry: as :func:`key` takes them.
        above, least, most, below: limits of a number; None: there is none.
        renamed_from: its former name in its section.
        moved_from: its former dotted name, in another section.
        former_values: what values that it took by its former name are now, by the TOML of each.
        also_called: names that other programs give to it, which errors answer with this one.
        in_stages: a stage of a run may give it another value.
        in_tables: a class table of a run may have a value of its own.
        is_fixed: a run that goes on keeps its value: stored tensors' shapes, samples' order or pixels depend on it.
        stands_for_section: a value in place of its section's table is the key's.
        name, hint, doc: its dotted name, type hint and meaning.
    """

    default: Any
    choices_or_registry: Sequence[str] = ()
    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    renamed_from: str = ""
    moved_from: str = ""
    former_values: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    also_called: tuple[str, ...] = ()
    in_stages: bool = False
    in_tables: bool = False
    is_fixed: bool = False
    stands_for_section: bool = False
    name: str = ""
    hint: Any = None
    doc: str = ""

    @property
    def section(self) -> str:
        """The dotted name of the section, "" at the top."""
        return self.name.rpartition(".")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that the key takes; empty where limits or nothing bound them."""
        return tuple(self._registry)

    @property
    def _registry(self) -> Sequence[str] | Mapping[str, Any]:
        listed = self.choices_or_registry
        found: Sequence[str] | Mapping[str, Any] = pkgutil.resolve_name(listed) if isinstance(listed, str) else listed
        return found

    @property
    def every_choice(self) -> tuple[str, ...]:
        """The choices, and the names that installed packages add to them (:mod:`plsc.extensions`)."""
        registry = self._registry
        return registry.every_name() if isinstance(registry, Registry) else tuple(registry)

    @property
    def kind(self) -> type:
        """Scalar type behind the hint: ``float`` of ``float | None``, ``str`` of ``tuple[str, ...]``."""
        arm = self._arms[0]
        return typing.cast(type, typing.get_args(arm)[0] if typing.get_origin(arm) is tuple else arm)

    @property
    def is_list(self) -> bool:
        """True if the key takes a list and nothing else."""
        return all(typing.get_origin(arm) is tuple for arm in self._arms)

    @property
    def takes_list(self) -> bool:
        """True if the key takes a list, perhaps beside a scalar."""
        return any(typing.get_origin(arm) is tuple for arm in self._arms)

    @property
    def _arms(self) -> list[Any]:
        """The types of the hint but None."""
        arms = typing.get_args(self.hint) if isinstance(self.hint, types.UnionType) else (self.hint,)
        return [arm for arm in arms if arm is not type(None)]

    @property
    def type_name(self) -> str:
        """The type in words."""
        plural = {bool: "booleans", int: "integers", float: "numbers", str: "strings"}
        single = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        if self.is_list:
            return f"a list of {plural[self.kind]}"
        return f"{single[self.kind]} or a list of {plural[self.kind]}" if self.takes_list else single[self.kind]

    @property
    def expected(self) -> str:
        """Accepted values, in words."""
        if self.choices and self.kind is str:
            return f"one of {', '.join(self.every_choice)}"
        limits = {"above": self.above, "at least": self.least, "at most": self.most, "below": self.below}
        given = [f"{word} {limit:.12g}" for word, limit in limits.items() if limit is not None]
        bounded = " ".join([self.type_name, " and ".join(given)]).rstrip()
        return " or ".join([*(toml_value(choice) for choice in self.choices), bounded])

    def checked(self, value: Any) -> Any:
        """Return ``value`` in the key's own type; :class:`UsageError` where it has another, or is out of range."""
        if isinstance(value, bool):
            value = self.former_values.get(toml_value(value), value)
        if not self.takes_list or (not self.is_list and not isinstance(value, list | tuple)):
            return self._checked_scalar(value, value)
        if not isinstance(value, list | tuple):
            raise self._wrong(value)
        return tuple(self._checked_scalar(item, value) for item in value)

    def parsed(self, text: str) -> Any:
        """Parse text of a command line to the key's type (unchecked): lists by commas or as TOML."""
        text = text.strip()
        if text in self.former_values:
            return self.former_values[text]
        if not self.takes_list or (not self.is_list and not text.startswith("[") and "," not in text):
            return self._parsed_scalar(text)
        if text.startswith("["):
            return read_toml_value(text)
        return [self._parsed_scalar(part.strip()) for part in text.split(",") if part.strip()]

    def _parsed_scalar(self, text: str) -> Any:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
        return text if self.kind is str and not quoted else read_toml_value(text)

    def _checked_scalar(self, value: Any, whole: Any) -> Any:
        kind: Any = self.kind
        if kind is not str and type(value) is str and value in self.choices:
            return value
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise self._wrong(whole)
        if self.choices and kind is str and not self._takes(value):
            hint = did_you_mean(value, self.every_choice)
            raise UsageError(f"{self.name} = {toml_value(value)} is not {self.expected}{hint}")
        if kind is not str and kind is not bool and not self._within(value):
            raise UsageError(f"{self.name} = {toml_value(value)} is out of range; it takes {self.expected}")
        return value

    def _takes(self, value: str) -> bool:
        return any(_is_choice(value, choice) for choice in self.choices) or value in self.every_choice

    def _within(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def _wrong(self, value: Any) -> UsageError:
        names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
        is_a = names.get(type(value), f"a {type(value).__name__}")
        shown = toml_value(value) if type(value) in names else repr(value)
        return UsageError(f"{self.name} = {shown} is {is_a}; it takes {self.expected}")


def _is_choice(value: str, choice: str) -> bool:
    start = choice.removesuffix("PATH")
    return value == choice if start == choice else value.startswith(start) and value != start


def fields_of(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield (dotted name, type hint, meaning, entry of :func:`key`) of a schema's fields, and of its sections'."""
    hints, meanings = typing.get_type_hints(schema), _meanings(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from fields_of(typing.cast(type, hint), f"{prefix}{field.name}.")
        elif "entry" in field.metadata:
            yield prefix + key_name(field.name), hint, meanings.get(field.name, ""), field.metadata["entry"]


def attribute(name: str) -> str:
    """The field that holds the key ``name``: a word of Python's, as "with", has an underscore behind it there."""
    return f"{name}_" if keyword.iskeyword(name) else name


def key_name(field: str) -> str:
    """The key that a field holds: the other way round of :func:`attribute`."""
    return field.removesuffix("_")


def keys_of(schema: type, prefix: str = "") -> dict[str, Key]:
    """The keys of a schema by dotted names, behind ``prefix``, in the order of the fields."""
    return {
        name: dataclasses.replace(entry, name=name, hint=hint, doc=doc)
        for name, hint, doc, entry in fields_of(schema, prefix)
        if isinstance(entry, Key)
    }


def options_of(kind: type[_Options], section: Any, **others: Any) -> _Options:
    """Options of a dataclass ``kind``: those that are keys of a ``section`` by their values there, and ``others``."""
    keys = {field.name for field in dataclasses.fields(section)}
    named = [field.name for field in dataclasses.fields(typing.cast(type, kind)) if field.name in keys]
    return kind(**{name: getattr(section, name) for name in named} | others)


def _meanings(schema: type) -> dict[str, str]:
    """What the docstring of a class says of its fields under "Attributes:"; nothing where Python has stripped it."""
    listed = (inspect.getdoc(schema) or "").partition("Attributes:\n")[2]
    return {name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.M)}


def toml_value(value: Any) -> str:
    """Format a scalar or a list of scalars as TOML: JSON's escapes are TOML's. What no terminal shows is escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        letters = json.dumps(value, ensure_ascii=False)
        return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in letters)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)


def read_toml_value(text: str) -> Any:
    """Parse ``text`` as a TOML value; anything else stays text, for the type check to name."""
    try:
        read = parse_toml(f"value = {text}")
    except (ValueError, RecursionError):  # Python's own, too, of a number of 4,300 digits
        return text
    return read["value"] if len(read) == 1 else text
