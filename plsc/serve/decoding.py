"""Callers' pictures made ready for the model: decoded in processes that are killed when one takes too much, in turns.

A picture is decoded by a :class:`DecodeProcess`, within limits of memory and processor time. :class:`Decoders` gives
the processes to callers in turn, a picture at a time, and keeps one of them for the others: 256 large pictures of one
caller do not delay another's single one.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from io import BufferedReader
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
import torch

from plsc.data.alignment import align_face
from plsc.embedding.detector import Detector, Face
from plsc.errors import DataError, UsageError
from plsc.image_files import SUFFIXES, PixelLimits, Shrunk, TooLargeError, suffix_of, unread_formats
from plsc.models.preprocessing import Preprocessing, check_square, picture_warnings, resize_image
from plsc.progress import counted, note
from plsc.serve.decode_process import ANSWER, FORMATS, JOB, PIXELS, TOO_LARGE, UNUSABLE
from plsc.serve.errors import ApiError
from plsc.serve.limits import Clock
from plsc.serve.settings import Limits
from plsc.serve.workers import Workers, call_in

FaceChoice = int | Literal["largest", "all"] | None  # by number; None: the largest, unless the caller is asked
MOST_FACES = 64  # of a picture that are told of, or searched

_FORMATS = {SUFFIXES[kind][0]: kind for kind in FORMATS}

_PIXELS_PER_CPU_SECOND = 6_500_000  # a tenth of what the slowest of usual encodings reach
_MIN_CPU_SECONDS = 2
_WALL_SECONDS = 5  # for each second of processor time: the machine may be busy
_ABANDONED_SECONDS = 0.1  # that a decoding may go on whose caller is gone; starting a new process costs as much
_WATCH_SECONDS = 0.05
_ATTEMPTS = 2  # for a picture whose process the system killed (out of memory): others may have filled it
_KILLED_BY_SYSTEM = -9  # SIGKILL, which Windows does not have
_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "TMPDIR")  # no secret is passed on


class DecodeProcess:
    """A process that decodes one picture at a time; it is started when it is needed.

    One thread at a time decodes; any thread may call :meth:`kill`.

    Args:
        limits: on a picture's pixels.
    """

    def __init__(self, limits: PixelLimits) -> None:
        self._limits = limits
        self._cpu_seconds = max(_MIN_CPU_SECONDS, -(-limits.whole // _PIXELS_PER_CPU_SECOND))
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()  # of the process and of what is known of it
        self._killed, self._closed = False, False
        self._decoding_since: float | None = None

    @property
    def runs(self) -> bool:
        """True if the next picture needs no new process."""
        return self._process is not None and not self._killed and self._process.poll() is None

    @property
    def seconds(self) -> float:
        """For how long the present picture is being decoded; 0 without one."""
        since = self._decoding_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_overdue(self) -> bool:
        """True if the present picture takes longer than any may."""
        return self.seconds > self._cpu_seconds * _WALL_SECONDS

    def start(self) -> None:
        """Start the process unless it runs; :class:`ApiError` 503 if it does not start."""
        if self.runs:
            return
        self.end()
        with self._guard:
            if self._closed:
                raise ApiError(503, "the service is stopping; ask another, or later")
            self._process, self._killed = self._open(), False
        try:
            self._read(ANSWER.size)  # READY
        except EOFError:
            self.end()
            if not self._closed:
                note("plsc serve: a process that decodes pictures did not start")
            raise ApiError(503, "pictures cannot be decoded at the moment; see the server's log") from None

    def decode(self, data: bytes, name: str) -> Shrunk:
        """Decode a picture, in a size that holds the limit.

        Raises:
            TooLargeError: it has too many pixels.
            DataError: it does not decode, or takes more time or memory than any picture may.
            ApiError: 503 if the process does not start.
        """
        self._decoding_since = time.monotonic()
        try:
            for _ in range(_ATTEMPTS):
                try:
                    return self._decode(data, name)
                except (OSError, EOFError):
                    killed, status = self._killed, self.end()
                    if killed or status != _KILLED_BY_SYSTEM:
                        break
            raise DataError(f"{name} takes too long to decode, or too much memory; save it again, smaller")
        finally:
            self._decoding_since = None

    def kill(self) -> None:
        """Kill the process; the picture that it decodes fails."""
        with self._guard:
            if self._process is not None:
                self._killed = True
                self._process.kill()

    def close(self) -> None:
        """Kill the process for good."""
        with self._guard:
            self._closed = True
        self.kill()

    def _open(self) -> "subprocess.Popen[bytes]":
        # -P: modules are not looked for in the working directory, which only those do who run there
        limits = map(str, (*self._limits, self._cpu_seconds))
        arguments = [sys.executable, "-P", "-m", "plsc.serve.decode_process", *limits]
        environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)  # noqa: PTH109 (the text that sys.path means)
        environment |= {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def _decode(self, data: bytes, name: str) -> Shrunk:
        self.start()
        encoded = name.encode()
        jobs = cast("BinaryIO", self._process and self._process.stdin)
        jobs.write(JOB.pack(len(encoded), len(data)) + encoded)
        jobs.write(data)
        jobs.flush()
        status, divisor, *shift, first, second = ANSWER.unpack(self._read(ANSWER.size))
        if status == PIXELS and first * second <= self._limits.decoded:
            pixels = np.frombuffer(self._read(first * second * 3), np.uint8).reshape(first, second, 3)
            return Shrunk(pixels, max(divisor, 1), (shift[0], shift[1]))
        if status not in (UNUSABLE, TOO_LARGE) or second > len(name) + 1000:
            raise EOFError  # a picture that took the process over cannot make this one allocate more
        message = bytes(self._read(second)).decode(errors="replace")
        raise TooLargeError(message) if status == TOO_LARGE else DataError(message)

    def _read(self, size: int) -> bytearray:
        """Exactly ``size`` bytes; EOFError if the process ended before."""
        content, answers = bytearray(size), cast("BufferedReader", self._process and self._process.stdout)
        if answers.readinto(content) < size:
            raise EOFError
        return content

    def end(self) -> int | None:
        """Kill the process, and wait for its exit status; the next call of :meth:`start` starts another.

        No other thread decodes with it.
        """
        with self._guard:
            process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with contextlib.suppress(OSError), process:  # which closes the pipes; what was not written is of no use
            pass
        return process.wait()


class DecodedImage(NamedTuple):
    """An image as the model expects it, and what a detector found in it.

    Attributes:
        pixels: uint8 (n, 3, H, W): one image, or that of each face where all are wanted.
        warnings: about it, a line each.
        taken: the faces that ``pixels`` show, in pixels of the file's picture; empty where no detector looked.
        faces: the first :data:`MOST_FACES` of those that were found, likewise.
        found: how many there are.
    """

    pixels: torch.Tensor
    warnings: Sequence[str]
    taken: Sequence[Face] = ()
    faces: Sequence[Face] = ()
    found: int = 0


def decode(
    process: DecodeProcess,
    data: bytes,
    name: str,
    contract: Preprocessing,
    landmarks: Any,
    detector: Detector | None,
    choice: FaceChoice = None,
) -> DecodedImage:
    """Decode a JPEG, PNG, WEBP, AVIF or HEIC file as the model expects it.

    Args:
        process: where the file is decoded; its pixels are aligned or resized here.
        contract: the model's, which says what size it takes.
        landmarks: (5, 2) points to align by, in pixels of the file's picture; without them ``detector`` finds the main
            face, and without that the image is taken as an aligned crop and resized, with warnings where it does not
            look like one.
        choice: which of several faces is meant.

    Raises:
        ApiError: 415 for another format, 413 for too many pixels, 422 where it does not decode or shows no such face.
    """
    check_format(data, name)
    size = contract.image_size
    try:
        pixels, divisor, shift = process.decode(data, name)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        if landmarks is not None:
            # A pixel stands for divisor x divisor of the file's, around their middle.
            points = (np.asarray(landmarks) + shift + 0.5) / divisor - 0.5
            return DecodedImage(align_face(image, points, check_square(size, "aligning by landmarks"), name)[None], ())
        if detector is not None:
            faces = detector.numbered(image, name)
            crops, taken = _crops(image, faces, choice, check_square(size, "aligning faces"), name)
            told, shown = ([_in_file(face, divisor, shift) for face in some] for some in (taken, faces[:MOST_FACES]))
            return DecodedImage(crops, (), told, shown, len(faces))
    except TooLargeError as error:
        raise ApiError(413, f"{error}, send a JPEG, or raise --max-megapixels of the service") from None
    except (DataError, UsageError) as error:
        raise ApiError(422, str(error)) from None
    found = picture_warnings(image, size)
    shrunk = f" (decoded at 1/{divisor})" if divisor > 1 else ""
    warnings = [f"{name}: {warning.message}{shrunk}; give an aligned crop" for warning in found]
    return DecodedImage(resize_image(image, size, contract.interpolation)[None], warnings)


def _crops(
    image: torch.Tensor, faces: Sequence[Face], choice: FaceChoice, size: int, name: str
) -> tuple[torch.Tensor, list[Face]]:
    """The crops (n, 3, size, size) of the chosen ones of numbered ``faces``, and those.

    Of all, those are left out whose landmarks form no face; :class:`DataError` where none is left.
    """
    if choice == "all":
        crops = {}
        for face in faces[:MOST_FACES]:
            with contextlib.suppress(DataError):
                crops[face] = align_face(image, face.landmarks, size, name)
        if crops:
            return torch.stack(list(crops.values())), list(crops)
        choice = 1  # whose error says why
    number = choice if isinstance(choice, int) else 1
    if number > len(faces):
        raise DataError(f"{name} shows {counted(len(faces), 'face')}, and none is number {number}; the largest is 1")
    face = faces[number - 1]
    return align_face(image, face.landmarks, size, name)[None], [face]


def _in_file(face: Face, divisor: int, shift: tuple[int, int]) -> Face:
    """A face in a picture that was decoded at a part of its size, in pixels of the file's."""
    offset = np.array(shift, np.float32)
    box = np.maximum(face.box * divisor - np.tile(offset, 2), 0)
    return replace(face, box=box, landmarks=(face.landmarks + 0.5) * divisor - 0.5 - offset)


