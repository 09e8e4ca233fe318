"""What it costs a network on CPUs that the C library gives freed memory back: MobileFaceNet with and without.

    python benchmarks/freed_memory.py [--rounds 5]

Training steps (32 pictures at 48x48, bf16, one thread) and embedding as plsc embed does it (64 pictures at 112x112,
fp32, 16 at a time by two threads, called from a thread of its own), each in fresh processes that take turns; prints the
medians and adds them to benchmarks/results/freed_memory.csv. A minute a round.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from results_file import add_row, script_parser
from torch import nn

from plsc.embedding.embedder import CPU_BATCH
from plsc.models import create
from plsc.native.allocator import keep_freed_memory

BATCHES = 20
MODEL_THREAD = ThreadPoolExecutor(1)
WORK = {"training": (32, 48, 1), "embedding": (64, 112, 2)}  # pictures, their side, threads


def measure(work: str) -> dict[str, float]:
    """Pictures a second (median batch) and new pages a batch, in this process."""
    pictures, side, threads = WORK[work]
    torch.set_num_threads(threads)
    network = create("mobilefacenet", embedding_dim=512, image_size=side).to(memory_format=torch.channels_last)
    network.train(work == "training")
    images = torch.randn(pictures, 3, side, side).contiguous(memory_format=torch.channels_last)
    run = train if work == "training" else embed
    for _ in range(3):
        run(network, images)
    pages, seconds = new_pages(), []
    for _ in range(BATCHES):
        begun = time.perf_counter()
        run(network, images)
        seconds.append(time.perf_counter() - begun)
    pages = new_pages() - pages
    return {"pictures_per_second": pictures / statistics.median(seconds), "new_pages_per_batch": pages / BATCHES}


def train(network: nn.Module, images: torch.Tensor) -> None:
    """One step, without the optimizer."""
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = network(images)
    embeddings.float().square().mean().backward()


def embed(network: nn.Module, images: torch.Tensor) -> None:
    """One batch, in the thread that a model has to itself."""
    MODEL_THREAD.submit(embed_parts, network, images).result()


@torch.inference_mode()
def embed_parts(network: nn.Module, images: torch.Tensor) -> None:
    """As many pictures at a time as plsc embed gives a CPU."""
    for part in images.split(CPU_BATCH):
        network(part)


def new_pages() -> int:
    """Pages that this process has been given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    parser = script_parser(__doc__, rounds=5)
    parser.add_argument("--measure", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        if args.keep and not keep_freed_memory():
            raise SystemExit("this C library has no mallopt, or there is a GPU")
        print(json.dumps(measure(args.measure)))
        return
    for work in WORK:
        compare(work, args.rounds)


def compare(work: str, rounds: int) -> None:
    """Let the two take turns, and write down what they did."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for keep in found:
            command = [sys.executable, __file__, "--measure", work, *(["--keep"] if keep else [])]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            found[keep].append(json.loads(ran.stdout))
    rate = {keep: [one["pictures_per_second"] for one in runs] for keep, runs in found.items()}
    pages = {keep: statistics.median(one["new_pages_per_batch"] for one in runs) for keep, runs in found.items()}
    ratio = statistics.median(kept / given for given, kept in zip(rate[False], rate[True], strict=True))
    given, kept = statistics.median(rate[False]), statistics.median(rate[True])
    print(
        f"{work}: {kept:.0f} pictures/s kept, {given:.0f} given back, {ratio:.2f} times; "
        f"{pages[True]:,.0f} and {pages[False]:,.0f} new pages a batch"
    )
    add_row(
        "freed_memory",
        {
            "work": work,
            "rounds": rounds,
            "kept_per_second": round(kept, 1),
            "given_back_per_second": round(given, 1),
            "ratio": round(ratio, 3),
            "kept_new_pages": round(pages[True]),
            "given_back_new_pages": round(pages[False]),
        },
    )


if __name__ == "__main__":
    main()
