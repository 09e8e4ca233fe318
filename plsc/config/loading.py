"""Reading configurations strictly, from TOML and ``--KEY VALUE`` overrides, and writing them."""

import dataclasses
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc import arcface_torch, strict_toml
from plsc.config.checks import check_together
from plsc.config.sections import EXCLUSIVE, Config, get
from plsc.errors import UsageError
from plsc.feature_config import FEATURES, section_class
from plsc.nearest import did_you_mean
from plsc.strict_toml import Entry, Tables
from plsc.toml_keys import Key, key_name, keys_of, toml_value

_Schema = typing.TypeVar("_Schema")
SHIPPED = Path(__file__).parents[1] / "configs"
KEYS = keys_of(Config)
# The keys that a table may have for itself, beside those of the head: its data, and its learning rate.
_OF_TABLES = ("data.train", "data.labels", "optim.head_lr")


def _stage_hint(name: str) -> str | None:
    return "a stage cannot change it; plsc train --list-keys lists what it can" if name in KEYS else None


def _table_hint(name: str) -> str | None:
    return "it is the same for all tables of a run" if name in KEYS else None


TABLES = strict_toml.tables_of(Config)
_ENTRIES: dict[str, Entry] = {**KEYS, **TABLES}
_OWN_KEYS = {name: dict(table.keys) for name, table in TABLES.items()}


def _take_keys(keys: Mapping[str, Key]) -> None:
    """Let configurations have these keys, and their stages and tables those of them that they may change."""
    KEYS.update(keys)
    may_change: dict[str, Callable[[Key], bool]] = {
        "stage": lambda entry: entry.in_stages,
        "table": lambda entry: entry.section == "head" or entry.in_tables or entry.name in _OF_TABLES,
    }
    hints = {"stage": _stage_hint, "table": _table_hint}
    for name, is_of in may_change.items():
        changeable = {each: dataclasses.replace(entry, default=None) for each, entry in KEYS.items() if is_of(entry)}
        TABLES[name] = dataclasses.replace(TABLES[name], keys={**_OWN_KEYS[name], **changeable}, hint=hints[name])
    _ENTRIES.update({**keys, **TABLES})


def _take_features(names: Iterable[str]) -> None:
    """Let configurations have the sections of rare features by these names, where they are ones."""
    for name in names:
        if not any(each.startswith(f"{name}.") for each in KEYS) and name in (*FEATURES, *FEATURES.every_name()):
            _take_keys(keys_of(section_class(name), f"{name}."))


