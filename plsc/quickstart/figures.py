"""The report's pictures: the training curve, and thumbnails."""

import base64
import io
from pathlib import Path
from typing import Any

from torch import Tensor

from plsc.data.codec import encode_image
from plsc.evaluation.plots import COLOURS, canvas
from plsc.train.metrics import read_metrics


def loss_curve(run: Path) -> str:
    """SVG of loss and learning rate over the steps of a run."""
    lines = [line for line in read_metrics(run) if line.get("loss") is not None]
    figure, axes = canvas(1)
    axes[0].plot([x["step"] for x in lines], [x["loss"] for x in lines], color=COLOURS[0], linewidth=2)
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("loss", color=COLOURS[0])
    axes[0].set_ylim(bottom=0)
    rate = axes[0].twinx()
    rate.plot([x["step"] for x in lines], [x["lr"] for x in lines], color=COLOURS[1], linewidth=1.2, linestyle="--")
    rate.set_ylabel("learning rate", color=COLOURS[1])
    rate.set_ylim(bottom=0)
    rate.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return svg_of(figure)


def svg_of(figure: Any) -> str:
    """A matplotlib figure as an <svg> element."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return inline(buffer)


def inline(buffer: io.BytesIO) -> str:
    """An SVG document as an element to stand within HTML."""
    text = buffer.getvalue().decode("utf-8")
    return text[text.index("<svg") :]


def thumbnail(image: Tensor) -> str:
    """A picture uint8 (3, H, W) as a data: URL."""
    return "data:image/jpeg;base64," + base64.b64encode(encode_image(image, "jpeg")).decode("ascii")
