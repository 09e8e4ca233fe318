"""Verification sets (.bin) that were made to harm: pickles are programs."""

import os
import pickle
import struct

from untrusted.samples import crafted

DEEP = 60  # of t = (t, t): a walk over all of it takes 2^60 steps


class _Call:
    def __init__(self, function: object, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self._call


def _doubled(levels: int = DEEP, start: bytes = b"N") -> bytes:
    """t = (t, t), nested ``levels`` deep in two bytes each."""
    return start + b"2\x86" * levels


def _shell(protocol: int) -> bytes:
    return pickle.dumps(_Call(os.system, "touch SHELL"), protocol=protocol)


def _memoized(levels: int) -> bytes:
    """Lists of ten references to the list before: 10^levels items in 22 bytes a level."""
    return b"".join(b"](" + b"h\x00" * 10 + b"eq\x00" if level else b"]q\x00" for level in range(levels))


def _stack_global(module: str, name: str) -> bytes:
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93"


PROGRAMS: dict[str, bytes] = {
    "nested tuples as a key": b"\x80\x04}" + _doubled() + b"K\x01s.",
    "nested tuples as keys of DICT": b"\x80\x04(" + _doubled() + b"K\x01d.",
    "nested tuples in a set": b"\x80\x04\x8f(" + _doubled() + b"\x90.",
    "nested tuples in a frozen set": b"\x80\x04(" + _doubled() + b"\x91.",
    "nested tuples as a dtype": b"\x80\x04cnumpy\ndtype\n" + _doubled() + b"\x85R.",
    "nested tuples as a shape": (
        b"\x80\x04cnumpy.core.numeric\n_frombuffer\n(C\x01acnumpy\ndtype\n\x8c\x02u1\x85R" + _doubled() + b"tR."
    ),
    "nested tuples as images": b"\x80\x04" + _doubled() + b"]\x86.",
    "nested tuples as a truth value": b"\x80\x04](C\x01aC\x01be](" + _doubled() + b"e\x86.",
    "nested tuples as an encoding": b"\x80\x04c_codecs\nencode\n\x8c\x01x" + _doubled() + b"\x86R.",
    "nested tuples as a state": (
        b"\x80\x04cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nNNtR(K\x01" + _doubled() + b"NNNtb."
    ),
    "lists of lists by reference": b"\x80\x04" + _memoized(60) + b".",
    "100,000 lists in each other": b"\x80\x04" + b"](" * 100_000 + b"e" * 100_000 + b".",
    "100,000 tuples in each other": b"\x80\x04N" + b"\x85" * 100_000 + b".",
    "a memo slot of 2^31": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a memo slot in text": b"]p2147483647\n.",
    "a frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"]]\x86.",
    "bytes longer than the file": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc",
    "a bytearray longer than the file": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b"abc",
    "text longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 33) + b"abc",
    "a long integer of 2^31 bytes": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"abc",
    "an integer of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "a long integer of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a shape of many huge numbers": (
        b"\x80\x04cnumpy.core.numeric\n_frombuffer\n(C\x01acnumpy\ndtype\n\x8c\x02u1\x85R("
        + (b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000) * 16
        + b"tt"
        + b"R."
    ),
    "os.system by GLOBAL": _shell(0),
    "os.system by REDUCE": _shell(2),
    "os.system by STACK_GLOBAL": _shell(4),
    "os.system by INST": b"(S'touch SHELL'\nios\nsystem\n.",
    "os.system by OBJ": b"(cos\nsystem\nS'touch SHELL'\no.",
    "eval by NEWOBJ": b"\x80\x02cbuiltins\neval\n\x8c\x031+1\x85\x81.",
    "a dotted global": _stack_global("numpy", "ndarray.__init__") + b")R.",
    "attributes by BUILD": b"\x80\x02cnumpy\ndtype\nN}X\x08\x00\x00\x00__call__K\x01s\x86b.",
    "attributes of a function by BUILD": b"\x80\x02c_codecs\nencode\n}(\x8c\x08__call__K\x01ub.",
    "a persistent id": b"Pos.system\n.",
    "an extension code": b"\x80\x02\x82\x01.",
    "10^15 bytes by a call": pickle.dumps(_Call(bytes, 10**15), protocol=2),
    "an empty stack": b"\x80\x040000.",
    "a stack of marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
}


CASES = {name: crafted("eval {model} --pairs {file}", "crafted.bin", program) for name, program in PROGRAMS.items()}
