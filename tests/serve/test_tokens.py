"""Who may call: tokens with roles, checked before the body; without tokens this machine alone, and no web page."""

import contextlib
import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from support.live_service import DIM, Live, bearer, live_service

from plsc.errors import ConflictError, DataError, NotFoundError, UsageError
from plsc.serve.access import RIGHTS, ROLES
from plsc.serve.errors import ApiError
from plsc.serve.routing import permission_of
from plsc.serve.server import Server
from plsc.serve.settings import Settings
from plsc.serve.tokens import Token, TokenBook, add_token, read_tokens, remove_token
from plsc.tools.entry import main

_NAMES: dict[str | None, str] = {
    None: "server_metadata server_live server_ready live ready",
    "search": "list_collections get_collection search detect info compare embeddings "
    "model_metadata model_ready infer version_metadata version_ready version_infer",
    "read": "list_persons get_person get_person_by_external_id get_thumbnail",
    "write": "create_collection compact_collection add_persons put_person update_person delete_person "
    "delete_person_by_external_id add_faces delete_face",
    "admin": "delete_collection list_snapshots take_snapshot delete_snapshot list_migrations begin_migration "
    "get_migration list_missing send_pictures estimate judge pause resume cut_over roll_back finish cancel",
}
NEEDED = {name: role for role, names in _NAMES.items() for name in names.split()}
NEEDED_RIGHTS = {"embeddings": "embeddings", "infer": "embeddings", "version_infer": "embeddings"}
FOR_ALL_COLLECTIONS = {"create_collection", "list_snapshots", "take_snapshot", "delete_snapshot", "begin_migration"}
SEEN = {"all": None, "own": ["c"], "other": ["staff", "guests"]}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tokens of each role: for all collections, for "c", for others, and with each right; "" is the file."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    found = {"": str(path), **{role: add_token(path, f"the-{role}", role) for role in ROLES}}
    for role in ROLES:
        for name in ("own", "other"):
            found[f"{role}-{name}"] = add_token(path, f"{role}-{name}", role, collections=SEEN[name])
        for right in RIGHTS:
            found[f"{role}-{right}"] = add_token(path, f"{role}-{right}", role, allow=[right])
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, secrets: dict[str, str]) -> Iterator[Live]:
    with live_service(tmp_path_factory.mktemp("guarded"), tokens=Path(secrets[""])) as running:
        yield running


def test_a_file_holds_hashes_and_is_its_owners_alone(tmp_path, clock):
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "camera-1", "read")
    other = add_token(path, "desk", "admin")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text(encoding="utf-8")
    assert [(token.name, token.role) for token in read_tokens(path)] == [("camera-1", "read"), ("desk", "admin")]
    book = TokenBook(path, clock)
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


def entry(line: str) -> str:
    """A token file with one token, whose table has ``line``."""
    return f"[[token]]\nname = 'a'\nrole = 'read'\ncreated = ''\n{line}\nsha256 = '{'a' * 64}'\n"


@pytest.mark.parametrize(
    "text",
    [
        "token = 3",
        "[[token]]\nname = 'a'",
        "x = 1",
        "[[token",
        "[[token]]\nname = 'a'\nrole = 'king'\ncreated = ''\nsha256 = ''",
        entry("allow = ['king']"),
        entry("allow = 'vectors'"),
        entry("collections = []"),
        entry("collections = ['a b']"),
        entry("collections = [1]"),
        entry("colections = ['staff']"),
        f"[[token]]\nname = 'a'\nrole = 'read'\ncreated = ''\nsha256 = '{'A' * 64}'",
        f"token = {'[' * 5000}{']' * 5000}",
        f"token = {'1' * 5000}",
        f"{'a.' * 100}b = 1",
    ],
)
def test_a_file_that_is_off_is_refused(tmp_path, text):
    path = tmp_path / "tokens.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"tokens\.toml"):
        read_tokens(path)


def rights_of(token: Token) -> tuple[object, ...]:
    return token.sha256, token.caller, token.expiry


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_that_is_cut_gives_nobody_more(tmp_path, end):
    path = tmp_path / "tokens.toml"
    for name, options in (
        ("door", {"collections": ["staff", "guests"], "rates": ["searches=5/m", "requests=9/s"]}),
        ("gone", {"expires": "2020-01-01", "allow": ["vectors"]}),
        ("old", {"collections": ["staff"], "rates": ["writes=1/h"], "expires": "2020-01-01T08:00Z"}),
    ):
        add_token(path, name, "write", **options)
    whole = path.read_text(encoding="utf-8").replace("\n", end).encode()
    path.write_bytes(whole)
    rights = {token.name: rights_of(token) for token in read_tokens(path)}
    read = 0
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        try:
            tokens = read_tokens(path)
        except DataError:
            continue
        read += 1
        assert all(rights_of(token) == rights[token.name] for token in tokens), whole[:size]
    assert read >= 3  # each behind a token


