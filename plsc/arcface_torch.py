"""Names of insightface's arcface_torch and their counterparts here: config keys, backbones, files, commands.

Error messages answer a name of arcface_torch with its counterpart, and docs/arcface_torch.md holds the same tables; a
test compares the two. A config of arcface_torch (a Python module) is read without being run, and becomes TOML.
"""

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from plsc.errors import DataError, UsageError
from plsc.text_files import read_text
from plsc.toml_keys import toml_value

PAGE = "docs/arcface_torch.md"
_LARGEST = 1 << 16  # bytes of a config; theirs have 1,000
_LONGEST_VALUE = 1 << 12  # characters of a value, as Python writes it
_LARGEST_INTEGER = 1 << 63


class Counterpart(NamedTuple):
    """The counterpart of a name of arcface_torch: ``ours``, empty where there is none, and a remark or the reason."""

    ours: str
    note: str = ""


def _table(rows: Mapping[str, str | tuple[str, str]]) -> Mapping[str, Counterpart]:
    return {name: Counterpart(*((row,) if isinstance(row, str) else row)) for name, row in rows.items()}


_WANDB = {
    "using_wandb": ('log.to = ["tensorboard", "wandb"]', "offline, unless WANDB_MODE=online is in the environment"),
    "wandb_key": ("", "WANDB_API_KEY in the environment, or wandb login"),
    "wandb_entity": ("", "WANDB_ENTITY in the environment"),
    "wandb_project": ("", "WANDB_PROJECT in the environment"),
    "wandb_log_all": ("", "the first rank alone logs"),
    "wandb_resume": ("--resume auto", "an option of plsc train, not a key; the run goes on in W&B too"),
    "suffix_run_name": ("", "WANDB_NAME in the environment, else the run directory's name"),
    "notes": ("", "WANDB_NOTES in the environment"),
    "save_artifacts": ("", "RUN/model.safetensors and RUN/checkpoints hold the weights"),
}

KEYS = _table(
    {
        "network": ("backbone", '"r50" is "iresnet50", "mbf" "mobilefacenet", "vit_b" "vit_base"'),
        "embedding_size": "embedding_dim",
        "fp16": ('precision = "fp16"', '"auto", the default, takes bf16 where it can; False is "fp32"'),
        "rec": ("data.train", "the folder with train.rec and train.idx, or train.rec itself"),
        "num_classes": ("", "counted from the data"),
        "num_image": ("", "counted from the data"),
        "batch_size": ("data.batch_size", "per rank, as there"),
        "num_workers": "data.workers",
        "margin_list": (
            'head.margin = "combined"',
            'with head.m1, m2 and m3; (1, m, 0) is "arcface" and (1, 0, m) "cosface", both with head.m',
        ),
        "loss": ("head.margin", '"arcface" or "cosface"'),
        "sample_rate": "head.sample_rate",
        "interclass_filtering_threshold": (
            "",
            "against wrong labels there are sub-centres (head.centers = 3) and sampling (head.sample_rate)",
        ),
        "optimizer": ("optim.name", '"sgd" or "adamw", which the head takes as well'),
        "lr": "optim.lr",
        "momentum": "optim.momentum",
        "weight_decay": "optim.weight_decay",
        "num_epoch": "epochs",
        "warmup_epoch": "optim.warmup_epochs",
        "gradient_acc": ("optim.accumulate", "a step here is one update; there the schedule counts micro-batches"),
        "seed": "seed",
        "val_targets": ("eval.sets", 'paths, as in ["ms1m/lfw.bin"]; the names of the files next to .rec'),
        "verbose": "eval.every_steps",
        "frequent": "log.every_steps",
        "output": ("--out RUN", "an option of plsc train, not a key"),
        "resume": ("--resume auto", "an option of plsc train, not a key; any number of ranks goes on"),
        "save_all_states": ("checkpoint.every_steps", "checkpoints always hold everything"),
        "dali": ("", "images are decoded by data.workers processes per rank, whose order needs no shuffled .rec"),
        "dali_aug": ('data.augment = "standard"', "a set of augmentations of its own"),
        **_WANDB,
        "local_rank": ("--nproc N", "an option of plsc train; under torchrun neither is needed"),
    }
)
BACKBONES = _table(
    {
        "r18": "iresnet18",
        "r34": "iresnet34",
        "r50": "iresnet50",
        "r100": "iresnet100",
        "r200": "iresnet200",
        "r2060": ("", "none of its recipes uses it"),
        "mbf": "mobilefacenet",
        "mbf_large": "mobilefacenet_large",
        "vit_t": ("vit_tiny", "with the rates of vit_t_dp005_mask0"),
        "vit_t_dp005_mask0": "vit_tiny",
        "vit_s": ("vit_small", "with the rates of vit_s_dp005_mask_0"),
        "vit_s_dp005_mask_0": "vit_small",
        "vit_b": ("vit_base", "with the rates of vit_b_dp005_mask_005"),
        "vit_b_dp005_mask_005": "vit_base",
        "vit_l_dp005_mask_005": "vit_large",
        "vit_h": ("", "its recipe has no published result; timm:NAME offers larger ViTs"),
    }
)
FILES = _table(
    {
        "configs/NAME.py": ("NAME.toml", "plsc train NAME.py --as-toml prints it as TOML"),
        "train.rec, train.idx, property": ("data.train", "the same files"),
        "lfw.bin, cfp_fp.bin, agedb_30.bin": ("eval.sets", "the same files"),
        "work_dirs/NAME": "runs/NAME",
        "training.log": "RUN/train.log",
        "tensorboard/": "RUN/tensorboard/",
        "model.pt, backbone.pth": (
            "RUN/model.safetensors",
            'init_weights = "model.pt" reads theirs; plsc export --format insightface writes it',
        ),
        "checkpoint_gpu_RANK.pt": (
            "RUN/checkpoints/step-XXXXXXXX/",
            "for any number of ranks; plsc table import reads the class rows of theirs, init_weights the backbone",
        ),
        "softmax_fc_gpu_RANK.pt, rank_RANK_softmax_weight.pt": (
            "table.safetensors",
            "plsc table import reads theirs, for head.init_rows; plsc table export --format arcface_torch writes them",
        ),
        "train.lst": ("", "plsc data convert FOLDER train.rec needs none"),
    }
)
COMMANDS = _table(
    {
        "python train_v2.py configs/NAME": "plsc train NAME.toml",
        "torchrun --nproc_per_node=8 train_v2.py configs/NAME": "plsc train NAME.toml --nproc 8",
        "torchrun --nnodes=2 --node_rank=0 --master_addr=IP … train_v2.py configs/NAME": (
            "plsc train NAME.toml --nproc 8 --nnodes 2 --node-rank 0 --master-addr IP",
            "or torchrun … --no-python plsc train NAME.toml",
        ),
        "python eval/verification.py": "plsc eval RUN --pairs lfw.bin",
        "python eval_ijbc.py, onnx_ijbc.py": "plsc eval RUN|model.onnx --ijb IJBC",
        "python torch2onnx.py model.pt": "plsc export RUN --format onnx --out model.onnx",
        "python inference.py": "plsc embed RUN --data FOLDER --out EMB",
        "python -m mxnet.tools.im2rec": "plsc data convert FOLDER train.rec",
        "python scripts/shuffle_rec.py": ("", "every epoch is permuted again, whatever the file's order"),
        "python flops.py": ("plsc plan NAME.toml", "memory and time of a step"),
    }
)


