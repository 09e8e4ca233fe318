"""Count the lines of code that ship, by package: no blank lines, comments or docstrings.

    python docs/code_lines.py [--files]

A statement over five lines counts five. Shipped are plsc, models, data and tools; below them stand tests, benchmarks
and docs, with all their lines as well.
"""

import argparse
import ast
import io
import itertools
import signal
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ("plsc", "models", "data", "tools")
BESIDE = ("tests", "benchmarks", "docs")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Number of lines of ``source`` that hold a token other than a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(source)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def python_files(folder: str) -> list[Path]:
    """The Python files below ``folder`` of the checkout; not those that plsc has by links to other folders."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if not path.parent.is_symlink()]


def main() -> None:
    """Print a line for each package, or for each file, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="a line for each file, the longest first")
    each_file = parser.parse_args().files
    counts: Counter[str] = Counter()
    for path in itertools.chain.from_iterable(map(python_files, SHIPPED)):
        name = path.relative_to(ROOT)
        room = name if each_file else Path(*name.parent.parts[:2])
        counts[str(room)] += code_lines(path.read_text(encoding="utf-8"))
    for place, count in counts.most_common():
        print(f"{count:7,}  {place}")
    print(f"{sum(counts.values()):7,}  lines of code shipped")
    for folder in BESIDE:
        texts = [path.read_text(encoding="utf-8") for path in python_files(folder)]
        every = sum(len(text.splitlines()) for text in texts)
        print(f"{sum(map(code_lines, texts)):7,}  of {every:,} lines in {folder}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends other programs
    main()
