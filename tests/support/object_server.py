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
        requests: GET requests so far.
        fault: what befalls every tenth of these: "", "503", "cut" (half of the body) or "403" (every one).
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self.requests = 0
        self.fault = ""
        self.client: Any = None
        self.url = ""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            self.requests += 1
            if self.fault == "403" or (self.fault == "503" and self.requests % 10 == 0):
                start_response(f"{self.fault} no", [("Content-Length", "0")])
                return []
            if self.fault == "cut" and self.requests % 10 == 0:
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
