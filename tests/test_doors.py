"""Two doors: what others supplied is opened in one place, and what is printed or logged is made printable in one."""

import ast
import io
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plsc.data.codec import encode_image
from plsc.errors import DataError
from plsc.progress import StatusLine, log_once, note, printable, show, warn
from plsc.regular_files import ALLOW_OUTSIDE, open_regular, read_bytes
from plsc.tools.entry import main

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import draw_architecture as architecture

HOSTILE = "a\x1b[2Jall good\r\nplsc: sound\x9b31m\u202egpj."
SHOWN = "a\ufffd[2Jall good\ufffd\ufffdplsc: sound\ufffd31m\ufffdgpj."

# Who may open files past plsc.regular_files, and why. Libraries (torch, zipfile, safetensors, numpy) open by name what
# was found to be a regular file before.
OPENERS = {
    "plsc.regular_files": "the door",
    "plsc.bench": "our own measurements, and a checkout that the user names",
    "plsc.client": "the user's own token",
    "plsc.cluster": "its own state, and labels and centres that it has written",
    "plsc.data.block_cache": "its own blocks",
    "plsc.data.glyphs": "the system's fonts and Unihan",
    "plsc.data.image_cache": "the system's, and our own cache",
    "plsc.data.packed_tars": "a stream of what the door has opened",
    "plsc.data.relabelled": "an array of a file that the door has opened",
    "plsc.data.record_keys": "a map of what it has opened by the door",
    "plsc.data.shard_index": "our own index",
    "plsc.devices": "the system's",
    "plsc.doctor.machine": "the system's",
    "plsc.embedding.columns": "files of a manifest, which are regular ones",
    "plsc.embedding.mtcnn": "files whose hashes are known",
    "plsc.embedding.onnx_engine": "a model of our own",
    "plsc.embedding.program": "a model that is a regular file",
    "plsc.embedding.set_writer": "our own folder",
    "plsc.models.trial": "the system's, and bytes of a model",
    "plsc.files": "our own files, and those of a manifest, which are regular ones",
    "plsc.gallery": "the store's own files, and snapshots of which each file is in a manifest",
    "plsc.features.journal": "its own files, beside the table's",
    "plsc.head": "our own table",
    "plsc.index": "files of a manifest, which are regular ones",
    "plsc.loggers.csv_table": "the run's own table",
    "plsc.models.torch_files": "a model that is a regular file",
    "plsc.models.weights": "a model that is a regular file",
    "plsc.native.build": "our own sources",
    "plsc.quickstart": "our own page",
    "plsc.serve": "the service's own files",
    "plsc.signing": "a key, and what is a regular file",
    "plsc.sizes": "the system's",
    "plsc.train.metrics": "the run's own log",
    "plsc.train.resumption": "the system's",
    "plsc.train.stored_table": "what it has just written",
    "plsc.train.table_file": "a map of what it has opened by the door",
}
# Who may print or log past plsc.progress, and why.
PRINTERS = {
    "plsc.progress": "the door",
    "plsc.data.glyphs.fonts": "switches another's log off",
    "plsc.doctor.report": "in colour, with printable()",
    "plsc.embedding.export": "calls a function that writes a model",
    "plsc.gallery.milvus.requests": "switches another's log off",
    "plsc.head.sharded_head": "names a backend of our own",
    "plsc.loggers.mlflow_run": "switches another's log off",
    "plsc.optim.eight_bit_adamw": "switches another's log off",
    "plsc.parallel.launch": "what ranks have printed",
    "plsc.strict_toml": "the name of a key of ours",
    "plsc.tools.entry": "help and usage of our own",
    "plsc.tools.train": "the name of an option",
    "plsc.train.components": "switches another's log off",
}
OPENING = {"memmap", "open_memmap", "fromfile", "ZipFile", "safe_open", "open"}
PRINTING = {"print", "input", "getLogger", "warn", "write"}


def opens(call: ast.Call) -> bool:
    """Whether a call opens a file for reading by its name."""
    name, owner = name_of(call)
    if name == "open" and owner in ("Index", "Image", "webbrowser"):
        return False
    if name == "load":
        return owner in ("np", "numpy", "torch")
    if name in ("read_bytes", "read_text"):  # of a path: the doors' own stand alone
        return isinstance(call.func, ast.Attribute)
    return name in OPENING and not is_for_writing(call)


def prints(call: ast.Call) -> bool:
    """Whether a call prints or logs."""
    name, owner = name_of(call)
    if name == "warn":
        return owner == "warnings"
    if name == "write":
        return owner in ("stdout", "stderr", "")
    return name in PRINTING and (owner in ("", "logging"))


def name_of(call: ast.Call) -> tuple[str, str]:
    """The function's name, and the last name of what it belongs to."""
    if isinstance(call.func, ast.Name):
        return call.func.id, ""
    if not isinstance(call.func, ast.Attribute):
        return "", ""
    owner = call.func.value
    return call.func.attr, getattr(owner, "attr", getattr(owner, "id", ""))


def is_for_writing(call: ast.Call) -> bool:
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return any(isinstance(mode, str) and mode[:1] in ("w", "a", "x") for mode in modes)


def calls(found: dict[str, Path]) -> Iterator[tuple[str, ast.Call]]:
    for name, path in found.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield name, node


