"""Does the planner's model of time explain the throughput that others have published?

    python benchmarks/retrodiction.py

reads benchmarks/published_throughput.csv (arcface_torch's tables and PLSC's, with the file and commit of each row),
fits three constants to every other row in the order of the file, and predicts the rest: the backbone, its all-reduce
and the collectives by plsc.plan, the head by what the peers' own code multiplies, reads and writes. Prints every row,
writes benchmarks/results/retrodiction.csv and docs/retrodiction.png. No GPU is used: nothing is run but the backbones'
Python.

The constants, of all GPUs, precisions and frameworks together: the share of its bound that a backbone reaches, that of
the head, and seconds for each of a backbone's operations. A row that says too little to be predicted (GPU, batch, a
backbone that plsc does not have) is printed without a prediction and enters nothing.
"""

import argparse
import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from results_file import RESULTS

from plsc import config as configuration
from plsc.devices import DEVICES, Device
from plsc.models import names
from plsc.plan.advice import profile_of
from plsc.plan.backbone_timing import Efficiency, plan_backbone_time
from plsc.plan.devices import LINK_SHARE, LINKS, Links
from plsc.plan.plan_config import PlanConfig, plan_config

PUBLISHED = Path(__file__).with_name("published_throughput.csv")
PICTURE = Path(__file__).parents[1] / "docs" / "retrodiction.png"
DIM = 512
PCIE_3 = 16e9  # x16, of the Xeons of 2019 in all the servers without NVLink

# Float32 passes over the (B, C/n) logits in a step of arcface_torch, each reading or writing all of them, as counted
# in its losses.py and partial_fc.py at c01f3d48: the product 1, arccosine and cosine in place with the copies that
# autograd keeps 8, margin and scale 3, softmax and gradient 11, the backward pass of all that 30, of the product 2.
LOGIT_PASSES = 55
# Likewise over the (C/n, D) rows: normalised 4, multiplied 3, the gradient of the normalisation 10, SGD with momentum
# and weight decay 11; gathered and returned where sampled 8; into and out of a data parallel one's buckets 3.
ROW_PASSES, SAMPLED_PASSES, BUCKET_PASSES = 28, 8, 3
DRAW_BYTES = 100  # for each row among which some are drawn: random numbers, and top-k of many, which sorts them
PRODUCTS = 6  # FLOPs for each of B x C/n x D: one product forward, two backward


@dataclass(frozen=True)
class Row:
    """A published row; ``images_per_second`` is theirs."""

    software: str
    gpu: str
    gpus: int
    gpus_per_node: int
    link: str
    backbone: str
    classes: int
    head: str
    sample_rate: float
    precision: str
    batch_per_gpu: int
    images_per_second: float
    memory_mib: str
    source: str
    note: str

    @property
    def why_not(self) -> str:
        """What keeps the row from being predicted; empty where nothing does."""
        if not self.gpu:
            return "GPU not stated"
        if not self.batch_per_gpu:
            return "batch not stated"
        return "" if self.backbone in names() else "no such backbone in plsc"

    @property
    def samples(self) -> int:
        """Of a step, over all GPUs."""
        return self.gpus * self.batch_per_gpu

    @property
    def is_half(self) -> bool:
        """True where the backbone computes in 16 bits."""
        return self.precision.startswith("fp16")


