"""TOML whose keys are counted before it is parsed: deep ones are refused, whatever stands between the dots."""

import tomllib

import pytest

from plsc.text_files import parse_toml

REFUSED = [
    "a.b.c.d.e.f.g.h.i = 1",
    '"a\\"b".' * 8 + "x = 1",
    "'#' . \"\\\\\" .c.d.e.f.g.h.i = 1",
    "x = '''\"''' \n[[a.b.c.d.e.f.g.h.i]]",
    'x = """ "" \\""" \n""" \ny = {a.b.c.d.e.f.g.h.i = 1}',
    'x = """a""""" # "\n' + "a." * 20_000,
    "x = [1, {a.b.c.d.e.f.g.h.i = 1}]",
    ".........",
]
TAKEN = [
    "a.b.c.d.e.f.g.h = 1.5\nb.c.d.e.f.g.h.i = 2",
    "[a.b.c.d.e.f.g.h]\ni.j = 1 # a.b.c.d.e.f.g.h.i",
    "x = ['a.b.c.d.e.f.g.h.i', \"a.b.\\\".c.d.e.f.g.h.i\"]\n'a.b.c.d.e.f.g.h.i'.j = {k.l = 1.5}",
    'x = """\na.b.c.d.e.f.g.h.i\n"a"" \\""""""\ny = \'\'\'a.b.c.d.e.f.g.h\'i\'\'.\'\'\'\'\'',
    "x = [\n" + "1.5, " * 20 + "]\ny = 1979-05-27T00:32:00.999",
]


@pytest.mark.parametrize("text", REFUSED)
def test_deep_keys_are_refused(text):
    with pytest.raises(ValueError, match="a key has more than 8 parts"):
        parse_toml(text)


@pytest.mark.parametrize("text", TAKEN)
def test_other_dots_are_nobodys_depth(text):
    assert parse_toml(text) == tomllib.loads(text) != {}
