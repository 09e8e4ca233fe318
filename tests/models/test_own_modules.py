"""Modules of a user's own: saved, loaded into their class, embedded with, evaluated and exported; what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model as load_into
from torch import Tensor, nn

import plsc
from plsc.embedding.export import export_onnx, export_torch
from plsc.errors import DataError, UsageError
from plsc.models import ModuleBackbone, create, load_model, load_weights, register, save_model
from plsc.models.backbone import _builders

SIZE, DIM = 32, 16
ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """As somebody would write it, with what evaluation mode changes."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, dim))

    def forward(self, x: Tensor) -> Any:
        return self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class InModule(nn.Module):
    """Its keys begin as those of a data parallel wrapper do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.fc[1]


class Maps(Net):
    def forward(self, x: Tensor) -> Any:
        return self.conv(x)


class Pairs(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Averaged(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).mean(0, keepdim=True)


class Branching(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(-x if x.mean() > 0 else x)


class OfTwo(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.view(2, 3, SIZE, SIZE))


class Regions(Net):
    """As arcface_torch's networks: autocast that may be off, and a part without gradients."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = x * 2
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class Guarded(Net):
    """Its last layer is computed on what was cast to float32."""

    def forward(self, x: Tensor) -> Any:
        return self.fc(torch.relu(self.norm(self.conv(x))).float().square().mean((2, 3)))


def backbone(kind: type[nn.Module] = Net, **options: Any) -> ModuleBackbone:
    """With running statistics of data, in training mode, as it is after a loop."""
    torch.manual_seed(0)
    made = ModuleBackbone(kind(), DIM, SIZE, **options)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.9
            module(torch.randn(4, 8, 5, 5) + 1)
    return made


