"""The logger "tensorboard": RUN/tensorboard."""

import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from plsc.files import AppendFile
from plsc.loggers.base import LoggedRun, RunLogger


class EventFile(RunLogger):
    """TensorBoard's event file of a run, in which points that an earlier file has of later steps count no more.

    TensorBoard's own writer appends from a thread of its own, which ends for good where the disk is full.
    """

    packages: ClassVar[Mapping[str, str]] = {"tensorboard": "pip install tensorboard"}
    takes_pictures = True

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run.out / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(AppendFile(folder / name))
        self._add(step=run.step + 1, file_version="brain.Event:2")
        self._add(step=run.step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the points of ``step``."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=points))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Append the picture."""
        width, height = struct.unpack(">II", png[16:24])  # of IHDR, the first chunk
        image = self._summary.Image(encoded_image_string=png, width=width, height=height, colorspace=3)
        self._add(step=step, summary=self._summary(value=[self._summary.Value(tag=name, image=image)]))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
