"""The list of all keys as text, for a terminal: by sections, or those that a word is about."""

import re
import textwrap
import typing
from collections.abc import Iterable

from plsc.config.loading import KEYS, TABLES, sections, shown, take_every_feature
from plsc.config.sections import Config, get
from plsc.errors import UsageError
from plsc.feature_config import FEATURES, section_class
from plsc.nearest import did_you_mean
from plsc.strict_toml import Tables, spellings
from plsc.toml_keys import Key

# What is changed from one run to the next; the other keys are right for most runs.
BASIC = (
    "data.train",
    "eval.sets",
    "backbone",
    "init_weights",
    "epochs",
    "data.batch_size",
    "data.augment",
    "optim.lr",
    "head.margin",
    "precision",
)
_WIDTH = 100


def describe(word: str = "", config: Config | None = None) -> str:
    """List keys with their defaults, types and meanings.

    Args:
        word: empty for all keys, the basic ones first; a section, for those in it; else the keys that have it in
            their names, or whose meaning has a word that begins with it.
        config: whose values are shown where they are not the defaults.

    Raises:
        UsageError: there is no such key; the nearest is named.
    """
    word = word.strip("[]")
    take_every_feature()
    if not word:
        basic = ["The keys that are changed most", *_entries((KEYS[name] for name in BASIC), config)]
        every = [_section(section, config) for section in sections()]
        return "\n\n".join(["\n".join(basic), *every, _section("stage", config)])
    inside = [name for name in (*sections(), "stage") if name and (name == word or name.startswith(f"{word}."))]
    if inside:
        return "\n\n".join(_section(section, config) for section in inside)
    every_entry: list[Key | Tables] = [*KEYS.values(), *TABLES.values()]
    found = [entry for entry in every_entry if _is_about(entry, word)]
    if not found:
        known_by = {section: [section] for section in sections()} | spellings(KEYS)
        near = did_you_mean(word, known_by, most=2) or "; plsc train --list-keys lists every key"
        raise UsageError(f"--list-keys {word}: no section, key or meaning of a key has this word{near}")
    return "\n".join(_entries(found, config))


def section_meaning(section: str) -> str:
    """What a section is about, by its dotted name."""
    schema: type = section_class(section) if section in FEATURES else Config
    for part in () if section in FEATURES else filter(None, section.split(".")):
        schema = typing.get_type_hints(schema)[part]
    return (schema.__doc__ or "").partition(": ")[2].partition("\n")[0]


def _section(section: str, config: Config | None) -> str:
    tables = [table for name, table in TABLES.items() if name.rpartition(".")[0] == section and section]
    if section in TABLES:
        return "\n".join(_entries([TABLES[section]], config))
    title = f"[{section}]: {section_meaning(section)}" if section else "At the top of the file: the run"
    return "\n".join([title, *_entries([*sections()[section], *tables], config)])


def _entries(entries: Iterable[Key | Tables], config: Config | None) -> list[str]:
    return [line for entry in entries for line in _entry(entry, config)]


def _entry(entry: Key | Tables, config: Config | None) -> list[str]:
    default = () if isinstance(entry, Tables) else entry.default
    value = default if config is None else get(config, entry.name)
    if isinstance(entry, Tables):
        head, takes = entry.title, f"{entry.expected}, of: {', '.join(entry.keys)}"
        head += f" = {shown(entry.name, value)}" if value else ""
    else:
        assigned = "(unset)" if value is None else f"= {shown(entry.name, value)}"
        head, takes = f"{entry.name} {assigned}", entry.expected
        head += f"   (default: {shown(entry.name, default)})" if value != default else ""
    text = textwrap.wrap(f"{entry.doc}  [{takes}]", _WIDTH - 6, break_on_hyphens=False)
    return [f"  {head}", *(f"      {line}" for line in text)]


def _is_about(entry: Key | Tables, word: str) -> bool:
    names = (entry.name, *(entry.also_called if isinstance(entry, Key) else ()))
    in_a_name = any(word.lower().replace("-", "_") in name for name in names)
    return in_a_name or re.search(rf"\b{re.escape(word)}", entry.doc, re.IGNORECASE) is not None
