"""Push to a hub and load from it: through a fake of the hub on this machine, by processes that know no other one."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from support.fake_hub import FakeHub, fake_hub
from support.signing_keys import keys
from support.waiting import serving
from torch import Tensor

import plsc
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.evaluation.report import percent
from plsc.models import Backbone, create, load_model, load_weights, save_model
from plsc.tools.entry import main

pytestmark = pytest.mark.live

SET = "avatars:6x3@1000"
SECRET = "/home/somebody/private/people.rec"
# In a process of its own, because huggingface_hub reads HF_ENDPOINT when it is imported.
LOADING = """
import json, sys
import numpy, timm, torch
import plsc
from plsc.tools.entry import main
repository, pixels, out = sys.argv[1:]
images = torch.from_numpy(numpy.load(pixels))
model = plsc.load_model(f"hf-hub:{repository}")
network = timm.create_model(f"hf-hub:{repository}", pretrained=True).eval()
config = timm.data.resolve_model_data_config(network)
mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
with torch.no_grad():
    found = network((images / 255 - mean) / std)
numpy.savez(out, ours=model(images), timms=found, contract=model.contract_id, size=config["input_size"])
"""


@dataclass
class Pushed:
    """A run, its backbone, what was measured of it, and the hub that it was pushed to."""

    run: Path
    backbone: Backbone
    report: dict[str, Any]
    calibration: dict[str, Any]
    hub: FakeHub
    environment: dict[str, str]

    @property
    def files(self) -> dict[str, bytes]:
        found = self.hub.at("ORG/faces", "main")
        assert found is not None
        return found[1]


def python(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, timeout=300)


def command(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return python("-m", "plsc.tools.entry", *words, environment=environment)


def trained(folder: Path, name: str = "timm:test_resnet") -> Backbone:
    """A run directory with statistics of its own, and paths of its machine."""
    torch.manual_seed(0)
    model = create(name, embedding_dim=8, image_size=64)
    model.train()(torch.rand(16, 3, 64, 64))
    folder.mkdir()
    save_model(model.eval(), folder / "model.safetensors")
    (folder / "config.toml").write_text(f'steps = 7\n[data]\ntrain = "{SECRET}"\n[head]\nmargin = "cosface"\n')
    return model


def pixels(count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (count, 3, 64, 64), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("push")
    backbone = trained(folder / "run")
    reports = [str(folder / name) for name in ("report.json", "calibration.json")]
    run, groups = str(folder / "run"), folder / "groups.csv"
    groups.write_text(
        "identity,group\n" + "".join(f"avatar-{1000 + n},{'even' if n % 2 else 'odd'}\n" for n in range(6))
    )
    words = ["eval", run, "--data", SET, "--groups", str(groups), "--json", reports[0], "--calibration", reports[1]]
    assert main(words) == 0
    with fake_hub() as hub:
        environment = hub.environment(folder / "home")
        words = ("push", run, "--repo", "ORG/faces", "--report", *reports, "--license", "cc-by-4.0", "--private")
        done = command(*words, environment=environment)
        assert done.returncode == 0, done.stderr
        report, calibration = (json.loads(Path(path).read_text()) for path in reports)
        yield Pushed(folder / "run", backbone, report, calibration, hub, environment)


def test_a_push_is_one_commit_of_every_file(pushed: Pushed) -> None:
    names = {"README.md", "config.json", "embedding.safetensors", "model.onnx", "model.safetensors"}
    assert pushed.files.keys() == names
    assert len(pushed.hub.commits["ORG/faces"]) == 2  # the first is the empty one of the creation
    assert pushed.hub.private["ORG/faces"]
    assert set(pushed.hub.by_lfs) == {"embedding.safetensors", "model.onnx", "model.safetensors"}


def test_the_cards_figures_are_the_reports(pushed: Pushed) -> None:
    text = pushed.files["README.md"].decode()
    front = yaml.safe_load(text.split("---\n")[1])
    assert (front["license"], front["library_name"]) == ("cc-by-4.0", "timm")
    (result,) = front["model-index"][0]["results"]
    found = {metric["type"]: metric["value"] for metric in result["metrics"]}
    expected = pushed.report["sets"][SET]
    for name in ("accuracy", "auc", "eer", "rank1", "rank5"):
        assert found.pop(name) == expected[name]
    for far, value in expected["tar@far"].items():
        assert found.pop(f"tar@far={far}", None) == value
    assert found == {name: value for name, value in expected["retrieval"].items() if name in found}
    assert f"| area under ROC, % | {100 * expected['auc']:.2f} |" in text
    point = pushed.calibration["points"][-1]
    (even, odd) = expected["by_group"]["groups"].values()
    assert f"| even | 3 | 9 | – | 27 | {percent(even['fnmr'])} | 9 |\n| odd | 3 | 9 |" in text
    assert odd["genuine_pairs"] == 9
    assert "by group of people were not measured" not in text
    assert f"| {point['fmr']:g} | {point['threshold']:.4f} | {100 * point['tmr']:.2f} | {point['impostors']} |" in text


def test_nothing_of_the_machine_leaves_it(pushed: Pushed) -> None:
    for name, content in pushed.files.items():
        for private in (SECRET.rpartition("/")[0], str(pushed.run.parent), "hf_fake"):
            assert private.encode() not in content, name
    assert "Data: people.rec." in pushed.files["README.md"].decode()


def test_plsc_and_timm_load_the_same_embeddings(pushed: Pushed, tmp_path: Path) -> None:
    np.save(tmp_path / "pixels.npy", pixels().numpy())
    words = ("-c", LOADING, "ORG/faces", str(tmp_path / "pixels.npy"), str(tmp_path / "found.npz"))
    done = python(*words, environment=pushed.environment)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    with torch.no_grad():  # the oracle: the backbone in float64, normalised by its definition
        expected = pushed.backbone.double()((pixels().double() - 127.5) / 127.5).numpy()
    pushed.backbone.float()
    bound = 1e-5 * np.abs(expected).max()
    assert np.abs(found["ours"] - expected).max() <= bound
    assert np.abs(found["timms"] - expected).max() <= bound
    assert str(found["contract"]) == plsc.load_model(pushed.run).contract_id == pushed.report["contract_id"]
    assert found["size"].tolist() == [3, 64, 64]


def test_a_signed_push_embeds_and_serves_under_its_key_alone(pushed: Pushed, tmp_path: Path) -> None:
    private, public = keys(tmp_path / "own")
    _, foreign = keys(tmp_path / "foreign")
    words = ("push", str(pushed.run), "--repo", "ORG/signed", "--sign", str(private))
    done = command(*words, environment=pushed.environment)
    assert done.returncode == 0, done.stderr
    embed = ("embed", "hf-hub:ORG/signed", "--data", SET, "--out", str(tmp_path / "found.emb"), "--workers", "0")
    refused = command(*embed, "--verify-key", str(foreign), environment=pushed.environment)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "signed by another key" in refused.stderr
    taken = command(*embed, "--verify-key", str(public), environment=pushed.environment)
    assert taken.returncode == 0, taken.stderr
    expected = plsc.embed(pushed.run, SET)
    np.testing.assert_allclose(
        EmbeddingSet(tmp_path / "found.emb").rows(0, len(expected)), expected, rtol=1e-4, atol=1e-5
    )
    serve = ["serve", "--model", "hf-hub:ORG/signed", "--verify-key", str(public), "--store", str(tmp_path / "gallery")]
    environment = {**os.environ, **pushed.environment}
    with serving(serve, env=environment) as address, plsc.Client(address) as client:
        found = client.embeddings([pixels(1)[0].permute(1, 2, 0).numpy()])
    np.testing.assert_allclose(found, plsc.load_model(pushed.run)(pixels(1)).numpy(), rtol=1e-4, atol=1e-5)


def test_offline_the_cache_is_enough(pushed: Pushed, tmp_path: Path) -> None:
    online = command("eval", "hf-hub:ORG/faces", "--data", SET, environment=pushed.environment)
    assert online.returncode == 0, online.stderr
    asked = len(pushed.hub.asked)
    offline = {**pushed.environment, "HF_HUB_OFFLINE": "1"}
    again = command("eval", "hf-hub:ORG/faces", "--data", SET, "--json", str(tmp_path / "r.json"), environment=offline)
    assert again.returncode == 0, again.stderr
    assert len(pushed.hub.asked) == asked
    expected = {name: value for name, value in pushed.report["sets"][SET].items() if name != "by_group"}
    assert json.loads((tmp_path / "r.json").read_text())["sets"] == {SET: expected}


def refusals(pushed: Pushed) -> dict[str, tuple[tuple[str, ...], dict[str, str], str]]:
    """By name: the words, the variables that change, and what the line has to say."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": pushed.environment["HF_HOME"] + "-none"}
    push = ("push", str(pushed.run), "--repo")
    return {
        "no token": ((*push, "ORG/faces"), {"HF_TOKEN": ""}, "there is no token"),
        "a bad token": ((*push, "ORG/faces"), {"HF_TOKEN": "hf_other"}, "check the token"),
        "a full repository": ((*push, "ORG/faces"), {}, "--overwrite"),
        "others' namespace": ((*push, "strangers/faces"), {}, "no right to write"),
        "a bad name": ((*push, "faces"), {}, "ORG/NAME"),
        "no hub": ((*push, "ORG/faces"), nowhere, "does not answer"),
        "no hub to load from": (("eval", "hf-hub:ORG/faces", "--data", SET), nowhere, "cannot be had"),
        "no such model": (("eval", "hf-hub:ORG/others", "--data", SET), {}, "cannot be had"),
        "best of a hub's": (("eval", "hf-hub:ORG/faces", "--best", "--data", SET), {}, "leave it out"),
    }


