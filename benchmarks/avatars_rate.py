"""Pictures a second that one core draws, at several sizes.

    python benchmarks/avatars_rate.py [--pictures 1000] [--data glyphs:han:least_fonts=3]

prints a line per size and adds it to benchmarks/results/avatars_rate.csv (glyphs_rate.csv).
"""

import time

import numpy as np
import PIL
import torch
from results_file import add_row, script_parser

from plsc.data import open_dataset


def pictures_per_second(source: str, size: int, pictures: int) -> float:
    """Measured in processor time, of this process alone; a process draws on one core."""
    data = open_dataset(source, image_size=size)
    order = np.random.default_rng(0).permutation(len(data))[: pictures + 200]
    for index in order[pictures:]:  # imports, the table of noise, fonts
        data.image(int(index))
    start = time.process_time()
    for index in order[:pictures]:
        data.image(int(index))
    return pictures / (time.process_time() - start)


def main() -> None:
    args = script_parser(__doc__, pictures=1000, data="avatars:1000x10").parse_args()
    torch.set_num_threads(1)
    for size in (32, 48, 112, 224):
        rate = round(pictures_per_second(args.data, size, args.pictures))
        print(f"{size:>4} x {size:<4} {rate:>6,} pictures/s per core")
        add_row(
            f"{args.data.partition(':')[0]}_rate",
            {
                "pillow": PIL.__version__,
                "image_size": size,
                "pictures": args.pictures,
                "pictures_per_second_per_core": rate,
            },
        )


if __name__ == "__main__":
    main()