def pictures(count: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def test_ten_lines_are_saved_and_loaded_into_their_class_bit_for_bit(tmp_path: Path) -> None:
    mesh = plsc.init()
    net = plsc.data_parallel(backbone(mean=(120.0, 110.0, 100.0), std=60.0, interpolation="bicubic"), mesh)
    head = plsc.ShardedHead(DIM, 10, mesh)
    opt_net, opt_head = torch.optim.SGD(net.parameters(), lr=0.1), plsc.HeadSGD(head, lr=0.1)
    loss = head(net(torch.randn(4, 3, SIZE, SIZE)), torch.arange(4))
    loss.backward()
    opt_net.step()
    opt_head.step()
    in_memory = plsc.load_model(net)
    assert net.training
    path = tmp_path / "net.safetensors"
    save_model(net, path)
    model = plsc.load_model(path, module=Net())
    assert model.preprocessing == in_memory.preprocessing == net.preprocessing
    assert (model.contract_id, model.embedding_dim, model.image_size) == (in_memory.contract_id, DIM, SIZE)
    expected = plsc.embed(net, pictures())
    assert np.ptp(expected, axis=0).max() > 0
    assert np.array_equal(plsc.embed(model, pictures()), expected)
    assert np.array_equal(plsc.embed(in_memory, pictures()), expected)
    assert load_into(Net(), path) == (set(), [])  # without plsc
    assert plsc.evaluate(net, "avatars:4x3") == {**plsc.evaluate(model, "avatars:4x3"), "model": in_memory.source}


@pytest.mark.live  # a file is tried in a process of its own
@pytest.mark.parametrize("export", [export_onnx, export_torch])
@pytest.mark.parametrize("kind", [Net, Regions])
def test_an_export_needs_no_class(export: Any, kind: type[Net], tmp_path: Path) -> None:
    own, path = backbone(kind), tmp_path / ("net.onnx" if export is export_onnx else "net.pt2")
    result = export(own, path)
    model = plsc.load_model(path)
    expected = plsc.embed(own, pictures())
    assert model.contract_id == plsc.load_model(own).contract_id == result["contract_id"]
    np.testing.assert_allclose(plsc.embed(model, pictures()), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", [Guarded, Regions])
def test_a_program_whose_module_casts_is_computed_in_bfloat16_too(kind: type[Net], tmp_path: Path) -> None:
    model, path = backbone(kind), tmp_path / "own.pt2"
    export_torch(model, path)
    found = [
        plsc.embed(plsc.load_model(source, precision="bf16", device="cpu"), list(pictures()))
        for source in (path, model)
    ]
    exact = plsc.embed(model, list(pictures()))
    assert not np.array_equal(found[0], exact), "it was computed in bfloat16"
    if kind is Guarded:
        assert np.array_equal(*found)
    np.testing.assert_allclose(found[0], exact, atol=0.02 * np.abs(exact).max())


def test_wrappers_are_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    compiled = torch.compile(backbone())
    for wrapped in (compiled, ModuleBackbone(torch.compile(Net()), DIM, SIZE)):
        save_model(wrapped, path)
        assert set(load_model(path, module=Net()).module.state_dict()) == set(Net().state_dict())


@pytest.mark.parametrize("kind", [InModule, Tied])
def test_keys_are_those_of_the_module(kind: type[nn.Module], tmp_path: Path) -> None:
    own = backbone(kind)
    save_model(own, tmp_path / "m.safetensors")
    back = load_model(tmp_path / "m.safetensors", module=kind())
    for key, tensor in own.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    assert back.name == own.name == f"{__name__}.{kind.__name__}"


def test_a_file_without_a_contract_needs_one(tmp_path: Path) -> None:
    own, path = backbone(), tmp_path / "m.pt"
    torch.save({"module." + key: tensor for key, tensor in own.module.state_dict().items()}, path)
    with pytest.raises(DataError, match=r"does not say which images .* module=plsc\.models\.ModuleBackbone"):
        plsc.load_model(path, module=Net())
    model = plsc.load_model(path, module=ModuleBackbone(Net(), DIM, SIZE))
    assert np.array_equal(plsc.embed(model, pictures()), plsc.embed(own, pictures()))


def test_a_file_without_its_class_is_refused_in_a_line_that_names_it(tmp_path: Path) -> None:
    save_model(backbone(), tmp_path / "m.safetensors")
    with pytest.raises(DataError, match=rf"holds weights of {__name__}\.Net, which .*load_model\(FILE, module=…\)"):
        plsc.load_model(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Wider, "lacks more.weight, more.bias"),
        (lambda: Net(8), r"other shapes in fc.1.weight \(16, 8\) instead of \(8, 8\)"),
        (lambda: nn.Linear(2, 2), "lacks weight, bias"),
    ],
)
def test_another_class_is_refused(module: Any, message: str, tmp_path: Path) -> None:
    save_model(backbone(), tmp_path / "m.safetensors")
    with pytest.raises(DataError, match=message):
        plsc.load_model(tmp_path / "m.safetensors", module=module())


@pytest.mark.parametrize(
    ("kind", "answer"), [(Maps, r"\(5, 8, 15, 15\)"), (Pairs, "a tuple"), (Averaged, r"\(1, 16\)")]
)
def test_an_answer_that_is_no_embedding_is_named(kind: type[Net], answer: str) -> None:
    with pytest.raises(UsageError, match=rf"{kind.__name__} answers {answer} to 5 images.* \(B, 16\)"):
        plsc.embed(backbone(kind), pictures())