def main() -> None:
    """Fit, predict, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = read_rows()
    models = [Model(row) for row in rows if not row.why_not]
    fitted, held_out = models[::2], models[1::2]
    constants = fit(fitted)
    print(
        f"backbone {constants.backbone:.3f} of its bound, head {constants.head:.3f} of its own, "
        f"{constants.operation * 1e6:.0f} us an operation"
    )
    for row in rows:
        print(_line(row, constants, models, held_out))
    for name, chosen in (("fitted", fitted), ("held out", held_out)):
        print(f"{name}: {len(chosen)} rows, median error {median_error(chosen, constants):.1%}")
    print(f"all, by the planner's own constants: median error {median_error(models, Efficiency()):.1%}")
    _write(rows, models, held_out, constants)
    _draw(fitted, held_out, constants)


def read_rows() -> list[Row]:
    """Every published row, in the order of the file."""
    with PUBLISHED.open(newline="") as file:
        return [_row(values) for values in csv.DictReader(file)]


def _row(values: dict[str, str]) -> Row:
    numbers = {name: int(values[name] or 0) for name in ("gpus", "gpus_per_node", "classes", "batch_per_gpu")}
    rates = {name: float(values[name]) for name in ("sample_rate", "images_per_second")}
    return Row(**{**values, **numbers, **rates})  # type: ignore[arg-type]


class Model:
    """The planner's description of a row's step."""

    def __init__(self, row: Row) -> None:
        self.row = row
        nvlink = row.link == "nvlink"
        self.device = DEVICES[row.gpu]
        inside = self.device.nvlink * LINK_SHARE if nvlink else PCIE_3 * LINK_SHARE
        self.links = Links(inside, LINKS["ethernet"] * LINK_SHARE)
        self.run = _setup(row)
        self.profile = profile_of(self.run)

    def seconds(self, constants: Efficiency) -> float:
        """Of a step."""
        allowed = replace(constants, tf32="tf32" in self.row.precision)
        parts = plan_backbone_time(self.run, self.profile, self.device, self.links, allowed)[0]
        computed, exchanged = head_seconds(self.row, self.device, self.links)
        return sum(parts.values()) + computed / constants.head + exchanged

    def images_per_second(self, constants: Efficiency) -> float:
        """Over all GPUs."""
        return self.row.samples / self.seconds(constants)

    def error(self, constants: Efficiency) -> float:
        """Of the prediction, relative to what is published."""
        return self.images_per_second(constants) / self.row.images_per_second - 1


def _setup(row: Row) -> PlanConfig:
    values = {
        "backbone": row.backbone,
        "precision": "fp16" if row.is_half else "fp32",
        "channels_last": row.software.startswith("PLSC"),  # NHWC in 16 bits, by its README
        "data": {"batch_size": row.batch_per_gpu},
    }
    return plan_config(configuration.from_dict(values), row.classes, row.gpus, row.gpus_per_node)


def head_seconds(row: Row, device: Device, links: Links) -> tuple[float, float]:
    """Seconds of the peers' head at the device's full speed, and of its collectives."""
    is_whole = row.head == "data_parallel"
    owned = row.classes if is_whole else -(-row.classes // row.gpus)
    rows = owned * row.sample_rate
    batch = row.batch_per_gpu if is_whole else row.samples
    passes = ROW_PASSES + (BUCKET_PASSES if is_whole else 0) + (SAMPLED_PASSES if row.sample_rate < 1 else 0)
    moved = 4 * rows * (LOGIT_PASSES * batch + passes * DIM) + (DRAW_BYTES * owned if row.sample_rate < 1 else 0)
    computed = PRODUCTS * batch * rows * DIM / _head_speed(row, device) + moved / device.bandwidth
    share = (row.gpus - 1) / row.gpus
    if is_whole:
        return computed, links.seconds(8 * share * rows * DIM, row.gpus, row.gpus_per_node, collective="all_reduce")
    gathered = links.seconds(share * batch * DIM * 4, row.gpus, row.gpus_per_node, calls=2)
    sums = links.seconds(8 * share * batch * 3, row.gpus, row.gpus_per_node, collective="all_reduce", calls=3)
    scattered = links.seconds(share * batch * DIM * 4, row.gpus, row.gpus_per_node, collective="reduce_scatter")
    return computed, gathered + sums + scattered


def _head_speed(row: Row, device: Device) -> float:
    """FLOP/s of the head's products: float32 in arcface_torch, or TF32 where its tables say so; PLSC's in 16 bits."""
    if row.software.startswith("PLSC") and row.is_half:
        return device.products["fp16"]
    return device.products["tf32" if "tf32" in row.precision else "fp32"]


def fit(models: list[Model]) -> Efficiency:
    """The three constants of the least mean of |log(predicted / published)|, by a search along each in turn."""

    def loss(point: tuple[float, ...]) -> float:
        constants = _constants(point)
        return sum(abs(math.log1p(model.error(constants))) for model in models) / len(models)

    best = search(loss, (math.log(0.8), math.log(0.7), math.log(5e-5)))
    return _constants(best)


def _constants(point: tuple[float, ...]) -> Efficiency:
    backbone, head, operation = map(math.exp, point)
    return Efficiency(backbone, head, operation)


def search(loss: Callable[[tuple[float, ...]], float], start: tuple[float, ...]) -> tuple[float, ...]:
    """The point that no step of 0.01 along one axis improves, from ``start`` with steps that halve."""
    best, least, step = start, loss(start), 0.32
    while step >= 0.01:
        moves = [
            tuple(x + sign * step * (i == axis) for i, x in enumerate(best)) for axis in range(3) for sign in (1, -1)
        ]
        value, point = min((loss(point), point) for point in moves)
        if value < least:
            best, least = point, value
        else:
            step /= 2
    return best


def median_error(models: list[Model], constants: Efficiency) -> float:
    """Median of |predicted / published - 1|."""
    return median(abs(model.error(constants)) for model in models)


def _line(row: Row, constants: Efficiency, models: list[Model], held_out: list[Model]) -> str:
    label = (
        f"{row.software:14} {row.gpus:2} {row.gpu or '?':8} {row.backbone:11} {row.classes:>11,} {row.head:14} "
        f"{row.sample_rate:<6g} {row.precision:9} x{row.batch_per_gpu:<4} {row.images_per_second:>8,.0f}"
    )
    found = next((model for model in models if model.row is row), None)
    if found is None:
        return f"{label}        –  {row.why_not}"
    half = "held out" if found in held_out else "fitted"
    return f"{label} {found.images_per_second(constants):>8,.0f} {found.error(constants):+7.1%}  {half}"


def _write(rows: list[Row], models: list[Model], held_out: list[Model], constants: Efficiency) -> None:
    by_row = {id(model.row): model for model in models}
    with (RESULTS / "retrodiction.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ["software", "gpu", "gpus", "backbone", "classes", "head", "sample_rate", "precision", "batch_per_gpu"]
        writer.writerow([*names, "published_images_per_second", "predicted_images_per_second", "error", "half"])
        for row in rows:
            model = by_row.get(id(row))
            figures: list[object] = ["", "", row.why_not]
            if model is not None:
                half = "held out" if model in held_out else "fitted"
                figures = [round(model.images_per_second(constants)), f"{model.error(constants):.3f}", half]
            writer.writerow([*(getattr(row, name) for name in names), f"{row.images_per_second:g}", *figures])


def _draw(fitted: list[Model], held_out: list[Model], constants: Efficiency) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 6.4), layout="constrained")
    axes = figure.subplots()
    ends = (300, 25_000)
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color="0.9", label="within 15%")
    colours = {"arcface_torch": "#4f46e5", "PLSC static": "#ea580c", "PLSC dynamic": "#16a34a"}
    for software, colour in colours.items():
        for chosen, filled in ((held_out, True), (fitted, False)):
            points = [model for model in chosen if model.row.software == software]
            axes.scatter(
                [model.row.images_per_second for model in points],
                [model.images_per_second(constants) for model in points],
                s=26,
                linewidth=1,
                edgecolor=colour,
                facecolor=colour if filled else "white",
                label=f"{software}, {'held out' if filled else 'fitted'}",
            )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="published, images per second", ylabel="predicted, images per second")
    ticks = [300, 1000, 3000, 10_000]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_title(
        f"Three constants, fitted to half of the rows: median error of the other half "
        f"{median_error(held_out, constants):.1%}",
        fontsize=10,
    )
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
