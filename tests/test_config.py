"""The configuration: every key, every way to get one wrong, and its own file format."""

import contextlib
import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plsc import config, losses
from plsc.config import KEYS, Config, KeepConfig
from plsc.errors import UsageError
from plsc.optim.backbone_optimizers import BACKBONE_OPTIMIZERS, HYPERPARAMETERS
from plsc.toml_keys import Key, toml_value

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def other_value(entry: Key) -> Any:
    """A value of the key's type that is not its default and within its limits."""
    if entry.name == "backbone":
        return "mobilefacenet"
    if entry.name == "head.exponentials_memory":
        return "1.5 GiB"
    if entry.name in ("head.m", "head.m1", "head.norm_high"):  # their margins bound them
        return 120.0 if entry.name == "head.norm_high" else 1.5
    if entry.name in ("data.image_size", "data.mean", "data.std"):  # [data] bounds them together
        return {"data.image_size": (64, 32), "data.mean": 120.5, "data.std": (58.395, 57.12, 57.375)}[entry.name]
    if entry.choices and entry.kind is str:
        value: Any = next(choice for choice in entry.choices if choice != entry.default)
    elif entry.kind is bool:
        value = not entry.default
    elif entry.kind is str:
        value = 'a "quoted" \\ näme\x7f'
    elif entry.kind is int:
        value = 8
    else:
        value = 0.625
    if entry.is_list:
        return (value, 0.75) if entry.kind is float else (value,)
    return value


def wrong_type(entry: Key) -> Any:
    return 3 if entry.kind in (str, bool) else "three"


def margin_of(entry: Key) -> str:
    """A margin that takes this key of [head], so that nothing else is wrong."""
    name = entry.name.rpartition(".")[2]
    return next((margin for margin, takes in config.margin_keys().items() if name in takes), "arcface")


def optimizer_of(entry: Key) -> dict[str, str]:
    """An optimizer that reads this key of [optim], where the default one does not."""
    if entry.name == "optim.state_dtype":
        return {"optim.name": "adamw"}
    section, _, name = entry.name.rpartition(".")
    readers = [reader for reader, names in HYPERPARAMETERS.items() if section == "optim" and name in names]
    return {"optim.name": readers[0]} if readers else {}


def test_defaults_are_a_configuration() -> None:
    loaded = config.load()
    assert loaded == dataclasses.replace(Config(), epochs=20)
    assert config.load(None, {"steps": 7}).epochs is None


def of_features(recipe: Path) -> list[pytest.MarkDecorator]:
    """The marks of the rare features that a recipe has."""
    sections = set(tomllib.loads(recipe.read_text())) - {field.name for field in dataclasses.fields(Config)}
    return [pytest.mark.feature(name) for name in sorted(sections)]


@pytest.mark.parametrize("recipe", [pytest.param(each, id=each.stem, marks=of_features(each)) for each in RECIPES])
def test_recipe_loads(recipe: Path) -> None:
    assert config.load(recipe).data.train


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.stem.startswith(("ms1mv3", "glint360k", "webface"))], ids=str
)
def test_recipes_for_gpus_multiply_the_class_table_on_their_matrix_units(recipe: Path) -> None:
    from plsc.parallel import Mesh
    from plsc.train.tables import make_head

    head = make_head(config.load(recipe), 10, Mesh(0, 1, 0, torch.device("meta")))
    assert head.weight.dtype == torch.bfloat16 or head.fp32_precision == "tf32"


def groups_of(entry: Key) -> dict[str, str]:
    """What a key goes with: head groups, tables in host memory, a file for a journal, classes that come, an old run."""
    if entry.section == "compatible":
        return {} if entry.name == "compatible.with" else {"compatible.with": "runs/old"}
    if entry.name == "journal.enabled":
        return {"head.placement": "mmap:table"}
    if entry.name in ("dynamic.admit_after", "dynamic.expire_after"):
        return {"dynamic.max_classes": "9"}
    if entry.name == "asynchronous.mode":
        return {"head_ranks": "1", "head.placement": "host"}
    needs_groups = entry.name in ("replicas.staleness", "replicas.averaging_period")
    groups = {"head_ranks": "1", "head.placement": "host", "replicas.averaging_period": "9"}
    return groups if needs_groups else {}


