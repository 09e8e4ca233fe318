"""``.bin`` sets of every origin are read; what a pickle could do beyond that, it may not."""

import io
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plsc.data import read_pairs, write_pairs
from plsc.errors import DataError, UsageError

IMAGES = [b"\xff\xd8\xff" + bytes([number, 200, 10, 13]) for number in range(8)]
SAME = [True, False, False, True]


def stored(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "set.bin"
    path.write_bytes(content)
    return path


def check(path: Path) -> None:
    pairs = read_pairs(path)
    assert list(pairs.images) == IMAGES
    assert pairs.is_same.tolist() == SAME
    assert pairs.is_same.dtype == np.bool_
    assert len(pairs) == 4


def test_round_trip_and_plain_reading(tmp_path: Path) -> None:
    write_pairs(tmp_path / "x.bin", IMAGES, np.array(SAME))
    check(tmp_path / "x.bin")
    images, same = pickle.loads((tmp_path / "x.bin").read_bytes(), encoding="bytes")  # as insightface reads it
    assert (images, same) == (IMAGES, SAME)
    with pytest.raises(UsageError, match="two for each"):
        write_pairs(tmp_path / "x.bin", IMAGES[1:], SAME)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("array", [False, True, "column", "writable"])
@pytest.mark.parametrize("truth", ["bool", "numpy", "array", "int"])
def test_every_protocol_and_kind(tmp_path: Path, protocol: int, array: bool | str, truth: str) -> None:
    images: list[Any] = list(IMAGES)
    if array:
        images = [np.frombuffer(image, dtype=np.uint8) for image in IMAGES]
    if array == "column":
        images = [image.reshape(-1, 1) for image in images]
    if array == "writable":
        images = [image.copy() for image in images]
    same: Any = {
        "bool": SAME,
        "numpy": [np.bool_(x) for x in SAME],
        "array": np.array(SAME),
        "int": [int(x) for x in SAME],
    }[truth]
    check(stored(tmp_path, pickle.dumps((images, same), protocol=protocol)))


def python2_string(text: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(text)) + text  # BINSTRING: bytes in Python 2, and in no Python 3 pickle


def python2_array(image: bytes) -> bytes:
    """A uint8 array as Python 2's numpy pickled it: old module path, byte strings throughout."""
    kind = b"cnumpy\ndtype\n" + python2_string(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + python2_string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    blank = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + python2_string(b"b") + b"\x87R"
    state = b"(K\x01K" + bytes([len(image)]) + b"\x85" + kind + b"\x89" + python2_string(image) + b"tb"
    return blank + state


@pytest.mark.parametrize("item", [python2_string, python2_array])
def test_python_2_pickles(tmp_path: Path, item: Any) -> None:
    images = b"(" + b"".join(item(image) for image in IMAGES) + b"l"
    same = b"(" + b"".join(b"I01\n" if value else b"I00\n" for value in SAME) + b"l"
    check(stored(tmp_path, b"\x80\x02" + images + same + b"\x86."))


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("nested", [False, True])
def test_commands_are_not_run(tmp_path: Path, protocol: int, nested: bool) -> None:
    mark = tmp_path / "mark"
    attack = Runs(os.system, f"touch {mark}")
    content = pickle.dumps(([attack, *IMAGES[1:]], SAME) if nested else attack, protocol=protocol)
    with pytest.raises(DataError, match=r"system, as no verification set does"):
        read_pairs(stored(tmp_path, content))
    assert not mark.exists()


HOSTILE = {
    "eval": Runs(eval, "1/0"),
    "getattr": Runs(getattr, b"", "join"),
    "import": Runs(__import__, "antigravity"),
    "numpy load": Runs(np.load, "/etc/passwd"),
    "numpy file": Runs(np.fromfile, "/etc/passwd"),
    "huge array": Runs(np.zeros, (10**15,)),
    "huge ndarray": Runs(np.ndarray, (10**15,)),
    "huge bytes": Runs(bytes, 10**15),
    "object array": np.array([{}, []], dtype=object),
    "float array": np.zeros(4),
    "a class": Path("/"),
    "a codec": Runs(str.encode, "x", "rot13"),
}


@pytest.mark.parametrize("what", list(HOSTILE))
@pytest.mark.parametrize("protocol", [2, 5])
def test_other_content_is_refused(tmp_path: Path, what: str, protocol: int) -> None:
    content = pickle.dumps(([HOSTILE[what], *IMAGES[1:]], SAME), protocol=protocol)
    with pytest.raises(DataError, match=r"set\.bin"):
        read_pairs(stored(tmp_path, content))


def test_the_readers_own_functions_cannot_be_changed(tmp_path: Path) -> None:
    # BUILD with a state of attributes, on each global that is allowed
    for name in (b"numpy\ndtype", b"numpy\nndarray", b"numpy.core.multiarray\n_reconstruct", b"_codecs\nencode"):
        with pytest.raises(DataError):
            read_pairs(stored(tmp_path, b"\x80\x02c" + name + b"\nN}X\x08\x00\x00\x00__call__K\x01s\x86b."))
    write_pairs(tmp_path / "x.bin", IMAGES, SAME)
    check(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"hello",
        pickle.dumps(None),
        pickle.dumps((IMAGES, SAME))[:-9],
        pickle.dumps((IMAGES, SAME[1:])),
        pickle.dumps(([], [])),
        pickle.dumps((IMAGES, ["yes"] * 4)),
        pickle.dumps((IMAGES, [2] * 4)),
        pickle.dumps((5, SAME)),
        pickle.dumps(({}, {})),
        pickle.dumps((["text"] * 8, SAME)),
        pickle.dumps(([np.zeros((2, 2, 3), np.uint8)] * 8, SAME)),
        pickle.dumps(([np.array(1, dtype=np.uint8)] * 8, SAME)),  # without a length
    ],
)
def test_damaged_or_foreign_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"set\.bin"):
        read_pairs(stored(tmp_path, content))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.bin"):
        read_pairs(tmp_path / "nowhere.bin")


def test_the_handmade_pickles_are_sound() -> None:
    out = io.StringIO()
    pickletools.dis(b"\x80\x02" + python2_array(IMAGES[0]) + b".", out=out)
    assert "BINSTRING" in out.getvalue()
