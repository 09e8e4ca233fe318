"""Tables of a configuration, [optim.groups] and [[stage]]: how they are read, written, refused, and put together."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc import config
from plsc.config import KEYS, TABLES, Config
from plsc.errors import UsageError
from plsc.strict_toml import Table

pytestmark = pytest.mark.feature("frozen")

WHOLE = """
epochs = 10
frozen = ["stem.*"]
[optim]
lr = 0.1
[optim.groups]
"*.bias" = { weight_decay = 0 }
"blocks.0.*" = { frozen = true, lr_scale = 0.1 }
[[stage]]
from_epoch = 2
optim.lr = 0.05
frozen = []
head.m = 0.3
[[stage]]
from_epoch = 5.5
optim.schedule = "cosine"
[stage.data]
augment = "standard"
[[stage]]
from_epoch = 6
optim.warmup_steps = 3
head.sample_rate = 0.1
"""


def load(folder: Path, text: str, overrides: dict[str, Any] | None = None) -> Config:
    path = folder / "run.toml"
    path.write_text(text)
    return config.load(path, overrides)


def test_tables_are_read_in_the_order_of_the_file_and_their_keys_in_the_order_of_the_reference(tmp_path: Path) -> None:
    loaded = load(tmp_path, WHOLE)
    assert loaded.optim.groups == (
        Table("*.bias", {"weight_decay": 0.0}),
        Table("blocks.0.*", {"lr_scale": 0.1, "frozen": True}),
    )
    assert [dict(stage.values) for stage in loaded.stage] == [
        {"from_epoch": 2.0, "head.m": 0.3, "optim.lr": 0.05, "frozen.weights": ()},
        {"from_epoch": 5.5, "data.augment": "standard", "optim.schedule": "cosine"},
        {"from_epoch": 6.0, "head.sample_rate": 0.1, "optim.warmup_steps": 3},
    ]
    assert list(loaded.stage[0].values) == ["from_epoch", "head.m", "optim.lr", "frozen.weights"]


def test_each_stage_keeps_what_it_does_not_give(tmp_path: Path) -> None:
    loaded = load(tmp_path, WHOLE + "[[stage]]\nfrom_epoch = 7\noptim.power = 2.0\n")
    before, *stages = config.stage_configs(loaded)
    assert before == loaded
    assert [stage.frozen.weights for stage in stages] == [()] * 4
    assert [stage.head.m for stage in stages] == [0.3] * 4
    assert [stage.head.sample_rate for stage in stages] == [1.0, 1.0, 0.1, 0.1]
    assert [stage.data.augment for stage in stages] == ["flip", "standard", "standard", "standard"]
    assert [stage.optim.schedule for stage in stages] == ["polynomial", "cosine", "cosine", "cosine"]
    assert [stage.optim.warmup_steps for stage in stages] == [None, None, 3, None]  # a new course has none
    assert [config.begins_course(stage) for stage in loaded.stage] == [False, True, True, True]


def test_tables_survive_the_file_the_checkpoint_and_the_command_line(tmp_path: Path) -> None:
    whole = WHOLE + '[[table]]\nname = "people"\nhead.s = 32\n[[table]]\nname = "scenes"\nbatch_share = 2\n'
    loaded = load(tmp_path, whole)
    assert load(tmp_path, config.to_toml(loaded)) == loaded
    assert config.from_dict(json.loads(json.dumps(config.to_dict(loaded)))) == loaded
    words = [word for name in TABLES for word in (f"--{name}", config.shown(name, config.get(loaded, name)))]
    bare = load(tmp_path, 'epochs = 10\nfrozen = ["stem.*"]', config.parse_arguments(words))
    assert bare == loaded
    without = load(tmp_path, whole, {"stage": "[]", "optim.groups": "{}", "table": "[]"})
    assert without == load(tmp_path, WHOLE.split("[optim]")[0])


def test_differences_name_tables_too(tmp_path: Path) -> None:
    loaded = load(tmp_path, WHOLE)
    other = load(
        tmp_path, WHOLE, {"stage": "[{from_epoch = 2, head.m = 0.2}]", "optim.groups": None, "optim.lr": "0.2"}
    )
    assert config.differences(loaded, loaded) == []
    assert [line.partition(" (was ")[0] for line in config.differences(loaded, other)] == [
        "optim.lr = 0.2",
        "optim.groups = none",
        "stage = [{ from_epoch = 2.0, head.m = 0.2 }]",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[stage]\nfrom_step = 3", "stage is an array of tables: write [[stage]] above each"),
        ("stage = 3", "stage is an array of tables"),
        ("stage = [3]", "stage 1 = 3 is not a table"),
        ("[[stages]]\nfrom_step = 3", "there is no key stages; did you mean stage?"),
        ("[[stage]]", "stage 1 is empty"),
        ("[[stage]]\nfrom_step = 3", "stage 1 changes nothing"),
        ("[[stage]]\nhead.m = 0.3", "stage 1 gives no beginning; give from_step or from_epoch"),
        ("[[stage]]\nfrom_step = 3\nfrom_epoch = 1\nhead.m = 0.3", "stage 1 gives from_step and from_epoch"),
        ("[[stage]]\nfrom_step = 0\nhead.m = 0.3", "stage 1: from_step = 0 is out of range; it takes an integer"),
        ("[[stage]]\nfrom_epoch = -1\nhead.m = 0.3", "stage 1: from_epoch = -1.0 is out of range"),
        ("[[stage]]\nfrom_step = 2.5\nhead.m = 0.3", "stage 1: from_step = 2.5 is a number; it takes an integer"),
        ("[[stage]]\nfrom_epoch = 20\nhead.m = 0.3", "where the run is over (epochs = 20)"),
        ("steps = 9\n[[stage]]\nfrom_step = 9\nhead.m = 0.3", "where the run is over (steps = 9)"),
        ("[[stage]]\nfrom_step = 5\nhead.m = 0.3\n[[stage]]\nfrom_step = 5\nhead.s = 9.0", "stage 2 begins at from_"),
        ('[[stage]]\nfrom_epoch = 3\nhead.margin = "cosface"', "no key head.margin; a stage cannot change it"),
        ("[[stage]]\nfrom_epoch = 3\ndata.batch_size = 8", "no key data.batch_size; a stage cannot change it"),
        ("[[stage]]\nfrom_epoch = 3\nlr = 0.1", "stage 1: there is no key lr; did you mean optim.lr?"),
        ("[[stage]]\nfrom_epoch = 3\nhead.sampel_rate = 0.1", "did you mean head.sample_rate?"),
        ("[[stage]]\nfrom_epoch = 3\nhead.m1 = 0.1", "stage 1: head.m1 is no key of the margin arcface"),
        ('[[stage]]\nfrom_epoch = 3\nhead.m = "x"', 'stage 1: head.m = "x" is a string; it takes a number at least 0'),
        ("[[stage]]\nfrom_epoch = 3\nhead = 3", "stage 1: head is a section, not a value"),
        ("[[stage]]\nfrom_epoch = 3\nfrozen = 3", "stage 1: frozen.weights = 3 is an integer; it takes a list of"),
        ("[[stage]]\nfrom_epoch = 3\nhead.sample_rate = 2", "stage 1: head.sample_rate = 2.0 is out of range"),
        ("[[stage]]\nfrom_epoch = 3\noptim.milestones = [3, 2]", "stage 1: optim.milestones must rise"),
        (
            '[head]\nmargin = "sphereface"\n[[stage]]\nfrom_epoch = 3\nhead.m = 0.5',
            "stage 1: [head] margin sphereface: ",
        ),
        (
            "[[stage]]\nfrom_epoch = 3\noptim.warmup_epochs = 1\noptim.warmup_steps = 1",
            "stage 1: optim.warmup_epochs and optim.warmup_steps are both given",
        ),
        ('[parallel]\ncomm_hook = "powersgd"\n[[stage]]\nfrom_epoch = 3\nfrozen = ["*"]', "no stage can change frozen"),
        ('averaging = "diloco"\n[[stage]]\nfrom_epoch = 3\nfrozen = ["*"]', "no stage can change frozen"),
        ("[optim]\ngroups = 3", "optim.groups takes tables under names"),
        ("[[optim.groups]]\nlr_scale = 3", "optim.groups takes tables under names"),
        ('[optim.group]\n"*.x" = {lr_scale = 1}', "there is no key optim.group; did you mean optim.groups?"),
        ('[optim.groups]\n"*" = 3', 'optim.groups."*" = 3 is not a table'),
        ('[optim.groups]\n"*" = {}', 'optim.groups."*" is empty'),
        ('[optim.groups]\n"*" = {lr = 3}', 'optim.groups."*": there is no key lr; it is lr_scale here'),
        ('[optim.groups]\n"*" = {lr_scal = 3}', "there is no key lr_scal; did you mean lr_scale?"),
        ('[optim.groups]\n"*" = {lr_scale = 0}', 'optim.groups."*": lr_scale = 0.0 is out of range'),
        ('[optim.groups]\n"*" = {frozen = 1}', "frozen = 1 is an integer; it takes true or false"),
        ("[optim.groups]\nblocks.0 = {lr_scale = 3}", 'there is no table 0; quote a name with dots: "blocks.0"'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["--stage.head.m", "--optim.groups.x.lr_scale", "--optim.groups.lr_scale"])
def test_one_table_s_key_is_not_for_the_command_line(word: str) -> None:
    with pytest.raises(UsageError, match=r"the command line: there is no key .* stands in the file, or whole after --"):
        config.parse_arguments([word, "3"])


@pytest.mark.parametrize(("name", "text"), [("stage", "from_step=3"), ("stage", "3"), ("optim.groups", "[{]")])
def test_text_that_is_no_table_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        config.load(None, {name: text})


names = st.text(max_size=6)
numbers = st.floats(min_value=1e-6, max_value=1e6)
group = st.fixed_dictionaries({}, optional={"lr_scale": numbers, "weight_decay": numbers, "frozen": st.booleans()})


@given(st.dictionaries(names, group.filter(bool), max_size=4), st.lists(st.lists(names, max_size=3), max_size=3))
def test_any_tables_survive_the_file(groups: dict[str, dict[str, Any]], frozen: list[list[str]]) -> None:
    stages = [{"from_step": 5 * number, "frozen": each} for number, each in enumerate(frozen, start=1)]
    loaded = config.load(None, {"optim.groups": groups, "stage": stages})
    assert [table.name for table in loaded.optim.groups] == list(groups)
    try:
        text = config.to_toml(loaded)
        text.encode()
    except UnicodeEncodeError:
        return
    assert config.from_dict(tomllib.loads(text)) == loaded


def test_the_keys_of_a_stage_are_keys_of_the_run() -> None:
    changeable = set(TABLES["stage"].keys) - {"from_step", "from_epoch"}
    assert changeable == {name for name, entry in KEYS.items() if entry.in_stages}
    margins = {f"head.{name}" for names in config.margin_keys().values() for name in names}
    assert margins < changeable
    text = config.describe()
    assert all(name in text for name in (*TABLES["optim.groups"].keys, *changeable, "[[stage]]", "[optim.groups]"))
