"""What `plsc embed` costs beyond its model: its rate against the bare model's on images that lie decoded in memory.

    python benchmarks/embed.py [--model mobilefacenet] [--images 1024] [--batch-size 64] [--workers 1] [--rounds 3]
                               [--precisions fp32 bf16]

writes avatars into a .rec of JPEGs, then lets both embed them in turn, and prints a line per precision and adds it to
benchmarks/results/embed.csv. Rates are images a second, the median of the rounds; the ratio is of these. `plsc embed`
reads, decodes, embeds, stores, hashes and syncs; starting its decoding processes is in its time, loading the model not.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from results_file import add_row, script_parser

from plsc import models
from plsc.data import ImageDataset, open_dataset
from plsc.data.avatars import AvatarDataset
from plsc.data.convert import convert
from plsc.embedding.embedder import EmbeddingModel, open_embedder
from plsc.embedding.extract import extract
from plsc.parallel import Mesh


def bare_rate(embedder: EmbeddingModel, images: torch.Tensor, batch_size: int) -> float:
    """Images a second of the model alone, on uint8 (N, 3, S, S).

    In a thread that is not the main one, like `plsc embed`: there OpenMP's threads soon sleep when they wait for each
    other, while the main thread's spin, which on a busy machine took eight times the processor time.
    """
    with ThreadPoolExecutor(1) as thread:
        start = time.perf_counter()
        for batch in images.split(batch_size):
            thread.submit(embedder, batch).result()
        return len(images) / (time.perf_counter() - start)


def embed_rate(
    embedder: EmbeddingModel, dataset: ImageDataset, folder: Path, batch_size: int, workers: int, mesh: Mesh
) -> tuple[float, str]:
    """Images a second of the whole command, and what it says that binds it."""
    start = time.perf_counter()
    summary = extract(embedder, dataset, folder, mesh, batch_size=batch_size, workers=workers, quiet=True)
    return len(dataset) / (time.perf_counter() - start), summary["bound_by"]


def measure(args: argparse.Namespace, precision: str, model: Path, dataset: ImageDataset, folder: Path) -> None:
    """Both in turn; prints and records the medians."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embedder, mesh = open_embedder(model, device=device, precision=precision), Mesh(0, 1, 0, device)
    images = torch.stack([dataset.image(index) for index in range(len(dataset))])
    bare_rate(embedder, images[: 2 * args.batch_size], args.batch_size)
    bare, whole, bound = [], [], ""
    for number in range(args.rounds):
        bare.append(bare_rate(embedder, images, args.batch_size))
        target = folder / f"{precision}-{number}"
        rate, bound = embed_rate(embedder, dataset, target, args.batch_size, args.workers, mesh)
        whole.append(rate)
    model_rate, rate = statistics.median(bare), statistics.median(whole)
    rates = f"model alone {model_rate:.1f} images/s, plsc embed {rate:.1f}"
    print(f"{args.model} {precision}: {rates}: {rate / model_rate:.1%}")
    add_row(
        "embed",
        {
            "model": args.model,
            "precision": precision,
            "threads": torch.get_num_threads(),
            "workers": args.workers,
            "batch_size": args.batch_size,
            "images": len(dataset),
            "rounds": args.rounds,
            "bound_by": bound,
            "model_images_per_second": round(model_rate, 1),
            "embed_images_per_second": round(rate, 1),
            "ratio": round(rate / model_rate, 3),
        },
    )


def main() -> None:
    parser = script_parser(__doc__, model="mobilefacenet", images=1024, batch_size=64, workers=1, rounds=3)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, records = Path(folder) / "model.safetensors", Path(folder) / "faces.rec"
        models.save_model(models.create(args.model, embedding_dim=512, image_size=112), model)
        convert(AvatarDataset(args.images // 8, 8), records, quiet=True)
        dataset = open_dataset(records)
        for precision in args.precisions:
            measure(args, precision, model, dataset, Path(folder))


if __name__ == "__main__":
    main()