def strategy_of(entry: Key) -> dict[str, str]:
    """A strategy that has the key, and a backbone that can be split."""
    if entry.name in ("parallel.pp", "parallel.pp_micro_batches"):
        pipeline = {"backbone": "vit_base", "data.batch_size": 256}
        return pipeline if entry.name == "parallel.pp" else {**pipeline, "parallel.pp": 2}
    if entry.name in ("parallel.tp", "fp8.enabled"):
        return {"backbone": "vit_tiny"}
    if entry.name == "compile_mode":
        return {"compile": True}
    strategies = {"parallel.shard_ranks": "hsdp", "parallel.offload": "fsdp"}
    return {"parallel.strategy": strategies[entry.name]} if entry.name in strategies else {}


@pytest.mark.parametrize("entry", KEYS.values(), ids=lambda entry: entry.name)
def test_each_key_from_file_and_command_line(entry: Key, tmp_path: Path) -> None:
    value = other_value(entry)
    extra = (
        {}
        if entry.name == "head.margin"
        else {"head.margin": margin_of(entry), **optimizer_of(entry), **groups_of(entry), **strategy_of(entry)}
    )
    if entry.name == "head.margin":
        value = "softmax"
    if entry.name == "head.placement":
        value = 'mmap:a "quoted" \\ näme'
    is_numbers = isinstance(value, tuple) and entry.kind in (int, float)
    text = ",".join(map(repr, value)) if is_numbers else value
    typed = toml_value(value) if isinstance(value, tuple | bool | str) and not is_numbers else str(text)
    from_line = config.load(None, {**extra, entry.name: typed})
    assert config.get(from_line, entry.name) == value
    written = write(tmp_path, config.to_toml(from_line))
    assert config.load(written) == from_line
    assert config.from_dict(config.to_dict(from_line)) == from_line


@pytest.mark.parametrize("entry", KEYS.values(), ids=lambda entry: entry.name)
def test_each_key_refuses_another_type(entry: Key, tmp_path: Path) -> None:
    section, _, last = entry.name.rpartition(".")
    value = toml_value(wrong_type(entry))
    path = write(tmp_path, (f"[{section}]\n" if section else "") + f"{last} = {value}\n")
    with pytest.raises(UsageError) as caught:
        config.load(path)
    message = str(caught.value)
    assert entry.name in message
    assert value in message
    assert entry.expected in message
    with pytest.raises(UsageError, match=entry.name):
        config.load(path, {entry.name: "[[nonsense"}) if entry.kind is not str else config.load(path)