def key_hint(name: str) -> str | None:
    """Say what arcface_torch's config key ``name`` is here; None where it has no such key, or both have the same.

    A dotted name stands for its last part: ``optim.gradient_acc`` is as near to it as ``gradient_acc``.
    """
    name = name.rpartition(".")[2]
    counterpart = KEYS.get(name)
    if counterpart is None or counterpart.ours.rpartition(".")[2] == name:
        return None
    return _sentence(name, counterpart)


def backbone_hint(name: str) -> str | None:
    """Say what arcface_torch's backbone ``name`` is here; None where it has no such backbone."""
    return _sentence(name, BACKBONES[name]) if name in BACKBONES else None


def _sentence(name: str, counterpart: Counterpart) -> str:
    note = f" ({counterpart.note})" if counterpart.note else ""
    here = f"is {counterpart.ours} here" if counterpart.ours else "has no counterpart here"
    return f"arcface_torch's {name} {here}{note}"


def to_toml(path: Path) -> str:
    """Translate a config of arcface_torch to TOML; its code is parsed, never run.

    Read are assignments ``config.KEY = value`` of literals, and arithmetic on keys assigned before.

    Raises:
        UsageError: it cannot be read, or is no such config.
    """
    try:
        values, unread = _assignments(_parse(read_text(path, _LARGEST)))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a TOML configuration") from None
    except DataError as error:
        raise UsageError(f"{error}; name a TOML configuration") from None
    except (RecursionError, MemoryError):  # the parser's own words for what lies too deep in each other
        raise UsageError(f"{path} is nested too deeply for a config of arcface_torch; write the TOML by hand") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is no Python file: {error}; name a TOML configuration") from None
    if not (values or unread):
        raise UsageError(
            f"{path} assigns no config.KEY, so it is no config of arcface_torch; name a TOML configuration"
        )
    try:
        return _as_toml(path.stem, values, unread)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{path} has a value of an unexpected kind: {error}; write the TOML by hand, by {PAGE}"
        ) from None


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():  # about escapes in strings, with the config's own text
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _assignments(tree: ast.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of ``config.KEY``, and the text of those that are neither plain literals nor arithmetic on others."""
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            try:
                values[target.attr] = _value(node.value, values)
                unread.pop(target.attr, None)
            except (ValueError, TypeError, KeyError, ArithmeticError):
                values.pop(target.attr, None)
                unread[target.attr] = _text(node.value)
    return values, unread


_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _text(node: ast.expr) -> str:
    """The expression as a comment can hold it: one line of bounded length."""
    try:
        text = ast.unparse(node).replace("\n", " ")
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of too many digits"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Evaluate an expression, each operation of which has bounded operands and a bounded result.

    Raises:
        ValueError: it is too large, or no literal.
        TypeError, KeyError, ArithmeticError: it is no arithmetic on numbers and keys assigned before.
    """
    if isinstance(node, ast.Attribute):
        return values[node.attr]
    if isinstance(node, ast.BinOp):
        operands = _value(node.left, values), _value(node.right, values)
        if not all(isinstance(operand, int | float) for operand in operands):
            raise TypeError("arithmetic on numbers alone")
        return _bounded(_OPERATIONS[type(node.op)](*operands))
    return _bounded(ast.literal_eval(node))


def _bounded(value: Any) -> Any:
    """Return a value that TOML has as well, of integers of 64 bits and finite numbers; ValueError for any other."""
    parts = value if isinstance(value, list | tuple) else [value]
    for part in parts:
        if isinstance(part, int) and not -_LARGEST_INTEGER <= part < _LARGEST_INTEGER:
            raise ValueError("an integer has more than 64 bits")
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError("a number is not finite")
        if not isinstance(part, str | int | float | None):
            raise ValueError(f"it holds a {type(part).__name__}")
    if len(repr(value)) > _LONGEST_VALUE:
        raise ValueError(f"it has more than {_LONGEST_VALUE:,} characters")
    return value


def _as_toml(name: str, values: dict[str, Any], unread: dict[str, str]) -> str:
    """Arrange the values by our sections; what has no counterpart becomes a comment with the reason."""
    sections: dict[str, list[str]] = {"": [], "data": [], "head": [], "optim": [], "eval": [], "log": []}
    comments: list[str] = []
    # base.py of arcface_torch computes in fp32 and clips the backbone's gradient at 5, which no key of it sets.
    for key, value in ({"fp16": False} | values).items():
        entries = _entries(key, value, values)
        for section, line in entries:
            sections[section].append(line)
        if not entries:
            comments.append(f"# {key} = {value!r}: {_left_out(key)}")
    sections["optim"].append("clip_norm = 5.0  # train_v2.py has it in its code")
    comments += [f"# {key} = {text}: not read, set it by hand" for key, text in unread.items()]
    lines = [f"# {name}.py of arcface_torch, translated by plsc train --as-toml; what is left out follows at the end"]
    for section, entries_of in sections.items():
        lines += ["", f"[{section}]"] if section and entries_of else []
        lines += entries_of
    return "\n".join([*lines, "", *comments]) + "\n"


def _left_out(key: str) -> str:
    ours, note = KEYS.get(key, Counterpart("", "not one of arcface_torch's keys"))
    return f"{ours} ({note})" if ours and note else ours or note


# Keys whose values are taken as they are.
_PLAIN = {"embedding_size", "num_epoch", "seed", "rec", "batch_size", "num_workers", "optimizer", "lr", "momentum"}
_PLAIN |= {"weight_decay", "warmup_epoch", "gradient_acc", "verbose", "frequent"}


def _entries(key: str, value: Any, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(section, line) of our keys for one of theirs; empty where there is none."""
    if key == "warmup_epoch" and value is not None and value < 0:
        return [("optim", f"warmup_epochs = 0  # {value} there: no warm-up")]
    if key in _PLAIN and value is not None:
        section, _, name = KEYS[key].ours.rpartition(".")
        return [(section, f"{name} = {toml_value(value)}")]
    if key == "network" and BACKBONES.get(value, Counterpart("")).ours:
        return [("", f"backbone = {toml_value(BACKBONES[value].ours)}")]
    if key == "fp16":
        return [("", 'precision = "fp16"  # "bf16" needs no loss scaling' if value else 'precision = "fp32"')]
    if key == "margin_list":
        return [("head", line) for line in _margin(*value)]
    if key == "sample_rate":
        return [("head", f"sample_rate = {toml_value(float(value))}")]
    if key == "val_targets":
        folder = values.get("rec", "")
        return [("eval", f"sets = {toml_value([f'{folder}/{target}.bin' for target in value])}")]
    return []


def _margin(m1: float, m2: float, m3: float) -> list[str]:
    """Its CombinedMarginLoss has three branches: the angle's where m3 = 0, the cosine's alone where m3 > 0."""
    if m3 > 0:
        return ['margin = "cosface"', "s = 64.0", f"m = {toml_value(float(m3))}"]
    if m1 == 1:
        return ['margin = "arcface"', "s = 64.0", f"m = {toml_value(float(m2))}"]
    return ['margin = "combined"', "s = 64.0", f"m1 = {float(m1)}", f"m2 = {float(m2)}", f"m3 = {float(m3)}"]
