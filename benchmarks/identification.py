"""Thresholds predicted from a small gallery, and the FPIR that they have in larger ones of other people and strangers.

    python benchmarks/identification.py --model MODEL --people lfw/      a folder of LFW's pictures, one folder a person
    python benchmarks/identification.py --model quickstart/model.onnx --people avatars:14000x1@5000000
    python benchmarks/identification.py --people drawn                  vectors of 12 groups of people, without a model

People are split by each seed: a share --strangers of them is not enrolled, and of the others one picture is. Half of
the strangers and --small enrolled people predict. The other strangers search galleries of --sizes other people, as many
of each size as there are people for. --people takes what `plsc eval --data` takes, or an embedding set. --tail is the
share of the scores that the tail is fitted to. A row is the mean of --seeds. Where people have several pictures, it has
FNIR at FPIR 1e-2 and rank-1 of the whole gallery, too.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from results_file import print_and_add, script_parser

from plsc.evaluation.larger_galleries import fit_impostors
from plsc.evaluation.one_to_many import identification_errors, search_gallery
from plsc.evaluation.probe import LabelledRows
from plsc.evaluation.search import FPIRS


def drawn(people: int = 14_000, groups: int = 12, dim: int = 128) -> LabelledRows:
    """A picture each of people who are nearer to others of their group; some are told from others with more noise."""
    random = np.random.default_rng(1)
    centres = random.normal(size=(groups, dim))
    centres *= 0.3 / np.linalg.norm(centres, axis=1, keepdims=True)
    group = random.choice(groups, people, p=random.dirichlet(np.full(groups, 0.7)))
    rows = centres[group] + random.normal(size=(people, dim)) * random.uniform(0.7, 1.3, (people, 1)) / np.sqrt(dim)
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return LabelledRows("drawn", unit, np.arange(people), [str(number) for number in range(people)])


def embedded(model: str, source: str) -> LabelledRows:
    """All pictures of ``source`` by a model."""
    from plsc.embedding.embedder import open_embedder
    from plsc.evaluation.probe_parts import PartReader
    from plsc.parallel.mesh import initialised

    with initialised() as mesh:
        reader = PartReader(open_embedder(model, device=mesh.device, mesh=mesh) if model else None, mesh)
        return reader.read([source], compared=False)[0]


def split(rows: LabelledRows, strangers: float, seed: int) -> tuple[LabelledRows, LabelledRows, LabelledRows]:
    """The enrolled picture of each person in a random order, their other pictures, and one picture of each stranger."""
    random = np.random.default_rng(seed)
    people = random.permutation(np.unique(rows.labels))
    mixed = random.permutation(len(rows))
    first = dict(zip(rows.labels[mixed].tolist(), mixed.tolist(), strict=True))
    unknown = people[: int(strangers * len(people))]
    enrolled = np.array([first[person] for person in people[len(unknown) :].tolist()])
    others = np.setdiff1d(np.flatnonzero(~np.isin(rows.labels, unknown)), enrolled)
    return rows.take(enrolled), rows.take(others), rows.take(np.array([first[each] for each in unknown.tolist()]))


def trial(rows: LabelledRows, args: Any, seed: int) -> Iterator[tuple[tuple[int, str], tuple[float, float]]]:
    """By the size and the rate: the predicted threshold, and the FPIR that it was found to have."""
    gallery, _, strangers = split(rows, args.strangers, seed)
    half = len(strangers) // 2
    scores = strangers.unit[:half] @ gallery.unit[: args.small].T
    fitted = fit_impostors(scores, args.tail)
    found = strangers.unit[half:] @ gallery.unit[args.small :].T
    for size in map(int, args.sizes.split(",")):
        starts = range(0, found.shape[1] - size + 1, size)
        if not starts:
            continue
        best = np.concatenate([found[:, start : start + size].max(axis=1) for start in starts])
        for name, fpir in FPIRS.items():
            if fpir / size * scores.size >= 1:
                threshold = fitted.threshold(size, fpir)
                yield (size, name), (threshold, float(np.mean(best >= threshold)))


def whole(rows: LabelledRows, args: Any) -> dict[str, float | None]:
    """FNIR and rank-1 of the whole gallery, by the first seed; None without mated probes."""
    gallery, mated, strangers = split(rows, args.strangers, 0)
    if not len(mated):
        return {"fnir": None, "rank1": None}
    errors = identification_errors(search_gallery(gallery, mated, strangers))
    point = errors["fnir@fpir"]["1e-2"]
    return {"fnir": None if point is None else round(point["fnir"], 4), "rank1": round(errors["rank1"], 4)}


def main() -> None:
    options = {"model": "", "people": "drawn", "strangers": 0.3, "small": 500, "sizes": "1500,3400,9000", "seeds": 8}
    args = script_parser(__doc__, results="identification", **options, tail=0.003).parse_args()
    rows = drawn() if args.people == "drawn" else embedded(args.model, args.people)
    results: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for seed in range(args.seeds):
        for key, value in trial(rows, args, seed):
            results.setdefault(key, []).append(value)
    if not results:
        raise SystemExit(f"{rows.name} has too few people for --small {args.small} and --sizes {args.sizes}")
    about = {"set": rows.name, "people": len(np.unique(rows.labels)), "small": args.small, "tail": args.tail}
    about |= whole(rows, args)
    for (size, name), values in results.items():
        threshold, found = np.mean(values, axis=0)
        error = np.std([each for _, each in values]) / np.sqrt(len(values))
        figures = {"threshold": round(threshold, 4), "found": round(found, 5), "error": round(error, 5)}
        print_and_add(
            "identification", {**about, "size": size, "fpir": name, "seeds": len(values), **figures}, args.out
        )


if __name__ == "__main__":
    main()
