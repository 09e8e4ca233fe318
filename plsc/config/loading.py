"""Reading configurations strictly, from TOML and ``--KEY VALUE`` overrides, and writing them."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc import arcface_torch, strict_toml
from plsc.config.checks import EXCLUSIVE, check_together
from plsc.config.sections import Config, get
from plsc.errors import UsageError
from plsc.strict_toml import Key, toml_value

SHIPPED = Path(__file__).parents[1] / "configs"
KEYS: dict[str, Key] = {entry.name: entry for entry in strict_toml.keys_of(Config)}


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML file (None: defaults alone), lay ``overrides`` over it, and check the whole.

    ``path`` may also be the name of a shipped configuration, see :func:`shipped`.

    ``overrides`` maps dotted keys ("optim.lr") to values, or to text as typed on a command line; None takes a key
    of the file out.
    Raises :class:`UsageError` for a missing or malformed file and for every wrong key or value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = strict_toml.flatten(
            strict_toml.read_toml(_resolve(Path(path))), KEYS, str(path), arcface_torch.key_hint
        )
    overridden = dict(overrides or {})
    for pair in EXCLUSIVE:
        if any(name in overridden for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    for name, value in overridden.items():
        entry = strict_toml.known(name, KEYS, "the command line", arcface_torch.key_hint)
        values[entry.name] = entry.parsed(value) if isinstance(value, str) else value
    return _build({name: value for name, value in values.items() if value is not None})


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
    names = ", ".join(shipped())
    raise UsageError(f"{path} does not exist: name a TOML file, or a shipped configuration: {names}")


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Build a configuration from nested mappings, as a TOML file holds them, with the same strictness."""
    return _build(strict_toml.flatten(tree, KEYS, "the configuration"))


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested mappings without the unset keys; :func:`from_dict` makes an equal configuration of them."""
    tree: dict[str, Any] = {}
    for name in KEYS:
        value = get(config, name)
        section, _, last = name.rpartition(".")
        if value is not None:
            (tree.setdefault(section, {}) if section else tree)[last] = value
    return tree


def to_toml(config: Config) -> str:
    """Format the whole configuration as TOML, defaults included; an unset key becomes a comment."""
    lines: list[str] = []
    current = ""
    for entry in KEYS.values():
        section, _, last = entry.name.rpartition(".")
        if section != current:
            current = section
            lines += ["", f"[{section}]"]
        value = get(config, entry.name)
        lines.append(f"# {last}: {entry.doc}" if value is None else f"{last} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def describe() -> str:
    """List every key with its default, type and meaning, as text."""
    lines: list[str] = []
    for entry in KEYS.values():
        default = "(unset)" if entry.default is None else f"= {toml_value(entry.default)}"
        lines += [f"{entry.name} {default}", f"    {entry.doc}  [{entry.expected}]"]
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Parse ``["--optim.lr", "0.2"]`` to overrides for :func:`load`; see :func:`strict_toml.parse_arguments`."""
    return strict_toml.parse_arguments(arguments, KEYS, arcface_torch.key_hint)


def _build(values: Mapping[str, Any]) -> Config:
    hints = typing.get_type_hints(Config)
    hints = {name: hints[name] for name in hints if dataclasses.is_dataclass(hints[name])}
    sections: dict[str, dict[str, Any]] = {name: {} for name in hints}
    top: dict[str, Any] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        (sections[section] if section else top)[last] = KEYS[name].checked(value)
    config = Config(**top, **{name: hints[name](**inner) for name, inner in sections.items()})
    check_together(config)
    if config.epochs is None and config.steps is None:
        return dataclasses.replace(config, epochs=20)
    return config
