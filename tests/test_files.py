"""Outputs that are never replaced by accident, and never seen half written."""

import os
from pathlib import Path

import pytest

from plsc import files
from plsc.errors import UsageError


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    files.check_output(tmp_path / "new", overwrite=False)
    files.check_output(tmp_path / "empty", overwrite=False)
    for name in ("file", "link"):
        with pytest.raises(UsageError, match=f"{name} exists already: give --overwrite to replace it"):
            files.check_output(tmp_path / name, overwrite=False)
        files.check_output(tmp_path / name, overwrite=True)
    with pytest.raises(UsageError, match="exists already"):
        files.check_output(tmp_path, overwrite=False)
    with pytest.raises(UsageError, match="Not a directory"):
        files.make_folder(tmp_path / "file" / "below")


def test_a_failure_leaves_no_new_folder(tmp_path: Path) -> None:
    def fail(keep: bool) -> None:
        with files.new_folder(tmp_path / "a" / "b") as folder:
            if keep:
                (folder / "result").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail(keep=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        fail(keep=True)
    assert (tmp_path / "a" / "b" / "result").exists()


@pytest.mark.live
def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(dead, 0)
    (tmp_path / f".x[1].rec.{dead}.tmp").touch()
    (tmp_path / f".x[1].{dead}.tmp").mkdir()
    kept = {f".x[1].rec.{os.getppid()}.tmp", ".x[1].rec.tmp", f".y.rec.{dead}.tmp"}
    for name in kept:
        (tmp_path / name).touch()
    files.remove_leftovers(tmp_path / "x[1].rec")
    files.remove_leftovers(tmp_path / "x[1]")
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    replace = Path.replace

    def renaming(self: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return replace(self, target)

    monkeypatch.setattr(files, "sync", lambda path: events.append(f"sync {path.name}"))
    monkeypatch.setattr(Path, "replace", renaming)
    with files.atomic_write(tmp_path / "file") as tmp_file:
        tmp_file.touch()
    assert events == [f"sync {tmp_file.name}", "rename file", f"sync {tmp_path.name}"]
    events.clear()
    with files.atomic_write_group([tmp_path / "main", tmp_path / "other"]) as group:
        for tmp_file in group:
            tmp_file.touch()
    written = [f"sync {tmp_file.name}" for tmp_file in group]
    folder = f"sync {tmp_path.name}"
    assert events == [*written, folder, "rename main", folder, "rename other", folder]
    events.clear()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "inner").touch()
    files.atomic_replace_dir(tmp_path / "new", tmp_path / "folder")
    assert events == ["sync inner", "sync new", "rename folder", folder]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    files.atomic_replace_dir(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"]


def test_nothing_is_written_through_links_that_somebody_put_beside(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in (f".result.{os.getpid()}.tmp", f".write-test-{os.getpid()}"):
        (folder / name).symlink_to(own)
    files.make_folder(folder)
    files.write_json(folder / "result", {"a": 1})
    assert own.read_text() == "precious"
    assert files.read_json(folder / "result") == {"a": 1}
