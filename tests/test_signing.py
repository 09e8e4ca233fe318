"""Signatures of checkpoints, embedding sets, indexes and exports, by the commands that write and read them."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.measured import Commands, Outcome
from support.signing_keys import keys
from untrusted.onnx_files import pooling
from untrusted.samples import Samples, make_samples

from plsc import signing
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.onnx_engine import OnnxEngine
from plsc.errors import IntegrityError
from plsc.evaluation.calibration import Calibration, OperatingPoint, write_calibration
from plsc.index import Index
from plsc.models import load_model
from plsc.signing import load_private_key, sign
from plsc.tools.entry import main
from plsc.train.checkpoint_inspection import read_backbone


@pytest.fixture(scope="module")
def originals(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    made = make_samples(tmp_path_factory.mktemp("originals"), commands)
    points = (OperatingPoint(0.1, 0.5, 0.9, 2),)
    write_calibration(made.folder / "calibration.json", Calibration("c", "m", ("s",), 10, 20, 30, points))
    return made


@pytest.fixture
def samples(originals: Samples, tmp_path: Path) -> Samples:
    return Samples(shutil.copytree(originals.folder, tmp_path / "samples"))


# What a command signs, and the command that reads it, by what is signed.
Words = list[str | Path]
WRITTEN: dict[str, Callable[[Samples, Path], Words]] = {
    "set": lambda samples, key: [
        *("embed", samples.model, "--data", "avatars:4x3@50", "--out", samples.folder / "set", "--sign", key)
    ],
    "index": lambda samples, key: [
        *("index", "build", samples.embeddings, "--out", samples.folder / "index", "--sign", key)
    ],
    "export": lambda samples, key: [
        *("export", samples.model, "--format", "onnx", "--out", samples.folder / "export.onnx", "--sign", key)
    ],
    "checkpoint": lambda samples, key: ["checkpoint", "sign", samples.run, key],
    "calibration": lambda samples, key: ["sign", key, samples.folder / "calibration.json"],
}
READ: dict[str, Callable[[Samples, Path], Words]] = {
    "set": lambda samples, out: ["gallery", "import", out / "store", "people", samples.folder / "set"],
    "index": lambda samples, out: ["index", "check", samples.folder / "index"],
    "export": lambda samples, out: [
        *("embed", samples.folder / "export.onnx", "--data", "avatars:2x2", "--out", out / "emb")
    ],
    "checkpoint": lambda samples, out: ["checkpoint", "export", samples.run, out / "model.safetensors"],
    # A rate beyond the evidence ends the service behind the calibration, and before it reads the model.
    "calibration": lambda samples, out: [
        *("serve", "--model", samples.model, "--store", out / "store", "--port", "0", "--fmr", "1e-9"),
        *("--calibration", samples.folder / "calibration.json"),
    ],
}
READABLE = {"calibration": (2, "is beyond the evidence")}  # how reading what is signed ends; otherwise with 0
SIGNED = {
    "set": "set/manifest.json",
    "index": "index/manifest.json",
    "export": "export.onnx",
    "checkpoint": "run/checkpoints/step-00000001/manifest.json",
    "calibration": "calibration.json",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", WRITTEN)
def test_what_is_signed_is_read_and_nothing_else(
    what: str, samples: Samples, tmp_path: Path, commands: Commands
) -> None:
    private, public = keys(tmp_path / "keys")
    _, foreign = keys(tmp_path / "foreign")
    done = commands(*WRITTEN[what](samples, private))
    assert done.code == 0, done
    signature = samples.folder / f"{SIGNED[what]}.sig"

    def read(key: Path, number: int) -> tuple[int, str]:
        out = tmp_path / f"out-{number}"
        out.mkdir()
        answer = commands(*READ[what](samples, out), "--verify-key", key)
        assert answer.code == 0 or not list(out.iterdir())
        return answer.code, answer.output

    expected, message = READABLE.get(what, (0, ""))
    code, output = read(public, 1)
    assert (code, message in output) == (expected, True), output
    code, output = read(foreign, 2)
    assert (code, "signed by another key" in output, output.count("\n")) == (1, True, 1), output
    sound = signature.read_text()
    other = base64.b64encode(bytes(64)).decode()
    changed = json.dumps({**json.loads(sound), "signature": other})
    for number, broken in enumerate((sound.replace("plsc", "other"), "[]", "{", changed, "7" * 5000, _raised(sound))):
        signature.write_text(broken)
        code, output = read(public, 3 + number)
        assert (code, output.count("\n"), str(samples.folder) in output) == (1, 1, True), output
    signature.unlink()
    code, output = read(public, 20)
    assert (code, "is not signed" in output, output.count("\n")) == (1, True, 1), output


@pytest.mark.first_ring("set")
@pytest.mark.parametrize("what", WRITTEN)
def test_a_forged_manifest_is_refused(what: str, samples: Samples, tmp_path: Path, commands: Commands) -> None:
    """Whoever changes a file can write its hashes anew, and the manifest's own digest; not the signature."""
    from plsc.files import write_manifest

    private, public = keys(tmp_path / "keys")
    assert commands(*WRITTEN[what](samples, private)).code == 0
    path = samples.folder / SIGNED[what]
    if what in ("export", "calibration"):
        path.write_bytes(path.read_bytes() + b"\0")
    elif what == "checkpoint":
        path.write_text(json.dumps({**json.loads(path.read_text()), "saved_at": 1.5}))
    else:
        manifest = json.loads(path.read_text())
        manifest.pop("seal")
        write_manifest(path.parent, {**manifest, "model": "another"})
    (tmp_path / "out").mkdir()
    done = commands(*READ[what](samples, tmp_path / "out"), "--verify-key", public)
    refused(done, "was changed after it was signed")
    assert not list((tmp_path / "out").iterdir())


