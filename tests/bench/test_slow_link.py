"""benchmarks/slow_link.py: namespaces are joined, limited and removed, and refused in one line where they cannot be."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slow_link import ADDRESSES, Network, require_privileges, slow_link

pytestmark = pytest.mark.live

SERVER = "import socket; s = socket.create_server(('', 5001)); print(flush=True); s.accept()[0].sendall(b'arrived')"
CLIENT = f"import socket; print(socket.create_connection(('{ADDRESSES[0]}', 5001), 10).recv(10).decode(), end='')"


def can_make_namespaces():
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"plsc-trial-{os.getpid()}"  # workers of pytest ask at the same time
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, ip and tc")
@pytest.mark.parametrize("network", [Network(100), Network(1000, 20)], ids=lambda network: network.name)
def test_ends_reach_each_other_and_are_removed(network):
    if network.round_trip_ms and not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun")
    with slow_link(network) as (first, second):
        shaped = subprocess.run(first.command("tc", "qdisc"), capture_output=True, text=True, check=True).stdout
        (limit,) = re.findall(rf"qdisc tbf .* dev {first.device} root .* rate (\w+)", shaped)
        assert limit == network.name.split("it/s")[0].replace(" ", "") + "it"
        server = subprocess.Popen(first.command(sys.executable, "-c", SERVER), stdout=subprocess.PIPE)
        assert server.stdout is not None
        with server.stdout:
            server.stdout.readline()
            client = second.command(sys.executable, "-c", CLIENT)
            assert subprocess.run(client, capture_output=True, text=True).stdout == "arrived"
        assert server.wait() == 0
    assert first.namespace not in namespaces()
    assert second.namespace not in namespaces()


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, ip and tc")
def test_what_tc_refuses_is_one_line_and_leaves_nothing_behind():
    with pytest.raises(SystemExit, match=r"^tc -n .*rate"), slow_link(Network(0)):
        pass
    assert f"plsc{os.getpid()}-" not in namespaces()


def test_without_root_or_iproute2_it_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="there is no 'ip': install iproute2"):
        require_privileges()
    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="run this as root"):
        require_privileges()
