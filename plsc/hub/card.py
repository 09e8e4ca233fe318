"""The model card, README.md of a hub's repository: what was measured, as the reports have it, and what was given."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plsc.errors import DataError, UsageError
from plsc.evaluation.calibration import FORMAT as CALIBRATION_FORMAT
from plsc.evaluation.calibration import Calibration, read_calibration
from plsc.evaluation.report import groups_rows, groups_title, percent, results_rows
from plsc.files import read_json
from plsc.models import Backbone
from plsc.models.timm_export import EMBEDDINGS, TimmFolder
from plsc.progress import printable
from plsc.strict_toml import read_toml

# Of a run's config.toml: what says how the weights came about, without a path of the machine.
_TRAINING = (
    ("steps", "epochs", "precision", "sync_batchnorm", "ema_decay"),
    {
        "data": ("batch_size", "augment", "image_size"),
        "head": ("margin", "s", "m", "sample_rate", "centers"),
        "optim": ("name", "lr", "weight_decay", "schedule"),
    },
)
_METRICS = ("accuracy", "auc", "eer", "rank1", "rank5")
# What Markdown, the hub's HTML or its mathematics would take a meaning from, wherever it stands in a line …
_MARKUP = re.compile(
    r"[\\`*\[\]<>|~$@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|!(?=\[)|(?<=www)\.|&(?=#?\w+;)", re.I
)
# … and what would begin a list, a heading or a rule, up to the letter that does.
_BEGINNING = re.compile(r"\d{1,9}(?=[.)](?:\s|$))|(?=[#+=]|-(?!\d))")
_PATH = re.compile(r"(?<![\w:])(?:[A-Za-z]:\\|~?/)[^\s,;'\"]*[/\\]([^\s,;'\"/\\]+)")


@dataclass(frozen=True)
class Measurements:
    """Content of reports, by kind: evaluations and probes by the set's name, and calibrations."""

    evaluations: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    probes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    calibrations: list[Calibration] = field(default_factory=list)


@dataclass(frozen=True)
class CardFacts:
    """What the card is written from.

    Attributes:
        repository: ``ORG/NAME``.
        measurements: of :func:`read_measurements`.
        license: its identifier on the hub; None: not stated.
        data: what the weights were trained on, in the words of who pushes; None: the names that the run has.
        run: the run directory, for how it was trained; None: there is none.
    """

    repository: str
    measurements: Measurements = field(default_factory=Measurements)
    license: str | None = None
    data: str | None = None
    run: Path | None = None


def read_measurements(paths: Iterable[Path], contract_id: str) -> Measurements:
    """Read reports of ``plsc eval --json`` and ``--calibration``.

    Args:
        paths: the files.
        contract_id: of the model that is pushed; a report that says another is refused.

    Raises:
        UsageError: a report is of another model, or two are of one set.
        DataError: a file is no report.
    """
    found = Measurements()
    for path in paths:
        content = read_json(path)
        if not isinstance(content, dict):
            raise DataError(f"{path} is no report of plsc eval --json or --calibration")
        if content.get("format") == CALIBRATION_FORMAT:
            found.calibrations.append(read_calibration(path))
            _check_model(path, found.calibrations[-1].contract_id, contract_id)
            continue
        sets = content.get("sets")
        if not isinstance(sets, dict) or not all(isinstance(result, dict) for result in sets.values()):
            raise DataError(f"{path} is no report of plsc eval --json or --calibration")
        _check_model(path, content.get("contract_id"), contract_id)
        for name, result in sets.items():
            kind = found.probes if "probe" in result else found.evaluations
            short = public_name(name)
            if short in kind:
                raise UsageError(f"{path} is the second report of {short}; give one of each set")
            kind[short] = result
    return found


def _check_model(path: Path, found: Any, contract_id: str) -> None:
    if found is not None and str(found).partition("+")[0] != contract_id:
        raise UsageError(f"{path} was measured with other weights ({found}, not {contract_id}); evaluate these ones")


def public_name(name: str) -> str:
    """Return the name of a set or a file without the folders of the machine that it was on."""
    return Path(name).name if "/" in name or "\\" in name else name


