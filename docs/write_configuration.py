"""Write docs/configuration.md from the code: every key of a training configuration, the margins, the recipes.

    python docs/write_configuration.py

All text of the tables comes from plsc/config/sections.py, plsc/losses and configs/, so a test can compare the committed
page with the code.
"""

import dataclasses
import typing
from pathlib import Path

from plsc import config, losses
from plsc.strict_toml import Key, toml_value

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
INTRODUCTION = """# Configuration reference

*Written from the code by `python docs/write_configuration.py`; a test compares this page with it.*

A configuration is a TOML file that sets what differs from the defaults below. Every key can also be given on the
command line, where it overrides the file; a key of a section is written with a dot there:

```sh
plsc train avatars_quickstart --out runs/first --steps 100 --optim.lr 0.05
```

An unknown key, a value of the wrong type and a value out of range are errors that name the key and the nearest
right one. `plsc train --list-keys` prints these tables as text. A run writes its complete configuration to
`RUN/config.toml`.

A list is written `["a.bin", "b/"]` in TOML and `a.bin,b/` on the command line.
"""


def page() -> str:
    """The page as Markdown."""
    sections = {"": [key for key in config.KEYS.values() if "." not in key.name]}
    for key in config.KEYS.values():
        section, dot, _ = key.name.rpartition(".")
        if dot:
            sections.setdefault(section, []).append(key)
    hints = typing.get_type_hints(config.Config)
    parts = [INTRODUCTION]
    for section, keys in sections.items():
        parts += [_heading(section, hints), _table(keys)]
        if section == "head":
            parts.append(_margins())
    return "\n".join([*parts, _recipes()])


def _heading(section: str, hints: dict[str, type]) -> str:
    if not section:
        return "## The run\n\nThese keys stand at the top of the file, before the first section.\n"
    _, _, meaning = (hints[section].__doc__ or "").partition(": ")
    first = meaning.partition(" ")[0]
    sentence = f"`{first}`{meaning.removeprefix(first)}" if "." in first else meaning[0].upper() + meaning[1:]
    return f"## `[{section}]`\n\n{sentence}\n"


def _table(keys: list[Key]) -> str:
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key.name}` | {_default(key)} | {_cell(_takes(key))} | {_cell(_meaning(key))} |" for key in keys]
    return "\n".join(lines) + "\n"


def _default(key: Key) -> str:
    return "unset" if key.default is None else f"`{toml_value(key.default)}`"


def _takes(key: Key) -> str:
    return ", ".join(f'`"{choice}"`' for choice in key.choices) or key.expected


def _meaning(key: Key) -> str:
    former = f" Formerly `{key.renamed_from}`." if key.renamed_from else ""
    return key.doc + former


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _margins() -> str:
    """A table of the margins: which keys of [head] each takes, with its own defaults."""
    lines = [
        "Each margin takes these keys of `[head]`; the values are its defaults:",
        "",
        "| margin | keys |",
        "|---|---|",
    ]
    for name, margin in losses.MARGINS.items():
        values = {field.name: field.default for field in dataclasses.fields(margin)}
        keys = ", ".join(f"`{key} = {toml_value(value)}`" for key, value in values.items())
        lines.append(f"| `{name}` | {keys} |")
    return "\n".join(lines) + "\n"


def _recipes() -> str:
    """The shipped configurations, described by the comment at the top of each."""
    lines = [
        "## Recipes",
        "",
        "These configurations are installed with plsc: `plsc train NAME` takes one by name. The files: `configs/`.",
        "",
    ]
    for name in config.shipped():
        text = (config.SHIPPED / f"{name}.toml").read_text(encoding="utf-8")
        comment = []
        for line in text.splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("#   "):  # an indented line is a command
                comment.append(line.removeprefix("#").strip())
        lines.append(f"- `{name}`: {_sentence(' '.join(comment))}")
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return text.rstrip(":;. ") + "."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
