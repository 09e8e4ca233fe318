"""The command's frame: overview, exit codes, one line per mistake."""

import json

import pytest

from plsc.tools.entry import COMMANDS, main


def test_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("plsc ")


def test_an_unknown_command_is_one_line(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"plsc: error: no command 'trian'; it is one of {', '.join(COMMANDS)}"
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
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


def test_a_keys_value_is_not_taken_for_a_positional_argument(capsys):
    assert main(["plan", "--embedding_dim", "256", "--classes", "100000", "--backbone", "resnet8"]) == 0
    assert "100,000 classes x 256" in capsys.readouterr().out