def allowed_by(name: str, allowed: dict[str, str]) -> str | None:
    return next((each for each in allowed if name == each or name.startswith(f"{each}.")), None)


def test_nobody_goes_around():
    doors = {"opens": (opens, OPENERS, set()), "prints": (prints, PRINTERS, set())}
    for name, call in calls(architecture.module_paths()):
        for what, (is_one, allowed, users) in doors.items():
            if is_one(call):
                users.add(allowed_by(name, allowed))
                assert allowed_by(name, allowed), f"{name}:{call.lineno} {what} past the door"
    for what, (_, allowed, users) in doors.items():
        assert users == set(allowed), f"somebody on the list of who {what} needs it no more"


def test_lines_are_made_printable(capsys, caplog):
    assert printable(HOSTILE) == SHOWN
    assert printable("\udcff") == "\ufffd"  # a byte of a name that is no UTF-8
    show("first", HOSTILE)
    note(HOSTILE)
    assert capsys.readouterr() == (f"first\n{SHOWN}\n", f"{SHOWN}\n")
    with caplog.at_level(logging.WARNING):
        warn("plsc.data", f"%s {HOSTILE}")
        log_once("plsc.data", f"once {HOSTILE}")
    assert caplog.messages == [f"%s {SHOWN}", f"once {SHOWN}"]
    file = io.StringIO()
    status = StatusLine(file)
    status.update(HOSTILE)
    status.print(HOSTILE)
    assert file.getvalue() == f"{SHOWN}\n{SHOWN}\n"


def test_regular_files_alone_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", largest=5) == b"12345"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    for name, why in (
        ("pipe", "it is no regular file"),
        ("zero", "it is no regular file"),
        (".", "it is a folder"),
        ("socket", "No such device"),
        ("loop", "Too many levels"),
        ("none", "No such file"),
        ("file", "it has 5 bytes, where 4 are the most"),
    ):
        with pytest.raises(DataError, match=f"cannot read .*: {why}"):
            read_bytes(tmp_path / name, largest=4)


def test_a_path_below_a_folder_does_not_lead_out_of_it(tmp_path, monkeypatch):
    private, folder = tmp_path / "private.jpg", tmp_path / "photos"
    private.write_bytes(b"private")
    (folder / "ann").mkdir(parents=True)
    (folder / "ann/1.jpg").write_bytes(b"own")
    (tmp_path / "photos-2").mkdir()
    (tmp_path / "photos-2/1.jpg").write_bytes(b"private")
    for link, target in (
        ("inside.jpg", "ann/1.jpg"),
        ("9.jpg", private),
        ("ann/9.jpg", "../../private.jpg"),
        ("bob", tmp_path),
        ("beside", tmp_path / "photos-2"),
    ):
        (folder / link).symlink_to(target)
    (tmp_path / "linked").symlink_to(folder)  # where the folder itself lies is its reader's choice
    inside = ["ann/1.jpg", "inside.jpg", "ann/../ann/1.jpg", "bob/photos/ann/1.jpg"]
    outside = ["9.jpg", "ann/9.jpg", "bob/private.jpg", "beside/1.jpg", "../private.jpg", str(private)]
    for root in (folder, tmp_path / "linked"):
        for name in inside:
            assert read_bytes(root / name, below=root.resolve()) == b"own"
        for name in outside:
            with pytest.raises(DataError, match=r"lies outside of .*--allow-outside"):
                open_regular(root / name, below=root.resolve())
    monkeypatch.setenv(ALLOW_OUTSIDE, "1")
    assert {read_bytes(folder / name, below=folder) for name in outside} == {b"private"}


def test_private_pictures_are_not_copied(tmp_path, caplog):
    """From a folder, a list or a folder with records, unless that is asked for."""
    folder = tmp_path / "photos"
    (folder / "ann").mkdir(parents=True)
    for place, grey in ((folder / "ann/1.png", 10), (tmp_path / "private.png", 200)):
        place.write_bytes(encode_image(torch.full((3, 16, 16), grey, dtype=torch.uint8), "png"))
    private = (tmp_path / "private.png").read_bytes()
    (folder / "ann/9.png").symlink_to(tmp_path / "private.png")
    (folder / "list.txt").write_text(f"ann/1.png\tann\n../private.png\tann\n{tmp_path}/private.png\tann\n")
    for number, (source, outside) in enumerate(((folder, 1), (folder / "list.txt", 2))):
        out = tmp_path / f"{number}.rec"
        assert main(["data", "convert", str(source), str(out)]) == 0
        assert private not in out.read_bytes()
        assert len([line for line in caplog.messages if "lies outside of" in line]) == outside
        caplog.clear()
        assert main(["data", "convert", str(source), str(out), "--allow-outside", "--overwrite"]) == 0
        assert out.read_bytes().count(private) == outside
        assert not caplog.messages
        assert ALLOW_OUTSIDE not in os.environ
    (tmp_path / "records").mkdir()
    (tmp_path / "records/train.rec").symlink_to(tmp_path / "0.rec")
    assert main(["data", "stats", str(tmp_path / "records")]) == 1
    assert main(["data", "stats", str(tmp_path / "records"), "--allow-outside"]) == 0
