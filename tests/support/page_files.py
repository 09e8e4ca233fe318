"""Small stand-ins for the files that pages of the documentation name: pictures, sets, models, runs."""

import contextlib
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from plsc.data.avatars import render_avatar
from support import drawn_face, scrfd

PERSONS, PICTURES, SIDE = 11, 4, 32
LANDMARKS = scrfd.POINTS * 8 + 36  # of the face that the stand-in detector finds in `photo`


def crops(folder: Path, first: int = 0, persons: int = PERSONS) -> None:
    """Write a folder per identity, with drawn faces."""
    for person in range(persons):
        (folder / f"person-{person}").mkdir(parents=True)
        for number in range(PICTURES):
            picture = Image.fromarray(render_avatar(first + person, number, SIDE))
            picture.save(folder / f"person-{person}" / f"{number}.jpg")


def gallery(folder: Path) -> None:
    """Write the store of a service that kept the pictures of the faces that it enrolled."""
    from plsc.gallery.backends import opened_store
    from plsc.gallery.thumbnails import ThumbnailStore
    from plsc.gallery.values import NewPerson

    with opened_store(folder, create=True) as store:
        store.create_collection("people", 4, "a model")
        kept = ThumbnailStore(store, folder / "thumbnails", keep=True)
        for person in range(PERSONS):
            crops = [torch.from_numpy(render_avatar(person, n, SIDE)).permute(2, 0, 1) for n in range(PICTURES)]
            kept.add_persons("people", [NewPerson(np.eye(4)[:PICTURES])], "a model", [crops])


def photo(seed: int) -> Image.Image:
    """Draw a photo in which the stand-in detector finds one face, whose points are LANDMARKS."""
    pixels = np.random.default_rng(seed).integers(0, 90, (96, 96, 3), dtype=np.uint8)
    pixels[:, :, 0] = 0
    pixels[32:40, 32:40] = (255, 0, 0)
    return Image.fromarray(pixels)


def photos(folder: Path) -> None:
    """Write a folder per person, with photos."""
    for person in range(PERSONS):
        (folder / f"person-{person}").mkdir(parents=True)
        for number in range(PICTURES):
            photo(100 * person + number).save(folder / f"person-{person}" / f"{number}.jpg", quality=95)


def landmarks(path: Path) -> None:
    """Write the landmarks of the photos of ``photos``."""
    numbers = ",".join(f"{value:.1f}" for value in LANDMARKS.ravel())
    keys = [f"person-{person}/{number}.jpg" for person in range(PERSONS) for number in range(PICTURES)]
    path.write_text("".join(f"{key},{numbers}\n" for key in keys))


def pairs(path: Path) -> None:
    """Write a verification set, as insightface's .bin."""
    from plsc.data.pairs import write_pairs

    same = [index % 2 == 0 for index in range(40)]
    images = []
    for index, is_same in enumerate(same):
        for identity, number in ((index, 0), (index if is_same else index + 100, 1)):
            file = io.BytesIO()
            Image.fromarray(render_avatar(identity, number, SIDE)).save(file, "JPEG")
            images.append(file.getvalue())
    write_pairs(path, images, same)


def records(path: Path) -> None:
    """Write a .rec with its .idx."""
    plsc("data", "convert", f"avatars:{PERSONS}x{PICTURES}", str(path), "--size", str(SIDE))


