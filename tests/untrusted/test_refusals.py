"""Files that were made to harm, read by users' own commands: refused in one line, at once, in little memory."""

from pathlib import Path

import pytest
from support.measured import Commands

from untrusted import (
    checkpoint_files,
    column_files,
    onnx_files,
    pickled,
    picture_folders,
    program_files,
    record_files,
    safetensors_files,
    text_files,
    torch_files,
)
from untrusted.samples import Case, Samples, make_samples

pytestmark = pytest.mark.exhaustive

CORPUS: dict[str, dict[str, Case]] = {
    "bin": pickled.CASES,
    "checkpoint": checkpoint_files.CASES,
    "rec": record_files.CASES,
    "onnx": onnx_files.CASES,
    "torch": torch_files.CASES,
    "program": program_files.CASES,
    "safetensors": safetensors_files.CASES,
    "folder": column_files.CASES,
    "text": text_files.CASES,
    "pictures": picture_folders.CASES,
}
SECONDS, MIB = 4.0, 256.0
PROGRAM_SECONDS = 6.0  # torch takes a second to load one of 10 MB: a trial has four, and more as the file is larger
LONGEST_OUTPUT = 4000


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
    assert kind != "program" or program_files.REASONS[name] in error, done
    assert len(done.output) < LONGEST_OUTPUT, done
    assert not any(": error: " in note or "Traceback" in note for note in notes), done
    assert done.seconds <= (PROGRAM_SECONDS if kind == "program" else SECONDS), done
    assert done.mib <= MIB, done
    assert sorted(folder.rglob("*")) == before, "the file made others"
    assert not Path("SHELL").exists()


def test_memory_that_grows_with_the_batch_is_not_taken(tmp_path: Path, commands: Commands) -> None:
    """Batches have the sizes that were tried, however many pictures there are."""
    (tmp_path / "crafted.onnx").write_bytes(onnx_files.growing().SerializeToString())
    data = ["--data", "avatars:60x1", "--batch-size", "60"]
    done = commands("embed", tmp_path / "crafted.onnx", *data, "--out", tmp_path / "out.emb")
    assert done.code == 0, done
    assert done.mib <= MIB, done
