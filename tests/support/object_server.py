"""An S3 in a thread of this process, which can fail requests and cut bodies off."""

import itertools
import logging
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SECRET = "A-SECRET-OF-TESTS"


class ObjectServer:
    """What answers at ``url``.

    Attributes:
        client: boto3's, to put objects.
        refuses: whether every GET request is answered 403.
        left: what is to befall requests, as :meth:`fail` was told, and has not yet.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self.refuses = False
        self.left: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self.client: Any = None
        self.url = ""

    def fail(self, *faults: tuple[str, str]) -> None:
        """Let each next "listing" or "read" of an object meet a fault: "503", "cut" (half of the body), or "none"."""
        self.left = list(faults)

    def _fault(self, environ: dict[str, Any]) -> str:
        kind = "listing" if "list-type" in environ["QUERY_STRING"] else "read"
        with self._lock:
            for place, (of, fault) in enumerate(self.left):
                if of == kind:
                    del self.left[place]
                    return fault
        return "403" if self.refuses else "none"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        fault = self._fault(environ) if environ["REQUEST_METHOD"] == "GET" else "none"
        if fault in {"403", "503"}:
            start_response(f"{fault} no", [("Content-Length", "0")])
            return []
        if fault == "cut":
            body = b"".join(self._application(environ, start_response))
            return itertools.chain([body[: len(body) // 2]], _broken(environ["werkzeug.socket"]))
        return self._application(environ, start_response)  # type: ignore[no-any-return]


def _broken(connection: socket.socket) -> Iterator[bytes]:
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionError("cut off")
    yield b""


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Serve an S3 with the bucket ``bucket``, which this process's environment names."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    faulty = ObjectServer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faulty, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    faulty.url = f"http://127.0.0.1:{server.server_port}"
    environment = {
        "AWS_ENDPOINT_URL": faulty.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            faulty.client = boto3.client("s3", endpoint_url=faulty.url, region_name="us-east-1")
            faulty.client.create_bucket(Bucket="bucket")
            yield faulty
        finally:
            faulty.client.close()
            server.shutdown()
            server.server_close()
            thread.join()
