"""Refusals of what does not go together in a configuration, before a process starts, and precision "auto".

Each section says what it does not go with (``refusals``), and the stages what they do not; here they are asked.
"""

import dataclasses
from collections.abc import Iterator

from plsc.config.sections import AUTO, Config
from plsc.config.stages import refusals_of_stages, stage_configs
from plsc.devices import Units
from plsc.errors import UsageError


def check_together(config: Config) -> None:
    """Raise UsageError for the first thing that does not go together in the run, or in one of its stages."""
    for refusal in _refusals(config):
        raise UsageError(refusal)


def _refusals(config: Config) -> Iterator[str]:
    yield from config.refusals()
    yield from refusals_of_stages(config)
    for number, stage in enumerate(stage_configs(config)[1:], start=1):
        yield from (f"stage {number}: {refusal}" for refusal in stage.refusals())


def with_precision(config: Config, units: Units) -> Config:
    """Put a precision in the place of "auto": the best that ``units`` have and the other keys go with, else fp32.

    Raises:
        UsageError: the other keys go with no precision that is fast here: fp8 asks for bf16.
    """
    if config.precision != AUTO:
        return config
    for precision in (*units.precisions, "fp32"):
        resolved = dataclasses.replace(config, precision=precision)
        problem = next(_refusals(resolved), None)
        if problem is None:
            return resolved
    raise UsageError(f'precision = "auto" is {units.best} here ({units.reason}): {problem}')
