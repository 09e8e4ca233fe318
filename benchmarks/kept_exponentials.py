"""What a step of the class head gains where pass 2 takes the exponentials that pass 1 kept, with and without in turn.

    python benchmarks/kept_exponentials.py [--classes 20000] [--batch 1024] [--dim 512] [--rounds 9] [--out DIR]

On a GPU the table is bfloat16 with an int8 momentum, and kernels make the passes; on a CPU it is float32, and PyTorch
makes them, since the compiled kernels keep nothing. Adds a row to benchmarks/results/kept_exponentials.csv: medians, of
the clock on a GPU and of the process on a CPU, where neighbours count less.
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
from results_file import print_and_add, script_parser
from torch import Tensor

import plsc

LOW = {"weight_dtype": "bfloat16", "momentum_dtype": "int8"}


def seconds_of_a_step(head: plsc.ShardedHead, optimizer: plsc.HeadSGD, x: Tensor, y: Tensor) -> float:
    """Forward, backward and the table's update."""
    start = _now(x)
    head(x.clone().requires_grad_(), y).backward()
    optimizer.step()
    return _now(x) - start


def _now(x: Tensor) -> float:
    """Seconds of the clock once a GPU has done its work, or of this process."""
    if not x.is_cuda:
        return time.process_time()
    torch.cuda.synchronize(x.device)
    return time.perf_counter()


def main() -> None:
    """Measure, print, and add the row."""
    parser = script_parser(__doc__, results="kept_exponentials", classes=20_000, batch=1024, dim=512, rounds=9)
    args = parser.parse_args()
    mesh = plsc.init()
    is_gpu = mesh.device.type == "cuda"
    storage: dict[str, Any] = LOW if is_gpu else {"backend": "torch"}
    generator = torch.Generator(mesh.device).manual_seed(0)
    x = torch.randn(args.batch, args.dim, generator=generator, device=mesh.device)
    y = torch.randint(args.classes, (args.batch,), generator=generator, device=mesh.device)
    steps = {}
    for memory in (0, args.classes * args.batch * (2 if is_gpu else 4)):
        head = plsc.ShardedHead(args.dim, args.classes, mesh, exponentials_memory=memory, **storage)
        steps[memory > 0] = partial(seconds_of_a_step, head, plsc.HeadSGD(head, lr=0.1, momentum=0.9), x, y)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds + 1):  # the first one is not counted
        for kept, step in steps.items():
            spent[kept].append(step())
    without, kept = (statistics.median(spent[each][1:]) for each in (False, True))
    row = {
        **{name: getattr(args, name) for name in ("classes", "batch", "dim", "rounds")},
        "storage": "bfloat16 + int8" if is_gpu else "float32",
        "ms_without": round(1e3 * without, 2),
        "ms_kept": round(1e3 * kept, 2),
        "ratio": round(kept / without, 4),
    }
    print_and_add("kept_exponentials", row, args.out)


if __name__ == "__main__":
    main()
