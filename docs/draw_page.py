"""Draw docs/page-desktop.png and docs/page-phone.png, and their -dark ones: the page over drawn faces, in Chromium.

plsc quickstart --out quickstart
python docs/draw_page.py quickstart/model.onnx quickstart/calibration.json
"""

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plsc
from plsc.data.avatars import AvatarDataset
from plsc.data.codec import encode_image

FOLDER = Path(__file__).parent
NAMES = """
Ada Björn Chidi Dalia Emre Farah Goran Hana Ines Jonas Kavya Leïla Mateo Nadia Oscar Priya Quentin Rosa Søren Tamar
Ulla Viktor Wanjiru Xenia Yusuf Zoë Akira Beatriz Ciro Dina Elif Fadi Greta Hugo Imani Jana Kofi Lucía Mira Noor
"""
CITIES = ("Bern", "Basel", "Geneva", "Lausanne", "Lugano")
FIRST_IDENTITY = 2_000_000  # trained on by no recipe
VIEWS = {  # how each picture is taken, and the person who is searched for
    "desktop": ({"viewport": {"width": 1280, "height": 830}}, 7),
    "phone": (
        {"viewport": {"width": 390, "height": 1080}, "device_scale_factor": 1.5, "has_touch": True, "is_mobile": True},
        11,
    ),
}
COLOURS = 256  # of a picture: nobody sees the difference, and it has a third of the size
SIZE = 96
PICTURES, ENROLLED = 4, 3  # of each person


def draw(model: str, calibration: str, rate: str) -> None:
    """Serve ``model`` over a new gallery and take both pictures."""
    names = NAMES.split()
    faces = AvatarDataset(len(names), PICTURES, first=FIRST_IDENTITY, image_size=SIZE)
    encoded = [encode_image(faces.image(index)) for index in range(len(faces))]
    with served(model, calibration, rate) as address:
        with plsc.Client(address) as client:
            client.create_collection("staff")
            for person, name in enumerate(names):
                start = person * PICTURES
                metadata = {"city": CITIES[person % len(CITIES)], "since": 2015 + person * 7 % 11}
                client.add_person("staff", name, metadata=metadata, faces=encoded[start : start + ENROLLED])
        take_pictures(address, {view: encoded[person * PICTURES + ENROLLED] for view, (_, person) in VIEWS.items()})


@contextmanager
def served(model: str, calibration: str, rate: str) -> Iterator[str]:
    """Run ``plsc serve`` with thumbnails; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        judge = ("--calibration", calibration, "--fmr", rate)
        command = (sys.executable, "-m", "plsc.tools.entry", "serve", "--model", model, "--store", f"{folder}/store")
        process = subprocess.Popen(
            (*command, "--port", "0", "--keep-thumbnails", *judge),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield line.split()[2].rstrip(":")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def take_pictures(address: str, queries: dict[str, bytes]) -> None:
    """Search for a picture in each view and scheme, and photograph the page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--headless", "--no-sandbox"])
        for view, (options, _) in VIEWS.items():
            for scheme, suffix in (("light", ""), ("dark", "-dark")):
                page = browser.new_context(**options, color_scheme=scheme).new_page()
                page.goto(address)
                picture = {"name": "visitor.jpg", "mimeType": "image/jpeg", "buffer": queries[view]}
                page.locator("#search-picture input").set_input_files(picture)
                page.locator("#matches img.thumbnail").last.wait_for()
                page.wait_for_timeout(500)
                save(page.screenshot(), FOLDER / f"page-{view}{suffix}.png")
        browser.close()


def save(screenshot: bytes, path: Path) -> None:
    """Write a PNG in few colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run directory or model file")
    parser.add_argument("calibration", help="what plsc eval --calibration wrote for it")
    parser.add_argument("--fmr", default="1e-4", help="false-match rate of the threshold (1e-4)")
    arguments = parser.parse_args()
    draw(arguments.model, arguments.calibration, arguments.fmr)
