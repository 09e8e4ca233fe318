"""The process that decodes callers' pictures: what a hostile file can do, it does here, within limits, and is killed.

It reads jobs from its standard input and writes pixels to its standard output, imports no torch, holds no secret and
opens no file. :class:`plsc.serve.decoding.DecodeProcess` is its other end.

  job     JOB: bytes of the name, bytes of the file; then both
  answer  ANSWER: a status; for PIXELS what the sides were divided by, the shift in x and y, height and width, otherwise
          four zeros and the bytes of a message; then the content
"""

import io
import math
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import BinaryIO

from plsc.errors import DataError
from plsc.image_files import PixelLimits, TooLargeError, decode_shrunk, open_header

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

JOB = struct.Struct("<II")
ANSWER = struct.Struct("<BBBBII")
READY, PIXELS, UNUSABLE, TOO_LARGE = range(4)
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "HEIF")
_PIPE_BYTES = 1 << 20
_NICENESS = 5  # searches go first where processors are short: a hostile picture takes seconds of one
_BASE_BYTES = 64 << 20
_BYTES_PER_PIXEL = 32  # Pillow holds 4, a progressive JPEG's coefficients 6, and conversions a few copies
# of a picture that is decoded whole, of twice as many, and made smaller, 10


def serve(jobs: BinaryIO, answers: BinaryIO, limits: PixelLimits, cpu_seconds: int) -> None:
    """Decode until there are no more jobs."""
    answers.write(ANSWER.pack(READY, 0, 0, 0, 0, 0))
    answers.flush()
    while len(head := jobs.read(JOB.size)) == JOB.size:
        name_size, size = JOB.unpack(head)
        name = jobs.read(name_size).decode()
        _limit_cpu(cpu_seconds)
        try:
            picture = decode_shrunk(jobs.read(size), name, limits, FORMATS)
        except DataError as error:
            message = str(error).encode()
            status = TOO_LARGE if isinstance(error, TooLargeError) else UNUSABLE
            answers.write(ANSWER.pack(status, 0, 0, 0, 0, len(message)))
            answers.write(message)
        else:
            height, width, _ = picture.pixels.shape
            answers.write(ANSWER.pack(PIXELS, picture.divisor, *picture.shift, height, width))
            answers.write(picture.pixels.data)
            del picture  # before the next are decoded
        answers.flush()


def _limit_memory(max_pixels: int) -> None:
    """Bound what decoding may take besides what the process has now."""
    if resource is None:
        return
    budget = _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (pathlib costs a tenth of the start)
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + budget, taken + budget))
    except (OSError, ValueError):  # not on macOS
        return


def _limit_cpu(seconds: int) -> None:
    """Let the system end this process after ``seconds``, at most one more, of processor time from here on."""
    if resource is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime) + seconds, hard))


def _prepare() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes; what a library prints goes nowhere, and an interrupt is the parent's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):  # not on Windows
        os.nice(_NICENESS)
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with suppress(ImportError, AttributeError, OSError):  # Linux alone has it, and bounds it for each user
        import fcntl

        for descriptor in (0, answers):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # a large picture passes in fewer turns
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold pictures
    return os.fdopen(0, "rb"), os.fdopen(answers, "wb")


def _import_decoders() -> None:
    """Import all that decoding needs, before memory is limited and somebody waits."""
    from PIL import Image

    with suppress(ImportError):  # an extra
        import pillow_heif  # noqa: F401
    with suppress(ImportError):  # not in Pillow before 11.3
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each thread takes memory of its own
    for kind in FORMATS[:3]:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind)
        with open_header(file.getvalue(), FORMATS) as image:
            image.load()


def main() -> None:
    """Serve the parent: ``python -m plsc.serve.decode_process PIXELS JPEG_PIXELS WHOLE_PIXELS CPU_SECONDS``."""
    *pixels, cpu_seconds = (int(value) for value in sys.argv[1:])
    limits = PixelLimits(*pixels)
    jobs, answers = _prepare()
    _import_decoders()
    _limit_memory(limits.decoded)
    try:
        serve(jobs, answers, limits, cpu_seconds)
    except BrokenPipeError:  # the parent is gone
        os._exit(0)


if __name__ == "__main__":
    main()