@pytest.mark.parametrize("entry", [e for e in KEYS.values() if e.kind is float], ids=lambda e: e.name)
@pytest.mark.parametrize("text", ["nan", "inf", "-1e9"])
def test_numbers_must_be_finite_and_in_range(entry: Key, text: str) -> None:
    with pytest.raises(UsageError, match=f"{entry.name} .*it takes a"):
        config.load(None, {entry.name: f"[{text}]" if entry.is_list else text})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "there is no key epoch; did you mean epochs?"),
        ("[optim]\nlearning_rate = 0.1", "no key optim.learning_rate; did you mean optim.lr?"),
        ("[optim]\nwarmup_epoch = 1", "is optim.warmup_epochs here"),
        ("batch_size = 3", "did you mean data.batch_size or eval.batch_size?"),
        ("[optim]\nleraning_rate = 0.1", "no key optim.leraning_rate; did you mean optim.lr?"),
        ("[optim]\nwarmup = 1", "did you mean optim.warmup_epochs or optim.warmup_steps?"),
        ("[optim]\nzzzz = 1", "plsc train --list-keys optim lists those of [optim]"),
        ("optim_lr = 1", "did you mean optim.lr?"),
        ("[optm]\nlr = 1", "did you mean [optim]?"),
        ("[checkpoint.keep]\nlats = 1", "did you mean checkpoint.keep.last?"),
        ("lr = 3", "did you mean optim.lr?"),
        ("[optimizer]\nlr = 3", "optimizer; did you mean [optim]?"),
        ("[heads]\n", "heads; did you mean [head]?"),
        ("zzzz = 1", "plsc train --list-keys"),
        ("data = 3", "data is a section"),
        ("data.train.x = 3", "data.train = {'x': 3} is a dict"),
        ("epochs = 3\nsteps = 4", "epochs and steps are both given"),
        ("[optim]\nwarmup_epochs = 3\nwarmup_steps = 4", "both given"),
        ("epochs = 0", "epochs = 0 is out of range; it takes an integer at least 1"),
        ("epochs = true", "epochs = true is a boolean"),
        ("epochs = 3.0", "epochs = 3.0 is a number; it takes an integer"),
        ('backbone = "iresnet51"', "did you mean iresnet50?"),
        ('backbone = "zzz"', "timm:NAME"),
        ('precision = "bf 16"', "did you mean bf16?"),
        ('[head]\nmargin = "arc_face"', "did you mean arcface?"),
        ("[head]\nm1 = 1.0", "head.m1 is no key of the margin arcface, which takes s, gradient, m"),
        ("[head]\nsample_rate = -0.1", "at least 0 and at most 1"),
        ("[optim]\nbetas = [0.9]", "it takes two"),
        ("[optim]\nmilestones = [3, 2]", "must rise"),
        ("[data]\nbatch_size = 1", "give 2 or more"),
        ("[optim]\nbetas = 0.9", "it takes a list of numbers"),
        (
            "[optim]\nbetas = [0.8, 0.99]",
            "optim.betas = [0.8, 0.99] has no effect: neither sgd nor the head's sgd reads",
        ),
        ('[optim]\nname = "adamw"\ntrust_coefficient = 0.1', "leave it out, or take lars"),
        ('[optim]\nname = "adamw"\nmomentum = 0.8', "leave it out, or take sgd or lars or muon"),
        ('[optim]\nname = "lion"\nhead = "sgd"\neps = 1e-3', "neither lion nor the head's sgd reads it"),
        ("[eval]\nsets = [1]", "it takes a list of strings"),
        ("epochs = ", "is not TOML"),
        ("epochs = 1\nepochs = 2", "is not TOML"),
        ('[data]\ntrain = "C:\\Users\\me"', "; write 'C:\\Users\\me' in single quotes, or double each backslash"),
        ('[eval]\nsets = ["D:\\Data"]', "; write 'D:\\Data' in single quotes"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        config.load(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_one_of_the_two_optimizers_reads_is_taken(tmp_path: Path) -> None:
    for text in (
        'name = "adamw"\nhead = "sgd"\nmomentum = 0.8',
        'head = "adamw"\nbetas = [0.8, 0.99]',
        'name = "adamw"\nmomentum = 0.9\ntrust_coefficient = 0.001',  # the defaults
    ):
        assert config.load(write(tmp_path, f"[optim]\n{text}\n"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        config.load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot read"):
        config.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text; name a TOML file"):
        config.load(tmp_path / "binary.toml")


def test_a_shipped_configuration_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.shipped() == [path.stem for path in RECIPES]
    assert config.load("fine_tune") == config.load("fine_tune.toml") == config.load(config.SHIPPED / "fine_tune.toml")
    with pytest.raises(
        UsageError, match=r"mine\.toml does not exist.*shipped configuration: avatars_compatible, avatars_quickstart"
    ):
        config.load("mine.toml")
    (tmp_path / "fine_tune.toml").write_text("seed = 5")  # a file of the user's comes first
    assert config.load("fine_tune.toml").seed == 5


def test_the_command_line_takes_the_place_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "epochs = 3\n[optim]\nlr = 0.3\nwarmup_epochs = 2\n")
    loaded = config.load(path, {"steps": "10", "optim.warmup_steps": "4", "data.train": "x,y"})
    assert (loaded.epochs, loaded.steps) == (None, 10)
    assert (loaded.optim.warmup_epochs, loaded.optim.warmup_steps, loaded.optim.lr) == (None, 4, 0.3)
    assert loaded.data.train == "x,y"
    with pytest.raises(UsageError, match="both given"):
        config.load(path, {"epochs": "1", "steps": "2"})


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("[checkpoint]\nkeep = 5", KeepConfig(last=5)),
        ("checkpoint.keep = 5", KeepConfig(last=5)),
        ("[checkpoint]\nkeep = { best = 2 }", KeepConfig(best=2)),
        ("[checkpoint.keep]\nlast = 3\nevery_hours = 12\nbest = 1", KeepConfig(3, 12.0, 1)),
    ],
)
def test_a_number_in_place_of_a_keep_policy_keeps_the_newest(text: str, keep: KeepConfig, tmp_path: Path) -> None:
    loaded = config.load(write(tmp_path, text))
    assert loaded.checkpoint.keep == keep
    assert config.from_dict(config.to_dict(loaded)) == loaded == config.load(write(tmp_path, config.to_toml(loaded)))
    given = config.load(write(tmp_path, text), config.parse_arguments(["--checkpoint.keep", "7"]))
    assert given.checkpoint.keep == dataclasses.replace(keep, last=7)


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("a.bin,b c/", ("a.bin", "b c/")),
        ('["a.bin", "b,c"]', ("a.bin", "b,c")),
        ("[]", ()),
        ("", ()),
    ],
)
def test_lists_on_the_command_line(text: str, sets: tuple[str, ...]) -> None:
    assert config.load(None, {"eval.sets": text}).eval.sets == sets


