"""How much of a stored template do scores tell whoever knows the embeddings of the pictures that were searched for?

Such a caller solves least squares: scores = pictures x template. Random unit vectors stand for the pictures, as many
as searches were made; scores are rounded as ``plsc serve --score-step`` rounds them. Prints the cosine between the
solution and the template, and the share of searches that show the template at all where the service has a threshold.

  python benchmarks/template_reconstruction.py --dim 512 --steps 0 0.01 0.1
"""

import argparse

import numpy as np

SEARCHES = (256, 512, 1024, 4096)


def cosine(dim: int, searches: int, step: float, seed: int) -> float:
    """Cosine between a random template and its reconstruction from ``searches`` rounded scores."""
    rng = np.random.default_rng(seed)
    template, pictures = _units(rng, 1, dim)[0], _units(rng, searches, dim)
    scores = pictures @ template
    shown = np.round(scores / step) * step if step else scores
    solution = np.linalg.lstsq(pictures, shown, rcond=None)[0]
    return float(solution @ template / np.linalg.norm(solution))


def shown_share(dim: int, threshold: float, seed: int) -> float:
    """Share of 100,000 random pictures that score at least ``threshold`` with a template."""
    rng = np.random.default_rng(seed)
    return float(np.mean(_units(rng, 100_000, dim)[:, 0] >= threshold))  # the template may be the first axis


def _units(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    rows = rng.standard_normal((count, dim), dtype=np.float32)
    units: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return units


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--steps", type=float, nargs="+", default=[0.0, 0.001, 0.01, 0.05, 0.1])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    args = parser.parse_args()
    print("searches", *(f"step {step:g}" for step in args.steps), sep="\t")
    for searches in SEARCHES:
        found = [np.mean([cosine(args.dim, searches, step, seed) for seed in range(3)]) for step in args.steps]
        print(searches, *(f"{value:.4f}" for value in found), sep="\t")
    for threshold in args.thresholds:
        print(f"random pictures that reach a threshold of {threshold:g}: {shown_share(args.dim, threshold, 0):.3%}")


if __name__ == "__main__":
    main()
