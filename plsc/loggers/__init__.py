"""Where a run's numbers and pictures go beside metrics.jsonl: ``log.to`` names the loggers of this registry."""

from collections.abc import Sequence

from plsc.errors import PlscError, UsageError, first_line
from plsc.extensions import Registry, is_subclass
from plsc.loggers.base import LoggedRun, RunLogger
from plsc.loggers.csv_table import CsvTable
from plsc.loggers.event_file import EventFile
from plsc.loggers.mlflow_run import MlflowRun
from plsc.loggers.wandb_run import WandbRun

__all__ = ["LOGGERS", "LoggedRun", "RunLogger", "check_loggers", "open_logger"]

LOGGERS: Registry[type[RunLogger]] = Registry(
    "plsc.loggers",
    {"tensorboard": EventFile, "csv": CsvTable, "wandb": WandbRun, "mlflow": MlflowRun},
    is_subclass(RunLogger),
    "a subclass of plsc.loggers.RunLogger",
)


def check_loggers(names: Sequence[str]) -> None:
    """Raise UsageError where one of ``names`` cannot work here; the message has the line that installs it."""
    for name in names:
        LOGGERS[name].check(name)


def open_logger(name: str, run: LoggedRun) -> RunLogger:
    """Open the logger ``name``; UsageError, of one line, for whatever keeps it from opening."""
    try:
        return LOGGERS[name](run)
    except PlscError:
        raise
    except Exception as error:  # a service's own, or of its client
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f'log.to has "{name}", which does not open ({reason}); mend it, or leave it out') from None