def _raised(signature: str) -> str:
    content = json.loads(signature)
    return json.dumps({**content, "counter": content["counter"] + 1})


def refused(done: Outcome, message: str) -> None:
    assert (done.code, message in done.output, done.output.count("\n")) == (1, True, 1), done


def test_an_older_one_another_kind_and_another_name_do_not_pass(
    samples: Samples, tmp_path: Path, commands: Commands
) -> None:
    private, public = keys(tmp_path / "keys")
    model, other = samples.model, samples.folder / "other.safetensors"
    assert commands("sign", private, model, samples.embeddings, "--counter", "7").code == 0

    def read(path: Path, *lowest: str) -> Outcome:
        out = tmp_path / "out.emb"
        shutil.rmtree(out, ignore_errors=True)
        data = ["--data", "avatars:2x2", "--out", out, "--verify-key", public]
        return commands("embed", path, *data, *(("--verify-from", *lowest) if lowest else ()))

    for taken in ("7", "8,model.safetensors=7"):
        assert read(model, taken).code == 0
    for lowest in ("8", "3,model.safetensors=8"):
        refused(read(model, lowest), "older than what is taken: it was signed with the counter 7, and 8 is the lowest")
    assert read(model, "newest").code == 2
    shutil.copy(model, other)
    shutil.copy(f"{model}.sig", f"{other}.sig")
    refused(read(other), "was signed under the name model.safetensors: call it that, or sign it again")
    other.unlink()
    other.symlink_to(model)
    refused(read(other), "was signed under the name model.safetensors")
    calibration = samples.folder / "calibration.json"
    sign(calibration, load_private_key(private))
    words = READ["calibration"](samples, tmp_path)
    refused(commands(*words, "--verify-key", public), "is signed as 'model', and is read as 'calibration'")


def test_a_signature_of_the_former_version_says_what_to_do(
    samples: Samples, tmp_path: Path, commands: Commands
) -> None:
    private, public = keys(tmp_path / "keys")
    former = {"format": "plsc signature", "version": 1, "key": "0" * 16, "signature": "AAAA"}
    (samples.index / "manifest.json.sig").write_text(json.dumps(former))
    words: Words = ["index", "check", samples.index, "--verify-key", public]
    refused(commands(*words), f"does not cover kind, name and counter as 2 does; sign {samples.index} again")
    assert commands("sign", private, samples.index).code == 0
    assert commands(*words).code == 0


def _model(samples: Samples) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in load_model(samples.model).state_dict().values()]


def _onnx(samples: Samples) -> list[bytes]:
    engine = OnnxEngine(samples.folder / "m.onnx", torch.device("cpu"))
    return [engine.run(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).numpy().tobytes()]


def _set(samples: Samples) -> list[bytes]:
    opened = EmbeddingSet(samples.embeddings)
    return [opened.rows(0, len(opened)).tobytes(), *(key.encode() for key in opened.keys)]


def _index(samples: Samples) -> list[bytes]:
    opened = Index.open(samples.index)
    return [opened.vectors.tobytes(), *(key.encode() for key in opened.keys)]


def _checkpoint(samples: Samples) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in read_backbone(samples.checkpoint).state_dict().values()]


