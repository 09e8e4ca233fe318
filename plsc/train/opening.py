"""Opens a run: what the request says is checked, and everything is built or resumed, with the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plsc.config import Config
from plsc.files import make_folder
from plsc.loggers import check_loggers
from plsc.parallel import Mesh
from plsc.parallel.collectives import on_main, raise_on_all_ranks
from plsc.train.checkpoint import CHECKPOINTS, CheckpointFolder
from plsc.train.components import TrainComponents, build, with_preprocessing
from plsc.train.evaluate import check_sets
from plsc.train.head_state import begin_tables
from plsc.train.resumption import (
    after_restart,
    check_folder,
    check_groups,
    current_launch,
    find_checkpoint,
    resolve_precision,
    resumption_lines,
    start_text,
    was_begun,
    write_descriptions,
)
from plsc.train.stages import RunSchedule
from plsc.train.state import Position, restore
from plsc.train.tables import open_training_data


@dataclass(frozen=True)
class OpenedRun:
    """A run before its next step.

    Attributes:
        components: of the run; their configuration has no "auto" left.
        why_precision: why "auto" is the run's precision; "" where it was given.
        checkpoints: the folder of its checkpoints.
        position: its progress.
        schedule: of the steps from there.
        start: what it starts from, in words.
        lines: about what it goes on from.
        is_saved: its last checkpoint holds it as it is.
    """

    components: TrainComponents
    why_precision: str
    checkpoints: CheckpointFolder
    position: Position
    schedule: RunSchedule
    start: str
    lines: Sequence[str]
    is_saved: bool


def open_run(config: Config, mesh: Mesh, out: Path, resume: str | None) -> OpenedRun:
    """Begin or resume the run ``out``; every rank calls. Arguments and errors as of :func:`plsc.train.trainer.train`.

    What may be refused is asked for before anything is written.
    """
    check_groups(config, mesh)
    config = raise_on_all_ranks(mesh, lambda: with_preprocessing(config))
    launch = current_launch(mesh)
    restarted, resume = on_main(lambda: after_restart(out, resume, launch), mesh)
    raise_on_all_ranks(mesh, lambda: check_folder(out, resume))
    dataset = raise_on_all_ranks(mesh, lambda: open_training_data(config))
    raise_on_all_ranks(mesh, lambda: check_sets(config) if mesh.is_main else None)
    raise_on_all_ranks(mesh, lambda: check_loggers(config.log.to) if mesh.is_main else None)
    checkpoints = CheckpointFolder(out / CHECKPOINTS, mesh, config.checkpoint.keep)
    stored = find_checkpoint(out, resume, checkpoints)  # a wrong one leaves no empty folder
    resolved, why_precision = resolve_precision(config, mesh, stored)
    components = build(resolved, dataset, mesh)
    position = Position() if stored is None else raise_on_all_ranks(mesh, lambda: restore(components, stored))
    schedule = RunSchedule(components, position)
    if stored is None:  # behind all that may be refused: the table's files would be there at the next attempt
        goes_on = resume is not None or on_main(lambda: was_begun(out, resolved), mesh)
        raise_on_all_ranks(mesh, lambda: begin_tables(components, goes_on=goes_on))
    superseded = [] if stored is None else checkpoints.set_aside_after(position.step)
    raise_on_all_ranks(mesh, lambda: make_folder(out) if mesh.is_main else out)
    raise_on_all_ranks(mesh, lambda: write_descriptions(out, components, launch) if mesh.is_main else None)
    steps_left = schedule.last_step - position.step
    lines = [] if stored is None else resumption_lines(stored, components, superseded, steps_left)
    is_saved = stored is not None and stored.path.parent.resolve() == checkpoints.folder.resolve()
    start = start_text(resolved, stored, restarted)
    return OpenedRun(components, why_precision, checkpoints, position, schedule, start, lines, is_saved)
