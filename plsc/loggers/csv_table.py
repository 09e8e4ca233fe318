"""The logger "csv": RUN/metrics.csv, a row per line of metrics.jsonl."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from plsc.files import AppendFile, atomic_write
from plsc.loggers.base import LoggedRun, RunLogger


class CsvTable(RunLogger):
    """A table with the step first, and a column per number; a row's numbers that its step has not are empty.

    A number that comes later, an evaluation's say, becomes a further column, for which the file is written anew.
    """

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._path = run.out / "metrics.csv"
        self._columns: list[str] = []
        if self._path.is_file():
            self._columns, rows = _read(self._path)
            self._rewrite(self._columns, [row for row in rows if int(row["step"]) <= run.step])
        self._file = AppendFile(self._path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row."""
        row = {"step": str(step), **{name: repr(value) for name, value in values.items()}}
        if added := [name for name in row if name not in self._columns]:
            columns = [*self._columns, *added]
            self._rewrite(columns, _read(self._path)[1])
            self._file.close()
            self._columns, self._file = columns, AppendFile(self._path)
        self._file.write_line(_line(row.get(name, "") for name in self._columns))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewrite(self, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
        lines = [columns, *([row.get(name, "") for name in columns] for row in rows)]
        with atomic_write(self._path) as tmp_path:
            tmp_path.write_text("".join(f"{_line(line)}\n" for line in lines), encoding="utf-8")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows; a last row that a killed writer left unfinished is left out."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    reader = csv.DictReader(whole.splitlines())
    columns = list(reader.fieldnames or [])
    return columns, [row for row in reader if row["step"].isdecimal() and None not in row.values()]


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()