def test_arguments() -> None:
    words = ["--optim.lr", "0.2", "--epochs=3", "--data.batch-size", "8", "--optim.weight_decay", "-1"]
    assert config.parse_arguments(words) == {
        "optim.lr": "0.2",
        "epochs": "3",
        "data.batch_size": "8",
        "optim.weight_decay": "-1",
    }
    for words, message in [
        (["--lrr", "1"], "did you mean optim.lr"),
        (["--epochs"], "needs a value"),
        (["--epochs", "--seed", "1"], "needs a value"),
        (["stray"], "belongs to no key"),
        (["--seed", "1", "--seed", "2"], "given twice"),
    ]:
        with pytest.raises(UsageError, match=message):
            config.parse_arguments(words)


def test_every_margin_is_public_and_its_parameters_are_keys_of_head() -> None:
    import plsc
    from plsc.losses import margins

    assert sorted(config.margin_keys()) == sorted(name.lower() for name in margins.__all__)
    assert all(hasattr(plsc, name) and hasattr(plsc.losses, name) for name in margins.__all__)
    keys = {field.name for field in dataclasses.fields(config.HeadConfig)}
    assert all(set(takes) <= keys for takes in config.margin_keys().values())


def test_every_key_is_listed_with_its_meaning() -> None:
    text = config.describe()
    one_line = " ".join(text.split())
    for name, entry in KEYS.items():
        assert f"{name} " in text
        assert entry.doc in one_line


@pytest.mark.parametrize("entry", KEYS.values(), ids=lambda entry: entry.name)
def test_every_meaning_is_a_sentence_and_names_the_default_of_an_unset_key(entry: Key) -> None:
    start, _, rest = entry.doc.partition(": ")
    names = {*config.margin_keys(), *BACKBONE_OPTIMIZERS, "polynomial", "cosine", "step", "powersgd", "dgc"}
    names |= {"every_k", "budget", "post_local_sgd", "hierarchical", "diloco", "asynchronous", "fsdp", "hsdp"}
    sentence = rest if set(start.split(", ")) <= names else entry.doc
    assert entry.doc.endswith(".")
    assert entry.doc.count("; unset: ") == (entry.default is None and entry.name != "steps")
    assert sentence[0].isupper() or set(start.split(", ")) <= names
    fields = [field for kind in losses.MARGINS.values() for field in dataclasses.fields(kind)]
    defaults = {field.default for field in fields if f"head.{field.name}" == entry.name}
    assert all(str(default).lower().removesuffix(".0") in entry.doc.lower() for default in defaults)


