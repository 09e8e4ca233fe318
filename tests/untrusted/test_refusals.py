"""Files that were made to harm, read by users' own commands: refused in one line, at once, in little memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.measured import Commands

from untrusted import (
    checkpoint_files,
    column_files,
    onnx_files,
    pickled,
    picture_folders,
    record_files,
    safetensors_files,
    text_files,
    torch_files,
)
from untrusted.samples import Case, Samples, make_samples

CORPUS: dict[str, dict[str, Case]] = {
    "bin": pickled.CASES,
    "checkpoint": checkpoint_files.CASES,
    "rec": record_files.CASES,
    "onnx": onnx_files.CASES,
    "torch": torch_files.CASES,
    "safetensors": safetensors_files.CASES,
    "folder": column_files.CASES,
    "text": text_files.CASES,
    "pictures": picture_folders.CASES,
}
SECONDS, MIB = 2.0, 256.0
LONGEST_OUTPUT = 4000


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    running = Commands()
    yield running
    running.close()


@pytest.fixture(scope="module")
def samples(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return make_samples(tmp_path_factory.mktemp("samples"), commands)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in CORPUS.items() for name in cases])
def test_a_crafted_file_is_refused(
    kind: str, name: str, tmp_path: Path, commands: Commands, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "crafted"
    folder.mkdir()
    arguments = CORPUS[kind][name](folder, samples)
    before = sorted(folder.rglob("*"))
    done = commands(*arguments)
    assert done.code in (1, 2), done
    assert done.output.replace("\n", "").isprintable(), done
    # A note may go before: of an index that is missing, of a record left out.
    *notes, error = done.output.rstrip("\n").split("\n")
    assert error.startswith(f"plsc {arguments[0]}"), done
    assert ": error: " in error, done
    assert "crafted" in error, done
    assert len(done.output) < LONGEST_OUTPUT, done
    assert not any(": error: " in note or "Traceback" in note for note in notes), done
    assert done.seconds <= SECONDS, done
    assert done.mib <= MIB, done
    assert sorted(folder.rglob("*")) == before, "the file made others"
    assert not Path("SHELL").exists()
