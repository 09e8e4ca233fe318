"""The logger "mlflow": a run of MLflow, in RUN/mlflow.db unless MLFLOW_TRACKING_URI says otherwise."""

import io
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from plsc.loggers.base import LoggedRun, RunLogger, require_packages

_NAME = "mlflow"
_INSTALL = "pip install plsc-torch[mlflow]"
_OTHER_LETTERS = re.compile(r"[^\w\-. :/]")  # which MLflow does not take in names
_PARAMS_AT_ONCE, _LONGEST_PARAM = 100, 6000


class MlflowRun(RunLogger):
    """A run of MLflow, the same one in every process of our run; keys of the configuration are its parameters.

    MLFLOW_TRACKING_URI (else the database RUN/mlflow.db, with pictures in RUN/mlartifacts), MLFLOW_EXPERIMENT_NAME
    (else "plsc"), and what else the package reads from the environment are respected.
    """

    packages: ClassVar[Mapping[str, str]] = {"mlflow": _INSTALL}
    takes_pictures = True

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own, about its other packages
            self._open()

    @classmethod
    def check(cls, name: str) -> None:
        """As of every logger; without a server MLflow needs what opens a database too."""
        super().check(name)
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            require_packages(name, {"sqlalchemy": _INSTALL, "alembic": _INSTALL})

    def _open(self) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # which tell how they make the tables; mlflow's import sets its own level
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric, out = Metric, self.run.out.absolute()
        given = os.environ.get("MLFLOW_TRACKING_URI")
        uri = given or f"sqlite:///{out / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri, registry_uri=None if given else uri)
        kept = self.run.kept(_NAME).get("run_id")
        try:
            found = self._client.get_run(kept) if kept else None
        except MlflowException:  # MLFLOW_TRACKING_URI names another store than before
            found = None
        if found is None:
            found = self._begin(None if given else (out / "mlartifacts").as_uri())
        self._id = found.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._last = max((point.step for point in self._client.get_metric_history(self._id, "epoch")), default=-1)
        self.place = f"MLflow run {self._id} ({'MLFLOW_TRACKING_URI' if given else self.run.out / 'mlflow.db'})"

    def _begin(self, artifacts: str | None) -> Any:
        """Make a run, in an experiment that is made where there is none."""
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "plsc"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name, artifacts)
        made = self._client.create_run(number, run_name=self.run.out.absolute().name)
        self.run.keep(_NAME, {"run_id": made.info.run_id})
        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _leaves(self.run.config)]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(made.info.run_id, params=params[first : first + _PARAMS_AT_ONCE])
        return made

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers that the run does not have already: MLflow would show a point twice."""
        now = int(1000 * time.time())
        named = {_OTHER_LETTERS.sub("_", name): value for name, value in values.items()}
        fresh = [self._metric(name, value, now, step) for name, value in named.items() if self._is_new(name, step)]
        self._client.log_batch(self._id, metrics=fresh)

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Log the picture among the run's images, with its step."""
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(png)).convert("RGB")
            self._client.log_image(
                self._id, image, key=_OTHER_LETTERS.sub("_", name).replace(":", "_"), step=step, synchronous=True
            )

    def close(self) -> None:
        """Tell MLflow that the run has ended; it goes on to run where ours goes on."""
        self._client.set_terminated(self._id)

    def _is_new(self, name: str, step: int) -> bool:
        if step != self._last:  # of the last step that it has, a killed process may have logged a part
            return step > self._last
        return all(point.step != step for point in self._client.get_metric_history(self._id, name))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{_OTHER_LETTERS.sub('_', name)}.")
        else:
            yield prefix + _OTHER_LETTERS.sub("_", name), value
