"""Progress lines on a terminal and in a pipe; counts with their nouns."""

import io

import pytest

from plsc.progress import Progress, StatusLine, counted


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


def test_a_share_never_exceeds_the_whole() -> None:
    progress = Progress("read", 2544, file=io.StringIO(), quiet=True)
    progress.advance(2560)
    assert "2,560/2,544 images (100%)" in progress.line()


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (4324, "image", "4,324 images"),
        (2, "identity", "2 identities"),
        (2, "query", "2 queries"),
        (2, "key", "2 keys"),
        (2, "empty class", "2 empty classes"),
        (2, "match", "2 matches"),
    ],
)
def test_a_count_has_the_number_of_its_noun(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_an_irregular_plural_is_given() -> None:
    assert counted(2, "person", "people") == "2 people"
