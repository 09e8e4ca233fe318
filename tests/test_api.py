"""The functions of ``plsc`` beside training: against the commands, and against the model called by hand."""

import inspect
import io
import json
import pydoc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import plsc
from plsc import models
from plsc.client import ServerError
from plsc.data import write_pairs
from plsc.data.alignment import TEMPLATE, align_face
from plsc.data.codec import encode_image
from plsc.embedding.embedder import EmbeddingModel
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import DataError, UsageError
from plsc.losses import Margin
from plsc.models.preprocessing import resize_image
from plsc.tools.entry import main

SIZE, DIM = 32, 16


def noise(seed: int, height: int = 40, width: int = 48) -> torch.Tensor:
    return torch.randint(256, (3, height, width), generator=torch.Generator().manual_seed(seed)).byte()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in four files, and a folder of six pictures, the fourth of which is broken."""
    folder = tmp_path_factory.mktemp("api")
    torch.manual_seed(0)
    backbone = models.create("resnet8", embedding_dim=DIM, image_size=SIZE)
    models.save_model(backbone, folder / "model.safetensors")
    torch.save(backbone.state_dict(), folder / "backbone.pth")
    (folder / "photos").mkdir()
    for seed in range(6):
        (folder / "photos" / f"{seed}.png").write_bytes(encode_image(noise(seed), "png"))
    (folder / "good").mkdir()
    for path in (folder / "photos").iterdir():
        (folder / "good" / path.name).write_bytes(path.read_bytes())
    (folder / "photos" / "3.png").write_bytes(b"broken")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> EmbeddingModel:
    return plsc.load_model(folder / "model.safetensors", device="cpu")


def by_hand(model: EmbeddingModel, seeds: list[int], flip: bool = False) -> np.ndarray:
    images = torch.stack([resize_image(noise(seed), SIZE) for seed in seeds])
    rows = model(images)
    return ((rows + model(images.flip(-1))) / 2 if flip else rows).numpy()


def test_every_name_is_there_with_its_signature_and_its_documentation():
    for name in plsc.__all__:
        value = getattr(plsc, name)
        assert inspect.getdoc(value), name
        assert name == "PlscError" or inspect.signature(value), name
    assert len(plsc.__all__) <= 28
    page = pydoc.render_doc(plsc, renderer=pydoc.plaintext)
    for name in ("load_model", "embed", "evaluate", "align", "open_images"):
        assert f"\n    {name}(" in page, name
        first = inspect.getdoc(getattr(plsc, name)).split("\n")[0]
        assert first in page, name


def documented() -> str:
    return (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_page_shows_every_name_in_a_block_that_runs():
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", documented(), flags=re.DOTALL))
    margins = {
        name
        for name in plsc.__all__
        if isinstance(getattr(plsc, name), type) and issubclass(getattr(plsc, name), Margin)
    }
    for name in set(plsc.__all__) - margins - {"PlscError"}:
        assert f"plsc.{name}" in blocks, name
    for name in margins:  # each by its name in configurations
        assert f'"{name.lower()}"' in blocks, name
    assert all(f"`{name}`" in documented() for name in plsc.__all__)


def test_a_head_shows_what_the_page_documents_and_nothing_else():
    shown = {
        name for name in set(dir(plsc.ShardedHead(8, 10))) - set(dir(torch.nn.Module())) if not name.startswith("_")
    }
    table = documented().split("| attribute | is |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|") and "`" in line]
    named = {re.split(r"\W", name)[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert shown == named


def test_the_name_embed_is_the_function_whatever_was_imported():
    from plsc.embedding import extract, pipeline  # noqa: F401

    assert callable(plsc.embed)
    with pytest.raises(AttributeError, match="no attribute 'embedd'"):
        plsc.embedd  # noqa: B018


@pytest.mark.parametrize("file", ["model.safetensors", "backbone.pth", "."])
def test_load_model_takes_what_the_commands_take(folder, model, file):
    loaded = plsc.load_model(str(folder / file), architecture="resnet8" if file.endswith("pth") else None)
    assert (loaded.embedding_dim, loaded.image_size) == (DIM, SIZE)
    images = torch.stack([resize_image(noise(0), SIZE)])
    torch.testing.assert_close(loaded(images), model(images))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.nn.Linear(2, 2),), {}, r"Linear is no backbone of .*ModuleBackbone"),
        ((None,), {}, "not by a NoneType"),
        (("nowhere",), {}, "nowhere does not exist"),
        (("nowhere",), {"device": "gpu"}, "there is no device 'gpu'"),
        (("nowhere",), {"precision": "fp8"}, "precision is 'fp8'"),
    ],
)
def test_what_no_model_can_be_loaded_from_is_named(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        plsc.load_model(*arguments, **options)
    if not options:
        with pytest.raises(UsageError, match=message):
            plsc.embed(*arguments, [noise(0)])


def forms(folder: Path) -> dict[str, object]:
    """The same six pictures in every form."""
    paths = sorted((folder / "good").iterdir())
    pictures = [noise(seed) for seed in range(6)]
    arrays = [picture.permute(1, 2, 0).numpy() for picture in pictures]
    return {
        "folder": str(folder / "good"),
        "Path": folder / "good",
        "paths": paths,
        "strings": tuple(map(str, paths)),
        "bytes": [path.read_bytes() for path in paths],
        "arrays": arrays,
        "one array": np.stack(arrays),
        "tensors": pictures,
        "one tensor": torch.stack(pictures),
        "Pillow": [Image.open(io.BytesIO(path.read_bytes())) for path in paths],
        "mixed": [paths[0], arrays[1], pictures[2], paths[3].read_bytes(), Image.fromarray(arrays[4]), str(paths[5])],
        "not contiguous": [array[:, ::-1][:, ::-1] for array in arrays],
        "opened": plsc.open_images(folder / "good", SIZE),
    }


@pytest.mark.parametrize("flip", [False, True])
def test_embed_takes_pictures_in_every_form(folder, model, flip):
    expected = by_hand(model, list(range(6)), flip)
    for form, pictures in forms(folder).items():
        rows = plsc.embed(model, pictures, flip=flip, batch_size=4)
        assert (rows.shape, rows.dtype) == ((6, DIM), np.float32), form
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6, err_msg=form)


def forms_of_one(folder: Path) -> dict[str, object]:
    """The first of those pictures in every form of a single one."""
    path, picture = folder / "good" / "0.png", noise(0)
    opened = Image.open(io.BytesIO(path.read_bytes()))
    array = picture.permute(1, 2, 0).numpy()
    return {"path": str(path), "bytes": path.read_bytes(), "array": array, "tensor": picture, "Pillow": opened}


def test_embed_takes_one_picture(folder, model):
    for form, picture in forms_of_one(folder).items():
        rows = plsc.embed(model, picture)
        np.testing.assert_allclose(rows, by_hand(model, [0]), rtol=1e-5, atol=1e-6, err_msg=form)
    grey = noise(0)[0]
    expected = model(resize_image(grey.expand(3, -1, -1), SIZE)[None]).numpy()
    np.testing.assert_allclose(plsc.embed(model, grey.numpy()), expected, rtol=1e-5, atol=1e-6)


def test_embed_gives_the_rows_of_the_command(folder, tmp_path, model):
    argv = ["embed", str(folder / "model.safetensors"), "--data", str(folder / "photos"), "--out", str(tmp_path / "e")]
    assert main([*argv, "--workers", "0", "--flip"]) == 0
    stored = EmbeddingSet(tmp_path / "e")
    errors: dict[int, str] = {}
    rows = plsc.embed(folder / "model.safetensors", folder / "photos", flip=True, errors=errors)
    np.testing.assert_allclose(rows, stored.rows(0, 6), rtol=1e-5, atol=1e-6)
    assert errors == dict(stored.errors)
    assert list(errors) == [3]
    assert not rows[3].any()


def test_a_broken_picture_raises_unless_errors_are_collected(folder, model):
    with pytest.raises(DataError, match=r"3\.png of .* does not decode"):
        plsc.embed(model, folder / "photos")
    with pytest.raises(DataError, match=r"cannot read /nowhere\.png"):
        plsc.embed(model, ["/nowhere.png"])
    truncated = Image.open(io.BytesIO(encode_image(noise(0), "png")[:2000]))
    with pytest.raises(DataError, match="image 1 does not decode"):
        plsc.embed(model, [noise(0), encode_image(noise(0), "png")[:500]])
    with pytest.raises(DataError, match="image 0 does not decode"):
        plsc.embed(model, truncated)


def test_a_model_that_answers_nan_is_an_error_of_its_rows(model, monkeypatch):
    monkeypatch.setattr(EmbeddingModel, "__call__", lambda self, images: torch.full((len(images), DIM), torch.nan))
    with pytest.raises(DataError, match="image 0: the model's embedding is not finite"):
        plsc.embed(model, [noise(0)])


WRONG = {
    "floats": np.zeros((4, 5, 3)),
    "channels first": np.zeros((3, 40, 40), np.uint8),
    "RGBA": np.zeros((4, 5, 4), np.uint8),
    "nothing in it": np.zeros((0, 5, 3), np.uint8),
    "float tensor": torch.zeros(3, 4, 4),
    "channels last": torch.zeros(4, 5, 3, dtype=torch.uint8),
    "None": None,
    "number": 3,
    "numbers": [1, 2],
    "one of them": [noise(0), None],
    "no file": "nowhere",
    "dict": {"a": 1},
}


@pytest.mark.parametrize("images", WRONG.values(), ids=WRONG)
def test_what_is_no_picture_is_named(model, images):
    with pytest.raises(UsageError, match=r"image \d is|there is no nowhere") as error:
        plsc.embed(model, images)
    assert "\n" not in str(error.value)


def test_nothing_to_embed_gives_no_rows(model):
    assert plsc.embed(model, []).shape == (0, DIM)
    assert plsc.embed(model, np.zeros((0, 4, 4, 3), np.uint8)).shape == (0, DIM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"workers": -1}, "workers must be at least 0, not -1"),
        ({"detector": "scrfd.onnx"}, "onnx:FILE"),
        ({"landmarks": "/nowhere.csv"}, r"no landmark file /nowhere\.csv"),
        ({"landmarks": "a", "detector": "onnx:b"}, "give one of them"),
    ],
)
def test_wrong_options_of_embed(model, options, message):
    with pytest.raises(UsageError, match=message):
        plsc.embed(model, [noise(0)], **options)


def test_images_of_another_size_are_refused(folder, model):
    with pytest.raises(UsageError, match=r"size of 40, and the model takes 32"):
        plsc.embed(model, plsc.open_images(folder / "good", 40))
    with pytest.raises(UsageError, match=r"give landmarks or a detector to plsc\.open_images"):
        plsc.embed(model, plsc.open_images(folder / "good", SIZE), landmarks="points.csv")


def test_landmarks_align_as_align_does(folder, tmp_path, model):
    points = TEMPLATE * 0.4 + 2
    numbers = ",".join(str(number) for number in points.flatten())
    (tmp_path / "points.csv").write_text("".join(f"{seed}.png,{numbers}\n" for seed in range(6)))
    rows = plsc.embed(model, folder / "good", landmarks=str(tmp_path / "points.csv"))
    crops = [plsc.align(folder / "good" / f"{seed}.png", points, image_size=SIZE) for seed in range(6)]
    np.testing.assert_allclose(rows, plsc.embed(model, crops), rtol=1e-5, atol=1e-6)


def test_align_cuts_the_crop_of_align_face_out_of_every_form(folder):
    points = TEMPLATE * 0.35 + [3, 1]
    expected = align_face(noise(0), points, 64).permute(1, 2, 0).numpy()
    for form, image in forms_of_one(folder).items():
        crop = plsc.align(image, points.tolist(), image_size=64)
        assert (crop.shape, crop.dtype, crop.flags["C_CONTIGUOUS"]) == ((64, 64, 3), np.uint8, True)
        np.testing.assert_array_equal(crop, expected, err_msg=form)


def test_align_by_the_template_itself_changes_nothing():
    picture = noise(0, 112, 112).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(plsc.align(picture, TEMPLATE), picture)
    with pytest.raises(DataError, match=r"^image: .*landmarks are five points"):
        plsc.align(picture, TEMPLATE[:4])


@pytest.mark.slow
def test_evaluate_gives_what_the_command_writes(folder, tmp_path, model):
    people = [[noise(10 * person + picture, 32, 32) for picture in range(3)] for person in range(5)]
    for person, pictures in enumerate(people):
        (tmp_path / "unseen" / f"person-{person}").mkdir(parents=True)
        for number, picture in enumerate(pictures):
            (tmp_path / "unseen" / f"person-{person}" / f"{number}.png").write_bytes(encode_image(picture, "png"))
    encoded = [encode_image(picture, "png") for pictures in people for picture in pictures[:2]] * 2
    write_pairs(tmp_path / "pairs.bin", encoded, [True, False] * 5)
    file = folder / "model.safetensors"
    argv = ["eval", str(file), "--pairs", str(tmp_path / "pairs.bin"), "--data", str(tmp_path / "unseen")]
    assert main([*argv, "--json", str(tmp_path / "result.json")]) == 0
    expected = json.loads((tmp_path / "result.json").read_text())
    sets = [tmp_path / "pairs.bin", str(tmp_path / "unseen")]
    assert json.loads(json.dumps(plsc.evaluate(str(file), sets))) == expected
    assert json.loads(json.dumps(plsc.evaluate(model, sets)["sets"])) == expected["sets"]
    baseline = plsc.evaluate("raw-pixels", tmp_path / "unseen")
    assert baseline["model"] == "raw-pixels"
    assert baseline["sets"]["unseen"]["identities"] == 5


def test_evaluate_says_what_is_missing(model):
    with pytest.raises(UsageError, match="nothing to evaluate on"):
        plsc.evaluate(model)
    with pytest.raises(UsageError, match=r"there is no nowhere"):
        plsc.evaluate(model, "nowhere")
    with pytest.raises(UsageError, match="does not exist"):
        plsc.evaluate("nowhere.safetensors", "avatars:3x2")


def brute_force(rows: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return np.argsort(-(queries / np.linalg.norm(queries, axis=1, keepdims=True)) @ unit.T, axis=1)[:, :k]


def test_an_index_over_an_array_finds_what_float64_finds(tmp_path):
    generator = np.random.default_rng(0)
    rows, queries = generator.normal(size=(50, DIM)), generator.normal(size=(7, DIM))
    index = plsc.Index.build(rows, keys=[f"{row}.png" for row in range(50)], labels=["a", None] * 25, quiet=True)
    expected = brute_force(rows, queries, 5)
    found = index.search(queries, 5)
    np.testing.assert_array_equal(found.ids, expected)
    assert [index.keys[row] for row in found.rows[0]] == [f"{row}.png" for row in expected[0]]
    assert [index.class_name(label) for label in found.labels[0]] == [
        "a" if row % 2 == 0 else None for row in expected[0]
    ]
    index.save(tmp_path / "saved" / "idx")
    scratch = index.folder
    del index
    assert not scratch.exists()
    np.testing.assert_array_equal(plsc.Index.open(tmp_path / "saved" / "idx").search(queries, 5).ids, expected)


class Series:
    """As pandas' own: with an array inside, and without a truth value."""

    def __init__(self, values):
        self._values = np.array(values, dtype=object)

    def __bool__(self):
        raise ValueError("the truth value of a Series is ambiguous")

    def __iter__(self):
        return iter(self._values)

    def tolist(self):
        return self._values.tolist()


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (np.array(["b", "a", "b"]), ["b", "a", "b"]),
        (np.array(["b", None, "a"], dtype=object), ["b", None, "a"]),
        (Series(["b", float("nan"), "a"]), ["b", None, "a"]),
        (iter(["b", None, "a"]), ["b", None, "a"]),
        ([None, None, None], [None, None, None]),
        ([10, 9, -1], ["10", "9", None]),
        (np.array([10, -1, 9], np.int32), ["10", None, "9"]),
        ([np.uint8(10), np.int64(9), None], ["10", "9", None]),
        (Series([10, 9, None]), ["10", "9", None]),
        (torch.tensor([2, 1, 0]), ["2", "1", "0"]),
    ],
)
def test_labels_are_names_or_integers_of_any_sequence(labels, names):
    index = plsc.Index.build(np.eye(3), labels=labels, keys=np.array(["x", "y", "z"]), quiet=True)
    assert [index.class_name(label) for label in index.labels] == names
    assert list(index.class_names) == [str(one) for one in sorted({int(n) if n.isdigit() else n for n in names if n})]
    assert list(index.keys) == ["x", "y", "z"]


