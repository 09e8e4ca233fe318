"""Choose hyper-parameters for Omniglot's one-shot runs without looking at them: on alphabets of the background alone.

    python benchmarks/omniglot_selection.py omniglot/train --out selection
    plsc train omniglot_one_shot --data.train selection/train.txt --eval.sets [] --out selection/run
    python examples/omniglot_one_shot.py selection/run --runs selection/runs

Eight of the 30 background alphabets are held out: train.txt lists the drawings of the others. runs/ holds tasks of the
published form, made as those are (Lake et al., Science 2015): 20 characters of one alphabet, a drawing of each by one
person to learn from, and by another to be judged on. With 50 tasks an alphabet 8,000 drawings are judged: the
published 400 have a standard error of one point at 4.5%, these of a quarter.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np

HELD_OUT = (
    "Anglo-Saxon_Futhorc",
    "Armenian",
    "Balinese",
    "Burmese_(Myanmar)",
    "Early_Aramaic",
    "Greek",
    "Japanese_(katakana)",
    "Sanskrit",
)
CHARACTERS = 20
PEOPLE = 20  # who drew an alphabet, in this order in each of its characters' folders


def write_run(characters: list[Path], folder: Path, name: str, generator: np.random.Generator) -> None:
    """Write one task, as run01 of the published ones is laid out."""
    chosen = [characters[number] for number in generator.permutation(len(characters))[:CHARACTERS]]
    learned, judged = generator.permutation(PEOPLE)[:2]
    lines = []
    for kind in ("training", "test"):
        (folder / name / kind).mkdir(parents=True)
    for number, place in enumerate(generator.permutation(CHARACTERS).tolist(), start=1):
        test, training = f"{name}/test/item{number:02}.png", f"{name}/training/class{place + 1:02}.png"
        shutil.copy(sorted(chosen[place].iterdir())[judged], folder / test)
        shutil.copy(sorted(chosen[place].iterdir())[learned], folder / training)
        lines.append(f"{test} {training}\n")
    (folder / name / "class_labels.txt").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("background", type=Path, help="a folder a character, named ALPHABET_characterNN")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--tasks", type=int, default=50, help="of each alphabet")
    args = parser.parse_args()
    characters: dict[str, list[Path]] = {}
    for folder in sorted(args.background.iterdir()):
        characters.setdefault(folder.name.rpartition("_character")[0], []).append(folder)
    if missing := set(HELD_OUT) - set(characters):
        parser.error(f"{args.background} lacks the alphabet {min(missing)}")
    args.out.mkdir(parents=True)
    learned = [folder for name in sorted(set(characters) - set(HELD_OUT)) for folder in characters[name]]
    lines = [f"{path.resolve()}\t{folder.name}\n" for folder in learned for path in sorted(folder.iterdir())]
    (args.out / "train.txt").write_text("".join(lines), encoding="utf-8")
    generator = np.random.default_rng(0)
    for number in range(len(HELD_OUT) * args.tasks):
        name, alphabet = f"run{number + 1:03}", HELD_OUT[number // args.tasks]
        write_run(characters[alphabet], args.out / "runs", name, generator)
    print(f"{len(lines):,} drawings of {len(learned)} characters to learn; {number + 1} tasks in {args.out / 'runs'}")


if __name__ == "__main__":
    main()
