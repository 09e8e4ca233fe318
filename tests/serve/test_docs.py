"""Serving, moving and the pages of features show every request, which tests/docs runs; docs/deployment.md has nginx."""

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from support.live_service import bearer, live_service
from support.page_runner import ROOT, blocks_of
from support.waiting import free_port, wait_until

from plsc.files import sha256
from plsc.serve.tokens import add_token

pytestmark = pytest.mark.live

SWAGGER_UI = {
    "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
    "NOTICE": "0d20d1adef18aee3f40dd258172155521ce702ac445cb5f7b7d60ed32dad2fb2",
    "swagger-ui-bundle.js": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    "swagger-ui-bundle.js.LICENSE.txt": "37eb6e7e59aed57b2c1acf076574b818ea07b74265717e0bd67b59e0baf9abbb",
    "swagger-ui.css": "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
}

SERVING, MIGRATION, DEPLOYMENT = (ROOT / "docs" / f"{name}.md" for name in ("serving", "migration", "deployment"))


def blocks(page: Path, language: str) -> str:
    return "\n".join(block.text for block in blocks_of(page) if block.language == language)


def test_swagger_ui_is_what_its_makers_published() -> None:
    """Hashes of the files in swagger-ui-dist of npm, of the version that index.html names."""
    folder = ROOT / "plsc" / "serve" / "swagger_ui"
    found = {path.name: sha256(path) for path in folder.iterdir()}
    assert {name: found.pop(name) for name in SWAGGER_UI} == SWAGGER_UI
    assert set(found) == {"index.html", "start.js"}, "they are our own"
    assert "swagger-ui-dist 5.35.0 from npm, unchanged" in (folder / "index.html").read_text()


def test_every_operation_is_shown(tmp_path):
    pages = (SERVING, MIGRATION, *sorted((ROOT / "docs" / "features").glob("*.md")))
    script = "\n".join(blocks(page, "sh") for page in pages)
    with live_service(tmp_path) as live:
        operations = live.ask("GET", "/openapi.json").json()["paths"]
    for path, methods in operations.items():
        written = re.sub(r"\{snapshot\}", r"\\$ID", re.sub(r"\{(person|face)\}", r"\\d", path))
        written = written.replace("{collection}", "staff").replace("{model}", "model").replace("{version}", "1")
        written = written.replace("{external_id}", "E-1234")
        shown = re.search(rf"\$URL{written}(?=[\s?\"|)]|$)", script, flags=re.MULTILINE)
        assert shown, f"{path} {list(methods)} is not shown"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None or shutil.which("openssl") is None, reason="needs nginx and openssl")
def test_nginx_serves_it_as_written(tmp_path):
    key, certificate = tmp_path / "faces.key", tmp_path / "faces.pem"
    names = ["-subj", "/CN=faces.example.org", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    secret = add_token(tmp_path / "tokens.toml", "camera", "admin")
    ports = {"listen 80;": free_port(), "listen 443 ssl;": free_port()}
    with live_service(tmp_path, tokens=tmp_path / "tokens.toml") as live:
        config = blocks(DEPLOYMENT, "nginx").replace("127.0.0.1:8080", live.server.address.removeprefix("http://"))
        for written, small in (
            ("client_body_timeout     30s", "client_body_timeout 3s"),
            ("tokens      32", "tokens 2"),
            ("rate=20r/s", "rate=2r/s"),  # which a slow machine exceeds too
        ):
            assert written in config
            config = config.replace(written, small)
        for line, port in ports.items():
            config = config.replace(line, line.replace("80", f"127.0.0.1:{port}").replace("443", f"127.0.0.1:{port}"))
        config = config.replace("/etc/ssl", str(tmp_path)).replace("/var/log/nginx", str(tmp_path))
        with nginx_running(tmp_path, config):
            url = f"https://127.0.0.1:{ports['listen 443 ssl;']}"
            context = ssl.create_default_context(cafile=str(certificate))
            with httpx.Client(base_url=url, verify=context, headers=bearer(secret)) as client:
                wait_for(client)
                assert client.post("/v1/collections", json={"name": "staff"}).status_code == 201
                page = client.get("/")
                assert "default-src 'none'" in page.headers["content-security-policy"]
                assert page.headers["strict-transport-security"] == "max-age=31536000"
                assert client.get("/v1/info", headers={"Authorization": ""}).status_code == 401
                assert client.post("/v1/compare", content=b"0" * (2**25 + 1)).status_code == 413
                assert client.get(f"/health/live?{'a' * 9000}").status_code == 414
                assert client.get("/health/live", headers={"Cookie": "a" * 9000}).status_code == 400
                assert client.get("/health/live", headers={"Cookie": "a" * 7000, "X": "a" * 7000}).status_code == 200
                slow = open_requests(3, ports["listen 443 ssl;"], context, secret)
                assert client.get("/v1/info").status_code == 429
                assert client.get("/health/live", headers={"Authorization": ""}).status_code == 200
                cut = {connection.recv(1024)[:12] for connection in slow}  # after the time for bodies
                assert b"HTTP/1.1 429" in cut <= {b"", b"HTTP/1.1 408", b"HTTP/1.1 429"}
                for connection in slow:
                    connection.close()
                statuses = {client.get("/health/live").status_code for _ in range(150)}
                assert statuses == {200, 429}
            moved = httpx.get(f"http://127.0.0.1:{ports['listen 80;']}/docs")
            assert (moved.status_code, moved.headers["location"]) == (301, "https://127.0.0.1/docs")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
@pytest.mark.parametrize(
    "settings",
    [
        "",
        "proxy_set_header Host $host;",
        "proxy_http_version 1.1; proxy_set_header Host $host;",
        "proxy_http_version 1.1; proxy_set_header X-Forwarded-For $remote_addr;",
    ],
)
def test_a_proxy_opens_no_service_without_tokens(tmp_path, settings):
    """To such a service everybody behind a proxy is this machine."""
    port = free_port()
    with live_service(tmp_path) as live:
        config = f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {live.server.address}; {settings} }} }}"
        with nginx_running(tmp_path, config):
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Host": "faces.example.org"})
            with client:
                wait_for(client)
                refused = client.post("/v1/collections", json={"name": "staff"})
                assert refused.status_code == 403
                assert "tokens" in refused.text
        assert live.ask("GET", "/v1/collections").json()["collections"] == []


def open_requests(count: int, port: int, context: ssl.SSLContext, secret: str) -> list[ssl.SSLSocket]:
    """Connections on which a body has been announced, and a byte of it has come."""
    head = f"POST /v1/compare HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nContent-Length: 9\r\n\r\n{{"
    found = []
    for _ in range(count):
        connection = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 10), server_hostname="127.0.0.1")
        connection.sendall(head.encode())
        found.append(connection)
    return found


@contextmanager
def nginx_running(folder: Path, config: str) -> Iterator[None]:
    """nginx with ``config`` inside its http block, all of its files in ``folder``."""
    own = f"pid {folder}/pid; error_log {folder}/error.log; daemon off; events {{}}\n"
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(f"{own}http {{\naccess_log off;\n{temporary}{config}}}\n")
    nginx = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf"], stderr=subprocess.PIPE)
    try:
        yield
    finally:
        nginx.terminate()
        nginx.communicate(timeout=20)


def wait_for(client: httpx.Client) -> None:
    def listens() -> bool:
        with suppress(httpx.ConnectError):
            return bool(client.get("/health/live"))
        return False

    wait_until(listens)
