"""What a detector finds in LFW, how fast, and what its crops are worth to an embedding model.

    python benchmarks/detector.py LFW PAIRS --detectors mtcnn [onnx:FILE …] [--landmarks FILE] [--model MODEL]

LFW is the folder of its pictures, PAIRS its pairs.txt, --landmarks a landmark file of those pictures. For each detector
and, as another way to crop, for the landmarks, it prints a line and adds it to benchmarks/results/detector.csv: the
pictures in which a face was found; pictures per second of one core at their own size, and with their longer side
enlarged to 1,024 pixels; the median distance from the landmarks of the file, as a share of that between the eyes; and
with --model the accuracy over the ten folds of those pairs whose faces all ways found. --every N takes every Nth pair.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from results_file import add_row, script_parser

import plsc
from plsc.data.alignment import align_face, read_landmarks
from plsc.data.codec import to_rgb_tensor
from plsc.embedding.detector import Detector, open_detector
from plsc.embedding.embedder import EmbeddingModel
from plsc.errors import DataError
from plsc.evaluation.pairs import verification
from plsc.models.preprocessing import resize_image
from plsc.regular_files import read_bytes

Points = dict[str, NDArray[Any]]
ENLARGED = 1024
ENLARGED_PICTURES = 20


def read_lfw_pairs(path: Path, every: int) -> list[tuple[str, str]]:
    """Every ``every``-th pair of pairs.txt as keys of two pictures, in its order."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    pairs = [
        ((row[0], row[1]), (row[0], row[2])) if len(row) == 3 else ((row[0], row[1]), (row[2], row[3])) for row in rows
    ]
    keys = [tuple(f"{name}/{name}_{int(number):04}.jpg" for name, number in pair) for pair in pairs[::every]]
    return [(first, second) for first, second in keys]


def picture(folder: Path, key: str) -> torch.Tensor:
    """uint8 (3, H, W) RGB."""
    return to_rgb_tensor(read_bytes(folder / key), key)


def detected(detector: Detector, folder: Path, keys: list[str]) -> tuple[Points, float]:
    """The main face's landmarks by key where one was found, and pictures per second of processor time."""
    points: Points = {}
    spent = 0.0
    for key in keys:
        image = picture(folder, key)
        start = time.process_time()
        try:
            points[key] = detector.main_face(image, key).landmarks
        except DataError:
            print(f"  no face in {key}")
        spent += time.process_time() - start
    return points, len(keys) / spent


def enlarged_rate(detector: Detector, folder: Path, keys: list[str]) -> float:
    """Pictures per second of processor time, with their longer side enlarged."""
    images = []
    for image in (picture(folder, key) for key in keys[:ENLARGED_PICTURES]):
        factor = ENLARGED / max(image.shape)
        images.append(resize_image(image, (round(image.shape[1] * factor), round(image.shape[2] * factor))))
    start = time.process_time()
    for image in images:
        detector.faces(image)
    return len(images) / (time.process_time() - start)


def distance(points: Points, others: Points) -> float:
    """Median over the pictures of the mean distance of the five points, in distances between the eyes."""
    return float(
        np.median(
            [
                np.linalg.norm(points[key] - others[key], axis=1).mean()
                / np.linalg.norm(np.diff(others[key][:2], axis=0))
                for key in points
                if key in others
            ]
        )
    )


def accuracy(model: EmbeddingModel, folder: Path, points: Points, pairs: list[tuple[str, str]]) -> tuple[float, float]:
    """Mean and standard deviation of the accuracy over ten folds of ``pairs``, whose faces all have ``points``."""
    keys = sorted({key for pair in pairs for key in pair})
    crops = [align_face(picture(folder, key), points[key], 112, key) for key in keys]
    rows = dict(zip(keys, plsc.embed(model, [crop.permute(1, 2, 0).numpy() for crop in crops]), strict=True))
    embeddings = np.stack([rows[key] for pair in pairs for key in pair])
    same = np.array([Path(first).parent == Path(second).parent for first, second in pairs])
    result = verification(embeddings, same)
    return result["accuracy"], result["accuracy_std"]


def main() -> None:
    parser = script_parser(__doc__, every=1)
    parser.add_argument("lfw", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--detectors", nargs="+", required=True)
    parser.add_argument("--landmarks", type=Path)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pairs = read_lfw_pairs(args.pairs, args.every)
    keys = sorted({key for pair in pairs for key in pair})
    ways: dict[str, Points] = {}
    rows: dict[str, dict[str, Any]] = {}
    if args.landmarks is not None:
        known = read_landmarks(args.landmarks)
        ways["landmark file"] = {key: np.array(known[key]).reshape(5, 2) for key in keys if key in known}
        rows["landmark file"] = {}
    for spec in args.detectors:
        detector, name = open_detector(spec), Path(spec.removeprefix("onnx:")).name
        ways[name], rate = detected(detector, args.lfw, keys)
        rows[name] = {
            "pictures_per_second_per_core": round(rate, 1),
            f"at_{ENLARGED}": round(enlarged_rate(detector, args.lfw, keys), 2),
        }
    shared = [pair for pair in pairs if all(key in points for key in pair for points in ways.values())]
    model = None if args.model is None else plsc.load_model(args.model)
    for name, points in ways.items():
        mean, std = accuracy(model, args.lfw, points, shared) if model else (None, None)
        far = distance(points, ways["landmark file"]) if args.landmarks and name != "landmark file" else None
        row = {
            "way": name,
            "pictures": len(keys),
            "found": len(points),
            "pictures_per_second_per_core": rows[name].get("pictures_per_second_per_core"),
            f"at_{ENLARGED}": rows[name].get(f"at_{ENLARGED}"),
            "distance_from_file": far and round(far, 4),
            "model": args.model and args.model.name,
            "pairs": len(shared),
            "accuracy": mean and round(mean, 4),
            "accuracy_std": std and round(std, 4),
        }
        print(row)
        add_row("detector", row)


if __name__ == "__main__":
    main()
