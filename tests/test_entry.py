"""The command's frame: overview, exit codes, one line per mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import plsc
from plsc.tools.entry import COMMANDS, main


def test_overview_names_every_command_and_there_is_a_version(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main([]) == 2
    capsys.readouterr()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("plsc ")


def test_an_unknown_command_is_one_line(capsys):
    for typed, meant in (("trian", "train"), ("quikstart", "quickstart"), ("serv", "serve")):
        assert main([typed]) == 2
        line = f"plsc: error: no command {typed!r}; did you mean {meant}? (see plsc --help)\n"
        assert capsys.readouterr().err == line
    assert main(["zzz"]) == 2
    line = f"plsc: error: no command 'zzz'; it is one of {', '.join(COMMANDS)} (see plsc --help)\n"
    assert capsys.readouterr().err == line


ACTIONS = [f"data {action}" for action in ("convert", "check", "stats", "pairs", "align")]
ACTIONS += [f"index {action}" for action in ("build", "search", "check")]


@pytest.mark.parametrize("name", [*COMMANDS, *ACTIONS])
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*name.split(), "--help"])
    assert stopped.value.code == 0
    assert "--json FILE" in capsys.readouterr().out


def test_a_result_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["data", "stats", "avatars:2x2", "--json", str(tmp_path / "file" / "x.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot write into" in captured.err


def test_result_is_written(tmp_path, capsys):
    target = tmp_path / "new" / "x.json"
    assert main(["data", "stats", "avatars:2x2", "--json", str(target)]) == 0
    assert json.loads(target.read_text())["classes"] == 2
    assert main(["data", "stats", "avatars:3x2", "--json", str(target)]) == 2
    assert f"{target} exists already: give --overwrite to replace it" in capsys.readouterr().err
    assert json.loads(target.read_text())["classes"] == 2
    assert main(["data", "stats", "avatars:3x2", "--json", str(target), "--overwrite"]) == 0
    assert json.loads(target.read_text())["classes"] == 3


def test_a_failure_leaves_no_folder_for_its_result(tmp_path):
    assert main(["data", "stats", "nowhere", "--json", str(tmp_path / "new" / "x.json")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_keys_value_is_not_taken_for_a_positional_argument(capsys):
    assert main(["plan", "--embedding_dim", "256", "--classes", "100000", "--backbone", "resnet8"]) == 0
    assert "100,000 classes x 256" in capsys.readouterr().out


ONE_OF_EACH = [
    (["serve", "--model", "m"], "plsc serve: error: the following arguments are required: --store"),
    (
        ["export", "m", "--format", "onx", "--out", "o"],
        "plsc export: error: --format: there is no 'onx'; did you mean onnx",
    ),
    (["train", "x.toml", "--nproc", "two"], "plsc train: error: --nproc: 'two' is not a whole number"),
    (["index", "search", "x", "--qery", "y"], "there is no option --qery; did you mean --query?"),
    (["data", "convert", "a", "b", "--nope"], "plsc data convert: error: there is no option --nope (see"),
    (["export", "m", "stray", "--format", "onnx", "--out", "o"], "plsc export: error: unexpected stray"),
    (["gallery", "check"], "plsc gallery check: error: the following arguments are required: STORE"),
    (["tokens"], "plsc tokens: error: the following arguments are required: add|change|list|remove"),
    (["data", "conver"], "plsc data: error: COMMAND: there is no 'conver'; did you mean convert? (see"),
    (["data", "zzz"], "plsc data: error: COMMAND: invalid choice: 'zzz' (choose from "),
]


@pytest.mark.parametrize(("argv", "message"), ONE_OF_EACH, ids=lambda value: " ".join(value[:2]) if value else "")
def test_wrong_arguments_are_one_line_that_names_command_problem_and_help(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
    command = captured.err.partition(": error:")[0]
    assert captured.err.endswith(f"(see {command} --help)\n")


@pytest.mark.live
def test_help_and_wrong_arguments_import_nothing_heavy():
    lines = [["--help"], ["--version"], ["trian"], *([name, "--help"] for name in COMMANDS)]
    lines += [*(argv for argv, _ in ONE_OF_EACH), ["train", "fine_tune", "--optim.lrr", "1"], ["plan", "x", "y", "z"]]
    code = f"""
