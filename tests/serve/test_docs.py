"""docs/serving.md shows every request of the service, which tests/docs runs, and a proxy's configuration that works."""

import re
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import closing

import httpx
import pytest
from support.live_service import live_service
from support.page_runner import ROOT, blocks_of

from plsc.serve.tokens import add_token

SERVING = ROOT / "docs" / "serving.md"


def blocks(language: str) -> str:
    return "\n".join(block.text for block in blocks_of(SERVING) if block.language == language)


def test_every_operation_is_shown(tmp_path):
    script = blocks("sh")
    with live_service(tmp_path) as live:
        operations = live.ask("GET", "/openapi.json").json()["paths"]
    for path, methods in operations.items():
        written = re.sub(r"\{snapshot\}", r"\\$ID", re.sub(r"\{(person|face)\}", r"\\d", path))
        written = written.replace("{collection}", "staff").replace("{model}", "model").replace("{version}", "1")
        shown = re.search(rf"\$URL{written}(?=[\s?\"|)]|$)", script, flags=re.MULTILINE)
        assert shown, f"{path} {list(methods)} is not shown"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None or shutil.which("openssl") is None, reason="needs nginx and openssl")
def test_nginx_serves_it_as_written(tmp_path):
    key, certificate = tmp_path / "faces.key", tmp_path / "faces.pem"
    names = ["-subj", "/CN=faces.example.org", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as plain,
        closing(socket.create_server(("127.0.0.1", 0))) as tls,
    ):
        ports = {"listen 80;": plain.getsockname()[1], "listen 443 ssl;": tls.getsockname()[1]}
    secret = add_token(tmp_path / "tokens.toml", "camera", "admin")
    with live_service(tmp_path, tokens=tmp_path / "tokens.toml") as live:
        config = blocks("nginx").replace("127.0.0.1:8080", live.server.address.removeprefix("http://"))
        for line, port in ports.items():
            config = config.replace(line, line.replace("80", f"127.0.0.1:{port}").replace("443", f"127.0.0.1:{port}"))
        config = config.replace("/etc/ssl", str(tmp_path)).replace("/var/log/nginx", str(tmp_path))
        own = f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; daemon off; events {{}}\n"
        temporary = "".join(
            f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (tmp_path / "nginx.conf").write_text(f"{own}http {{\n{temporary}{config}}}\n")
        nginx = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf"], stderr=subprocess.PIPE)
        try:
            url = f"https://127.0.0.1:{ports['listen 443 ssl;']}"
            context = ssl.create_default_context(cafile=str(certificate))
            with httpx.Client(base_url=url, verify=context, headers={"Authorization": f"Bearer {secret}"}) as client:
                wait_for(client)
                assert client.post("/v1/collections", json={"name": "staff"}).status_code == 201
                page = client.get("/")
                assert "default-src 'none'" in page.headers["content-security-policy"]
                assert page.headers["strict-transport-security"] == "max-age=31536000"
                assert client.get("/v1/info", headers={"Authorization": ""}).status_code == 401
                assert client.post("/v1/compare", content=b"0" * (2**25 + 1)).status_code == 413
                statuses = {client.get("/health/live").status_code for _ in range(150)}
                assert statuses == {200, 429}
            moved = httpx.get(f"http://127.0.0.1:{ports['listen 80;']}/docs")
            assert (moved.status_code, moved.headers["location"]) == (301, "https://127.0.0.1/docs")
        finally:
            nginx.terminate()
            nginx.communicate(timeout=20)


def wait_for(client: httpx.Client) -> None:
    for _ in range(100):
        try:
            client.get("/health/live")
            return
        except httpx.ConnectError:
            time.sleep(0.05)
    raise AssertionError("nginx does not listen")
