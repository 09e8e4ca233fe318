"""The logger "wandb": a run of Weights & Biases, offline in RUN/wandb unless WANDB_MODE says otherwise."""

import io
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from plsc.loggers.base import LoggedRun, RunLogger

_NAME = "wandb"
_FLUSH_SECONDS = (
    0.1  # of its file; by default kill -9 costs the last 15 s, of which steps before a checkpoint stay lost
)


class WandbRun(RunLogger):
    """A run of W&B, by the same id and project in every process of our run.

    WANDB_MODE (else "offline"), WANDB_PROJECT (else "plsc"), WANDB_NAME (else the run directory's), WANDB_RUN_ID and
    what else the package reads from the environment are respected. ``wandb sync RUN/wandb/offline-run-*`` uploads an
    offline run; each process of ours has left one folder, and W&B joins them by the id.
    """

    packages: ClassVar[Mapping[str, str]] = {"wandb": "pip install plsc-torch[wandb]"}
    takes_pictures = True

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        import wandb

        kept = run.kept(_NAME)
        environ = os.environ
        project = kept.get("project") or environ.get("WANDB_PROJECT") or "plsc"
        self._run: Any = wandb.init(
            project=project,
            id=kept.get("id"),
            name=environ.get("WANDB_NAME") or run.out.absolute().name,
            dir=environ.get("WANDB_DIR") or str(run.out.absolute()),
            mode=environ.get("WANDB_MODE") or "offline",  # type: ignore[arg-type]
            config=dict(run.config),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=_FLUSH_SECONDS),
        )
        number = self._run.id
        run.keep(_NAME, {"id": number, "project": project})
        self._image = wandb.Image
        where = self._run.url or f"offline; wandb sync {run.out / 'wandb'}/offline-run-*-{number} uploads it"
        self.place = f"W&B run {number} of {project} ({where})"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers. W&B itself leaves a step out that the run has already."""
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Log the picture."""
        from PIL import Image

        self._run.log({name: self._image(Image.open(io.BytesIO(png)))}, step=step)

    def close(self) -> None:
        """Write what waits, or upload it."""
        self._run.finish()
