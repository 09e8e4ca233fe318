"""Keys that moved: files and command lines of before hold, with a warning; what runs stored, without."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from plsc import config
from plsc.errors import UsageError
from plsc.features.averaging.config import AveragingConfig

FORMER = {"averaging": "local_sgd", "averaging_period": 4}
NOW = AveragingConfig(name="local_sgd", period=4)


def test_a_file_and_a_command_line_of_before_warn_and_hold(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[parallel]\naveraging = "local_sgd"\naveraging_period = 4\n')
    words = ["--parallel.averaging", "local_sgd", "--parallel.averaging_period", "4"]
    readers: list[tuple[Any, dict[str, Any]]] = [
        (file, {}),
        (None, {f"parallel.{name}": value for name, value in FORMER.items()}),
    ]
    for path, overrides in readers:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert config.load(path, overrides).section(AveragingConfig) == NOW
        said = " ".join(str(each.message) for each in told)
        assert "parallel.averaging is now called averaging.name" in said
        assert "parallel.averaging_period is now called asynchronous.period and averaging.period" in said
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parsed = config.parse_arguments(words)
    assert len(told) == 2
    assert config.load(None, parsed).section(AveragingConfig) == NOW


def test_what_a_run_has_stored_is_read_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = config.from_dict({"parallel": FORMER, "epochs": 2})
    assert loaded.section(AveragingConfig) == NOW
    assert config.from_dict(config.to_dict(loaded)) == loaded


def test_a_key_by_both_of_its_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[averaging]\nperiod = 4\n[parallel]\naveraging_period = 5\n")
    with pytest.warns(FutureWarning), pytest.raises(UsageError, match=r"averaging\.period is given twice"):
        config.load(file)
