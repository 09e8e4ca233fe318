"""Pictures are decoded in processes with budgets: a hostile one costs its sender alone."""

import asyncio
import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from support.live_service import Live, image_input, live_service, picture
from support.pictures import smooth
from support.waiting import wait_until

from plsc.data import decode_image
from plsc.data.alignment import TEMPLATE, align_face
from plsc.errors import DataError
from plsc.image_files import PixelLimits, TooLargeError
from plsc.models.preprocessing import Preprocessing
from plsc.serve.access import Owner
from plsc.serve.decoding import DecodeProcess, Decoders, decode
from plsc.serve.settings import Limits

pytestmark = pytest.mark.live

MEGAPIXELS = 12_000_000
# On a loaded machine a request of large pictures takes longer than usual.
SETTINGS = {"decode_processes": 1, "limits": Limits(deadline_seconds=110)}


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def heic(image: Any, **options: Any) -> bytes:
    import pillow_heif

    file = io.BytesIO()
    pillow_heif.from_pillow(image).save(file, **options)
    return file.getvalue()


def noise(size: int) -> Any:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8))


def scan_bomb(side: int, scans: int) -> bytes:
    """A progressive JPEG with ``scans`` more scans: next to no bytes, and a pass over the picture for each."""
    data = encoded(Image.new("L", (side, side)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2][: 2 + int.from_bytes(data[last + 2 : last + 4], "big") + 30]
    return data[:-2] + scan * scans + data[-2:]


@contextlib.contextmanager
def decoding(max_pixels: int = MEGAPIXELS, max_jpeg_pixels: int = MEGAPIXELS) -> Iterator[DecodeProcess]:
    running = DecodeProcess(PixelLimits(max_pixels, max_jpeg_pixels, 2 * max_pixels))
    try:
        yield running
    finally:
        running.close()
        running.end()


@pytest.fixture
def process() -> Iterator[DecodeProcess]:
    with decoding() as running:
        yield running


def child_of(process: DecodeProcess) -> psutil.Process:
    assert process._process is not None
    return psutil.Process(process._process.pid)


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended, perhaps just now
            found += [child] if "plsc.serve.decode_process" in child.cmdline() else []
    return found


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 95, "subsampling": 0}),
        ("JPEG", "RGB", {"subsampling": 1}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
        ("WEBP", "RGB", {}),
    ],
)
def test_pixels_are_those_of_the_library(process, kind, mode, options):
    """Embeddings made by the service and by plsc embed are compared with each other."""
    data = encoded(noise(61).crop((0, 0, 61, 40)).convert(mode), kind, **options)
    pixels = torch.from_numpy(process.decode(data, "x").pixels).permute(2, 0, 1)
    assert torch.equal(pixels, decode_image(data, "x"))


