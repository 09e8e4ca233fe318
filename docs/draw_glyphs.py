"""Draw docs/glyphs.jpg: characters of a specification, a row each, by its fonts and variants.

python docs/draw_glyphs.py "glyphs:han:least_fonts=9:characters=8:variants=2" docs/glyphs.jpg
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from plsc.data import open_dataset

SIZE, GAP = 64, 3


def draw(spec: str, out: Path, columns: int) -> None:
    """Write the contact sheet: the pictures of each class in a row, the first ``columns`` of them."""
    glyphs = open_dataset(spec, image_size=SIZE)
    side = SIZE + GAP
    sheet = np.full((glyphs.num_classes * side + GAP, columns * side + GAP), 255, dtype=np.uint8)
    for label in range(glyphs.num_classes):
        for column, index in enumerate(np.flatnonzero(glyphs.labels == label)[:columns]):
            top, left = label * side + GAP, column * side + GAP
            sheet[top : top + SIZE, left : left + SIZE] = glyphs.image(int(index))[0].numpy()
    Image.fromarray(sheet).save(out, quality=50)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="SPEC", help="as plsc's data.train takes it")
    parser.add_argument("out", metavar="FILE", type=Path, help="the picture to write")
    parser.add_argument("--columns", type=int, default=20, metavar="N", help="pictures of a character (20)")
    given = parser.parse_args()
    draw(given.spec, given.out, given.columns)
