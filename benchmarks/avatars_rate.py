"""Pictures a second that one core draws, at several sizes.

    python benchmarks/avatars_rate.py [--pictures 1000]

prints a line per size and adds it to benchmarks/results/avatars_rate.csv.
"""

import argparse
import csv
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import PIL
import torch

from plsc.data.avatars import AvatarDataset

RESULTS = Path(__file__).parent / "results" / "avatars_rate.csv"
IMAGES_PER_IDENTITY = 10


def pictures_per_second(size: int, pictures: int) -> float:
    """Measured in processor time, of this process alone; a process draws on one core."""
    data = AvatarDataset(pictures // IMAGES_PER_IDENTITY + 1, IMAGES_PER_IDENTITY, image_size=size)
    data.image(len(data) - 1)  # imports and the table of noise
    start = time.process_time()
    for index in range(pictures):
        data.image(index)
    return pictures / (time.process_time() - start)


def processor() -> str:
    """The processor's name, where the system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def add_row(row: dict[str, str | int]) -> None:
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000)
    pictures = parser.parse_args().pictures
    torch.set_num_threads(1)
    versions = f"python {platform.python_version()}, numpy {np.__version__}, pillow {PIL.__version__}"
    for size in (32, 48, 112, 224):
        rate = round(pictures_per_second(size, pictures))
        print(f"{size:>4} x {size:<4} {rate:>6,} pictures/s per core")
        date = datetime.now(UTC).date().isoformat()
        add_row({
            "date": date, "device": processor(), "versions": versions, "image_size": size,
            "pictures": pictures, "pictures_per_second_per_core": rate,
        })  # fmt: skip


if __name__ == "__main__":
    main()
