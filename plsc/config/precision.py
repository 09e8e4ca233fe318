"""What ``precision = "auto"`` stands for, once it is known what computes."""

import dataclasses

from plsc.config.checks import check_together
from plsc.config.sections import AUTO, Config
from plsc.devices import Units
from plsc.errors import UsageError


def with_precision(config: Config, units: Units) -> Config:
    """Put a precision in the place of "auto": the best that ``units`` have and the other keys go with, else fp32.

    Raises:
        UsageError: the other keys go with no precision that is fast here: fp8 asks for bf16.
    """
    if config.precision != AUTO:
        return config
    for precision in (*units.precisions, "fp32"):
        resolved = dataclasses.replace(config, precision=precision)
        try:
            check_together(resolved)
        except UsageError as error:
            problem = error
        else:
            return resolved
    raise UsageError(f'precision = "auto" is {units.best} here ({units.reason}): {problem}')