@given(st.text())
def test_any_text_survives_the_file(text: str) -> None:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return
    written = config.to_toml(dataclasses.replace(Config(), init_weights=encoded.decode()))
    assert tomllib.loads(written)["init_weights"] == text


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_any_number_survives_the_file(number: float) -> None:
    assert math.isclose(config.load(None, {"optim.lr": repr(number)}).optim.lr, number, rel_tol=0)


@given(st.lists(st.text(max_size=8), max_size=4))
def test_no_command_line_breaks_the_parser(words: list[str]) -> None:
    with contextlib.suppress(UsageError):
        config.load(None, config.parse_arguments(words))


@pytest.mark.parametrize(
    ("former", "name", "text"),
    [
        ("data.turned_classes", "data.rotation_classes", "true"),
        ("turned_views", "rotation_tta", "true"),
        ("ema", "ema_decay", "0.5"),
        ("optim.final", "optim.min_lr_ratio", "0.5"),
    ],
)
def test_a_renamed_key_is_read_by_its_former_name_with_a_warning(
    tmp_path: Path, former: str, name: str, text: str
) -> None:
    section, _, last = former.rpartition(".")
    path = write(tmp_path, (f"[{section}]\n" if section else "") + f"{last} = {text}\n")
    with pytest.warns(FutureWarning, match=f"{former} is now called {name}"):
        assert config.get(config.load(path), name) == json.loads(text)
    with pytest.warns(FutureWarning, match=f"{former} is now called {name}"):
        overrides = config.parse_arguments([f"--{former}", text])
    assert overrides == {name: text}
    assert f"\n{last} = " not in config.to_toml(config.load(None, overrides))
    with path.open("a") as file:
        file.write(f"{name.rpartition('.')[2]} = {text}\n")
    with pytest.warns(FutureWarning), pytest.raises(UsageError, match=f"{name} is given twice"):
        config.load(path)


@pytest.mark.parametrize("text", ["64", "[64]", "[64, 64]", "64, 64"])
def test_a_square_is_one_number_however_it_is_written(text: str) -> None:
    contract = config.load(None, {"data.image_size": text}).data.preprocessing
    assert (contract.image_size, contract.shape) == (64, (3, 64, 64))


def test_an_image_size_is_height_and_width(tmp_path: Path) -> None:
    path = write(tmp_path, "[data]\nimage_size = [64, 32]\nmean = [123.675, 116.28, 103.53]\nstd = 58\n")
    contract = config.load(path).data.preprocessing
    assert (contract.shape, contract.mean, contract.std) == ((3, 64, 32), (123.675, 116.28, 103.53), 58.0)
    assert contract.interpolation == "bilinear"


def test_what_is_not_given_of_the_contract_is_as_ever() -> None:
    contract = config.Config().data.preprocessing
    assert (contract.image_size, contract.mean, contract.std, contract.interpolation) == (112, 127.5, 127.5, "bilinear")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"data.image_size": "[64, 32, 48]"}, r"image_size .*one number of pixels, or \[height, width\]"),
        ({"data.image_size": "[]"}, "image_size"),
        ({"data.image_size": "[64, 8]"}, "data.image_size .*at least 16"),
        ({"data.mean": "[1.0, 2.0]"}, "mean .*of red, green and blue"),
        ({"data.mean": "[0.485, 0.456, 0.406]"}, r"0 to 1; of pixels 0 to 255 it is \[123.675, 116.28, 103.53\]"),
        ({"data.std": "[0.229, 0.224, 0.225]"}, r"0 to 1; of pixels 0 to 255 it is \[58.395, 57.12, 57.375\]"),
        ({"data.std": "0"}, "data.std"),
        ({"data.interpolation": "nearest"}, "data.interpolation .*bilinear, bicubic"),
        ({"data.image_size": "[64, 32]", "data.rotation_classes": "true"}, "data.rotation_classes .*no square"),
        ({"data.image_size": "[64, 32]", "rotation_tta": "true"}, "rotation_tta .*no square"),
    ],
)
def test_what_is_no_contract_is_refused_by_name(given: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        config.load(None, given)
