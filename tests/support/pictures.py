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


def stored(image: Any, kind: str, **options: Any) -> bytes:
    """The file of a Pillow image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