_take_keys(KEYS)
_take_features(FEATURES)


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML file (None: defaults alone), lay ``overrides`` over it, and check the whole.

    ``path`` may also be the name of a shipped configuration, see :func:`shipped`.

    ``overrides`` maps dotted keys ("optim.lr") to values, or to text as typed on a command line; None takes a key
    of the file out.
    Raises :class:`UsageError` for a missing or malformed file and for every wrong key or value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        tree = strict_toml.read_toml(_resolve(Path(path)))
        _take_features(_unknown(tree))
        values = strict_toml.flatten(tree, _ENTRIES, str(path), arcface_torch.key_hint)
    overridden = dict(overrides or {})
    for pair in EXCLUSIVE:
        if any(name in overridden for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    _take_features(_unknown(overridden))
    for name, value in overridden.items():
        entry = strict_toml.known(name, _ENTRIES, "the command line", arcface_torch.key_hint)
        strict_toml.warn_of_former_name(name, entry, _ENTRIES, "the command line")
        for each in strict_toml.successors(name, entry, _ENTRIES):
            values[each.name] = each.parsed(value) if isinstance(value, str) else value
    return _build({name: value for name, value in values.items() if value is not None})


def _unknown(names: Iterable[str]) -> set[str]:
    """The sections of dotted names that no key known so far lies in."""
    sections = {name.partition(".")[0] for name in (*_ENTRIES, *(entry.moved_from for entry in KEYS.values()))}
    return {name.partition(".")[0] for name in names} - sections


def shipped() -> list[str]:
    """Names of the configurations that are installed with plsc; :func:`load` takes them in place of a path."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _resolve(path: Path) -> Path:
    """Return ``path`` where such a file exists, else the shipped configuration of that name."""
    if not path.suffix and not path.exists() and path.with_suffix(".py").exists():
        path = path.with_suffix(".py")  # arcface_torch's own way to name a config
    if path.suffix == ".py":
        raise UsageError(
            f"{path} is a config of arcface_torch, and plsc reads TOML: plsc train {path} --as-toml > "
            f"{path.stem}.toml translates it ({arcface_torch.PAGE})"
        )
    if path.exists() or path.parent != Path() or path.suffix not in ("", ".toml"):
        return path
    if path.stem in shipped():
        return SHIPPED / f"{path.stem}.toml"
    near = did_you_mean(path.stem, shipped()) or f": {', '.join(shipped())}"
    raise UsageError(f"{path} does not exist: name a TOML file, or a shipped configuration{near}")


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Build a configuration from nested mappings, as a TOML file holds them, with the same strictness."""
    _take_features(_unknown(tree))
    with warnings.catch_warnings():  # what a run has stored keeps the names of its time
        warnings.simplefilter("ignore", FutureWarning)
        return _build(strict_toml.flatten(tree, _ENTRIES, "the configuration"))


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested mappings without the unset keys; :func:`from_dict` makes an equal configuration of them."""
    values = {name: get(config, name) for name in _ENTRIES if _is_written(config, name)}
    values |= {name: entry.to_tree(values[name]) or None for name, entry in TABLES.items()}
    return strict_toml.nested({name: value for name, value in values.items() if value is not None})


def to_toml(config: Config) -> str:
    """Format the whole configuration as TOML, defaults included; an unset key becomes a comment."""
    lines: list[str] = []
    for section, entries in sections().items():
        if not _is_written(config, entries[0].name):
            continue
        lines += ["", f"[{section}]"] if section else []
        for entry in entries:
            value, last = get(config, entry.name), entry.name.rpartition(".")[2]
            lines.append(f"# {last}: {entry.doc}" if value is None else f"{last} = {toml_value(value)}")
        for name, table in TABLES.items():
            if section and name.startswith(f"{section}."):
                lines += _tables_to_toml(config, table)
    for name, table in TABLES.items():
        lines += [] if "." in name else _tables_to_toml(config, table)
    return "\n".join(lines) + "\n"


def _tables_to_toml(config: Config, entry: Tables) -> list[str]:
    value = get(config, entry.name)
    return entry.to_toml(value) if value else ["", f"# {entry.title}: {entry.doc}"]


def _is_written(config: Config, name: str) -> bool:
    """Whether a written configuration has the key: of rare features, those that are given."""
    section = name.partition(".")[0]
    return section not in FEATURES or get(config, section) in config.features


def sections() -> dict[str, list[Key]]:
    """Return the keys by their sections, those of the run itself under "", in the order in which they are written."""
    found: dict[str, list[Key]] = {}
    for entry in KEYS.values():
        found.setdefault(entry.section, []).append(entry)
    return found


def differences(before: Config, after: Config) -> list[str]:
    """``"optim.lr = 0.2 (was 0.1)"`` for each key, and each kind of tables, whose value differs."""
    pairs = {name: (get(before, name), get(after, name)) for name in _ENTRIES}
    return [f"{name} = {shown(name, now)} (was {shown(name, was)})" for name, (was, now) in pairs.items() if was != now]


def changes_to_toml(before: Config, after: Config) -> str:
    """Format the keys, tables left out, whose values differ as TOML, with those of ``after``; "" where none does."""
    lines: list[str] = []
    for section, entries in sections().items():
        changed = [entry for entry in entries if get(before, entry.name) != get(after, entry.name)]
        lines += [f"[{section}]"] if section and changed else []
        for entry in changed:
            value, last = get(after, entry.name), entry.name.rpartition(".")[2]
            lines.append(f"# leave {last} out" if value is None else f"{last} = {toml_value(value)}")
    return "\n".join(lines)


def shown(name: str, value: Any) -> str:
    """Format a value of a key or of tables in one line."""
    entry = _ENTRIES[name]
    if isinstance(entry, Tables):
        return entry.inline(value) if value else "none"
    return "unset" if value is None else toml_value(value)


def take_every_feature() -> None:
    """Let the list of keys have those of all installed packages' features."""
    _take_features(FEATURES.every_name())


def parse_arguments(arguments: Sequence[str], options: Sequence[str] = ()) -> dict[str, str]:
    """Parse ``["--optim.lr", "0.2"]`` to overrides for :func:`load`; see :func:`strict_toml.parse_arguments`.

    ``options`` are those of the command, ``"--nproc"``, one of which a misspelt key may be.
    """

    _take_features(_unknown(word[2:].replace("-", "_") for word in arguments if word.startswith("--")))

    def hint(name: str) -> str | None:
        near = did_you_mean(name, {option: [option[2:].replace("-", "_")] for option in options})
        return arcface_torch.key_hint(name) or near.removeprefix("; ") or None

    return strict_toml.parse_arguments(arguments, _ENTRIES, hint)


def _section(schema: type[_Schema], values: Mapping[str, Any], prefix: str = "") -> _Schema:
    """Make a section, and those in it, of checked values by dotted names."""
    hints = typing.get_type_hints(schema)
    found: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(typing.cast(type, schema))):
        if dataclasses.is_dataclass(hints[name]):
            found[name] = _section(hints[name], values, f"{prefix}{name}.")
        elif (dotted := prefix + key_name(name)) in values:
            found[name] = values[dotted]
    return schema(**found)


def _build(values: Mapping[str, Any]) -> Config:
    checked = {name: _ENTRIES[name].checked(value) for name, value in values.items()}
    config = _section(Config, checked)
    for name in dict.fromkeys(key.partition(".")[0] for key in checked):
        if name in FEATURES:
            config = config.with_section(_section(section_class(name), checked, f"{name}."))
    if config.epochs is None and config.steps is None:
        config = dataclasses.replace(config, epochs=20)
    check_together(config)
    return config
