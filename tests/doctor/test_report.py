"""Lines of a report: in colour on terminals only, and of several ranks one line that names who is wrong."""

import io

from plsc.doctor.report import Report, absent, failed, found, merge


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_words_stand_on_every_output_and_colours_on_terminals(monkeypatch):
    lines = [found("sums", "right", error=1e-6), failed("sorts", "wrong", "repair it"), absent("GPU", "none")]
    plain, terminal = io.StringIO(), Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    for out in (plain, terminal):
        report = Report(1, out)
        report.add("kernels", lines)
        report.close()
    for word in ("ok", "FAIL", "-> repair it", "1 of 3 lines FAIL (kernels: sorts)"):
        assert word in plain.getvalue()
    assert "\033" not in plain.getvalue()
    assert "\033[1;31mFAIL" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    uncoloured = Terminal()
    Report(1, uncoloured).add("kernels", lines)
    assert "\033" not in uncoloured.getvalue()
    assert report.as_dict()["sections"]["kernels"]["sums"] == {
        "state": "ok",
        "text": "right",
        "figures": {"error": 1e-6},
    }


def test_a_terminal_shows_what_is_being_looked_at_until_the_next_line():
    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        report = Report(1, out)
        report.begin("kernels")
        report.show_work("sums")
        report.add("kernels", [absent("GPU", "none")])
    assert plain.getvalue().split() == ["kernels", "-", "GPU", "none"]
    title, work, line = terminal.getvalue().replace("\r\033[K", "|").split("|")
    assert (title, work.split()) == ("kernels\n", ["…", "sums"])
    assert line.endswith("none\n")


def test_a_failure_of_any_rank_is_the_line():
    good = [found("sums", "right", error=1.0), found("sorts", "right")]
    bad = [failed("sums", "wrong", "repair it", error=9.0), found("sorts", "right"), failed("only here", "x", "y")]
    sums, sorts, only = merge([good, bad, bad])
    assert (sums.state, sums.text, sums.advice) == ("FAIL", "ranks 1, 2: wrong", "repair it")
    assert [figures["error"] for figures in sums.figures["by_rank"]] == [1.0, 9.0, 9.0]
    assert (sorts.state, sorts.text, dict(sorts.figures)) == ("ok", "right", {})
    assert only.text == "ranks 1, 2: x"
    assert merge([good]) == good