@pytest.mark.parametrize("read", [_model, _onnx, _set, _index, _checkpoint])
def test_what_was_hashed_is_what_is_read(
    read: Callable[[Samples], list[bytes]], samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody exchanges each file as soon as it has been hashed: the reader knows the signed one, or refuses."""
    private, public = keys(tmp_path / "keys")
    (samples.folder / "m.onnx").write_bytes(pooling().SerializeToString())
    for path in (samples.model, samples.folder / "m.onnx", samples.embeddings, samples.index, samples.checkpoint):
        sign(path, load_private_key(private))
    monkeypatch.setenv("PLSC_VERIFY_KEY", str(public))
    expected = read(samples)
    exchanged: set[Path] = set()

    def exchange(path: Path) -> None:
        if path not in exchanged and path.name != "manifest.json" and samples.folder in path.parents:
            exchanged.add(path)
            changed = path.read_bytes()[:-9] + b"exchanged"
            path.unlink()
            path.write_bytes(changed)

    def digest(file: Any, kind: str, real: Any = hashlib.file_digest) -> Any:
        found = real(file, kind)
        exchange(Path(file.name))
        return found

    def description(content: bytes, real: Any = signing.describe_content) -> dict[str, Any]:
        found: dict[str, Any] = real(content)
        if content == (samples.folder / "m.onnx").read_bytes():
            exchange(samples.folder / "m.onnx")
        return found

    monkeypatch.setattr(hashlib, "file_digest", digest)
    monkeypatch.setattr(signing, "describe_content", description)
    # torch opens a checkpoint's files again, and they are hashed anew; a removal counts as a change of a model.
    refusals = {_checkpoint: "is corrupt", _model: "was written while it was read"}
    if read in refusals:
        with pytest.raises(IntegrityError, match=refusals[read]):
            read(samples)
    else:
        assert read(samples) == expected
    assert exchanged


@pytest.mark.exhaustive
def test_a_changed_file_of_a_signed_set_is_refused(samples: Samples, tmp_path: Path, commands: Commands) -> None:
    private, public = keys(tmp_path / "keys")
    assert commands(*WRITTEN["set"](samples, private)).code == 0
    path = samples.folder / "set/shard-00000/embeddings.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    done = commands("index", "build", samples.folder / "set", "--out", tmp_path / "idx", "--verify-key", public)
    refused(done, "embeddings.npy is corrupt")


@pytest.mark.exhaustive
def test_a_training_goes_on_from_a_signed_checkpoint_alone(
    samples: Samples, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = keys(tmp_path / "keys")
    words: Words = ["train", samples.config, "--out", samples.run, "--resume", "auto", "--steps", "2"]
    done = commands(*words, "--verify-key", public)
    refused(done, "is not signed")
    assert commands("checkpoint", "sign", samples.run, private).code == 0
    assert commands(*words, "--verify-key", public).code == 0


def test_the_environment_names_the_key_too(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLSC_VERIFY_KEY", str(keys(tmp_path / "keys")[1]))
    assert main(["index", "check", str(samples.index)]) == 1
    assert "is not signed" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_not_signed(samples: Samples, tmp_path: Path, commands: Commands) -> None:
    private, _ = keys(tmp_path / "keys")
    os.truncate(next(samples.checkpoint.glob("*.distcp")), 10)
    done = commands("checkpoint", "sign", samples.run, private)
    refused(done, "not signed")
    assert not list(samples.checkpoint.glob("*.sig"))


def test_keys_that_are_none_are_usage_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, public = keys(tmp_path / "keys")
    rsa = generate_private_key(public_exponent=65537, key_size=2048)
    (tmp_path / "rsa.pem").write_bytes(rsa.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "text.pem").write_text("no key")
    for key in (tmp_path / "rsa.pem", tmp_path / "text.pem", tmp_path / "none.pem", public):
        words = ["embed", "m.onnx", "--data", "avatars:2x2", "--out", str(tmp_path / "e"), "--sign", str(key)]
        assert main(words) == 2
        error = capfd.readouterr().err
        assert (error.count("\n"), str(key) in error) == (1, True), error


def test_a_key_that_others_may_read_gets_a_warning(samples: Samples, tmp_path: Path, commands: Commands) -> None:
    private, _ = keys(tmp_path / "keys")
    private.chmod(0o644)
    done = commands("checkpoint", "sign", samples.run, private)
    assert (done.code, "chmod 600" in done.output) == (0, True), done


@pytest.mark.live
def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    private, _ = keys(tmp_path / "keys")
    code = (
        "import sys; sys.modules['cryptography'] = None; from plsc.tools.entry import main; "
        f"sys.exit(main(['checkpoint', 'sign', '.', {str(private)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "plsc-torch[signing]" in done.stderr
