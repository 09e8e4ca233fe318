"""Pictures a second that one core draws, at several sizes.

    python benchmarks/avatars_rate.py [--pictures 1000]

prints a line per size and adds it to benchmarks/results/avatars_rate.csv.
"""

import time

import PIL
import torch
from results_file import add_row, script_parser

from plsc.data.avatars import AvatarDataset

IMAGES_PER_IDENTITY = 10


def pictures_per_second(size: int, pictures: int) -> float:
    """Measured in processor time, of this process alone; a process draws on one core."""
    data = AvatarDataset(pictures // IMAGES_PER_IDENTITY + 1, IMAGES_PER_IDENTITY, image_size=size)
    data.image(len(data) - 1)  # imports and the table of noise
    start = time.process_time()
    for index in range(pictures):
        data.image(index)
    return pictures / (time.process_time() - start)


def main() -> None:
    pictures = script_parser(__doc__, pictures=1000).parse_args().pictures
    torch.set_num_threads(1)
    for size in (32, 48, 112, 224):
        rate = round(pictures_per_second(size, pictures))
        print(f"{size:>4} x {size:<4} {rate:>6,} pictures/s per core")
        add_row(
            "avatars_rate",
            {
                "pillow": PIL.__version__,
                "image_size": size,
                "pictures": pictures,
                "pictures_per_second_per_core": rate,
            },
        )


if __name__ == "__main__":
    main()