def test_a_file_with_keys_behind_the_hash_is_put_in_order(tmp_path, capsys):
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "door", "search", collections=["staff"])
    in_order = path.read_text(encoding="utf-8")
    lines = in_order.splitlines()
    path.write_text("\n".join([lines[0], lines[-1], *lines[1:-1]]), encoding="utf-8")
    with pytest.raises(DataError, match=r"keys stand behind sha256 of door.*plsc tokens change door"):
        TokenBook(path)
    assert main(["tokens", "change", "door", "--file", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == in_order
    assert TokenBook(path).find(secret.encode()).name == "door"


def closed(book: TokenBook, secret: str) -> bool:
    try:
        book.find(secret.encode())
    except ApiError as error:
        return error.status_code == 503
    return False


def test_a_running_service_follows_the_file(tmp_path, clock):
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "a", "read")
    book = TokenBook(path, clock)
    late = add_token(path, "b", "read")
    remove_token(path, "a")
    clock.now += 1.0
    assert book.find(late.encode())
    assert book.find(secret.encode()) is None


@pytest.mark.parametrize("how", ["gone", "half an edit", "no permission"])
def test_a_file_that_cannot_be_read_closes_the_service_after_a_moment(tmp_path, clock, capsys, how):
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "a", "read")
    book, content = TokenBook(path, clock), path.read_text(encoding="utf-8")
    if how == "half an edit":
        path.write_text("[[tok", encoding="utf-8")
    else:
        path.unlink()
    if how == "no permission":
        path.mkdir()  # the tests' user may be root, who reads what has no permission, but no folder
    for later in (1.0, 4.9):
        clock.now += later
        assert not closed(book, secret)
    clock.now += 1.0
    assert closed(book, secret)
    assert not book.is_current()
    assert closed(book, "plsc_wrong")
    assert capsys.readouterr().err.count("then all are refused") == 1
    if path.is_dir():
        path.rmdir()
    path.write_text(content, encoding="utf-8")
    clock.now += 1.0
    assert book.find(secret.encode())
    assert book.is_current()


def test_a_removed_token_is_refused_when_file_descriptors_are_exhausted(tmp_path, clock):
    """Else a flood of connections would keep a removed token valid."""
    path = tmp_path / "tokens.toml"
    secret, kept = add_token(path, "a", "read"), add_token(path, "b", "read")
    book = TokenBook(path, clock)
    remove_token(path, "a")
    clock.now += 1.0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert taken
        assert book.find(secret.encode()) is None
        assert book.find(kept.encode())
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_open_to_others_is_warned_of(tmp_path, clock, capsys):
    path = tmp_path / "tokens.toml"
    secret = add_token(path, "a", "read")
    book = TokenBook(path, clock)
    assert capsys.readouterr().err == ""
    path.chmod(0o640)
    clock.now += 1.0
    assert book.find(secret.encode())
    assert f"(mode 0640); close it: chmod 600 {path}" in capsys.readouterr().err


