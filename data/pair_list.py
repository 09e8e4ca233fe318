"""Verification sets from a published list of pairs, in the form of LFW's ``pairs.txt``.

The first line may give the number of folds and that of same, and of different, pairs in each: ``10<TAB>300``, or
``1100`` for a single fold. Each further line is a pair; fields are separated by tabs or blanks::

    NAME<TAB>1<TAB>4                    images 1 and 4 of one person
    NAME_A<TAB>1<TAB>NAME_B<TAB>2       image 1 of a person and image 2 of another

Image 4 of NAME is the file NAME_0004, with any suffix and in any folder; in LFW, ``NAME/NAME_0004.jpg``. Pairs are
written in the order of the list: ``plsc eval`` takes ten contiguous folds of equal size, which are the list's own if it
has ten. Huang et al., "Labeled Faces in the Wild", 2007.
"""

from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plsc.data.codec import Encoding
from plsc.data.dataset import ImageDataset
from plsc.data.pairs import encoded_and_checked, write_pairs
from plsc.errors import DataError, UsageError
from plsc.files import check_output
from plsc.progress import counted
from plsc.text_files import text_lines

FORM = "NAME i j, or NAME i OTHER j"
_SHOWN = 5  # names of missing images in an error


class PairList(NamedTuple):
    """Pairs of image names without suffix, their truth bool (N,), and the number of folds (0: not given)."""

    names: list[tuple[str, str]]
    is_same: NDArray[np.bool_]
    folds: int


def read_pair_list(path: Path) -> PairList:
    """Read a list of pairs.

    Raises:
        UsageError: there is no such file.
        DataError: it is no text, a line has another form, or the number of pairs is not that of the first line.
    """
    if not path.is_file():
        raise UsageError(f"there is no list of pairs {path}")
    folds = per_fold = 0
    names: list[tuple[str, str]] = []
    truth: list[bool] = []
    for number, line in text_lines(path):
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else line.split()
        if not any(fields):
            continue
        if not names and not folds and len(fields) < 3 and all(map(_is_number, fields)):
            folds, per_fold = (1, int(fields[0])) if len(fields) == 1 else (int(fields[0]), int(fields[1]))
            continue
        names.append(_pair(fields, path, number))
        truth.append(len(fields) == 3)
    if not names:
        raise DataError(f"{path} lists no pair; each line is {FORM}")
    if folds and len(names) != 2 * folds * per_fold:
        raise DataError(
            f"{path} announces {counted(folds, 'fold')} of {per_fold} same and {per_fold} different pairs, and lists "
            f"{counted(len(names), 'pair')}; use another copy"
        )
    return PairList(names, np.array(truth), folds)


def pairs_of_list(
    dataset: ImageDataset,
    pair_list: PairList,
    out: Path,
    *,
    encoding: Encoding = "jpeg",
    skip_missing: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the pairs of a list, in its order, as a ``.bin``.

    Args:
        dataset: has the images; they are copied as stored if its ``image_size`` is None, otherwise resized and
            re-encoded.
        pair_list: of :func:`read_pair_list`.
        out: the file to write.
        encoding: of re-encoded images.
        skip_missing: leave out pairs of which an image is missing; the result is then no longer the protocol's.
        overwrite: replace ``out`` if it exists.

    Returns:
        ``{"out", "pairs", "same", "images", "identities", "folds", "left_out"}``; folds are None if the list does not
        say, or where pairs are ``left_out``.

    Raises:
        UsageError: ``out`` exists, or cannot be written.
        DataError: images of the list are missing in the data set (with ``skip_missing``: all pairs lack one), or have a
            name that two have, or do not decode.
    """
    check_output(out, overwrite=overwrite)
    wanted = sorted({name for pair in pair_list.names for name in pair})
    index_of = _indices(dataset, set(wanted))
    missing = [name for name in wanted if name not in index_of]
    kept = np.array([first in index_of and second in index_of for first, second in pair_list.names])
    if not kept.any() or (missing and not skip_missing):
        raise DataError(_missing_error(dataset, missing, len(wanted)))
    names = [name for pair, whole in zip(pair_list.names, kept, strict=True) if whole for name in pair]
    images = {name: encoded_and_checked(dataset, index_of[name], encoding) for name in sorted(set(names))}
    is_same = pair_list.is_same[kept]
    write_pairs(out, [images[name] for name in names], is_same)
    return {
        "out": str(out),
        "pairs": len(is_same),
        "same": int(is_same.sum()),
        "images": len(images),
        "identities": len({name.rpartition("_")[0] for name in images}),
        "folds": (pair_list.folds or None) if kept.all() else None,
        "left_out": int(np.sum(~kept)),
    }


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _pair(fields: list[str], path: Path, number: int) -> tuple[str, str]:
    if len(fields) == 3:
        fields = [fields[0], fields[1], fields[0], fields[2]]
    if len(fields) != 4 or not (fields[0] and fields[2] and _is_number(fields[1]) and _is_number(fields[3])):
        raise DataError(f"{path} line {number} is {' '.join(fields)[:80]!r}; each line is {FORM}")
    return f"{fields[0]}_{int(fields[1]):04d}", f"{fields[2]}_{int(fields[3]):04d}"


def _indices(dataset: ImageDataset, wanted: set[str]) -> dict[str, int]:
    """Return the index of each wanted image by its name."""
    found: dict[str, int] = {}
    for index in range(len(dataset)):
        name = PurePosixPath(dataset.key(index)).stem
        if name in wanted and found.setdefault(name, index) != index:
            raise DataError(
                f"{dataset.source} has two images named {name}: {dataset.key(found[name])} and {dataset.key(index)}; "
                "keep one of them"
            )
    return found


def _missing_error(dataset: ImageDataset, missing: list[str], total: int) -> str:
    names = ", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
    problem = f"{len(missing):,} of the list's {counted(total, 'image')} are missing in {dataset.source}: {names}"
    if len(missing) < total:
        return f"{problem}; add them, or give --skip-missing to leave their pairs out"
    return f"{problem}; images are found by their names (NAME_0001.jpg), and its first is {dataset.key(0)}"
