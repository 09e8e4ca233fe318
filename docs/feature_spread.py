"""Count the shipped files that name a rare feature outside its folder.

    python docs/feature_spread.py [--files]

A file names a feature by its section or keys, its classes, functions or modules, or its options in Python. Words of
docstrings count as well as code. Folders of ``plsc/features`` are found, and named nowhere; the registry of the
head's options (``plsc/head/options.py``) is counted.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each with the folder that is its own, or the files that are while it has none, and the words that name it.
FEATURES: dict[str, tuple[tuple[str, ...], str]] = {
    "averaging": (
        ("plsc/features/averaging",),
        r"averaging\.(name|period|start_step|group_)|[Mm]odel_?[Aa]veraging|AveragingConfig|AVERAGINGS|local_sgd|[Dd]i[Ll]o[Cc]o|"
        r"outer_(lr|momentum)|features.averaging|\"averaging\"",
    ),
    "asynchronous": (
        ("plsc/features/asynchronous",),
        r"asynchronous\.(mode|staleness|period)|Asynchronous[A-Z]|is_asynchronous|parallel\.asynchronous|[Cc]hange_?[Mm]ail|"
        r"[Tt]able_?[Cc]hanges|features.asynchronous|\"asynchronous\"",
    ),
    "frozen": (
        ("plsc/features/frozen",),
        r"frozen_(rows|names|keys|weights|parts|for_good|by_stage)|Frozen[A-Z]|frozen\.(weights|rows)|features.frozen|\"frozen\"|"
        r"trains_head_alone|\bfrozen = \"|\bfrozen: ",
    ),
    "compatible": (
        ("plsc/features/compatible",),
        r"compatible\.with|CompatibleConfig|InfluenceLoss|influence_loss|[Cc]lass_?[Cc]entres|open_centres|centres_count|"
        r"compatible_models|features.compatible|\"compatible\"",
    ),
    "fp8": (("plsc/features/fp8",), r"\bfp8\b|[Ff]loat8"),
    "journal": (("plsc/features/journal",), r"[Jj]ournal(?!_mode)|savepoint"),
    "replicas": (
        ("plsc/features/replicas",),
        r"averaging_period|Replica(Options|Averaging)|replicas\.staleness|average_bytes|features.replicas",
    ),
    "negative_filter": (
        ("plsc/features/negative_filter",),
        r"[Nn]egative_?[Ff]ilter|features.negative_filter",
    ),
    "labels": (
        ("plsc/features/labels",),
        r"[Mm]ulti_?[Ll]abel|LabelOptions|LabelsConfig|SeveralLabels|label_reduction|labels_per_step|features.labels|"
        r"\blabels\.(positives|reduction|per_step)",
    ),
    "tables": (
        ("plsc/features/tables",),
        r"\[\[table\]\]|[Ss]harded_?[Hh]eads|JoinedDataset|TableKeys|batch_share|config\.table\b|run\.table\b|features.tables",
    ),
    "dynamic": (
        ("plsc/features/dynamic",),
        r"[Dd]ynamic_?[Hh]ead|max_classes|admit_after|expire_after|KeyMap|key_map|DynamicConfig|[Nn]amed_?[Tt]able|"
        r"[Rr]emoved_?[Rr]ows|insert_first_rows|features.dynamic",
    ),
}
IN_FOLDERS = tuple(name for name, (own, _) in FEATURES.items() if own == (f"plsc/features/{name}",))


def shipped_files() -> list[Path]:
    """The Python files that ship, by their paths below the root."""
    folders = (ROOT / name for name in ("plsc", "models", "data", "tools"))
    found = (path for folder in folders for path in folder.rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found if not any(each.is_symlink() for each in path.parents))


def named_in(feature: str) -> list[str]:
    """The shipped files that name ``feature`` outside its folder."""
    own, words = FEATURES[feature]
    outside = (path for path in shipped_files() if not path.as_posix().startswith(own))
    return [path.as_posix() for path in outside if re.search(words, (ROOT / path).read_text(encoding="utf-8"))]


def main() -> None:
    """Print a line for each feature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name the files")
    files = parser.parse_args().files
    for feature in FEATURES:
        found = named_in(feature)
        print(f"{feature:<16} {len(found):>3} {'files' if files else 'other files name it'}")
        for name in found if files else ():
            print(f"{'':<20} {name}")


if __name__ == "__main__":
    main()
