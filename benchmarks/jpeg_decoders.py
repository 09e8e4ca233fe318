"""Libraries that decode JPEG beside each other, in turn in one process: images per second of processor time.

    python benchmarks/jpeg_decoders.py [--images 400] [--rounds 9]

Drawn faces of 112 pixels, of quality 95 and 75. Those of plsc/data/decoders.py are measured where they are installed,
and Pillow; simplejpeg and OpenCV likewise, which plsc does not use: their pixels of CMYK are others, and they refuse
what the others take, or take what those refuse. Says of each whether it gives Pillow's pixels. Adds rows to
benchmarks/results/jpeg_decoders.csv (or into --out).
"""

import io
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import numpy as np
import torch
from PIL import Image
from results_file import add_row, script_parser

from plsc.data import open_dataset
from plsc.data.decoders import DECODERS, find_decoder
from plsc.progress import show

Decode = Callable[[bytes], torch.Tensor]
KINDS = {"q95 4:4:4": (95, 0), "q95 4:2:0": (95, 2), "q75 4:2:0": (75, 2)}


def pillow(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def installed() -> dict[str, Decode]:
    """The decoders that are here, by their package's name; pixels are (3, H, W)."""
    found: dict[str, Decode] = {"Pillow": pillow}
    found |= {name: decoder.decode for name in DECODERS if (decoder := find_decoder(name)) is not None}
    try:
        from simplejpeg import decode_jpeg

        found["simplejpeg"] = lambda data: torch.from_numpy(decode_jpeg(data, "RGB")).permute(2, 0, 1)
    except ImportError:
        pass
    try:
        import cv2

        cv2.setNumThreads(1)
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        found["opencv-python-headless"] = lambda data: torch.from_numpy(
            cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        ).permute(2, 0, 1)
    except ImportError:
        pass
    return found


def main() -> None:
    args = script_parser(__doc__, results="jpeg_decoders", images=400, rounds=9).parse_args()
    torch.set_num_threads(1)
    drawn, decoders = open_dataset(f"avatars:{-(-args.images // 4)}x4"), installed()
    pictures = [Image.fromarray(drawn.image(index).permute(1, 2, 0).numpy()) for index in range(args.images)]
    for kind, (quality, subsampling) in KINDS.items():
        files = []
        for picture in pictures:
            picture.save(buffer := io.BytesIO(), "JPEG", quality=quality, subsampling=subsampling)
            files.append(buffer.getvalue())
        rates: dict[str, list[float]] = {name: [] for name in decoders}
        for _ in range(args.rounds):
            for name, decode in decoders.items():
                start = time.process_time()
                for file in files:
                    decode(file)
                rates[name].append(len(files) / (time.process_time() - start))
        for name, decode in decoders.items():
            same = all(torch.equal(decode(file), pillow(file)) for file in files)
            row = {"decoder": f"{name} {metadata.version(name)}", "kind": kind, "images": len(files)}
            row |= {"bytes": round(statistics.mean(map(len, files))), "rounds": args.rounds}
            row |= {"images_per_cpu_s": round(statistics.median(rates[name]))}
            row |= {"low": round(min(rates[name])), "high": round(max(rates[name])), "same_pixels": same}
            show(f"{kind}  {row['decoder']:32} {row['images_per_cpu_s']:>7,} images/CPU s, same pixels: {same}")
            add_row("jpeg_decoders", row, args.out)


if __name__ == "__main__":
    main()