import contextlib, sys
from plsc.tools.entry import main
for argv in {lines}:
    with contextlib.suppress(SystemExit):
        main(argv)
    heavy = {{"torch", "torchvision", "PIL", "fastapi", "faiss", "matplotlib"}} & set(sys.modules)
    assert not heavy, (argv, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def run_closed(argv: list[str], **closed: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command whose standard ``stdout`` or ``stderr`` is a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        streams = {name: writing if name in closed else subprocess.PIPE for name in ("stdout", "stderr")}
        return subprocess.run([sys.executable, "-m", "plsc.tools.entry", *argv], text=True, **streams)
    finally:
        os.close(writing)


@pytest.mark.live
@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["train", "--list-keys"], ["serve", "--help"], ["gallery", "migrate", "--help"]]
)
def test_a_command_ends_quietly_where_nobody_reads_its_output(argv: list[str]) -> None:
    done = run_closed(argv, stdout=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.live
def test_work_goes_on_where_nobody_reads_the_errors(tmp_path: Path) -> None:
    argv = ["data", "convert", "avatars:3x2", str(tmp_path / "train.rec"), "--json", str(tmp_path / "done.json")]
    assert run_closed(argv, stderr=True).returncode == 0
    assert json.loads((tmp_path / "done.json").read_text())
    assert run_closed(["nonsense"], stderr=True).returncode == 2


@pytest.mark.live
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(("argv", "command"), [(["--help"], "plsc"), (["train", "--list-keys"], "plsc train")])
def test_output_that_a_full_disk_does_not_take_is_a_failure_of_a_line(argv: list[str], command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "plsc.tools.entry", *argv], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{command}: error: ")
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.live
def test_only_the_first_of_a_machines_ranks_prints_and_tells_torchrun_why(tmp_path):
    """Both ranks make the same mistake; the launcher ends the others when the first has ended."""
    ranks = []
    for rank in range(2):
        environment = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / f"{rank}.json")
        command = [sys.executable, "-m", "plsc.tools.entry", "train", "x.toml", "--nproc", "two"]
        ranks.append(subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True))
    line = ranks[0].communicate()[1]
    assert ranks[0].returncode == 2
    assert line.count("\n") == 1
    assert json.loads((tmp_path / "0.json").read_text())["message"]["message"] == line.rstrip()
    ranks[1].terminate()
    assert ranks[1].communicate()[1] == ""
    assert not (tmp_path / "1.json").exists()


@pytest.mark.live
def test_every_public_name_is_there_and_imported_at_its_first_use_only():
    code = "import sys, plsc; assert 'torch' not in sys.modules; plsc.ArcFace; assert 'torch' in sys.modules; plsc.head"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(plsc, name) for name in plsc.__all__)
    assert set(plsc.__all__) <= set(dir(plsc))
    with pytest.raises(AttributeError, match="no attribute 'Arcface'"):
        _ = plsc.Arcface


@pytest.mark.live
@pytest.mark.slow
def test_torchruns_report_repeats_our_line():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-m", "plsc.tools.entry", "train", "x.toml", "--resume"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    line = "plsc train: error: --resume: expected one argument (see plsc train --help)"
    assert done.returncode == 1
    assert done.stderr.splitlines().count(line) == 1, done.stderr
    assert f"traceback : {line}" in done.stderr


@pytest.mark.live
def test_a_former_key_is_told_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[head]\nmax_classes = 9\n")
    command = [sys.executable, "-m", "plsc.tools.entry", "train", "run.toml", "--as-toml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    now = "head.max_classes is now called dynamic.max_classes; the old name goes with the next release"
    assert (done.returncode, done.stderr) == (0, f"plsc train: warning: run.toml: {now}\n")
