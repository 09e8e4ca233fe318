"""What ONNX exports in lower precision, and with the preprocessing inside, cost in accuracy and gain in speed.

    python benchmarks/export_precisions.py --model runs/faces --data people/ [--calibrate 256] [--images 128]
                                           [--turns 5]

exports the model, a run or somebody's .onnx file, in float32, the same with the preprocessing inside, in fp16 and in
int8, also with normalisations rounded, judges each against the model on the people of --data as `plsc export` does, and
embeds the same pictures with all five in turn on the CPU.
Prints a line and adds a row per file to benchmarks/results/export_precisions.csv: rates are images a second, the median
of the turns; difference is the largest from float32's, as a share of the largest value; cosine is the mean to it.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_file import add_row, script_parser
from torch.nn.functional import cosine_similarity

from plsc.embedding import onnx_deployment
from plsc.embedding.embedder import EmbeddingModel, model_file, open_embedder
from plsc.embedding.export import CPU, export_onnx, reduce_onnx
from plsc.embedding.onnx_deployment import NORMALISATIONS, OnnxForm
from plsc.embedding.onnx_source import open_source
from plsc.evaluation.precision_loss import JudgedPictures
from plsc.models import load_model
from plsc.models.preprocessing import Preprocessing

ROUNDED = "int8, normalisations too"
FORMS = {
    "fp32": ("fp32", False),
    "fp32, uint8 input": ("fp32", True),
    "fp16": ("fp16", False),
    "int8": ("int8", False),
    ROUNDED: ("int8", False),
}


def exporter(path: Path) -> tuple[str, Preprocessing, Callable[..., dict[str, Any]]]:
    """A model's name, what it takes, and the function that exports it into a file."""
    if path.suffix == ".onnx":
        source = open_source(path)
        return path.stem, source.engine.preprocessing, partial(reduce_onnx, source)
    model = load_model(path)
    return model.name, model.preprocessing, partial(export_onnx, model)


def rates_in_turn(embedders: dict[str, EmbeddingModel], images: torch.Tensor, turns: int) -> dict[str, float]:
    """Images a second of each, the median of the turns; the first turn is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in embedders}
    for _ in range(turns + 1):
        for name, embedder in embedders.items():
            start = time.perf_counter()
            embedder(images)
            rates[name].append(len(images) / (time.perf_counter() - start))
    return {name: statistics.median(found[1:]) for name, found in rates.items()}


def main() -> None:
    parser = script_parser(__doc__, results="export_precisions", model="", data="", calibrate=256, images=128, turns=5)
    args = parser.parse_args()
    name, preprocessing, export = exporter(model_file(args.model))
    pictures = JudgedPictures(args.data, preprocessing, args.calibrate)
    files, embedders = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (file, (precision, inside)) in enumerate(FORMS.items()):
            path = Path(folder) / f"{number}.onnx"
            onnx_deployment.NORMALISATIONS = () if file == ROUNDED else NORMALISATIONS
            files[file] = export(
                path,
                tolerance=math.inf,  # told, whatever it is
                form=OnnxForm(precision, inside, pictures.batches()),
                judge=lambda reference, written: pictures.loss(reference, written, 1.0).to_dict(),
            )
            embedders[file] = open_embedder(path, device=CPU)
        images = torch.cat(list(pictures.batches()))[: args.images]
        expected = embedders["fp32"](images)
        rates = rates_in_turn(embedders, images, args.turns)
        for file, result in files.items():
            judged, difference = result["judged"], (embedders[file](images) - expected).abs().max()
            row = {
                "model": name,
                "image_size": result["image_size"],
                "data": args.data,
                "file": file,
                "megabytes": round(result["bytes"] / 1e6, 2),
                "difference": f"{float(difference / expected.abs().max()):.1e}",
                "accuracy": round(judged["accuracy"], 4),
                "far": judged["far"],
                "tar": round(judged["tar"], 4),
                "tar_lost": round(judged["tar_lost"], 4),
                "threshold": round(judged["threshold"], 4),
                "images_per_second": round(rates[file], 1),
                "ratio": round(rates[file] / rates["fp32"], 2),
                "cosine": round(float(cosine_similarity(embedders[file](images), expected).mean()), 5),
            }
            print(", ".join(f"{column} {value}" for column, value in row.items()))
            add_row("export_precisions", row, args.out)


if __name__ == "__main__":
    main()
