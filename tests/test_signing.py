"""Signatures of checkpoints, embedding sets, indexes and exports, by the commands that write and read them."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from support.measured import Commands
from untrusted.samples import Samples, make_samples

from plsc.tools.entry import main


def keys(folder: Path) -> tuple[Path, Path]:
    """A private key and its public one, as openssl writes them."""
    folder.mkdir()
    key = Ed25519PrivateKey.generate()
    private, public = folder / "key.pem", folder / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    running = Commands()
    yield running
    running.close()


@pytest.fixture(scope="module")
def originals(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return make_samples(tmp_path_factory.mktemp("originals"), commands)


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
}
READ: dict[str, Callable[[Samples, Path], Words]] = {
    "set": lambda samples, out: ["gallery", "import", out / "store", "people", samples.folder / "set"],
    "index": lambda samples, out: ["index", "check", samples.folder / "index"],
    "export": lambda samples, out: [
        *("embed", samples.folder / "export.onnx", "--data", "avatars:2x2", "--out", out / "emb")
    ],
    "checkpoint": lambda samples, out: ["checkpoint", "export", samples.run, out / "model.safetensors"],
}
SIGNED = {
    "set": "set/manifest.json",
    "index": "index/manifest.json",
    "export": "export.onnx",
    "checkpoint": "run/checkpoints/step-00000001/manifest.json",
}


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

    assert read(public, 1)[0] == 0
    code, output = read(foreign, 2)
    assert (code, "signed by another key" in output, output.count("\n")) == (1, True, 1), output
    sound = signature.read_text()
    other = base64.b64encode(bytes(64)).decode()
    changed = json.dumps({**json.loads(sound), "signature": other})
    for number, broken in enumerate((sound.replace("plsc", "other"), "[]", "{", changed, "7" * 5000)):
        signature.write_text(broken)
        code, output = read(public, 3 + number)
        assert (code, output.count("\n"), str(samples.folder) in output) == (1, 1, True), output
    signature.unlink()
    code, output = read(public, 20)
    assert (code, "is not signed" in output, output.count("\n")) == (1, True, 1), output


@pytest.mark.parametrize("what", WRITTEN)
def test_a_forged_manifest_is_refused(what: str, samples: Samples, tmp_path: Path, commands: Commands) -> None:
    """Whoever changes a file can write its hashes anew, and the manifest's own digest; not the signature."""
    from plsc.files import write_manifest

    private, public = keys(tmp_path / "keys")
    assert commands(*WRITTEN[what](samples, private)).code == 0
    path = samples.folder / SIGNED[what]
    if what == "export":
        path.write_bytes(path.read_bytes() + b"\0")
    elif what == "checkpoint":
        path.write_text(json.dumps({**json.loads(path.read_text()), "saved_at": 1.5}))
    else:
        manifest = json.loads(path.read_text())
        manifest.pop("seal")
        write_manifest(path.parent, {**manifest, "model": "another"})
    (tmp_path / "out").mkdir()
    done = commands(*READ[what](samples, tmp_path / "out"), "--verify-key", public)
    assert (done.code, "was changed after it was signed" in done.output) == (1, True), done
    assert not list((tmp_path / "out").iterdir())


def test_a_changed_file_of_a_signed_set_is_refused(samples: Samples, tmp_path: Path, commands: Commands) -> None:
    private, public = keys(tmp_path / "keys")
    assert commands(*WRITTEN["set"](samples, private)).code == 0
    path = samples.folder / "set/shard-00000/embeddings.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    done = commands("index", "build", samples.folder / "set", "--out", tmp_path / "idx", "--verify-key", public)
    assert (done.code, "embeddings.npy is corrupt" in done.output) == (1, True), done


def test_a_training_goes_on_from_a_signed_checkpoint_alone(
    samples: Samples, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = keys(tmp_path / "keys")
    words: Words = ["train", samples.config, "--out", samples.run, "--resume", "auto", "--steps", "2"]
    done = commands(*words, "--verify-key", public)
    assert (done.code, "is not signed" in done.output) == (1, True), done
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
    assert (done.code, "not signed" in done.output, done.output.count("\n")) == (1, True, 1), done
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


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    private, _ = keys(tmp_path / "keys")
    code = (
        "import sys; sys.modules['cryptography'] = None; from plsc.tools.entry import main; "
        f"sys.exit(main(['checkpoint', 'sign', '.', {str(private)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "plsc-torch[signing]" in done.stderr
