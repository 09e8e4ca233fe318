"""Whether the data of a run that goes on is what it had: rows of the class table belong to names, not numbers."""

from pathlib import Path
from typing import Any

from plsc.data import ImageDataset
from plsc.errors import DataError, UsageError, quoted
from plsc.files import LARGEST_JSON, read_json
from plsc.train.checkpoint import listed_names
from plsc.train.checkpoint_reader import StoredCheckpoint

_BYTES_OF_NAME = 4096  # in a list of names, at most
_MEND = "bring that data back, or begin another run (another --out), with --init_weights RUN/model.safetensors"


def changed_data(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The entries of :func:`plsc.data.identity.samples` that differ; earlier versions stored three of them."""
    return [name for name, value in now.items() if before.get(name, value) != value]


def check_data(stored: StoredCheckpoint, dataset: ImageDataset, now: dict[str, Any]) -> None:
    """Refuse to go on from ``stored``, whose classes cannot come and go, where a row would be given to another class.

    Other names of pictures are taken where the classes' names say who is in them: a list may name files otherwise.
    Where these may be mere numbers, they say nothing.

    Args:
        stored: the checkpoint.
        dataset: the present data.
        now: its :func:`plsc.data.identity.samples`.

    Raises:
        UsageError: classes, labels, or the names that tell who is in a class, are others; or an earlier version kept
            the classes' names in a file that is gone.
    """
    before = stored.state["data"]
    changed = changed_data(before, now)
    file = listed_names(stored.path)
    if not changed and "names_sha256" not in before:
        if not file.exists():
            raise UsageError(
                f"{stored.path} is of an earlier version, which kept the names of classes in the run's {file.name} "
                f"alone: copy that to {file} to go on"
            )
        other = _other_class(file, dataset)
    elif "names_sha256" in changed:
        other = _other_class(file, dataset) or "classes have other names"
    else:
        other = ""
    for name in changed[:1]:
        if name in ("images", "classes"):
            other = f"{name} were {before[name]:,} and are {now[name]:,}"
        elif name == "labels_sha256":
            other = "labels are others"
    if not other and "keys_sha256" in changed and _may_be_numbers(dataset):
        other = "pictures have other names, and those of its classes may be mere numbers"
    if other:
        raise UsageError(f"data.train = {dataset.source} is not what the run began with: its {other}; {_MEND}")


def _other_class(file: Path, dataset: ImageDataset) -> str:
    """What has become of the first class whose name in the run's list is another; "" where there is none."""
    try:
        content = read_json(file, LARGEST_JSON + _BYTES_OF_NAME * dataset.num_classes)
    except DataError:
        return "" if not file.exists() else f"classes cannot be compared with {file}, which is damaged"
    names = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(names, list) or len(names) != dataset.num_classes:
        return f"classes are not those that {file} lists"
    for number, (was, is_now) in enumerate(zip(names, dataset.class_names, strict=True)):
        if was != str(is_now):
            return f"class {number:,} was {quoted(was)} and is {quoted(is_now)}"
    return ""


def _may_be_numbers(dataset: ImageDataset) -> bool:
    return any(str(name).rpartition("/")[2].isdecimal() for name in dataset.class_names)