@pytest.mark.parametrize(
    "labels", [["a", 1, "a"], [1.5, 2, 2], [True, False, True], [-2, 0, 0], [["a"], ["b"], ["c"]], "abc", 3, [b"a"] * 3]
)
def test_other_labels_are_refused_in_one_line(labels):
    with pytest.raises(UsageError, match="label") as refused:
        plsc.Index.build(np.eye(3), labels=labels, quiet=True)
    assert "\n" not in str(refused.value)


TWO = [np.int64(2), np.uint8(2), np.array(2)]
NO_INTEGERS = [True, np.bool_(True), 2.0, np.float32(2), np.array([2]), "2", None, float("nan")]
HALF = [np.float32(0.5), np.float64(0.5)]


@pytest.mark.live
def test_numbers_of_numpy_are_numbers(client_of_nobody):
    rows = np.random.default_rng(0).standard_normal((420, 4))
    built = {name: plsc.Index.build(rows, kind=name, recall=0.5, quiet=True) for name in ("exact", "ivf", "hnsw")}
    crop, points = np.zeros((112, 112, 3), np.uint8), TEMPLATE.tolist()
    integers = [
        *(lambda k, index=index: index.search(rows[:1], k).ids.shape == (1, 2) for index in built.values()),
        lambda label: plsc.Index.build(np.eye(3), labels=["a", "b", "c"], quiet=True).class_name(label) == "c",
        lambda seed: len(plsc.Index.build(rows, kind="ivf", recall=0.5, seed=seed, quiet=True)),
        lambda size: plsc.align(crop, points, image_size=size).shape == (2, 2, 3),
        lambda size: plsc.evaluate("raw-pixels", "avatars:3x2", batch_size=size, seed=size)["sets"],
        lambda size: plsc.ShardedHead(size, size, centers=size, seed=size).sharded_state(),
        lambda steps: plsc.ShardedHead(4, 4, averaging_period=steps, chunk_classes=steps),
        client_of_nobody(lambda client, k: client.search("a", [1.0], k=k)),
        client_of_nobody(lambda client, id: client.delete_face("a", id, id)),
    ]
    for ask in integers:
        for value in TWO:
            assert ask(value)
    for ask in integers[:-2]:
        for value in NO_INTEGERS:
            with pytest.raises(UsageError, match="must be an integer"):
                ask(value)
    numbers = [
        lambda share: plsc.Index.build(rows, kind="ivf", recall=share, quiet=True).manifest["recall_asked"],
        lambda time: len(plsc.Index.build(rows, kind="auto", latency_ms=time, quiet=True)),
        client_of_nobody(lambda client, score: client.search("a", [1.0], threshold=score, filter={"n": score})),
        client_of_nobody(lambda client, n: client.add_person("a", metadata={"n": n, "flag": np.bool_(True)})),
        client_of_nobody(lambda client, n: list(client.persons("a", filter={"n": {"in": np.array([n, n])}}))),
        client_of_nobody(lambda client, seconds: plsc.Client(client._url, timeout=seconds, retries=0).info()),
    ]
    for ask in numbers:
        assert all(ask(value) for value in HALF)
    with pytest.raises(UsageError, match="cannot be sent as JSON: a set is no text"):
        client_of_nobody(lambda client, value: client.search("a", [1.0], filter={"n": value}))({1})
    for wrong in ("0.5", float("nan"), 0, -1, float("inf"), np.array([1.0])):
        with pytest.raises(UsageError, match="timeout"):
            plsc.Client("http://127.0.0.1:1", timeout=wrong)


