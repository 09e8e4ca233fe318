"""Who may call: tokens with roles, checked before the body; without tokens this machine alone, and no web page."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route
from support.live_service import DIM, Live, live_service

from plsc.errors import ConflictError, DataError, NotFoundError, UsageError
from plsc.serve import tokens
from plsc.serve.routing import required_role
from plsc.serve.server import Server
from plsc.serve.settings import Settings
from plsc.serve.tokens import ROLES, TokenBook, add_token, read_tokens, remove_token
from plsc.tools.entry import main

NEEDED = {
    "list_collections": "read",
    "create_collection": "write",
    "get_collection": "read",
    "delete_collection": "admin",
    "compact_collection": "admin",
    "list_persons": "read",
    "add_persons": "write",
    "get_person": "read",
    "update_person": "write",
    "delete_person": "write",
    "add_faces": "write",
    "delete_face": "write",
    "get_thumbnail": "read",
    "search": "read",
    "info": "read",
    "compare": "read",
    "embeddings": "read",
    "list_snapshots": "admin",
    "take_snapshot": "admin",
    "delete_snapshot": "admin",
    "model_metadata": "read",
    "model_ready": "read",
    "infer": "read",
    "version_metadata": "read",
    "version_ready": "read",
    "version_infer": "read",
    "server_metadata": None,
    "server_live": None,
    "server_ready": None,
    "live": None,
    "ready": None,
}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A token of each role; "" is the file."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    return {"": str(path), **{role: add_token(path, f"the-{role}", role) for role in ROLES}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, secrets: dict[str, str]) -> Iterator[Live]:
    with live_service(tmp_path_factory.mktemp("guarded"), tokens=Path(secrets[""])) as running:
        yield running


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_a_file_holds_hashes_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "camera-1", "read")
    other = add_token(path, "desk", "admin")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text(encoding="utf-8")
    assert [(token.name, token.role) for token in read_tokens(path)] == [("camera-1", "read"), ("desk", "admin")]
    book = TokenBook(path)
    found = [book.find(given.encode()) for given in (secret, other, secret[:-1], secret + "x", "")]
    assert [token and token.name for token in found] == ["camera-1", "desk", None, None, None]
    refused = ((("camera-1", "read"), ConflictError), (("a b", "read"), UsageError), (("c", "x"), UsageError))
    for wrong, error in refused:
        with pytest.raises(error):
            add_token(path, *wrong)
    remove_token(path, "camera-1")
    with pytest.raises(NotFoundError):
        remove_token(path, "camera-1")
    assert [token.name for token in read_tokens(path)] == ["desk"]


@pytest.mark.parametrize(
    "text",
    [
        "token = 3",
        "[[token]]\nname = 'a'",
        "x = 1",
        "[[token",
        "[[token]]\nname = 'a'\nrole = 'king'\nsha256 = ''\ncreated = ''",
        f"[[token]]\nname = 'a'\nrole = 'read'\nsha256 = '{'A' * 64}'\ncreated = ''",
    ],
)
def test_a_file_that_is_off_is_refused(tmp_path, text):
    path = tmp_path / "tokens.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"tokens\.toml"):
        read_tokens(path)


def test_a_running_service_follows_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokens, "_REREAD_SECONDS", 0.0)
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "a", "read")
    book = TokenBook(path)
    late = add_token(path, "b", "read")
    assert book.find(late.encode())
    path.write_text("half an ed", encoding="utf-8")
    assert book.find(secret.encode())
    assert "stay in force" in capsys.readouterr().err
    path.write_text("", encoding="utf-8")
    assert book.find(secret.encode()) is None


def test_a_removed_token_is_refused_though_the_file_could_not_be_read_at_first(tmp_path, monkeypatch, capsys):
    """Else a moment without file descriptors would leave a removed token valid for ever."""
    monkeypatch.setattr(tokens, "_REREAD_SECONDS", 0.0)
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "a", "read")
    book = TokenBook(path)
    add_token(path, "b", "read")
    remove_token(path, "a")
    with monkeypatch.context() as unreadable:
        unreadable.setattr(
            Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(24, "Too many open files"))
        )
        assert book.find(secret.encode())
        assert book.find(secret.encode())
    assert capsys.readouterr().err.count("stay in force") == 1
    assert book.find(secret.encode()) is None


def test_the_command(tmp_path, capsys):
    path = tmp_path / "t.toml"
    assert main(["tokens", "add", "a", "--role", "write", "--file", str(path)]) == 0
    secret = capsys.readouterr().out.strip()
    assert TokenBook(path).find(secret.encode())
    assert main(["tokens", "list", "--file", str(path), "--json", str(tmp_path / "l.json")]) == 0
    assert capsys.readouterr().out.split()[:2] == ["a", "write"]
    assert json.loads((tmp_path / "l.json").read_text())["tokens"][0]["name"] == "a"
    assert main(["tokens", "remove", "a", "--file", str(path)]) == 0
    assert main(["tokens", "remove", "a", "--file", str(path)]) == 2
    assert main(["tokens", "list", "--file", str(tmp_path / "none.toml")]) == 2


@pytest.mark.slow
def test_each_operation_needs_its_role(live, secrets):
    described = live.ask("GET", "/openapi.json").json()
    operations = {
        operation["operationId"]: (method.upper(), path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }
    assert {name: operation["x-role"] for name, (_, _, operation) in operations.items()} == NEEDED
    for name, (method, path, _) in operations.items():
        path = path.format(collection="c", person=1, face=1, snapshot="s", model="m", version="1")
        for role in (None, "wrong", *ROLES):
            secret = "plsc_x" if role == "wrong" else secrets.get(role or "")
            status = live.ask(method, path, headers={} if role is None else bearer(str(secret))).status_code
            needed = NEEDED[name]
            if needed is None:
                assert status in (200, 503), name
            elif role in (None, "wrong"):
                assert status == 401, (name, role)
            else:
                assert (status == 403) == (ROLES.index(role) < ROLES.index(needed)), (name, role, status)


@pytest.mark.parametrize("tail", ["%0A", "%0a", "%0D%0A", "%00", "%7F"])
def test_control_characters_in_a_path_give_no_other_role(live, secrets, tail):
    """Routes match before a newline at the end, where what the role was told by did not."""
    assert live.ask("POST", "/v1/collections", {"name": "lined"}, headers=bearer(secrets["write"])).status_code in (
        201,
        409,
    )
    for role, method, path in (
        ("write", "POST", "/v1/snapshots"),
        ("read", "GET", "/v1/snapshots"),
        ("write", "POST", "/v1/collections/lined/compact"),
        ("admin", "GET", "/v1/info"),
    ):
        answer = live.ask(method, path + tail, headers=bearer(secrets[role]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request"), (method, path)


@pytest.mark.parametrize("header", ["", "Bearer", "Basic YTpi", "bearer  x", "Bearer \xff"])
def test_other_authorizations_are_none(live, header):
    answer = live.ask("GET", "/v1/info", headers={"Authorization": header.encode("latin-1")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_trailer_replaces_no_header(live, secrets):
    body = b'{"name": "by-trailer"}'
    head = (
        "POST /v1/collections HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    )
    trailer = f"Authorization: Bearer {secrets['write']}\r\n"
    for given, status in (("", b"401"), (f"Authorization: Bearer {secrets['read']}\r\n", b"403")):
        with live.connect() as connection:
            connection.sendall(f"{head}{given}\r\n{len(body):x}\r\n{body.decode()}\r\n0\r\n{trailer}\r\n".encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("name", ["Authorization", "Host", "Origin", "Sec-Fetch-Site"])
def test_a_header_that_decides_is_sent_once(live, secrets, name):
    given = [("Host", "x"), ("Authorization", f"Bearer {secrets['read']}")]
    twice = [*given, (name, dict(given).get(name, "none")), (name, dict(given).get(name, "none"))]
    lines = "".join(f"{key}: {value}\r\n" for key, value in twice)
    with live.connect() as connection:
        connection.sendall(f"GET /v1/info HTTP/1.1\r\n{lines}\r\n".encode())
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert name.lower().encode() in answer


def test_the_audit_names_the_token(live, secrets):
    live.ask("POST", "/v1/collections", {"name": "by-token"}, headers=bearer(secrets["write"]))
    live.ask("DELETE", "/v1/collections/by-token", headers=bearer(secrets["write"]))
    live.ask("DELETE", "/v1/collections/by-token", headers=bearer(secrets["admin"]))
    lines = [json.loads(line) for line in (live.folder / "audit.jsonl").read_text(encoding="utf-8").splitlines()]
    done = [(line["token"], line["operation"], line["status"]) for line in lines if "the-" in (line["token"] or "")]
    assert done[-2:] == [("the-write", "create_collection", 201), ("the-admin", "delete_collection", 204)]


def test_the_page_and_health_are_open_and_the_role_is_told(live, secrets):
    assert live.ask("GET", "/health/ready").status_code == 200
    assert live.ask("GET", "/").status_code == 200
    for role in ROLES:
        assert live.ask("GET", "/v1/info", headers=bearer(secrets[role])).json()["role"] == role
    assert live.ask("GET", "/v1/info", headers={**bearer(secrets["read"]), "Host": "faces.example"}).status_code == 200


def test_without_tokens_only_this_machine_and_its_own_page(tmp_path):
    with live_service(tmp_path) as live:
        port = live.server.address.rpartition(":")[2]
        for headers, status in (
            ({}, 200),
            ({"Host": f"localhost:{port}"}, 200),
            ({"Host": "[::1]:80"}, 200),
            ({"Host": "127.0.0.9"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Host": f"evil.example:{port}"}, 403),
            ({"Host": ""}, 403),
            ({"Host": "127.0.0.1.evil.example"}, 403),
            ({"Origin": live.server.address}, 200),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": "http://127.0.0.1:1"}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 200),
            ({"Sec-Fetch-Site": "none"}, 200),
            ({"Sec-Fetch-Site": "same-site"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
        ):
            assert live.ask("GET", "/v1/info", headers=headers).status_code == status, headers
        body = {"a": {"vector": [1.0] * DIM}, "b": {"vector": [1.0] * DIM}}
        for path in ("/v1/compare", "/"):
            refused = live.http.post(path, json=body, headers={"Origin": "http://evil.example"})
            assert refused.status_code == 403


def test_other_machines_need_tokens():
    for host in ("0.0.0.0", "::", "192.0.2.1", "faces.example"):
        with pytest.raises(UsageError, match="plsc tokens add"):
            Server(Settings(host=host, port=0))
    with pytest.raises(UsageError, match="plsc tokens add"):
        Server(Settings(port=0, tokens=Path("nowhere.toml")))


@pytest.mark.slow
def test_a_taken_port_is_told(tmp_path):
    with live_service(tmp_path) as live:
        port = int(live.server.address.rpartition(":")[2])
        with pytest.raises(UsageError, match=f"port {port}.*another port"):
            Server(Settings(port=port))
        with pytest.raises(UsageError, match="metrics"):
            Server(Settings(port=0, metrics_port=port))
        assert httpx.get(live.server.address + "/health/live").status_code == 200


def test_nothing_unknown_is_open(live, secrets):
    for method, path in (
        *[
            ("GET", path)
            for path in ("/v1", "/v3", "/page/a/b", "/docs/a/b", "/redoc", "/health", "/health/live/x", "/metrics")
        ],
        ("POST", "/"),
        ("PUT", "/health/live"),
    ):
        assert live.ask(method, path).status_code == 401, path
        assert live.ask(method, path, headers=bearer(secrets["admin"])).status_code in (404, 405), path


def test_an_endpoint_without_a_role_is_no_route():
    async def forgotten() -> None: ...

    with pytest.raises(TypeError, match="declares no role"):
        required_role(Route("/forgotten", forgotten))