def samples(path: Path) -> None:
    """Write a tar of samples as webdataset does, packed if its name says so."""
    with tarfile.open(path, "w:gz" if path.name.endswith(".gz") else "w") as tar:
        for person in range(PERSONS):
            for number in range(PICTURES):
                file = io.BytesIO()
                Image.fromarray(render_avatar(person, number, SIDE)).save(file, "JPEG")
                for field, content in (("jpg", file.getvalue()), ("cls", str(person).encode())):
                    member = tarfile.TarInfo(f"{path.name[:1]}{person:03d}{number:03d}.{field}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def table(path: Path) -> None:
    """Write a Parquet file as `datasets` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for person in range(PERSONS):
        for number in range(PICTURES):
            file = io.BytesIO()
            Image.fromarray(render_avatar(person, number, SIDE)).save(file, "JPEG")
            rows.append({"image": {"bytes": file.getvalue(), "path": f"{number}.jpg"}, "person": f"person-{person}"})
    pq.write_table(pa.Table.from_pylist(rows), path)


def model(path: Path, embedding_dim: int = 16) -> None:
    """Write an untrained backbone: .safetensors, or a bare state_dict under any other suffix."""
    from plsc.models import create, save_model

    torch.manual_seed(0)
    backbone = create("resnet8", embedding_dim=embedding_dim, image_size=SIDE)
    if path.suffix == ".safetensors":
        save_model(backbone, path)
    else:
        torch.save(backbone.state_dict(), path)


def onnx_model(path: Path) -> None:
    """Write an untrained backbone as ONNX; next.onnx is another one than all others."""
    source = path.with_name("exported.safetensors")
    model(source, embedding_dim=24 if path.name == "next.onnx" else 16)
    plsc("export", str(source), "--format", "onnx", "--out", str(path))
    source.unlink()


def detector(path: Path) -> None:
    """Write a stand-in for an SCRFD detector."""
    scrfd.stand_in(path)


def lfw_archive(path: Path) -> None:
    """Write an archive of photos with LFW's folders and names."""
    with tarfile.open(path, "w:gz") as archive:
        for person in range(PERSONS):
            for number in range(PICTURES):
                file = io.BytesIO()
                photo(100 * person + number).save(file, "JPEG", quality=95)
                entry = tarfile.TarInfo(f"lfw/person-{person}/person-{person}_{number + 1:04}.jpg")
                entry.size = file.tell()
                file.seek(0)
                archive.addfile(entry, file)


def pair_list(path: Path) -> None:
    """Write a list of pairs of the photos of ``lfw_archive``, in LFW's form: ten same and ten different."""
    same = [f"person-{index}\t1\t2" for index in range(10)]
    other = [f"person-{index}\t1\tperson-{index + 1}\t1" for index in range(10)]
    path.write_text("\n".join(["1\t10", *same, *other]) + "\n")


def detector_archive(path: Path) -> None:
    """Write an archive with a stand-in detector, as insightface's model packs have it."""
    detector(path.with_name("det_10g.onnx"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(path.with_name("det_10g.onnx"), "det_10g.onnx")
    path.with_name("det_10g.onnx").unlink()


def picture(path: Path) -> None:
    """Write one drawn face."""
    Image.fromarray(render_avatar(7, len(path.stem), SIDE)).save(path)


def whole_photo(path: Path) -> None:
    """Draw a photo in which a real detector finds a face."""
    pixels = drawn_face.photo(300, 240, (100, 90, 50)).permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(path, quality=95)


def party(path: Path) -> None:
    """Draw a photo in which a real detector finds two faces."""
    pixels = drawn_face.photo(520, 260, (120, 120, 60), (360, 120, 75)).permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(path, quality=95)


def calibration(path: Path) -> None:
    """Measure the thresholds of the model of ``onnx_model`` beside it."""
    crops(path.parent / "calibrated")
    source = path.with_name("model.onnx")
    plsc("eval", str(source), "--data", str(path.parent / "calibrated"), "--calibration", str(path))
    shutil.rmtree(path.parent / "calibrated")


def plsc(*argv: str) -> None:
    """Run a command in this process."""
    from plsc.tools.entry import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(list(argv))
    assert code == 0, errors.getvalue()


def configuration(path: Path) -> None:
    """Write a configuration that reads faces.rec."""
    path.write_text(f"[data]\ntrain = {json.dumps('faces.rec')}\n[eval]\nsets = ['lfw.bin']\n")


MAKERS: dict[str, Callable[[Path], None]] = {
    "lfw.tgz": lfw_archive,
    "buffalo_l.zip": detector_archive,
    "pairs.txt": pair_list,
    "faces/": crops,
    "unseen/": lambda path: crops(path, first=5000),
    "people/": lambda path: crops(path, first=6000, persons=30),  # half of them judge int8
    "photos/": photos,
    "gallery/": gallery,
    "other/": gallery,
    ".rec": records,
    ".tar": samples,
    ".tar.gz": samples,
    ".parquet": table,
    ".csv": landmarks,
    ".bin": pairs,
    ".onnx": onnx_model,
    ".safetensors": model,
    ".pth": model,
    "portrait.jpg": whole_photo,
    "party.jpg": party,
    ".jpg": picture,
    ".calibration.json": calibration,
    "quickstart/calibration.json": calibration,
    ".toml": configuration,
}


def make(folder: Path, names: str) -> None:
    """Make the files of ``names``, separated by spaces, in ``folder``; how is said by the name or its ending."""
    for name in names.split():
        kind = next(kind for kind in MAKERS if name == kind or (kind.startswith(".") and name.endswith(kind)))
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (detector if "scrfd" in name or "det_" in name else MAKERS[kind])(path)
