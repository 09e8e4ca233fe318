"""Names of arcface_torch: answers to its keys and backbones, its configs as TOML, and the page that lists them."""

import os
import re
from pathlib import Path

import pytest

from plsc import arcface_torch, config
from plsc.arcface_torch import BACKBONES, COMMANDS, FILES, KEYS, Counterpart
from plsc.errors import UsageError
from plsc.models import names
from plsc.tools.entry import COMMANDS as TOOLS
from plsc.tools.entry import main

PAGE = (Path(__file__).parents[1] / arcface_torch.PAGE).read_text(encoding="utf-8")

RECIPE = """
from easydict import EasyDict as edict

config = edict()
config.margin_list = (1.0, 0.5, 0.0)
config.network = "r50"
config.resume = False
config.output = None
config.embedding_size = 512
config.sample_rate = 1.0
config.fp16 = True
config.weight_decay = 5e-4
config.batch_size = 128
config.gradient_acc = 2 # 256 in all
config.optimizer = "sgd"
config.lr = 0.1
config.verbose = 2000
config.dali = False
config.rec = "/data/ms1m"
config.num_epoch = 20
config.warmup_epoch = config.num_epoch // 10
config.val_targets = ['lfw', "cfp_fp"]
config.suffix_run_name = os.environ["NAME"]
"""


def rows_of(heading: str) -> list[str]:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize(
    ("heading", "table"), [("Config keys", KEYS), ("Backbones", BACKBONES), ("Files", FILES), ("Commands", COMMANDS)]
)
def test_the_page_holds_the_table(heading: str, table: dict[str, Counterpart]) -> None:
    cells = [(their, f"`{c.ours}`" if c.ours else "none", c.note) for their, c in table.items()]
    expected = [f"| `{their}` | {ours} | {note} |".replace("RUN|", "RUN\\|") for their, ours, note in cells]
    assert rows_of(heading) == expected


def test_every_counterpart_exists() -> None:
    for counterpart in KEYS.values():
        key = counterpart.ours.partition(" ")[0]
        assert not key or key.startswith("--") or key in config.KEYS, key
    assert {counterpart.ours for counterpart in BACKBONES.values()} - {""} <= set(names())
    tools = {counterpart.ours.split()[1] for counterpart in COMMANDS.values() if counterpart.ours}
    assert tools <= set(TOOLS)
    for table in (KEYS, BACKBONES, FILES, COMMANDS):
        assert all(counterpart.ours or counterpart.note for counterpart in table.values())


def test_the_recipes_on_the_page_are_the_shipped_ones() -> None:
    sections = re.findall(r"### `\w+` and `(\w+)`\n\n(.*?)\n(?=\n)", PAGE + "\n", re.DOTALL)
    assert len(sections) == 5
    for name, table in sections:
        recipe = config.load(name)
        for line in table.splitlines()[2:]:
            _, _, _, key, shown, _ = (cell.strip(" `") for cell in line.split("|"))
            value = config.get(recipe, key)
            if key == "head.margin":
                value = f"{value}, m = {recipe.head.m:g}"
            elif isinstance(value, float):
                value = f"{value:g}"
            assert shown == str("unset" if value is None else value), key


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--fp16", "True"], 'arcface_torch\'s fp16 is precision = "fp16" here'),
        (["--gradient_acc", "2"], "arcface_torch's gradient_acc is optim.accumulate here"),
        (["--dali"], "arcface_torch's dali has no counterpart here (images are decoded by"),
        (["--output", "x"], "arcface_torch's output is --out RUN here"),
        (["--optim.warmup-epoch", "2"], "arcface_torch's warmup_epoch is optim.warmup_epochs here"),
        (["--backbone", "mbf"], "arcface_torch's mbf is mobilefacenet here"),
        (["--backbone", "vit_h"], "arcface_torch's vit_h has no counterpart here"),
        (["--lr", "1"], "did you mean optim.lr?"),
        (["--learning_rate", "1"], "no key learning_rate; did you mean optim.lr?"),
        (["--zzzz", "1"], "plsc train --list-keys lists every key"),
    ],
)
def test_a_name_of_theirs_is_answered_with_ours(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "avatars_quickstart", *words]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1


def test_their_key_in_a_file_is_answered_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[data]\nrec = 'faces'\n")
    with pytest.raises(UsageError, match=r"there is no key data.rec; arcface_torch's rec is data.train here"):
        config.load(path)


