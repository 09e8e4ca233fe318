"""What docs/deployment.md offers, as far as one machine can run it: the image's steps, Caddy, systemd's own check."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from support.container import Builder, Image, in_root, instructions, start_in_root
from support.live_service import live_service
from support.page_runner import ROOT, blocks_of
from support.waiting import free_port, wait_until

from plsc import models
from plsc.serve.tokens import add_token

pytestmark = pytest.mark.live

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
needs_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not (shutil.which("debootstrap") and shutil.which("unshare")),
    reason="needs root, debootstrap and unshare",
)


# --- the image -------------------------------------------------------------------------------------------------------


def context(folder: Path) -> Path:
    """What .dockerignore lets into the image, from a folder that also holds a gallery and keys."""
    rules = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    for rule in rules[1:]:
        if rule.startswith("!"):
            source = ROOT / rule[1:]
            copy = folder / rule[1:]
            if source.is_dir():
                shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, copy)
        else:
            assert rule == "**/__pycache__"
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("debian") / "root"
    done = subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no Debian can be fetched here: {done.stdout.strip().splitlines()[-1:]}")
    (root / "etc/apt/apt.conf.d/80retries").write_text('Acquire::Retries "5";\nAcquire::http::Timeout "20";\n')
    (root / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
    return root


@pytest.fixture(scope="module")
def image(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image, in which the environment of these tests stands in for the packages that pip would fetch."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the packages of these tests are not made for the Python 3.11 of Debian 12")
    folder = tmp_path_factory.mktemp("images")
    packages = {"/packages": Path(np.__file__).resolve().parents[1]}
    environment = {"PYTHONPATH": "/packages", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    builder = Builder(base, context(tmp_path_factory.mktemp("context")), folder, packages, environment)
    built = builder.build(DEPLOY / "Dockerfile")
    yield built
    shutil.rmtree(folder)


@pytest.mark.slow
@needs_root
def test_the_image_serves_without_rights_and_writes_to_its_volumes_alone(image: Image, tmp_path: Path) -> None:
    model, store, cache, secrets = (tmp_path / name for name in ("model", "store", "cache", "secrets"))
    uid = int(image.user.partition(":")[0])
    assert uid >= 1000
    for folder in (model, store, cache, secrets):
        folder.mkdir()
        os.chown(folder, uid, uid)
    tmp_path.chmod(0o755)
    models.save_model(models.create("mobilefacenet", embedding_dim=16, image_size=48), model / "model.safetensors")
    secret = add_token(secrets / "tokens", "operator", "admin")
    os.chown(secrets / "tokens", uid, uid)
    port = free_port()
    mounts = {"/model": model, "/run/secrets": secrets, "/packages": Path(np.__file__).resolve().parents[1]}
    environment = {**image.environment, "PYTHONPATH": "/packages", "OMP_NUM_THREADS": "1"}
    command = [*image.entrypoint, *image.command, "--port", str(port)]
    volumes = dict(zip(sorted(image.volumes), (cache, store), strict=True))
    process = start_in_root(image.root, command, environment, mounts, user=image.user, writable=volumes)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or answers(url), seconds=120)
        assert process.poll() is None, process.communicate()
        check = [part.replace("8080", str(port)) for part in image.healthcheck]
        assert in_root(image.root, check, environment, mounts, user=image.user, writable=volumes).returncode == 0
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}) as client:
            assert client.post("/v1/collections", json={"name": "staff"}).status_code == 201
        assert all(path.stat().st_uid == uid for path in store.rglob("*"))
        assert not [path for path in store.rglob("*") if path.stat().st_mode & 0o077]
    finally:
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    outside = [path for path in image.root.rglob("*") if path.lstat().st_uid == uid and path.is_file()]
    assert outside == []


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


# --- what describes it -----------------------------------------------------------------------------------------------


def test_the_image_is_built_of_what_the_package_needs_and_no_more() -> None:
    found = instructions(DEPLOY / "Dockerfile")
    copied = [text for name, text in found if name == "COPY"]
    assert copied == [". /src", "--from=build /opt/plsc /opt/plsc"]
    assert [name for name, _ in found].index("USER") > max(n for n, (name, _) in enumerate(found) if name == "RUN")
    rules = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for needed in (
        "pyproject.toml",
        "build_backend.py",
        "constraints.txt",
        "plsc",
        "models",
        "data",
        "tools",
        "configs",
        "README.md",
    ):
        assert f"!{needed}" in rules


@pytest.mark.parametrize("name", ["plsc", "plsc-cuda"])
def test_compose_gives_the_container_no_rights_and_no_disk(name: str) -> None:
    service = {**COMPOSE["services"]["plsc"], **COMPOSE["services"][name]}
    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    mounted = {volume.rsplit(":/", 1)[1].removesuffix(":ro") for volume in service["volumes"]}
    declared = json.loads(dict(instructions(DEPLOY / "Dockerfile"))["VOLUME"])
    assert {f"/{place}" for place in mounted} == {*declared, "/model"}
    assert service["secrets"] == ["tokens"]
    # Compose puts the variable's default into the text, and splits it as a shell does.
    command, image = service["command"], json.loads(dict(instructions(DEPLOY / "Dockerfile"))["CMD"])
    assert shlex.split(re.sub(r"\$\{PLSC_SERVE:-(.*?)\}", r"\1", command)) == image


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_sound_and_shut_in(tmp_path: Path) -> None:
    unit = tmp_path / "plsc.service"
    text = (DEPLOY / "plsc.service").read_text()
    assert "/opt/plsc/bin/plsc serve " in text
    unit.write_text(text.replace("/opt/plsc/bin/plsc", shutil.which("true") or ""))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=15", unit], capture_output=True, text=True
    )
    assert judged.returncode == 0, judged.stdout.splitlines()[-1]


# --- Caddy -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("caddy") is None, reason="needs caddy")
def test_caddy_serves_it_as_written(tmp_path: Path) -> None:
    port = free_port()
    written = "\n".join(block.text for block in blocks_of(ROOT / "docs" / "deployment.md") if block.language == "caddy")
    secret = add_token(tmp_path / "tokens.toml", "camera", "admin")
    with live_service(tmp_path, tokens=tmp_path / "tokens.toml") as live:
        config = written.replace("127.0.0.1:8080", live.server.address.removeprefix("http://"))
        # The name's certificate cannot be fetched here: the same site without TLS.
        assert re.search(r"^faces\.example\.org \{$", config, re.MULTILINE)
        config = config.replace("faces.example.org {", f"http://127.0.0.1:{port} {{")
        config = config.replace("{\n", "{\n\tadmin off\n", 1)
        assert "read_header 10s" in config
        config = config.replace("read_header 10s", "read_header 1s")
        (tmp_path / "Caddyfile").write_text(config)
        caddy = subprocess.Popen(
            ["caddy", "run", "--config", tmp_path / "Caddyfile", "--adapter", "caddyfile"],
            stderr=subprocess.PIPE,
            env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(url))
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}) as client:
                assert client.post("/v1/collections", json={"name": "staff"}).status_code == 201
                assert client.get("/v1/info", headers={"Authorization": ""}).status_code == 401
                # 502 where the service has refused it, and closed, while Caddy still sends.
                assert client.post("/v1/compare", content=b"0" * (2**25 + 1)).status_code in (413, 502)
                assert client.get("/health/live", headers={"Cookie": "a" * 20_000}).status_code == 431
                assert client.get("/health/live", headers={"Cookie": "a" * 7000}).status_code == 200
                with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
                    slow.sendall(b"GET /health/live HTTP/1.1\r\nHost: ")
                    assert slow.recv(1024) == b"", "a head that does not come is not waited for"
                page = client.get("/")
                assert "default-src 'none'" in page.headers["content-security-policy"]
                assert page.headers["strict-transport-security"] == "max-age=31536000"
        finally:
            caddy.terminate()
            caddy.communicate(timeout=20)
