"""Dataclasses as a strict schema of TOML files and command lines: every wrong key or value is named.

A schema is a frozen dataclass whose fields are made by :func:`plsc.toml_keys.key` or :func:`tables`, or are themselves
such dataclasses (sections, which may have sections).

pydantic would replace Key.checked and its limits, some 60 lines. Sections, the nearest right key, former names,
``--KEY VALUE`` with its lists, the written TOML and the list of keys would stay ours, its error objects would have to
be turned into one line each, and every command that reads a configuration would import it (0.2 s).
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.errors import DataError, UsageError, first_line
from plsc.nearest import did_you_mean, nearest
from plsc.text_files import parse_toml, read_text
from plsc.toml_keys import Key, fields_of, keys_of, read_toml_value, toml_value

_LARGEST = 1 << 16  # bytes of a configuration: a written one has 6,000

Hint = Callable[[str], str | None]


def _no_hint(name: str) -> None:
    """Know no foreign names."""


@dataclass(frozen=True)
class Table:
    """One of several tables: its name, empty in an array, and the values that it gives, by the dotted names of keys."""

    name: str
    values: Mapping[str, Any] = dataclasses.field(hash=False)


@dataclass(frozen=True)
class Tables:
    """Tables that share their keys: an array of them, ``[[name]]``, or one under each name of the user's choice.

    Attributes:
        name: dotted.
        doc: their meaning.
        keys: of each table, none of which has to be given.
        are_named: their names are the user's choice.
        hint: as :func:`known` takes it.
    """

    name: str
    doc: str
    keys: Mapping[str, Key]
    are_named: bool
    hint: Hint = _no_hint
    renamed_from: str = ""
    moved_from: str = ""

    @property
    def title(self) -> str:
        """The line above them in a file."""
        return f"[{self.name}]" if self.are_named else f"[[{self.name}]]"

    @property
    def expected(self) -> str:
        """Accepted values, in words."""
        return "tables under names" if self.are_named else "an array of tables"

    def parsed(self, text: str) -> Any:
        """Parse text of a command line (unchecked): TOML's inline form."""
        return read_toml_value(text)

    def checked(self, value: Any) -> tuple[Table, ...]:
        """Return the tables with their values checked; :class:`UsageError` names the wrong one."""
        if self.are_named:
            if not isinstance(value, Mapping):
                raise UsageError(f'{self.name} takes tables under names: [{self.name}], then lines "NAME" = {{ … }}')
            return tuple(self._table(name, tree, f"{self.name}.{toml_value(name)}") for name, tree in value.items())
        if not isinstance(value, list | tuple):
            raise UsageError(f"{self.name} is an array of tables: write [[{self.name}]] above each of them")
        return tuple(self._table("", tree, f"{self.name} {number}") for number, tree in enumerate(value, start=1))

    def to_tree(self, value: Sequence[Table]) -> Any:
        """Return nested mappings as a TOML file holds them; :meth:`checked` makes the same tables of them."""
        trees = [nested(table.values) for table in value]
        return {table.name: tree for table, tree in zip(value, trees, strict=True)} if self.are_named else trees

    def to_toml(self, value: Sequence[Table]) -> list[str]:
        """Format the tables as lines of a file."""
        if self.are_named:
            return ["", f"[{self.name}]", *(f"{toml_value(table.name)} = {_inline(table)}" for table in value)]
        return [line for table in value for line in ("", f"[[{self.name}]]", *_assignments(table))]

    def inline(self, value: Sequence[Table]) -> str:
        """Format the tables in one line, which :meth:`parsed` takes."""
        if self.are_named:
            return _braced(f"{toml_value(table.name)} = {_inline(table)}" for table in value)
        return f"[{', '.join(map(_inline, value))}]"

    def _table(self, name: str, tree: Any, label: str) -> Table:
        if not isinstance(tree, Mapping):
            raise UsageError(f"{label} = {tree!r} is not a table; a table is written {{ KEY = VALUE }}")
        sections = {key.split(".")[0] for key in self.keys if "." in key}
        for inner, value in tree.items():
            if self.are_named and inner not in sections and isinstance(value, Mapping):
                raise UsageError(f'{label}: there is no table {inner}; quote a name with dots: "{name}.{inner}"')
        given = flatten(tree, self.keys, label, self.hint)
        if not given:
            raise UsageError(f"{label} is empty; give it a key to change: {', '.join(list(self.keys)[:3])}, …")
        keys = [key for key in self.keys if key in given]  # in their order, whatever the file's
        values = {key: dataclasses.replace(self.keys[key], name=f"{label}: {key}") for key in keys}
        return Table(name, {key: entry.checked(given[key]) for key, entry in values.items()})