def test_the_process_imports_no_torch():
    code = "import plsc.serve.decode_process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_searches_go_before_decoding(process):
    process.start()
    assert os.getpriority(os.PRIO_PROCESS, child_of(process).pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_scans_are_limited_and_time_is_where_the_count_is_not(process, monkeypatch):
    with pytest.raises(DataError, match="more than 100 scans"):
        process.decode(scan_bomb(64, 200), "x")
    with decoding() as slow:
        monkeypatch.setattr(slow, "_cpu_seconds", 0)  # the system counts whole seconds: this one is over within one
        with pytest.raises(DataError, match="takes too long"):
            list(map(slow.decode, [scan_bomb(3400, 80)] * 50, ["x"] * 50))
        monkeypatch.setattr(slow, "_cpu_seconds", 60)
        assert slow.decode(picture(1), "x").pixels.shape == (16, 16, 3), "another process took its place"


def test_memory_is_limited(process):
    """A process of a smaller limit is given what a larger one takes, past the check of its header."""
    process.start()
    child = child_of(process)
    limit, _ = child.rlimit(psutil.RLIMIT_AS)
    assert child.memory_info().vms < limit < child.memory_info().vms + 500 * 2**20
    assert child.memory_info().rss < 80 * 2**20


def test_a_killed_process_is_replaced(process):
    process.decode(picture(1), "x")
    child_of(process).kill()
    assert process.decode(picture(2), "x").pixels.shape == (16, 16, 3)
    process.kill()
    assert process.decode(picture(3), "x").pixels.shape == (16, 16, 3)


def test_it_ends_with_its_parent(tmp_path):
    code = (
        "import os; from plsc.serve.decoding import DecodeProcess; from plsc.serve.settings import Limits;"
        "p = DecodeProcess(Limits().pixels); p.start();"
        "print(p._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert started.returncode == -signal.SIGKILL
    child = int(started.stdout)
    wait_until(lambda: is_ended(child))


def is_ended(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    return True


def test_callers_take_turns():
    """One caller has all but one of the processes, and a picture of another goes before the rest of its request."""
    order: list[str] = []
    one_ends = threading.Semaphore(0)

    def work(name: str, _: DecodeProcess) -> str:
        order.append(name)
        assert one_ends.acquire(timeout=60)
        return name

    async def run() -> None:
        decoders = Decoders(1, Limits())
        first = decoders.submit(Owner("a", "a"), [lambda p, n=n: work(f"a{n}", p) for n in range(4)])
        second = decoders.submit(Owner("a", "a"), [lambda p: work("b0", p)])
        third = decoders.submit(Owner("c", "c"), [lambda p: work("c0", p)])
        fourth = decoders.submit(Owner("d", "d"), [lambda p: work("d0", p)])
        first[3].cancel()
        futures = [*first[:3], *second, *third, *fourth]
        for ended in range(6):  # one after the other
            while sum(future.done() for future in futures) < ended or len(order) < ended + decoders.running:
                await asyncio.sleep(0)
            one_ends.release()
        assert await asyncio.gather(*futures) == ["a0", "a1", "a2", "b0", "c0", "d0"]
        await asyncio.to_thread(decoders.close)

    asyncio.run(run())
    assert order.index("b0") < order.index("a2")
    assert order.index("c0") <= 1
    assert order.index("d0") < order.index("a2")
    assert "a3" not in order


def ask_beside(live: Live, body: Any) -> tuple[list[Any], threading.Thread]:
    """Send a request in a thread; returns where its answer will be."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(live.ask("POST", "/v1/embeddings", body)))
    thread.start()
    return answers, thread


@pytest.mark.slow
def test_many_large_pictures_do_not_delay_another_caller(live):
    large = encoded(Image.new("RGB", (3400, 3400), "teal"), "WEBP")
    assert len(large) < 40_000
    answers, thread = ask_beside(live, {"inputs": [image_input(large)] * 16})
    wait_until(lambda: live.service.decoders.running)
    for seed in range(4):  # each waits for one large picture; on a busy machine several pass between two
        assert live.ask("POST", "/v1/embeddings", {"inputs": [image_input(picture(seed))]}).status_code == 200
    assert not answers, "the large pictures were decoded before the others asked"
    thread.join()
    assert answers[0].status_code == 200, answers[0].text[:300]


@pytest.mark.slow
def test_who_goes_away_takes_the_decoding_along(live):
    body = json.dumps({"inputs": [image_input(scan_bomb(3400, 80))] * 50}).encode()
    with live.connect() as connection:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {live.http.base_url.netloc.decode()}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: live.service.decoders.running)
    wait_until(lambda: not live.service.decoders.running)
    time.sleep(0.05)
    assert not live.service.decoders.running


@pytest.mark.slow
def test_a_picture_that_nobody_waits_for_is_killed():
    bomb, others = scan_bomb(9000, 80), {child.pid for child in children()}

    async def run() -> None:
        decoders = Decoders(1, Limits(image_pixels=100_000_000, jpeg_pixels=100_000_000))
        await asyncio.to_thread(decoders.start)
        started = {child.pid for child in children()} - others
        (future,) = decoders.submit(Owner("a", "a"), [lambda process: process.decode(bomb, "x")])
        await asyncio.sleep(0.5)
        future.cancel()
        while decoders.running:
            await asyncio.sleep(0.01)
        assert started - {child.pid for child in children()}, "it was decoded to its end"
        (next_one,) = decoders.submit(Owner("b", "b"), [lambda process: process.decode(picture(1), "x")])
        assert (await next_one).pixels.shape == (16, 16, 3)
        await asyncio.to_thread(decoders.close)

    asyncio.run(run())


def png(side: int, cut: int) -> bytes:
    """A PNG whose data end early."""
    row = zlib.compress(bytes((1 + 3 * side) * side))[:-cut]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", row) + chunk(b"IEND", b"")


def test_a_bad_picture_fails_alone_by_name(live):
    good = image_input(picture(1))
    for data, status, said in (
        (scan_bomb(64, 200), 422, "scans"),
        (png(100, 50), 422, "does not decode"),
        (encoded(noise(64), "JPEG")[:200], 422, "does not decode"),
        (b"RIFF0000WEBP", 422, "does not decode"),
        (b"\xff\xd8", 415, "convert it first"),
        (b"", 415, "convert it first"),
        (encoded(Image.new("1", (6000, 4334)), "PNG"), 413, "send a JPEG, or raise --max-megapixels"),
        (encoded(Image.new("L", (9000, 7223)), "JPEG"), 413, "65,000,000"),
        (encoded(noise(20), "GIF"), 415, "JPEG, PNG, WEBP or AVIF"),
    ):
        answer = live.ask("POST", "/v1/embeddings", {"inputs": [good, image_input(data), good]})
        assert (answer.status_code, "inputs[1]" in answer.text, said in answer.text) == (status, True, True), (
            answer.text
        )
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    animated = [encoded(frames[0], kind, save_all=True, append_images=frames[1:]) for kind in ("WEBP", "PNG")]
    found = live.ask("POST", "/v1/embeddings", {"inputs": [image_input(data) for data in animated]})
    alone = live.ask("POST", "/v1/embeddings", {"inputs": [image_input(encoded(frames[0], "PNG"))]})
    assert np.allclose(found.json()["embeddings"], alone.json()["embeddings"] * 2, atol=0.2)


@pytest.mark.slow
def test_the_end_does_not_wait_for_decoding(tmp_path, capfd):
    body, others = {"inputs": [image_input(scan_bomb(3400, 80))] * 100}, {child.pid for child in children()}
    with live_service(tmp_path, drain_seconds=1.0) as live:
        answers, thread = ask_beside(live, body)
        wait_until(lambda: live.service.decoders.running)
        live.server.stop()
        thread.join()
    assert answers[0].status_code == 503
    assert {child.pid for child in children()} == others
    assert "Traceback" not in capfd.readouterr().err


def test_landmarks_in_the_file_s_pixels_find_the_face_in_a_shrunk_picture():
    """Shrinking makes a difference of 1.3; landmarks beside their place by one pixel of the file, 3.6."""
    landmarks, image = 200 + 2.0 * TEMPLATE, smooth(803, 601)
    with decoding(803 * 601 // 4, 10**6) as process:
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            data = encoded(image, "JPEG", quality=95, exif=exif)
            shrunk, divisor, _ = process.decode(data, "x")
            assert (divisor, sorted(shrunk.shape)) == (4, [3, 151, 201])
            crop = decode(process, data, "x", Preprocessing(112), landmarks, None).pixels
            full = align_face(decode_image(data, "x"), landmarks, 112)
            assert (crop.float() - full).abs().mean() < 2, orientation


SMALLER = [(kind, mode) for kind in ("PNG", "WEBP", "HEIF") for mode in ("RGB", "RGBA")]
SMALLER += [("PNG", mode) for mode in ("L", "LA", "P", "1", "I;16")]


@pytest.mark.parametrize(("kind", "mode"), SMALLER)
def test_a_picture_that_is_no_jpeg_is_made_smaller_too(kind, mode):
    """To means of the pixels that it has when it is decoded as it is."""
    width, height = (202, 152) if kind == "HEIF" else (201, 151)  # HEVC has even sides
    image = smooth(width, height)
    image = image.convert("L").convert("I;16") if mode == "I;16" else image.convert(mode)
    data = heic(image) if kind == "HEIF" else encoded(image, kind)
    whole = Image.fromarray(decode_image(data, "x").permute(1, 2, 0).numpy())
    most = -(-width * height // 2)
    with decoding(most) as process:
        shrunk, divisor, shift = process.decode(data, "x")
    assert (divisor, shift, shrunk.shape) == (2, (0, 0), (76, 101, 3))
    assert np.abs(shrunk.astype(int) - np.asarray(whole.reduce(2))).max() <= 1
    with decoding(most - 1) as process, pytest.raises(TooLargeError, match=f"more than the {2 * most - 2:,} allowed"):
        process.decode(data, "x")


@pytest.mark.slow
def test_a_heic_of_24_megapixels_is_decoded_within_the_limits():
    """As recent iPhones write them: in tiles of 512."""
    data = heic(smooth(5712, 4284), quality=50, tile_size=512, preset="ultrafast")
    with decoding(Limits().image_pixels) as process:
        assert process.decode(data, "x").pixels.shape == (2142, 2856, 3)
        assert peak_kilobytes(process) < 400 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"progressive": True}])
def test_a_photo_of_64_megapixels_is_decoded_within_the_limits(kind):
    data = encoded(smooth(9248, 6936), "JPEG", **kind)
    with decoding(Limits().image_pixels, Limits().jpeg_pixels) as process:
        assert process.decode(data, "x").pixels.shape == (1734, 2312, 3)
        assert peak_kilobytes(process) < (300 if kind else 120) * 1024


def peak_kilobytes(process):
    memory = Path(f"/proc/{child_of(process).pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in memory.splitlines() if line.startswith("VmHWM"))


def test_no_secret_of_the_environment_is_passed_on(process, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    process.start()
    assert "hunter2" not in Path(f"/proc/{child_of(process).pid}/environ").read_text(encoding="utf-8", errors="replace")
    assert os.environ["PGPASSWORD"] == "hunter2"


def test_the_limit_of_pixels_is_the_operator_s(tmp_path):
    with live_service(tmp_path, limits=Limits(image_pixels=300)) as live:
        for size, status in ((24, 200), (25, 413)):
            answer = live.ask("POST", "/v1/embeddings", {"inputs": [image_input(picture(1, size))]})
            assert answer.status_code == status
        assert live.ask("GET", "/v1/info").json()["limits"]["image_pixels"] == 300