@pytest.mark.live
def test_readiness_tells_of_a_token_file_that_is_gone(tmp_path, clock):
    with live_service(tmp_path, callers={"a": {"role": "admin"}}, clock=clock) as live:
        (tmp_path / "tokens.toml").unlink()
        for later in (1.0, 1.0):
            clock.now += later
            assert live.ask("GET", "/v1/info").status_code == 200
        clock.now += 5.0
        refused = live.ask("GET", "/v1/info")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        ready = live.ask("GET", "/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "without its tokens"})
        assert live.ask("GET", "/health/live").status_code == 200


def test_the_command(tmp_path, capsys):
    file = ["--file", str(tmp_path / "t.toml")]
    limited = ["--collections", "staff", "guests", "--rate", "searches=50", "writes=1/m", "--expires", "2027-01-01"]
    assert main(["tokens", "add", "a", "--role", "search", *limited, *file]) == 0
    secret = capsys.readouterr().out.strip()
    token = TokenBook(tmp_path / "t.toml").find(secret.encode())
    assert (token.role, token.collections, token.allow) == ("search", ("staff", "guests"), ())
    assert (token.rates, token.expires) == (("searches=50", "writes=1/m"), "2027-01-01")
    assert main(["tokens", "list", *file, "--json", str(tmp_path / "l.json")]) == 0
    shown = capsys.readouterr().out
    assert (shown.split()[:2], "until 2027-01-01" in shown) == (["a", "search"], True)
    assert json.loads((tmp_path / "l.json").read_text())["tokens"][0]["name"] == "a"
    for change, expected in (
        (["--allow", "vectors", "--collections", "*"], ("search", ("vectors",), None)),
        (["--allow", "--role", "read", "--rate", "--expires", "never"], ("read", (), None)),
    ):
        assert main(["tokens", "change", "a", *change, *file]) == 0
        (token,) = read_tokens(tmp_path / "t.toml")
        assert (token.role, token.allow, token.collections) == expected
    assert (token.rates, token.expires) == ((), None)
    for wrong in (
        ["change", "nobody", "--role", "read"],
        *(["change", "a", *words] for words in (["--rate", "searches=many"], ["--expires", "tomorrow"])),
        ["change", "a", "--expires", "2027-13-01"],
        ["add", "other", "--role", "search", "--collections", "a b"],
        ["add", "other", "--role", "search", "--allow", "all"],
        ["remove", "b"],
    ):
        assert main(["tokens", *wrong, *file]) == 2, wrong
        assert capsys.readouterr().err, wrong
    assert main(["tokens", "remove", "a", *file]) == 0
    assert main(["tokens", "list", "--file", str(tmp_path / "none.toml")]) == 2


def operations(live: Live) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Method, path and description of every operation that is described, by name."""
    return {
        operation["operationId"]: (method.upper(), path, operation)
        for path, methods in live.ask("GET", "/openapi.json").json()["paths"].items()
        for method, operation in methods.items()
    }


def filled(path: str) -> str:
    return path.format(collection="c", person=1, face=1, snapshot="s", model="m", version="1", external_id="E-1")


@pytest.mark.live
@pytest.mark.slow
def test_each_operation_needs_its_role_right_and_collection(live, secrets):
    described = operations(live)
    assert {name: operation["x-role"] for name, (_, _, operation) in described.items()} == NEEDED
    for name, (method, path, operation) in described.items():
        assert operation.get("x-right") == NEEDED_RIGHTS.get(name)
        needed = NEEDED[name]
        for secret in (None, "plsc_x"):
            status = live.ask(method, filled(path), headers={} if secret is None else bearer(secret)).status_code
            assert status in (200, 503) if needed is None else status == 401, name
        if needed is None:
            continue
        for role in ROLES:
            for seen in SEEN:
                refused = (
                    ROLES.index(role) < ROLES.index(needed)
                    or (name in NEEDED_RIGHTS and role != "admin")
                    or ("{collection}" in path and seen == "other")
                    or (name in FOR_ALL_COLLECTIONS and seen != "all")
                )
                secret = secrets[role if seen == "all" else f"{role}-{seen}"]
                status = live.ask(method, filled(path), headers=bearer(secret)).status_code
                assert (status == 403) == refused, (name, role, seen, status)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_each_right_opens_what_it_is_for(live, secrets, role):
    for name, (method, path, _) in operations(live).items():
        if name in NEEDED_RIGHTS:
            for right in RIGHTS:
                status = live.ask(method, filled(path), headers=bearer(secrets[f"{role}-{right}"])).status_code
                assert (status == 403) == (right != NEEDED_RIGHTS[name] and role != "admin"), (name, right)


@pytest.mark.live
@pytest.mark.parametrize("tail", ["%0A", "%0a", "%0D%0A", "%00", "%7F"])
def test_control_characters_in_a_path_give_no_other_role(live, secrets, tail):
    """Routes match before a newline at the end, where what the role was told by did not."""
    made = live.ask("POST", "/v1/collections", {"name": "lined"}, headers=bearer(secrets["write"]))
    assert made.status_code in (201, 409)
    for role, method, path in (
        ("write", "POST", "/v1/snapshots"),
        ("read", "GET", "/v1/snapshots"),
        ("write", "POST", "/v1/collections/lined/compact"),
        ("admin", "GET", "/v1/info"),
    ):
        answer = live.ask(method, path + tail, headers=bearer(secrets[role]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request"), (method, path)


@pytest.mark.live
@pytest.mark.parametrize("header", ["", "Bearer", "Basic YTpi", "bearer  x", "Bearer \xff"])
def test_other_authorizations_are_none(live, header):
    answer = live.ask("GET", "/v1/info", headers={"Authorization": header.encode("latin-1")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.live
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


@pytest.mark.live
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


@pytest.mark.live
def test_the_page_and_health_are_open_and_the_role_is_told(live, secrets):
    assert live.ask("GET", "/health/ready").status_code == 200
    assert live.ask("GET", "/").status_code == 200
    for role in ROLES:
        told = live.ask("GET", "/v1/info", headers=bearer(secrets[role])).json()
        assert (told["role"], told["collections"]) == (role, None)
        assert told["rights"] == (sorted(RIGHTS) if role == "admin" else [])
        assert told["score_step"] == (0 if role == "admin" else 0.01)
    assert live.ask("GET", "/v1/info", headers={**bearer(secrets["read"]), "Host": "faces.example"}).status_code == 200


@pytest.mark.live
def test_without_tokens_only_this_machine_and_its_own_page(tmp_path):
    with live_service(tmp_path) as live:
        port = live.server.address.rpartition(":")[2]
        for headers, status in (
            ({}, 200),
            ({"Host": f"localhost:{port}"}, 200),
            ({"Host": f"[::1]:{port}"}, 200),
            ({"Host": f"127.0.0.9:{port}"}, 200),
            ({"Host": "localhost"}, 200),
            ({"Host": "localhost:9000"}, 200),
            ({"Host": "localhost:9000", "Origin": "http://localhost:9000", "Sec-Fetch-Site": "same-origin"}, 200),
            ({"Host": "localhost:9000", "Via": "1.1 proxy"}, 403),
            ({"Host": "localhost:9000", "Origin": "http://localhost:9001"}, 403),
            ({"Host": "evil.example:9000", "Origin": "http://evil.example:9000"}, 403),
            ({"Host": "localhost.evil.example:9000"}, 403),
            ({"Host": f"[::1]evil.example:{port}"}, 403),
            ({"Host": f"127.0.0.1:80@evil.example:{port}"}, 403),
            ({"Host": f"127.0.0.1:{port}@evil.example"}, 403),
            ({"Host": f"127.0.0.1:0{port}0"}, 403),
            ({"Forwarded": "for=192.0.2.1"}, 403),
            *(({name: "192.0.2.1"}, 403) for name in ("X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via")),
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


@pytest.mark.live
@pytest.mark.parametrize("host", [b"", b"Host: localhost:9000\r\n"])
def test_health_checks_may_speak_http_1_0(tmp_path, host):
    with live_service(tmp_path) as live:
        for path, status in ((b"/health/ready", b"200"), (b"/v2/health/live", b"200"), (b"/v1/info", b"403")):
            with live.connect() as connection:
                connection.sendall(b"GET %b HTTP/1.0\r\n%b\r\n" % (path, host))
                answer = connection.recv(4096)
                assert answer.split(b" ", 2)[1] == status, path
                assert (b"send HTTP/1.1" in answer) == (status == b"403")
        with live.connect() as connection:
            connection.sendall(b"GET /health/ready HTTP/1.0\r\nHost: evil.example\r\n\r\n")
            assert b" 403 " in connection.recv(4096)


@pytest.mark.live
def test_a_wrong_token_is_told_in_words(live):
    for secret, said in (({}, "a token is needed: "), (bearer("plsc_wrong"), "The service does not know this token")):
        refused = live.ask("GET", "/v1/info", headers=secret)
        assert (refused.status_code, refused.json()["error"]["message"][: len(said)]) == (401, said)


def test_other_machines_need_tokens():
    for host in ("0.0.0.0", "::", "192.0.2.1", "faces.example"):
        with pytest.raises(UsageError, match="plsc tokens add"):
            Server(Settings(host=host, port=0))
    with pytest.raises(UsageError, match="plsc tokens add"):
        Server(Settings(port=0, tokens=Path("nowhere.toml")))


@pytest.mark.live
@pytest.mark.slow
def test_a_taken_port_is_told(tmp_path):
    with live_service(tmp_path) as live:
        port = int(live.server.address.rpartition(":")[2])
        with pytest.raises(UsageError, match=f"port {port}.*another port"):
            Server(Settings(port=port))
        with pytest.raises(UsageError, match="metrics"):
            Server(Settings(port=0, metrics_port=port))
        assert httpx.get(live.server.address + "/health/live").status_code == 200


@pytest.mark.live
def test_nothing_unknown_is_open(live, secrets):
    read = ("/v1", "/v3", "/page/a/b", "/docs/a/b", "/redoc", "/health", "/health/live/x", "/metrics")
    for method, path in (*(("GET", path) for path in read), ("POST", "/"), ("PUT", "/health/live")):
        assert live.ask(method, path).status_code == 401, path
        assert live.ask(method, path, headers=bearer(secrets["admin"])).status_code in (404, 405), path


def test_an_endpoint_without_a_role_is_no_route():
    async def forgotten() -> None: ...

    with pytest.raises(TypeError, match="declares no role"):
        permission_of(Route("/forgotten", forgotten))