def model_card(model: Backbone, contract_id: str, facts: CardFacts, timm: TimmFolder | None) -> str:
    """Return the card's text, with its front matter of YAML."""
    try:
        sections = [
            _front_matter(model, facts, timm),
            f"# {facts.repository}\n\n{_summary(model, contract_id)}",
            _use_section(model, facts.repository, timm),
            _measured(facts.measurements),
            _training(model, facts),
            _limits(facts),
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"a report lacks what a card needs ({error!r}); write it by plsc eval --json") from None
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(model: Backbone, facts: CardFacts, timm: TimmFolder | None) -> str:
    found = facts.measurements
    tags = ["plsc", "image-embeddings", *(["timm"] if timm else []), "onnx"]
    lines = [f"license: {_yaml(facts.license)}"] if facts.license else []
    lines += [f"library_name: {'timm' if timm else 'plsc'}", "pipeline_tag: image-feature-extraction", "tags:"]
    lines += [f"- {_yaml(tag)}" for tag in tags]
    results = [*_results(found.evaluations, _metrics), *_results(found.probes, _probe_metrics)]
    if results:
        name = facts.repository.rpartition("/")[2]
        lines += ["model-index:", f"- name: {_yaml(name)}", "  results:", *results]
    return "\n".join(["---", *lines, "---"])


def _results(sets: Mapping[str, Mapping[str, Any]], metrics: Any) -> list[str]:
    lines: list[str] = []
    for name, result in sets.items():
        values = {key: value for key, value in metrics(result).items() if value is not None}
        if values:
            lines += ["  - task:", "      type: image-feature-extraction", "    dataset:"]
            lines += [f"      name: {_yaml(name)}", f"      type: {_yaml(name)}", "    metrics:"]
            lines += [f"    - type: {_yaml(key)}\n      value: {_yaml(value)}" for key, value in values.items()]
    return lines


def _metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    retrieval = result["retrieval"]
    return {
        **{name: result[name] for name in _METRICS},
        **{f"tar@far={far}": value for far, value in result["tar@far"].items()},
        **{name: retrieval[name] for name in retrieval if name.startswith(("recall@", "map@", "r_precision"))},
    }


def _probe_metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{result['probe']} top-1": result["top1"], f"{result['probe']} top-5": result["top5"]}


def _yaml(value: Any) -> str:
    """A scalar of YAML, in one line: a text in JSON's quotes, a number that YAML 1.1 takes for one (1.0e-05)."""
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return printable(json.dumps(value, ensure_ascii=False))  # JSON leaves some ends of lines as they are


def _summary(model: Backbone, contract_id: str) -> str:
    return (
        f"`{model.name}`, trained by plsc: RGB images of {model.preprocessing.describe()} (of pixel values 0 to 255) "
        f"to embeddings of {model.embedding_dim:,} numbers, which are compared by their cosine. "
        f"Contract id of the embeddings: `{contract_id}`."
    )


def _use_section(model: Backbone, repository: str, timm: TimmFolder | None) -> str:
    height, width = model.preprocessing.shape[1:]
    parts = [
        "## Use",
        "With plsc, which resizes and normalises; of this model, its run and its exports alike:",
        f'```python\nimport plsc\n\nmodel = plsc.load_model("hf-hub:{repository}")\n'
        'embeddings = plsc.embed(model, "photos/")\n```',
    ]
    if timm is not None:
        what = (
            f"the embeddings: they differ from plsc's by at most {timm.max_abs_error:.1e} on random images, where the "
            f"largest value is {timm.max_abs_value:.2g}"
            if timm.returns == EMBEDDINGS
            else "the trunk's features, because this family's classifier cannot stand for the embedding layers; "
            "these are in embedding.safetensors"
        )
        parts += [
            f"With timm alone, whose model returns {what}:",
            f'```python\nimport timm\n\nmodel = timm.create_model("hf-hub:{repository}", pretrained=True).eval()\n'
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n```",
            "`num_classes=0` gives the trunk's features, another number a new classifier to train.",
        ]
    parts += [
        f"With onnxruntime: `model.onnx` takes `data`, float32 (B, 3, {height}, {width}) of (x - mean)/std, and "
        f"returns `embedding` (B, {model.embedding_dim}).",
        '```python\nimport onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")\n'
        '(embeddings,) = session.run(["embedding"], {"data": images})\n```',
    ]
    return "\n\n".join(parts)


