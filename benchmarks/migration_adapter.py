"""TAR of a gallery in an old model's space, in a new one's, and of estimates by adapters of 100, 1,000 and 5,000 faces.

    plsc embed OLD.onnx --data FACES --out old
    plsc embed NEW.onnx --data FACES --out new
    python benchmarks/migration_adapter.py old new --name "what they are of"

Half of the people who have two pictures are kept apart, and judged: a probe by the new model against each other's
estimate. Adapters learn from the first faces of the others, whole people in a random order. Prints
plsc.gallery.migration.judgement's table for each size.
"""

from pathlib import Path

import numpy as np
from results_file import print_and_add, script_parser

from plsc.embedding.columns import Float32, Int64
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.gallery.migration.adapter import fit_adapter
from plsc.gallery.migration.judgement import judge


def embeddings(folder: Path) -> tuple[Float32, Int64, list[str]]:
    """Rows, labels and keys of an embedding set."""
    found = EmbeddingSet(folder)
    rows = np.concatenate([np.asarray(shard.embeddings, dtype=np.float32) for shard in found.shards])
    labels = np.concatenate([np.asarray(shard.labels) for shard in found.shards])
    return rows, labels, [key for shard in found.shards for key in shard.keys]


def main() -> None:
    """Print the tables, and add a row for each size."""
    parser = script_parser(__doc__, results="migration_adapter", seed=0, fmr=1e-3, name="")
    parser.add_argument("old", type=Path, metavar="OLD", help="embedding set of the old model")
    parser.add_argument("new", type=Path, metavar="NEW", help="embedding set of the new model, of the same pictures")
    parser.add_argument("--faces", type=int, nargs="+", default=[100, 1000, 5000], help="of an adapter")
    args = parser.parse_args()
    (old, persons, keys), (new, _, new_keys) = embeddings(args.old), embeddings(args.new)
    if keys != new_keys:
        parser.error("the two sets are not of the same pictures in the same order")
    random = np.random.default_rng(args.seed)
    names, counts = np.unique(persons, return_counts=True)
    judged = np.isin(persons, random.permutation(names[counts > 1])[: np.sum(counts > 1) // 2])
    others = np.concatenate([np.flatnonzero(persons == name) for name in random.permutation(names)])
    others = others[~judged[others]]
    for faces in args.faces:
        rows = others[:faces]
        adapter = fit_adapter(old[rows], new[rows], persons[rows], seed=args.seed)
        found = judge(
            *(old[judged], new[judged], persons[judged]),
            threshold=None,
            fmr=args.fmr,
            estimated=adapter(old[judged]),
            seed=args.seed,
        )
        print(found.table())
        tars = {f"tar_{name}": round(each.tar, 4) for name, each in found.spaces.items()}
        low, high = found.spaces["estimated"].tar_interval
        row = {
            "data": args.name,
            "faces": len(rows),
            "persons": len(np.unique(persons[rows])),
            "kind": adapter.kind,
            "fmr": args.fmr,
            **tars,
            "estimated_low": round(low, 4),
            "estimated_high": round(high, 4),
            "tar_one_threshold": round(found.spaces["estimated"].used_tar, 4),
            "judged_persons": found.persons,
            "genuine_pairs": found.genuine_pairs,
        }
        print_and_add("migration_adapter", row, args.out)


if __name__ == "__main__":
    main()
