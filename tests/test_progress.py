"""Progress lines on a terminal and in a pipe; counts with their nouns."""

import errno
import io
import sys

import pytest

from plsc.progress import Progress, StatusLine, counted, note, show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_one_line_of_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    file = Terminal()
    status = StatusLine(file)
    status.update("step 1")
    status.update("step 2, and more than the terminal's width")
    status.print("evaluated")
    status.update("step 3")
    status.close()
    status.close()
    clear = "\r\x1b[K"
    assert file.getvalue() == f"{clear}step 1{clear}step 2, and more th{clear}evaluated\n{clear}step 3\n"


def test_a_pipe_gets_each_state_as_a_line() -> None:
    file = io.StringIO()
    status = StatusLine(file)
    status.update("step 1")
    status.print("evaluated")
    status.close()
    assert file.getvalue() == "step 1\nevaluated\n"


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_what_nobody_reads_of_the_errors_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Unread())
    status = StatusLine()
    status.update("step 1")
    status.print("evaluated")
    note("more")
    sys.stderr.close()  # what it was replaced by
    monkeypatch.setattr(sys, "stderr", None)  # closed before the command began
    status.update("step 2")
    assert not StatusLine().rewrites
    note("more")


def test_a_command_ends_where_nobody_reads_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Unread())
    with pytest.raises(SystemExit) as ended:
        show("a line")
    assert ended.value.code == 141
    show("the rest")
    sys.stdout.close()


def test_letters_that_the_output_does_not_know_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    show("Zoë: 1 …", "\ud800")
    assert content.getvalue() == b"Zo?: 1 ?\n?\n"


def test_a_share_never_exceeds_the_whole() -> None:
    progress = Progress("read", 2544, file=io.StringIO(), quiet=True)
    progress.advance(2560)
    assert "2,560/2,544 images (100%)" in progress.line()


def test_a_count_has_the_number_of_its_noun() -> None:
    assert (counted(1, "image"), counted(0, "image"), counted(4324, "image")) == ("1 image", "0 images", "4,324 images")
    plurals = {"identity": "identities", "query": "queries", "key": "keys", "match": "matches"}
    plurals |= {"empty class": "empty classes"}
    assert {noun: counted(2, noun) for noun in plurals} == {noun: f"2 {plural}" for noun, plural in plurals.items()}
    assert counted(2, "person", "people") == "2 people"