@pytest.fixture
def client_of_nobody():
    """Makes a call of ``ask(client, value)``, true if the request was sent: nobody answers it."""

    def called(ask):
        def call(value):
            with plsc.Client("http://127.0.0.1:1", retries=0) as client, pytest.raises(ServerError) as sent:
                ask(client, value)
            return sent.value.status == 0

        return call

    return called


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, "tensor"])
def test_an_index_takes_every_kind_of_floats(dtype):
    rows = np.eye(6, DIM)
    given = torch.from_numpy(rows) if dtype == "tensor" else rows.astype(dtype)
    np.testing.assert_array_equal(plsc.Index.build(given, quiet=True).search(rows, 1).ids[:, 0], range(6))


def test_rows_without_a_direction_are_left_out_and_ids_say_so():
    rows = np.eye(6, DIM)
    rows[1], rows[2, 0], rows[3, 0] = 0, np.nan, 1e300
    index = plsc.Index.build(rows, quiet=True)
    assert index.ids.tolist() == [0, 4, 5]


def test_an_index_is_built_over_an_embedding_set_and_replaced_on_demand_only(folder, tmp_path):
    argv = ["embed", str(folder / "model.safetensors"), "--data", str(folder / "good"), "--out", str(tmp_path / "e")]
    assert main([*argv, "--workers", "0"]) == 0
    index = plsc.Index.build(tmp_path / "e", tmp_path / "idx", quiet=True)
    assert list(index.keys) == [f"{seed}.png" for seed in range(6)]
    other = plsc.Index.build(np.eye(3), quiet=True)
    for attempt in (lambda: plsc.Index.build(np.eye(3), tmp_path / "idx"), lambda: other.save(tmp_path / "idx")):
        with pytest.raises(UsageError, match="idx exists already: give overwrite=True to replace it"):
            attempt()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UsageError, match="is no index: name another folder"):
        other.save(tmp_path / "mine", overwrite=True)
    index.save(tmp_path / "idx")  # where it is already
    other.save(tmp_path / "idx", overwrite=True)
    assert len(plsc.Index.open(tmp_path / "idx")) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "idx", "mine"]


