"""One set of pictures, and what writes it as every kind of source."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from plsc.data import open_dataset
from plsc.data.convert import convert
from support.pictures import stored

PEOPLE = ("ann", "bob", "eve")
IMAGES = 23  # prime: no number of ranks or batches divides it


def person(number: int) -> str:
    return PEOPLE[number % 3]


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3), np.uint8)
    return stored(Image.fromarray(pixels).resize((32, 32)), "JPEG", quality=90)


PICTURES = {f"{person(number)}/{number:02d}.jpg": picture(number) for number in range(IMAGES)}
ROWS = [(name.partition("/")[0], name, content) for name, content in PICTURES.items()]


def write_folder(folder: Path) -> str:
    for name, content in PICTURES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def write_list(folder: Path) -> str:
    write_folder(folder)
    (folder / "list.tsv").write_text("".join(f"{name}\t{label}\n" for label, name, _ in ROWS))
    return str(folder / "list.tsv")


def write_records(folder: Path) -> str:
    convert(open_dataset(write_folder(folder / "of"), image_size=None), folder / "x.rec", quiet=True)
    return str(folder / "x.rec")


def write_tars(folder: Path) -> str:
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for label, name, content in ROWS[shard::3]:
                stem = name.removesuffix(".jpg")
                described = json.dumps({"label": label, "source": "drawn"}).encode()
                for member, data in ((name, content), (f"{stem}.json", described), (f"{stem}.cls", label.encode())):
                    header = tarfile.TarInfo(member)
                    header.size = len(data)
                    tar.addfile(header, io.BytesIO(data))
    return f"{folder}/{{0..2}}.tar"


def columns(rows: list[tuple[str, str, bytes]]) -> dict[str, list]:
    return {
        "image": [{"bytes": content, "path": name} for _, name, content in rows],
        "label": [label for label, _, _ in rows],
    }


def write_parquet(folder: Path) -> str:
    import pyarrow.parquet as pq

    for shard in range(2):
        pq.write_table(arrow_table(ROWS[shard::2]), folder / f"{shard}.parquet", row_group_size=4)
    return str(folder)


def arrow_table(rows: list[tuple[str, str, bytes]]):
    import pyarrow as pa

    return pa.table(columns(rows))


def write_lance(folder: Path) -> str:
    import lance
    import pyarrow as pa

    keys = pa.array([name for _, name, _ in ROWS])
    lance.write_dataset(arrow_table(ROWS).append_column("key", keys), folder / "x.lance", max_rows_per_file=10)
    return str(folder / "x.lance")


def write_datasets(folder: Path) -> str:
    import datasets

    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=list(PEOPLE)),
        "key": datasets.Value("string"),
    }
    rows = columns(ROWS) | {"key": [name for _, name, _ in ROWS]}  # saving leaves the last part of pictures' paths
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(folder / "saved", num_shards=3)
    return str(folder / "saved")


KINDS: dict[str, Callable[[Path], str]] = {
    "folder": write_folder,
    "list": write_list,
    "rec": write_records,
    "tars": write_tars,
    "parquet": write_parquet,
    "lance": write_lance,
    "datasets": write_datasets,
}