Entry = Key | Tables


def tables(schema: type, *, are_named: bool = False, hint: Hint = _no_hint) -> Any:
    """A field of a schema that holds tables with the keys of ``schema``, none by default; see :class:`Tables`."""
    return dataclasses.field(default=(), metadata={"entry": Tables("", "", keys_of(schema), are_named, hint)})


def tables_of(schema: type) -> dict[str, Tables]:
    """What :func:`tables` made in a schema and its sections, by dotted names."""
    return {
        name: dataclasses.replace(entry, name=name, doc=doc)
        for name, _, doc, entry in fields_of(schema)
        if isinstance(entry, Tables)
    }


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted names as nested mappings, lists as JSON holds them."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        section = functools.reduce(lambda inner, part: inner.setdefault(part, {}), path, tree)
        section[last] = list(value) if isinstance(value, tuple) else value
    return tree


def _assignments(table: Table) -> list[str]:
    return [f"{name} = {toml_value(value)}" for name, value in table.values.items()]


def _inline(table: Table) -> str:
    return _braced(_assignments(table))


def _braced(parts: Iterable[str]) -> str:
    return f"{{ {', '.join(parts)} }}"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file's tables; :class:`UsageError` where it is missing, unreadable or malformed."""
    try:
        return parse_toml(text := read_text(path, _LARGEST))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; name a TOML file") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a TOML configuration") from None
    except DataError as error:
        raise UsageError(f"{error}; name a TOML file") from None
    except RecursionError:
        raise UsageError(f"{path} is not TOML that is meant here: it is nested too deeply") from None
    except ValueError as error:  # the parser's, and Python's of a number of 4,300 digits
        raise UsageError(f"{path} is not TOML: {first_line(error)}{_about_backslashes(text)}") from None


def _about_backslashes(text: str) -> str:
    r"""What to do where a Windows path stands in double quotes, in which ``\U`` begins the number of a letter."""
    for path in re.findall(r"""=[\s\[]*+("[^"\n]*+")""", text):
        if "\\" in path and read_toml_value(path) == path:  # what is no TOML comes back as it is
            quoted = path.replace('"', "'")
            return f"; write {quoted} in single quotes, or double each backslash"
    return ""


def flatten(tree: Mapping[str, Any], keys: Mapping[str, Entry], where: str, hint: Hint = _no_hint) -> dict[str, Any]:
    """Flatten nested tables to ``{dotted name: value}``; :class:`UsageError` for a wrong key, as of :func:`known`."""
    values: dict[str, Any] = {}
    sections = _sections(keys)
    for name, value in dict(_flat(tree, sections)).items():
        if name in sections and _short_form(name, keys) is None:
            raise UsageError(f"{where}: {name} is a section, not a value: write [{name}]")
        entry = known(name, keys, where, _no_hint if isinstance(value, Mapping) else hint)
        if isinstance(entry, Tables) or value != entry.default:  # a written configuration has all keys
            warn_of_former_name(name, entry, keys, where)
        for each in successors(name, entry, keys):
            if each.name in values:
                raise UsageError(f"{where}: {each.name} is given twice, once by its former name; keep one")
            values[each.name] = value
    return values