@pytest.mark.parametrize(
    ("embeddings", "options", "message"),
    [
        (np.zeros(4), {}, r"float64\[4\]; give floats of shape \[N, D\]"),
        (np.zeros((3, 0)), {}, "give floats"),
        (np.zeros((3, 4), int), {}, "give floats"),
        ([[1.0, 2.0]], {}, "over an array .* not list"),
        (np.eye(3), {"keys": ["a"]}, "1 keys do not match"),
        (np.eye(3), {"labels": ["a"]}, "1 labels"),
        ("nowhere", {}, "no folder nowhere"),
        ("nowhere", {"keys": ["a"]}, "keys, labels and a contract of its own"),
        (np.eye(3), {"kind": "tree"}, "no kind 'tree'"),
    ],
)
def test_what_no_index_can_be_built_of_is_named(embeddings, options, message):
    with pytest.raises(UsageError, match=message):
        plsc.Index.build(embeddings, quiet=True, **options)


def test_objects_say_what_they_are(folder, model, tmp_path):
    index = plsc.Index.build(np.eye(4, dtype=np.float32))
    index.save(tmp_path / "people.idx")
    with plsc.Client("http://ada:geheim@127.0.0.1:1", "a token") as client:
        assert repr(client) == "<plsc.Client of http://***@127.0.0.1:1>"
    opened = plsc.Index.open(tmp_path / "people.idx")
    assert repr(opened) == f"<plsc.Index at {tmp_path / 'people.idx'}: exact, 4 vectors of 4>"
    images = f"(B, 3, {SIZE}, {SIZE}) uint8 -> (B, {DIM}) float32"
    assert repr(model) == f"<EmbeddingModel of {folder / 'model.safetensors'}: {images}, computed in fp32>"
    pictures = plsc.open_images(folder / "good", SIZE)
    assert repr(pictures) == f"<LooseImages of {folder / 'good'}: 6 images of 0 classes>"