def _measured(found: Measurements) -> str:
    parts = ["## Measured"]
    if found.evaluations:
        parts += ["By `plsc eval`, on sets that are named as they were:", _table(results_rows(found.evaluations))]
    for name, result in found.evaluations.items():
        if "by_group" in result:
            parts += [f"{_plain(groups_title(name, result['by_group']))}:", _table(groups_rows(result["by_group"]))]
    if found.probes:
        rows = [("probe of frozen embeddings", "method", "images", "top-1, %", "top-5, %")]
        for name, result in found.probes.items():
            images = f"{result['images']:,}"
            rows.append((name, result["probe"], images, percent(result["top1"]), percent(result["top5"])))
        parts.append(_table(rows))
    for calibration in found.calibrations:
        parts += _thresholds(calibration)
    return "\n\n".join(parts if len(parts) > 1 else [*parts, "No report of an evaluation was given."])


def _thresholds(calibration: Calibration) -> list[str]:
    sets = _plain(", ".join(public_name(name) for name in calibration.sets))
    rows = [("false-match rate", "threshold, cosine", "true-match rate, %", "different pairs that match")]
    for point in calibration.points:
        rows.append((f"{point.fmr:g}", f"{point.threshold:.4f}", percent(point.tmr), f"{point.impostors:,}"))
    pairs = f"{calibration.impostor_pairs:,} different and {calibration.genuine_pairs:,} same pairs"
    return ["### Thresholds", f"Measured on {sets}: {calibration.images:,} images, {pairs}.", _table(rows)]


def _plain(text: str) -> str:
    """``text``, which somebody gave, as Markdown shows it letter by letter, in one line."""
    line = _MARKUP.sub(r"\\\g<0>", printable(" ".join(text.split())))
    start = _BEGINNING.match(line)
    return line if start is None else f"{start[0]}\\{line[start.end() :]}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    escaped = [[_plain(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]])


def _training(model: Backbone, facts: CardFacts) -> str:
    config = _run_config(facts.run)
    names = facts.data or ", ".join(_data_names(config))
    parts = ["## Training", f"Data: {_plain(names) or 'not stated'}."]
    rows = [("key", "value"), *_settings(config)]
    if len(rows) > 1:
        parts.append(_table(rows))
    return "\n\n".join(parts)


def _run_config(run: Path | None) -> dict[str, Any]:
    path = None if run is None else run / "config.toml"
    return {} if path is None or not path.is_file() else read_toml(path)


def _data_names(config: Mapping[str, Any]) -> list[str]:
    sections = [config.get("data", {}), *(table.get("data", {}) for table in config.get("table", []))]
    found = [section["train"] for section in sections if isinstance(section, dict) and section.get("train")]
    return list(dict.fromkeys(public_name(str(name)) for name in found))


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    plain, sections = _TRAINING
    pairs = [(key, config.get(key)) for key in plain]
    pairs += [(f"{name}.{key}", config.get(name, {}).get(key)) for name, keys in sections.items() for key in keys]
    return [(key, _PATH.sub(r"\1", json.dumps(value))) for key, value in pairs if value is not None]


def _limits(facts: CardFacts) -> str:
    found = facts.measurements
    lines = ["## Limits", "Stated from what is known of this model, and no more:"]
    points = ["Embeddings may be compared with embeddings of the same contract id only."]
    if not found.calibrations:
        points.append("No threshold was calibrated: `plsc eval --calibration` measures one on your own images.")
    else:
        points.append("The thresholds hold for people like those that they were measured on.")
    if not (found.evaluations or found.probes):
        points.append("It was not evaluated here.")
    if not any("by_group" in result for result in found.evaluations.values()):
        points.append("Results by group of people were not measured.")
    points.append(f"Licence: {_plain(facts.license or '') or 'not stated'}.")
    return "\n\n".join([*lines, "\n".join(f"- {point}" for point in points)])