@pytest.mark.parametrize("case", [
    "no token", "a bad token", "a full repository", "others' namespace", "a bad name", "no hub", "no hub to load from",
    "no such model", "best of a hub's",
])  # fmt: skip
def test_a_refusal_is_one_line(case: str, pushed: Pushed) -> None:
    words, changes, said = refusals(pushed)[case]
    done = command(*words, environment={**pushed.environment, **changes})
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["timm:test_vit", "timm:deit_tiny_distilled_patch16_224"])
def test_timm_loads_an_exported_folder(name: str, tmp_path: Path) -> None:
    """A transformer's embeddings; of a distilled one, whose classifier is two, the features."""
    backbone: Any = trained(tmp_path / "run", name)
    assert main(["export", str(tmp_path / "run"), "--format", "timm", "--out", str(tmp_path / "out")]) == 0
    network = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = (pixels().double() - 127.5) / 127.5
    backbone.double()
    with torch.no_grad():
        expected = backbone(images) if "vit" in name else backbone.trunk(images)
        found = network(images.float())
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    read = load_model(tmp_path / "out" / "model.safetensors")
    written = load_model(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(tensor, read.state_dict()[key]) for key, tensor in written.state_dict().items())
    fresh = create(name, embedding_dim=8, image_size=64)
    load_weights(fresh, tmp_path / "out")  # init_weights = "out": the last layers come along
    assert torch.equal(fresh.state_dict()["fc.weight"], written.state_dict()["fc.weight"])


def test_another_trunk_is_pushed_and_refused_for_timm_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pushed: Pushed
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trained(run, "resnet7")
    assert main(["export", str(run), "--format", "timm", "--out", str(out)]) == 2
    assert "timm has no resnet7" in capsys.readouterr().err
    assert not out.exists()
    (tmp_path / "report.json").write_text(json.dumps(pushed.report))
    assert main(["push", str(run), "--folder", str(out), "--report", str(tmp_path / "report.json")]) == 2
    assert "was measured with other weights" in capsys.readouterr().err
    assert main(["push", str(run), "--folder", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"README.md", "config.json", "model.onnx", "model.safetensors"}
    ids = {plsc.load_model(path).contract_id for path in (run, out, out / "model.onnx")}
    assert len(ids) == 1