def check_format(data: bytes, name: str) -> None:
    """:class:`ApiError` 415 unless the first bytes are those of a format that this service decodes."""
    kind = _FORMATS.get(suffix_of(data) or "")
    if kind is None:
        raise ApiError(415, f"{name} is no JPEG, PNG, WEBP or AVIF image, nor HEIC; convert it first")
    if kind in unread_formats():
        shown = "HEIC" if kind == "HEIF" else kind
        raise ApiError(415, f"{name} is {shown}: on the server, {unread_formats()[kind]}; or send JPEG")


class Decoders(Workers[DecodeProcess]):
    """Processes that decode, given to callers in turn; methods but :meth:`close` are called in one event loop.

    A picture that is being decoded when its future is cancelled is killed.

    Args:
        share: of the processes that one caller may have at a time; there is one more.
        limits: of a picture's pixels.
    """

    def __init__(self, share: int, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._processes = [DecodeProcess(limits.pixels) for _ in range(share + 1)]
        # The process works while its thread waits.
        super().__init__(self._processes, share, "plsc-decode", limits, clock, cost=time.monotonic)
        self._watching = False

    def start(self) -> None:
        """Start the processes, which otherwise start with their first pictures."""
        for process in self._processes:
            process.start()

    def close(self) -> None:
        """Kill the processes, and wait for the threads that used them."""
        for process in self._processes:
            process.close()
        super().close()
        for process in self._processes:
            process.end()

    def _assign(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._assign(loop)
        if self._running and not self._watching:
            self._watching = True
            loop.call_later(_WATCH_SECONDS, self._watch, loop)

    def _done(self, loop: asyncio.AbstractEventLoop, worker: DecodeProcess) -> None:
        """Start another process in place of one that was killed, before a picture waits for it."""
        if worker.runs:
            self._release(loop, worker)
            return
        with contextlib.suppress(RuntimeError):  # closed
            started = self._threads.submit(worker.start)
            started.add_done_callback(lambda _: call_in(loop, self._release, loop, worker))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kill what takes too long, and what nobody waits for."""
        for process, job in self._running.items():
            if process.is_overdue or (job.future.done() and process.seconds > _ABANDONED_SECONDS):
                process.kill()
        self._watching = bool(self._running)
        if self._watching:
            loop.call_later(_WATCH_SECONDS, self._watch, loop)
