"""Write docs/configuration.md from the code: every key of a training configuration, the margins, the recipes.

    python docs/write_configuration.py

All text of the tables comes from the sections in plsc/config/, plsc/losses and configs/, so a test can compare the
committed page with the code.
"""

import dataclasses
from pathlib import Path

from plsc import config, losses
from plsc.strict_toml import Tables
from plsc.toml_keys import Key, toml_value

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
right one. `plsc train --list-keys` prints these tables as text, `--list-keys optim` a section, `--list-keys lr` every
key that is about a word; behind a CONFIG, with its values. A run writes its complete configuration to
`RUN/config.toml`.

A list is written `["a.bin", "b/"]` in TOML and `a.bin,b/` on the command line. Tables, those of `[optim.groups]`,
`[[stage]]` and `[[table]]`, are given whole there, in TOML's inline form:
`--optim.groups '{ "*.bias" = { weight_decay = 0.0 } }'`.
"""
_EXAMPLES = {
    "optim.groups": """[optim.groups]
"*.bias" = { weight_decay = 0.0 }
"layer1.*" = { lr_scale = 0.1 }
""",
    "stage": """[[stage]]                     # the head alone trains before it, by frozen = ["*"] at the top
from_epoch = 1
frozen = []
optim.lr = 0.05

[[stage]]
from_epoch = 16
head.sample_rate = 0.3
data.augment = "standard"
""",
    "table": """[[table]]
name = "faces"
data.train = "faces.rec"
batch_share = 3
head.init_rows = "faces.npy"

[[table]]
name = "scenes"
data.train = "scenes/"
data.labels = "clusters/top_labels.npy"
batch_share = 1
loss_weight = 0.5
head.margin = "cosface"
head.sample_rate = 0.1
head.placement = "host"
""",
}


def page() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for section, keys in config.sections().items():
        parts += [_heading(section), _table(keys)]
        if section == "head":
            parts.append(_margins())
        parts += [
            _tables(entry) for name, entry in config.TABLES.items() if name.rpartition(".")[0] == section and section
        ]
    parts += [_tables(config.TABLES[name]) for name in ("stage", "table")]
    return "\n".join([*parts, _recipes()])


def _heading(section: str) -> str:
    if not section:
        return "## The run\n\nThese keys stand at the top of the file, before the first section.\n"
    meaning = config.section_meaning(section)
    first = meaning.partition(" ")[0]
    sentence = f"`{first}`{meaning.removeprefix(first)}" if "." in first else meaning[0].upper() + meaning[1:]
    return f"## `[{section}]`\n\n{sentence}\n"


def _table(keys: list[Key]) -> str:
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key.name}` | {_default(key)} | {_cell(_takes(key))} | {_cell(_meaning(key))} |" for key in keys]
    return "\n".join(lines) + "\n"


def _tables(entry: Tables) -> str:
    """The keys of tables, and which keys of the run they take besides."""
    own = [key for name, key in entry.keys.items() if name not in config.KEYS]
    lines = [f"## `{entry.title}`", "", entry.doc, "", _table(own)]
    if borrowed := [f"`{name}`" for name in entry.keys if name in config.KEYS]:
        lines += [f"Beside these, keys of the run: {', '.join(borrowed)}.", ""]
    example = _EXAMPLES[entry.name]
    return "\n".join([*lines, f"```toml\n{example}```", ""])


def _default(key: Key) -> str:
    return "unset" if key.default is None else f"`{toml_value(key.default)}`"


def _takes(key: Key) -> str:
    if key.choices and key.kind is str:
        return ", ".join(f'`"{choice}"`' for choice in key.choices)
    return key.expected


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
