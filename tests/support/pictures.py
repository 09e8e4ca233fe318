"""Pictures on disk."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(path: Path, seed: int = 0) -> Path:
    """Write a picture of noise, 12 by 12 pixels, in the format of its suffix, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def smooth(width: int, height: int) -> Any:
    """A Pillow image without details that shrinking would lose, nor large areas of one colour."""
    spots = np.random.default_rng(0).normal(128, 90, (max(height // 25, 4), max(width // 25, 4)))
    image = Image.fromarray(spots.clip(0, 255).astype(np.uint8)).convert("RGB")
    return image.resize((width, height), Image.Resampling.BICUBIC)


def stored(image: Any, kind: str, **options: Any) -> bytes:
    """The file of a Pillow image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
