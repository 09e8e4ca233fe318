"""Steps of a class head with one and with several labels a sample, beside a loss that goes label by label.

    python benchmarks/multi_label.py [--classes 200000] [--dim 512] [--batch 64] [--labels 8] [--rounds 5] [--threads 2]

The peer is the way of private forks of Partial FC: for each label in turn all logits, with the sample's other labels
among the negatives, in float32 by PyTorch; their mean is differentiated, and SGD steps. Ours is `positives="kept"` in
float32, on the same start, and in bfloat16 with an int8 momentum. All take turns; the losses of the first step are
compared. Adds a row of processor seconds a step to benchmarks/results/multi_label.csv.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results_file import print_and_add, script_parser

import plsc

S, M, LR = 64.0, 0.4, 0.1


def make_problem(classes: int, dim: int, batch: int, labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings (B, D), and labels (B, K) that differ within a sample."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, dim, generator=generator)
    first = torch.randint(classes, (batch, 1), generator=generator)
    return x, (first + torch.arange(labels) * (classes // labels)) % classes


def ours(x: torch.Tensor, y: torch.Tensor, classes: int, **options: Any) -> tuple[Callable[[], float], torch.Tensor]:
    """A step, and the table that it starts from."""
    head = plsc.ShardedHead(x.shape[1], classes, margin=plsc.CosFace(s=S, m=M), positives="kept", **options)
    start = head.weight.detach().float().clone()
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=0.9)

    def step() -> float:
        leaf = x.clone().requires_grad_()
        loss = head(leaf, y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, start


def label_by_label(x: torch.Tensor, y: torch.Tensor, start: torch.Tensor) -> Callable[[], float]:
    """The peer's step."""
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=0.9)

    def step() -> float:
        leaf = x.clone().requires_grad_()
        total = 0.0
        for label in y.unbind(1):
            unit = torch.nn.functional.normalize(leaf)
            cos = unit @ torch.nn.functional.normalize(weight).t()
            shift = torch.zeros_like(cos).scatter_(1, label[:, None], M)
            loss = torch.nn.functional.cross_entropy((cos - shift) * S, label) / y.shape[1]
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def main() -> None:
    """Measure, print and add a row."""
    defaults = {"classes": 200_000, "dim": 512, "batch": 64, "labels": 8, "rounds": 5, "threads": 2}
    args = script_parser(__doc__, results="multi_label", **defaults).parse_args()
    torch.set_num_threads(args.threads)
    x, y = make_problem(args.classes, args.dim, args.batch, args.labels)
    low = {"weight_dtype": "bfloat16", "momentum_dtype": "int8"}
    of_float32, start = ours(x, y, args.classes)
    steps = {
        "one label, float32": ours(x, y[:, 0], args.classes)[0],
        "float32": of_float32,
        "one label, bf16": ours(x, y[:, 0], args.classes, **low)[0],
        "bf16": ours(x, y, args.classes, **low)[0],
        "label by label": label_by_label(x, y, start),
    }
    losses = {name: step() for name, step in steps.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            spent[name].append(time.process_time() - begun)
    median = {name: statistics.median(times) for name, times in spent.items()}
    row = {name: getattr(args, name) for name in defaults} | {
        f"CPU s, {name}": round(median[name], 4) for name in steps
    }
    row["loss"], row["loss, label by label"] = losses["float32"], losses["label by label"]
    row["several / one, float32"] = round(median["float32"] / median["one label, float32"], 3)
    row["several / one, bf16"] = round(median["bf16"] / median["one label, bf16"], 3)
    row["label by label / float32"] = round(median["label by label"] / median["float32"], 2)
    row["label by label / bf16"] = round(median["label by label"] / median["bf16"], 2)
    print_and_add("multi_label", row, args.out)


if __name__ == "__main__":
    main()