def test_a_config_of_theirs_is_printed_as_toml_and_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ms1mv3_r50.py"
    path.write_text(RECIPE + f"open({str(tmp_path / 'written')!r}, 'w')\n")
    assert main(["train", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert f"{path} is a config of arcface_torch, and plsc reads TOML: plsc train {path} --as-toml > " in captured.err
    assert main(["train", str(path), "--as-toml"]) == 0
    captured = capsys.readouterr()
    assert not (tmp_path / "written").exists()
    assert "# dali = False: images are decoded by data.workers processes per rank" in captured.out
    assert "# suffix_run_name = os.environ['NAME']: not read, set it by hand" in captured.out
    translated = tmp_path / "ms1mv3_r50.toml"
    translated.write_text(captured.out)
    expected = {"backbone": "iresnet50", "precision": "fp16", "epochs": "20", "data.train": "/data/ms1m"}
    expected |= {"head.s": "64", "head.m": "0.5", "optim.accumulate": "2", "optim.warmup_epochs": "2"}
    expected |= {"optim.clip_norm": "5", "eval.sets": "/data/ms1m/lfw.bin,/data/ms1m/cfp_fp.bin"}
    assert config.load(translated) == config.load(None, expected)


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("margin_list = (1.0, 0.0, 0.4)", ['margin = "cosface"', "m = 0.4"]),
        ("margin_list = (1.1, 0.2, 0.0)", ['margin = "combined"', "m1 = 1.1", "m2 = 0.2", "m3 = 0.0"]),
        ("warmup_epoch = -1", ["warmup_epochs = 0  # -1 there: no warm-up"]),
    ],
)
def test_their_values_are_translated(line: str, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "3millions.py"
    path.write_text(f"config.{line}\n")
    translated = tmp_path / "3millions.toml"
    translated.write_text(text := arcface_torch.to_toml(path))
    assert all(line in text.splitlines() for line in lines)
    assert 'precision = "fp32"' in text  # base.py's, where a recipe does not say
    config.load(translated)


@pytest.mark.parametrize(
    ("text", "message"),
    [("print(1)\n", "assigns no config.KEY"), ("config.lr = = 1\n", "is no Python file"), (None, "cannot read")],
)
def test_other_python_files_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        arcface_torch.to_toml(path)
    with pytest.raises(UsageError, match="plsc reads TOML"):
        config.load(path)


def test_a_config_of_theirs_is_known_without_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "r50.py").write_text(RECIPE)
    with pytest.raises(UsageError, match=r"r50\.py is a config of arcface_torch.*plsc train .*r50\.py --as-toml"):
        config.load(tmp_path / "r50")


@pytest.mark.parametrize(
    "line",
    [
        "config.margin_list = (1.0, 0.5)",
        "config.margin_list = ('a', 'b', 'c')",
        "config.network = ['r50']",
        "config.sample_rate = 'all'",
        "config.val_targets = 3",
        "config.warmup_epoch = 'none'",
    ],
)
def test_a_value_of_an_unexpected_kind_is_one_error(line: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"odd\.py has a value of an unexpected kind"):
        arcface_torch.to_toml(path)


@pytest.mark.parametrize(
    ("lines", "comments"),
    [
        (["lr = 3"] + ["lr = config.lr * config.lr"] * 60, ["lr = config.lr * config.lr"]),
        (["lr = 9e307", "lr = config.lr * 100"], ["lr = config.lr * 100"]),
        (["lr = 1e999"], ["lr = 1e309"]),
        (["seed = 9223372036854775807", "seed = config.seed + 1"], ["seed = config.seed + 1"]),
        (["seed = 0x" + "f" * 9000], ["seed = an integer of too many digits"]),
        (["lr = 1j", "rec = {'a': 1}"], ["lr = 1j", "rec = {'a': 1}"]),
        (["rec = 'x' * 1000000000"], ["rec = 'x' * 1000000000"]),
        (["val_targets = [0] * 1000000000"], ["val_targets = [0] * 1000000000"]),
        (["lr = 2 ** 2 ** 2 ** 9", "seed = 1 << 99999"], ["lr = 2 ** 2 ** 2 ** 9", "seed = 1 << 99999"]),
        ([f"rec = {'x' * 5000!r}"], [f"rec = '{'x' * 4095} ..."]),
    ],
)
def test_a_value_beyond_a_number_of_64_bits_or_a_short_text_is_left_to_its_reader(
    lines: list[str], comments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "large.py"
    path.write_text("config.network = 'r50'\n" + "".join(f"config.{line}\n" for line in lines))
    text = arcface_torch.to_toml(path)
    assert [line for line in text.splitlines() if "not read" in line] == [
        f"# {comment}: not read, set it by hand" for comment in comments
    ]
    (tmp_path / "large.toml").write_text(text)
    assert config.load(tmp_path / "large.toml") == config.load(
        None, {"backbone": "iresnet50", "precision": "fp32", "optim.clip_norm": "5"}
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("config.lr = " + "-" * 60_000 + "1", "is nested too deeply"),
        ("config.lr = " + "-" * 3_000 + "1", "is nested too deeply"),
        ("config.lr = " + "1+" * 30_000 + "1", "is nested too deeply"),
        ("config.lr = 1" + " if 1 else 1" * 4_000, "is nested too deeply"),
        ("config.rec = " + "[" * 5_000, "is no Python file"),
        ("#" * ((1 << 16) + 1), "it has 65,537 bytes, where 65,536 are the most"),
    ],
)
def test_a_config_that_is_too_deep_or_too_large_is_refused_in_a_line(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.py"
    path.write_text(text)
    assert main(["train", str(path), "--as-toml"]) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_pipe_for_a_config_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert main(["train", str(tmp_path / "pipe.py"), "--as-toml"]) == 2
    assert "pipe.py" in capsys.readouterr().err
