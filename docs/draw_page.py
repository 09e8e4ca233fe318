"""Draw docs/page-desktop.png and docs/page-phone.png: the service's page over drawn faces, in Chromium.

plsc train avatars_quickstart --nproc 2 --out runs/avatars
plsc eval runs/avatars --data avatars:400x6@1000000 --calibration avatars.calibration.json
python docs/draw_page.py runs/avatars avatars.calibration.json
"""

import argparse
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
QUERIES = {"desktop": 7, "phone": 11}  # the person searched for in each picture
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
        take_pictures(address, {view: encoded[person * PICTURES + ENROLLED] for view, person in QUERIES.items()})


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
    """Search for a picture in each view, and photograph the page."""
    from playwright.sync_api import sync_playwright

    views = {
        "desktop": {"viewport": {"width": 1280, "height": 830}, "color_scheme": "light"},
        "phone": {"viewport": {"width": 390, "height": 1080}, "color_scheme": "dark", "device_scale_factor": 2},
    }
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--headless", "--no-sandbox"])
        for view, options in views.items():
            page = browser.new_context(**options).new_page()
            page.goto(address)
            picture = {"name": "visitor.jpg", "mimeType": "image/jpeg", "buffer": queries[view]}
            page.locator("#search-picture input").set_input_files(picture)
            page.locator("#matches img.thumbnail").last.wait_for()
            page.wait_for_timeout(500)
            page.screenshot(path=FOLDER / f"page-{view}.png")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run directory or model file")
    parser.add_argument("calibration", help="what plsc eval --calibration wrote for it")
    parser.add_argument("--fmr", default="1e-4", help="false-match rate of the threshold (1e-4)")
    arguments = parser.parse_args()
    draw(arguments.model, arguments.calibration, arguments.fmr)
