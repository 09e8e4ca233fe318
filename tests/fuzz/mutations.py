"""Damage of valid samples: of bytes, of text, of values as JSON has them."""

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any

INTEGERS = (
    0, 1, -1, 7, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**30,
)  # fmt: skip
TEXTS = (
    "", "x", "\0", "\x1b[2J", "../../etc/passwd", "/etc/passwd", "a" * 5000, "é🙂", "null", "NaN", "%00", "1" * 400,
    "'; --", "{}", "__import__('os')", "\ud800", "nan", "-1", "1e400", "http://127.0.0.1/",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [None], {"": None}, 0.0, -0.0, 1e308, 5e-324, float("inf"), float("nan"),
    *INTEGERS, *TEXTS,
)  # fmt: skip
TOKENS = (
    b"", b"\0" * 8, b"\xff" * 8, b"[" * 3000, b"{\"a\":" * 1000, b"9" * 5000, b"PK\x05\x06", b"N" + b"2\x86" * 60,
    b"\r\n", b"\t", b"cos\nsystem\n", b"\x80\x04", b"\x93NUMPY", b"-" * 3000,
)  # fmt: skip


def mutated_bytes(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """``data`` after one to four changes; some take a piece of another sample."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_CHANGES)(content, others, rng)
    return bytes(content)


def _flip(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _overwrite(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    """A number in place of the bytes that hold one, perhaps."""
    form = rng.choice(["<B", "<H", "<I", "<Q", ">I"])
    value = rng.choice(INTEGERS) % 2 ** (8 * struct.calcsize(form))
    place = rng.randrange(len(content) + 1)
    content[place : place + struct.calcsize(form)] = struct.pack(form, value)


def _cut(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    first = rng.randrange(len(content) + 1)
    stop = len(content) if rng.random() < 0.5 else min(first + rng.randrange(1, 64), len(content))
    del content[first:stop]


def _repeat(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    first = rng.randrange(len(content) + 1)
    piece = bytes(content[first : first + rng.randrange(1, 64)])
    content[first:first] = piece * rng.choice((1, 2, 100))


def _insert(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    place = rng.randrange(len(content) + 1)
    content[place:place] = rng.choice(TOKENS)


def _splice(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    other = rng.choice(others)
    place, first = rng.randrange(len(content) + 1), rng.randrange(len(other) + 1)
    content[place:] = other[first:]


_CHANGES = (_flip, _flip, _overwrite, _overwrite, _cut, _repeat, _insert, _splice)


def mutated_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of its parts replaced, removed, repeated or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(value, rng)
    return value


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[rng.choice(TEXTS)] = value.pop(key)
            case 2:
                value[rng.choice(TEXTS)] = _value(rng)
            case _:
                value[key] = _changed(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                del value[place]
            case 1:
                value[place:place] = [value[place]] * rng.choice((1, 10, 1000))
            case _:
                value[place] = _changed(value[place], rng)
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.3:
        return value * rng.choice((-1, 2, 1000, 1e300))
    return _value(rng)


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))  # it may be changed in its turn


def as_json(value: Any, rng: random.Random) -> bytes:
    """``value`` as JSON, now and then with damaged bytes."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    return mutated_bytes(text, [text], rng) if rng.random() < 0.1 else text