@pytest.mark.parametrize("export", [export_onnx, export_torch])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Branching, "Branching has no form for torch.export: .*may not branch on values"),
        (OfTwo, "fails on a batch of 1: .*let it take any number of images"),
        (Maps, r"answers \(1, 8, 15, 15\) to 1 images"),
    ],
)
def test_what_has_no_form_is_named_in_a_line(export: Any, kind: type[Net], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        export(backbone(kind), tmp_path / "m.out")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_plain_module_is_told_how_to_become_a_backbone(tmp_path: Path) -> None:
    for use in (
        lambda: save_model(Net(), tmp_path / "m.safetensors"),
        lambda: plsc.load_model(Net()),
        lambda: plsc.embed(Net(), pictures()),
        lambda: plsc.evaluate(Net(), "avatars:4x3"),
        lambda: export_onnx(Net(), tmp_path / "m.onnx"),
        lambda: export_torch(Net(), tmp_path / "m.pt2"),
    ):
        with pytest.raises(
            UsageError, match=r"Net is no backbone .*ModuleBackbone\(MODULE, EMBEDDING_DIM, IMAGE_SIZE\)"
        ):
            use()
    with pytest.raises(UsageError, match="leave them out of a model in memory"):
        plsc.load_model(backbone(), best=True)
    with pytest.raises(UsageError, match="an architecture and a module"):
        load_model(tmp_path / "m.safetensors", architecture="resnet8", module=Net())


def test_a_state_of_more_than_tensors_is_refused(tmp_path: Path) -> None:
    class Counting(Net):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

    with pytest.raises(UsageError, match="has _extra_state in its state, which is no tensor"):
        save_model(backbone(Counting), tmp_path / "m.safetensors")


def _saved_in_parts(mesh: Any, path: str) -> str:
    net = plsc.data_parallel(backbone(), mesh, strategy="fsdp")
    with pytest.raises(UsageError, match=r"lies in parts on several ranks: .*get_model_state_dict") as raised:
        save_model(net, path)
    return str(raised.value)


def test_a_module_of_which_a_rank_has_a_part_says_how_it_is_saved(ranks: Any, tmp_path: Path) -> None:
    assert "\n" not in "".join(ranks(2, _saved_in_parts, str(tmp_path / "m.safetensors")))


@pytest.mark.live
def test_a_builder_may_return_any_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(embedding_dim: int, image_size: Any, *, width: int = 8) -> nn.Module:
        assert width == 8
        return Net(embedding_dim)

    monkeypatch.setitem(_builders, "plain", plain)
    register(plain)
    for name in ("plain", "turned:plain"):
        model = create(name, embedding_dim=DIM, image_size=SIZE, width=8)
        save_model(model, tmp_path / "m.safetensors")
        back = load_model(tmp_path / "m.safetensors")
        assert (back.name, back.options) == (name, {"width": 8})
        assert np.array_equal(plsc.embed(back, pictures()), plsc.embed(model, pictures()))
    # The four rotations' one backbone, taken out for fine-tuning.
    single = create("plain", embedding_dim=DIM // 4, image_size=SIZE)
    load_weights(single, tmp_path / "m.safetensors")
    assert torch.equal(single.module.conv.weight, back.upright.module.conv.weight)


INSTALLED = {
    "own-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n",
    "own-1.0.dist-info/entry_points.txt": "[plsc.backbones]\nown_net = own:own_net\n",
    "own.py": """
from torch import nn
def own_net(embedding_dim, image_size):
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, embedding_dim))
""",
}
RECIPE = """
backbone = "own_net"
embedding_dim = 16
steps = 2
[data]
train = "avatars:6x4"
image_size = 32
batch_size = 8
workers = 0
"""


@pytest.mark.live
@pytest.mark.slow
def test_commands_take_the_module_of_an_installed_package_and_its_exports_without_it(tmp_path: Path) -> None:
    for name, text in INSTALLED.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    (tmp_path / "own.toml").write_text(RECIPE)

    def run(*command: str, installed: bool = True) -> tuple[int, str]:
        path = os.pathsep.join([str(ROOT), *([str(tmp_path / "site")] if installed else [])])
        line = [sys.executable, "-m", "plsc.tools.entry", *command]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    data = ("--data", "avatars:4x3@100")
    assert run("train", "own.toml", "--out", "run")[0] == 0
    assert run("eval", "run", *data)[0] == 0
    assert run("export", "run", "--format", "onnx", "--out", "own.onnx")[0] == 0
    assert run("export", "run", "--format", "torch", "--out", "own.pt2")[0] == 0
    for model in ("own.onnx", "own.pt2"):
        assert run("eval", model, *data, installed=False)[0] == 0
        assert run("embed", model, *data, "--out", f"{model}.emb", installed=False)[0] == 0
    code, err = run("embed", "run", *data, "--out", "x.emb", installed=False)
    assert (code, err.count("\n")) == (1, 1)
    assert "holds weights of own_net, which neither plsc nor an installed package builds" in err
