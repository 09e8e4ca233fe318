"""The stages of a run: the configuration that holds in each, and what stages do not go with.

A stage begins after a number of steps or epochs and changes some keys; those that it does not give keep their values.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from plsc.config.sections import Config, get
from plsc.feature_config import FEATURES
from plsc.strict_toml import Table

BEGINNING = ("from_step", "from_epoch")
_WARMUP = ("optim.warmup_epochs", "optim.warmup_steps")
# Keys that describe the course of the learning rate: a stage that gives one of them begins a new course.
_COURSE = ("optim.schedule", *_WARMUP, "optim.power", "optim.min_lr_ratio", "optim.milestones", "optim.gamma")


def changes_of(stage: Table) -> dict[str, Any]:
    """The keys that a stage changes, with their values."""
    return {name: value for name, value in stage.values.items() if name not in BEGINNING}


def begins_course(stage: Table) -> bool:
    """Return whether a stage begins a new course of the learning rate, its own warm-up included."""
    return any(name in stage.values for name in _COURSE)


def stage_configs(config: Config) -> list[Config]:
    """The configuration of the run before its first stage, and of each stage: that of the one before it, changed.

    A new course of the learning rate has no warm-up but one that the stage gives.
    """
    found = [config]
    for stage in config.stage:
        changes = changes_of(stage)
        if begins_course(stage):
            changes = dict.fromkeys(_WARMUP) | changes
        found.append(with_values(found[-1], changes))
    return found


def refusals_of_stages(config: Config) -> Iterator[str]:
    """Say when stages begin that cannot: what only the data can tell, an epoch's length, is left to the trainer."""
    for number, stage in enumerate(config.stage, start=1):
        given = [name for name in BEGINNING if name in stage.values]
        if len(given) != 1:
            yield f"stage {number} gives {' and '.join(given) or 'no beginning'}; give from_step or from_epoch"
        if not changes_of(stage):
            yield f"stage {number} changes nothing; give it a key to change, such as optim.lr"
        for name, length in (("from_step", config.steps), ("from_epoch", config.epochs)):
            if length is not None and stage.values.get(name, 0) >= length:
                yield (
                    f"stage {number} begins at {name} = {stage.values[name]:g}, where the run is over "
                    f"({name[5:]}s = {length}); begin it earlier, or raise {name[5:]}s"
                )
    for number, (earlier, later) in enumerate(pairwise(config.stage), start=2):
        for name in BEGINNING:
            if name in earlier.values and name in later.values and later.values[name] <= earlier.values[name]:
                yield (
                    f"stage {number} begins at {name} = {later.values[name]:g}, not after the one before it "
                    f"({earlier.values[name]:g}); put stages in the order in which they begin"
                )


def with_values(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return ``config`` with other values, by dotted names."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, last = name.rpartition(".")
        by_section.setdefault(section, {})[last] = value
    top = by_section.pop("", {})
    sections = {name: dataclasses.replace(get(config, name), **values) for name, values in by_section.items()}
    changed = dataclasses.replace(
        config, **{name: each for name, each in sections.items() if name not in FEATURES}, **top
    )
    for section in (each for name, each in sections.items() if name in FEATURES):
        changed = changed.with_section(section)
    return changed
