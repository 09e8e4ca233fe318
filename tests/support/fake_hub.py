"""A Hugging Face hub on the loopback interface: what huggingface_hub asks of it to create, commit and resolve.

Commits are dictionaries of files; weights are uploaded by LFS, other files in the commit itself, as the hub decides it.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_fake"
LARGE = (".safetensors", ".onnx")


class FakeHub:
    """The hub's repositories.

    Attributes:
        url: of HF_ENDPOINT.
        commits: {repository: [{file: content} of each commit]}; a commit's id is its number as 40 digits.
        branches: {(repository, branch): number of its commit}.
        private: {repository: whether it was created so}.
        asked: "METHOD /path" of every request.
        by_lfs: names of files that came by LFS.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.branches: dict[tuple[str, str], int] = {}
        self.private: dict[str, bool] = {}
        self.asked: list[str] = []
        self.by_lfs: list[str] = []
        self.objects: dict[str, bytes] = {}

    def environment(self, home: Any) -> dict[str, str]:
        """Variables under which huggingface_hub uses this hub, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def at(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The id and the files of a commit, named by a branch or its id."""
        number = int(revision) if revision.isdecimal() else self.branches.get((repository, revision))
        if number is None or repository not in self.commits:
            return None
        return f"{number:040d}", self.commits[repository][number]

    def commit(self, repository: str, branch: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Take the lines of a commit, of which each is the header or a file."""
        files = dict(self.commits[repository][self.branches[repository, branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
                self.by_lfs.append(value["path"])
        self.commits[repository].append(files)
        number = len(self.commits[repository]) - 1
        self.branches[repository, branch] = number
        return {"commitUrl": f"{self.url}/{repository}/commit/{number:040d}", "commitOid": f"{number:040d}"}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a hub until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._resolve()

    def do_GET(self) -> None:
        if self.path.startswith("/api/whoami-v2"):
            self._json({"name": "ORG", "auth": {}} if self._is_known() else {"error": "Invalid token"}, 401)
        else:
            self._resolve()

    def do_PUT(self) -> None:
        content = self._body()
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._json({})

    def do_POST(self) -> None:
        body = self._body()
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if not self._is_known():
            self._json({"error": "Invalid token"}, 401)
        elif parts[:3] == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif parts[4] == "branch":
            self._branch("/".join(parts[2:4]), parts[5])
        elif parts[4] == "preupload":
            modes = [(each["path"], "lfs" if each["path"].endswith(LARGE) else "regular") for each in _files(body)]
            self._json({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]})
        elif parts[4] == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            self._json(self.hub.commit("/".join(parts[2:4]), parts[5], lines))
        else:
            self._json({"error": "not found"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization'] or 'ORG'}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name.startswith("strangers/"):
            self._json({"error": "You have no rights to create a model in this namespace"}, 403)
        elif name in self.hub.commits:
            self._json(url, 409)
        else:
            self.hub.commits[name], self.hub.branches[name, "main"] = [{}], 0
            self.hub.private[name] = bool(wanted.get("private") or wanted.get("visibility") == "private")
            self._json(url)

    def _branch(self, name: str, branch: str) -> None:
        exists = (name, branch) in self.hub.branches
        self.hub.branches.setdefault((name, branch), self.hub.branches[name, "main"])
        self._json({}, 409 if exists else 200)

    def _resolve(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if len(parts) < 5 or parts[2] != "resolve":
            self._answer(b"{}", 200 if parts == [""] else 404)
            return
        found = self.hub.at("/".join(parts[:2]), parts[3])
        content = None if found is None else found[1].get("/".join(parts[4:]))
        if found is None or content is None:
            missing = "EntryNotFound" if found else "RepoNotFound"
            commit = {"X-Repo-Commit": found[0]} if found else {}
            self._answer(b"", 404, {"X-Error-Code": missing, "X-Error-Message": f"{missing} here", **commit})
            return
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": found[0], "ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        self._answer(content, 200, headers)

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _json(self, content: dict[str, Any], status: int = 200) -> None:
        self._answer(json.dumps(content).encode(), status if "error" in content or status == 409 else 200)

    def _answer(self, content: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _files(body: bytes) -> list[dict[str, Any]]:
    return json.loads(body)["files"]  # type: ignore[no-any-return]
