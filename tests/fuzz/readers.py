"""Fuzz targets of readers: a valid file of each, damaged, read as commands read it."""

import contextlib
import importlib.util
import json
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from untrusted import onnx_files
from untrusted.pickled import PROGRAMS
from untrusted.samples import Samples

from fuzz.driver import Target, Violation, damaged, damaged_member, files_below
from fuzz.mutations import mutated_value
from plsc import config
from plsc.data import open_dataset, read_image
from plsc.data.alignment import read_landmarks
from plsc.data.pair_list import read_pair_list
from plsc.data.pairs import read_pairs, write_pairs
from plsc.embedding.columns import open_array
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.onnx_engine import OnnxEngine
from plsc.errors import PlscError
from plsc.evaluation.calibration import Calibration, OperatingPoint, read_calibration, write_calibration
from plsc.evaluation.templates import find_prefix, read_faces, read_template_pairs
from plsc.files import describe_content, digest, read_json, write_manifest
from plsc.gallery.sqlite.backup import read_snapshot
from plsc.index import Index
from plsc.models import load_model
from plsc.train.checkpoint_inspection import describe_checkpoint, read_backbone

MAX_PIXELS = 1 << 20
IJB = {
    "ijbb_name_5pts_score.txt": b"1.jpg 1 1 2 2 3 3 4 4 5 5 0.9\n2.jpg 1 1 2 2 3 3 4 4 5 5 0.5\n",
    "ijbb_face_tid_mid.txt": b"1.jpg 1 1\n2.jpg 2 2\n",
    "ijbb_template_pair_label.txt": b"1 2 0\n1 1 1\n",
}