def _flat(tree: Mapping[str, Any], sections: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for inner, value in tree.items():
        name = prefix + inner
        if name in sections and isinstance(value, Mapping):
            yield from _flat(value, sections, f"{name}.")
        else:
            yield name, value


def _sections(keys: Iterable[str]) -> set[str]:
    """The dotted names of the sections that ``keys`` lie in, and of those that hold these."""
    words = [name.split(".") for name in keys]
    return {".".join(path[:depth]) for path in words for depth in range(1, len(path))}


def _short_form(section: str, keys: Mapping[str, Entry]) -> Key | None:
    """The key that a value in place of a section's table is."""
    candidates = (entry for entry in keys.values() if isinstance(entry, Key) and entry.stands_for_section)
    return next((entry for entry in candidates if entry.section == section), None)


def known(name: str, keys: Mapping[str, Entry], where: str, hint: Hint = _no_hint) -> Entry:
    """Return the key ``name``, or the one formerly so called, or that stands for the section of this name.

    Args:
        name: dotted.
        keys: of the schema.
        where: the file or command line, for messages.
        hint: what a name that another program uses is called here, as a sentence; None for other names.

    Raises:
        UsageError: there is no such key; the hint, or the nearest key, is named.
    """
    if name in keys:
        return keys[name]
    if short := _short_form(name, keys):
        return short
    section, dot, last = name.rpartition(".")
    for entry in keys.values():
        is_beside = entry.name.startswith(section + dot) and entry.name.count(".") == len(dot)
        if entry.moved_from == name or (entry.renamed_from == last and is_beside):
            return entry
    for entry in keys.values():
        if isinstance(entry, Tables) and name.startswith(f"{entry.name}."):
            raise UsageError(
                f"{where}: there is no key {name}; {entry.title} stands in the file, or whole after --{entry.name}, as "
                f"{entry.name} = … would be written in TOML"
            )
    raise UsageError(f"{where}: there is no key {name}; {hint(name) or _nearest(name, keys)}")


def successors(name: str, entry: Entry, keys: Mapping[str, Entry]) -> list[Entry]:
    """The keys that a value of ``name`` is for: ``entry``, which :func:`known` found, or several that came from one."""
    return [entry] if name in keys else [each for each in keys.values() if each.moved_from == name] or [entry]


def warn_of_former_name(name: str, entry: Entry, keys: Mapping[str, Entry], where: str) -> None:
    """Warn where ``name`` is what ``entry``, which :func:`known` found, was called before."""
    is_short_form = isinstance(entry, Key) and entry.section == name
    if name != entry.name and not is_short_form:
        now = " and ".join(each.name for each in successors(name, entry, keys))
        message = f"{where}: {name} is now called {now}; the old name goes with the next release"
        warnings.warn(message, FutureWarning, stacklevel=3)


def _nearest(name: str, keys: Mapping[str, Entry]) -> str:
    """Name the key or two, or the section, that a misspelt dotted ``name`` most resembles, as the end of a message."""
    given, _, last = name.rpartition(".")
    sections = sorted(_sections(keys))
    near = nearest(given or name, sections)
    if not given and near:
        return f"did you mean [{near[0]}]?"
    # "optimizer" is [optim]: a section's name that begins another word counts as near.
    near = near or [other for other in sections if (given or name).startswith(other)][-1:]
    within = {other: entry for other, entry in keys.items() if given and near and other.startswith(f"{near[0]}.")}
    attempts = [(last, spellings(within)), (last, spellings(keys))]
    if re.search(r"[._]", name):  # of a section and a key in one
        attempts.insert(1, (name, {key: [key] for key in keys}))
    for word, known_by in attempts:
        if hint := did_you_mean(word, known_by, most=2):
            return hint.removeprefix("; ")
    if not near:
        return "plsc train --list-keys lists every key"
    return f"plsc train --list-keys {near[0]} lists those of [{near[0]}]" if given else f"did you mean [{near[0]}]?"


def spellings(keys: Mapping[str, Entry]) -> dict[str, list[str]]:
    """Each key with the last part of its name, its name in its section, and what other programs call it."""
    others = {name: entry.also_called if isinstance(entry, Key) else () for name, entry in keys.items()}
    return {name: [name.rpartition(".")[2], name.partition(".")[2], *others[name]] for name in keys}


def parse_arguments(arguments: Sequence[str], keys: Mapping[str, Entry], hint: Hint = _no_hint) -> dict[str, str]:
    """Parse ``["--optim.lr", "0.2", "--epochs=3"]`` to ``{"optim.lr": "0.2", "epochs": "3"}``.

    :class:`UsageError` for an unknown key (as of :func:`known`), a key without a value, a key given twice, and a word
    that belongs to no key.
    """
    found: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"{word!r} belongs to no key; keys are given as --KEY VALUE")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        entry = known(name, keys, "the command line", hint)
        warn_of_former_name(name, entry, keys, "the command line")
        given, name = name, entry.name
        if not equals:
            if not words or words[0].startswith("--"):
                raise UsageError(f"--{name} needs a value: {entry.expected}")
            value = words.pop(0)
        for each in successors(given, entry, keys):
            if each.name in found:
                raise UsageError(f"--{each.name} is given twice; give it once")
            found[each.name] = value
    return found
