"""The metrics' own port: who may ask, and that a slow client holds neither it nor the end of the service."""

import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from support.live_service import live_service

from plsc.serve import observability


def test_a_name_that_is_made_to_resolve_to_this_machine_is_refused(tmp_path):
    with live_service(tmp_path, metrics_port=0) as live:
        for host, status in (
            ("127.0.0.1", 200),
            ("localhost:9090", 200),
            ("[::1]:1", 200),
            ("evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("[::1]evil.example", 403),
            ("127.0.0.1:80@evil.example", 403),
            ("", 403),
        ):
            answer = httpx.get(live.server.metrics_address, headers={"Host": host})
            assert (answer.status_code, "plsc_limit_k" in answer.text) == (status, status == 200), host


def test_a_dripping_client_is_cut_off_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(observability, "_CONNECTION_SECONDS", 1.0)
    with live_service(tmp_path, metrics_port=0) as live:
        place = urlsplit(live.server.metrics_address)
        dripping = [socket.create_connection((place.hostname, place.port), timeout=10) for _ in range(20)]
        dripping[-1].sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(dripping[-1], 60.0)
        assert httpx.get(live.server.metrics_address).status_code == 200
        late = socket.create_connection((place.hostname, place.port), timeout=10)
        late.sendall(b"GET /metrics HTTP/1.1\r\n")
        monkeypatch.setattr(observability, "_CONNECTION_SECONDS", 3600.0)  # the end of the service waits for no scrape
    for connection in (*dripping, late):
        connection.close()


def drip(connection: socket.socket, seconds: float) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        connection.sendall(b"x")
        time.sleep(0.1)