def targets(samples: Samples, folder: Path) -> list[Target]:
    """Every reader's target; they write into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        *_single_files(samples, folder),
        _records(samples, folder),
        *_folders(samples, folder),
        *_manifests(samples, folder),
        *(_ijb(name, folder) for name in IJB),
    ]


def _file(name: str, path: Path, valid: Sequence[bytes], read: Callable[[Path], object]) -> Target:
    """A reader of one file."""

    def run(content: bytes) -> None:
        path.write_bytes(content)
        read(path)

    return damaged(name, valid, run)


def _single_files(samples: Samples, folder: Path) -> list[Target]:
    write_pairs(folder / "sound.bin", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"] * 4, [True, False, True, False])
    arrays = [np.frombuffer(b"abcd", np.uint8)] * 2
    pairs = [(folder / "sound.bin").read_bytes(), *PROGRAMS.values()]
    pairs += [pickle.dumps((arrays, np.array([True])), protocol=protocol) for protocol in (0, 2, 4, 5)]
    calibration = Calibration("c", "m", ("s",), 10, 20, 30, (OperatingPoint(0.1, 0.5, 0.9, 2),))
    write_calibration(folder / "sound.json", calibration)
    state = load_model(samples.model).state_dict()
    torch.save(state, folder / "sound.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    onnx = [onnx_files.pooling().SerializeToString(), onnx_files.expanding(2, 2).SerializeToString()]
    array = (samples.embeddings / "shard-00000/embeddings.npy").read_bytes()
    images = [path.read_bytes() for path in _pictures(folder)]
    toml = (samples.run / "config.toml").read_bytes()
    return [
        _file("bin", folder / "x.bin", [p for p in pairs if len(p) < 100_000], _read_pairs),
        _file("pt", folder / "x.pt", [path.read_bytes() for path in sorted(folder.glob("*.pt"))], load_model),
        _file("safetensors", folder / "x.safetensors", [samples.model.read_bytes()], load_model),
        _file("onnx", folder / "x.onnx", onnx, lambda path: OnnxEngine(path, torch.device("cpu"))),
        _file("npy", folder / "x.npy", [array], lambda path: open_array(path, (None, None), "float32")),
        _file("image", folder / "x.img", images, lambda path: read_image(path, max_pixels=MAX_PIXELS)),
        _file("toml", folder / "x.toml", [toml, samples.config.read_bytes()], lambda path: config.load(path, {})),
        _file("list", folder / "x.txt", [b"a/1.png\t0\nb/2.png\t1\n", b"a\tx\tz\nb\ty\tz\n"], _read_list),
        _file("pair list", folder / "p.txt", [b"1\t2\nAda\t1\t2\nAda\t1\tBo\t2\n"], read_pair_list),
        _file("landmarks", folder / "x.csv", _landmarks(), read_landmarks),
        _file("calibration", folder / "x.json", [(folder / "sound.json").read_bytes()], read_calibration),
    ]


def _landmarks() -> list[bytes]:
    numbers = ",".join(map(str, range(10)))
    entry = json.dumps({"path": "b.png", "landmarks": list(range(10))})
    return [f"path,{numbers}\na.png,{numbers}\n{entry}\n".encode(), b"a.png\t" + numbers.replace(",", "\t").encode()]


def _pictures(folder: Path) -> list[Path]:
    from support.pictures import picture

    suffixes = ["png", "jpg", "webp", "bmp", "gif", "tiff", "avif"]
    if importlib.util.find_spec("pillow_heif") is not None:
        import pillow_heif

        pillow_heif.register_heif_opener()
        suffixes.append("heic")
    return [picture(folder / f"sound.{suffix}") for suffix in suffixes]


def _read_pairs(path: Path) -> None:
    pairs = read_pairs(path)
    if len(pairs.images) != 2 * len(pairs) or not all(isinstance(image, bytes) for image in pairs.images):
        raise Violation("a set of pairs that is none")


def _read_list(path: Path) -> None:
    dataset = open_dataset(path)
    if len(dataset.labels) != len(dataset) or int(dataset.labels.max()) >= dataset.num_classes:
        raise Violation("labels beyond the classes")


def _records(samples: Samples, folder: Path) -> Target:
    """A .rec with its companions: any of them damaged."""
    suffixes = (".rec", ".idx", ".classes.json", ".keys.tsv")
    files = {suffix: samples.records.with_suffix(suffix).read_bytes() for suffix in suffixes}

    def run(damaged: str, content: bytes) -> None:
        for suffix in suffixes:
            path = folder / f"x{suffix}"
            path.unlink(missing_ok=True)
            path.write_bytes(content if suffix == damaged else files[suffix])
        if len(content) % 5 == 0:
            (folder / "x.idx").unlink()
        dataset = open_dataset(folder / "x.rec")
        for index in range(min(len(dataset), 12)):
            dataset.key(index)
            with contextlib.suppress(PlscError):
                dataset.encoded(index)

    return damaged_member("rec", files, run)


def _folders(samples: Samples, folder: Path) -> list[Target]:
    """Folders with one of their files damaged, and described as it is: whoever forges a file forges its hash."""

    def target(name: str, source: Path, read: Callable[[Path], object]) -> Target:
        def run(file: str, content: bytes) -> None:
            copy = copied(source, folder / name.replace(" ", "-") / source.name)
            (copy / file).write_bytes(content)
            if Path(file).name != "manifest.json":
                describe_again(copy, copy / file)
            read(copy)

        return damaged_member(name, files_below(source), run)

    return [
        target("checkpoint", samples.checkpoint, read_checkpoint),
        target("embedding set", samples.embeddings, read_set),
        target("index", samples.index, read_index),
    ]


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def describe_again(folder: Path, changed: Path) -> None:
    """Let the manifests describe ``changed`` as it is."""
    entry = describe_content(changed.read_bytes())
    for owner in {changed.parent, folder}:
        manifest = read_json(owner / "manifest.json")
        described = [manifest["files"], *(shard["files"] for shard in manifest.get("shards", []))]
        for files in described:
            if changed.name in files:
                files[changed.name] = entry
        _write_manifest(owner, manifest)


def _write_manifest(folder: Path, manifest: Any) -> None:
    """Write a manifest, sealed again where it was."""
    if isinstance(manifest, dict) and "seal" in manifest:
        try:
            unsealed = {name: value for name, value in manifest.items() if name != "seal"}
            digest(unsealed)
            write_manifest(folder, unsealed)
            return
        except ValueError:  # NaN, which cannot be sealed
            pass
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8", errors="replace")


def read_checkpoint(path: Path) -> None:
    describe_checkpoint(path)
    read_backbone(path)


def read_set(path: Path) -> None:
    opened = EmbeddingSet(path, verify=True)
    if opened.rows(0, len(opened)).shape != (len(opened), opened.dim):
        raise Violation("rows of another shape")
    for row in range(len(opened)):
        _ = opened.keys[row]


def read_index(path: Path) -> None:
    index = Index.open(path)
    found = index.search(np.ones((1, index.dim)), 3)
    for row, label in zip(found.rows[0], found.labels[0], strict=True):
        _ = index.keys[int(row)], index.class_name(int(label))


def _manifests(samples: Samples, folder: Path) -> list[Target]:
    """Manifests with other values, sealed; and a checkpoint's small state."""

    def target(name: str, source: Path, file: str, read: Callable[[Path], object]) -> Target:
        valid = json.loads((source / file).read_text())

        def make(rng: random.Random) -> bytes:
            return json.dumps(mutated_value(valid, rng)).encode("utf-8", "replace")

        def run(content: bytes) -> None:
            copy = copied(source, folder / name.replace(" ", "-") / source.name)
            if file == "manifest.json":
                _write_manifest(copy, json.loads(content))
            else:
                (copy / file).write_bytes(content)
                describe_again(copy, copy / file)
            read(copy)

        return Target(name, make, run)

    return [
        target("checkpoint manifest", samples.checkpoint, "manifest.json", read_checkpoint),
        target("checkpoint state", samples.checkpoint, "state.json", read_checkpoint),
        target("embedding set manifest", samples.embeddings, "manifest.json", read_set),
        target("index manifest", samples.index, "manifest.json", read_index),
        target("snapshot manifest", samples.snapshot, "manifest.json", read_snapshot),
    ]


def _ijb(name: str, folder: Path) -> Target:
    def run(content: bytes) -> None:
        meta = folder / "ijb/meta"
        meta.mkdir(parents=True, exist_ok=True)
        for each, sound in IJB.items():
            (meta / each).write_bytes(content if each == name else sound)
        read_faces(folder / "ijb", find_prefix(folder / "ijb"), 112)
        read_template_pairs(folder / "ijb", "ijbb")

    return damaged(f"ijb {name.removesuffix('.txt')}", [IJB[name]], run, also=list(IJB.values()))
