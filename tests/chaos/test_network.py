"""Proxies in front of the ports of a run's pods know whose connection it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.runtime.pod_env import free_port
from tests.chaos.network import Network

DEADLINE_SECONDS = 30.0
SERVER = """
import os, socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
server = socketserver.ThreadingTCPServer(("127.0.0.1", int(os.environ["SLUICE_PORT_GRPC"])), Echo)
print("listens", flush=True)
server.serve_forever()
"""
CALLER = """
import socket, sys, time
family, address, port = socket.AddressFamily[sys.argv[1]], sys.argv[2], int(sys.argv[3])
while True:
    peer = socket.socket(family)
    if peer.connect_ex((address, port)) == 0:
        break
    peer.close()
    time.sleep(0.05)
peer.sendall(b"hello\\n")
assert peer.makefile().readline() == "hello\\n"
"""


def started(run_dir: Path, role: str, *command: str, **variables: str) -> subprocess.Popen[bytes]:
    pod = {"SLUICE_JOB_FILE": f"{run_dir}/pods/{role}/job.json", "SLUICE_ROLE": role, **variables}
    return subprocess.Popen(
        [sys.executable, "-c", *command], env=os.environ | pod, stdout=subprocess.PIPE
    )


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path) as network:
        yield network


@pytest.mark.parametrize(
    ("family", "prefix"), [("AF_INET", ""), ("AF_INET6", "::ffff:")], ids=["IPv4", "gRPC's"]
)
def test_a_connection_belongs_to_the_role_of_its_process(
    network: Network, tmp_path: Path, family: str, prefix: str
) -> None:
    port = str(free_port())
    server = started(tmp_path, "buffer", SERVER, SLUICE_PORT_GRPC=port)
    try:
        assert server.stdout
        assert server.stdout.readline() == b"listens\n", "a proxy listens before its server does"
        address = prefix + network.addresses["buffer"]
        for role, name in (("trainer", "trainer"), ("rollout", "worker")):
            assert (
                started(tmp_path, role, CALLER, family, address, port).wait(DEADLINE_SECONDS) == 0
            )
            until_passed(network, (name, "buffer"), 2 * len("hello\n"))
    finally:
        server.kill()
        server.wait()


def until_passed(network: Network, pair: tuple[str, str], size: int) -> None:
    """The proxy counts a piece just after it has passed it on."""
    end = time.monotonic() + DEADLINE_SECONDS
    while network.passed(pair) != size:
        assert time.monotonic() < end, f"{pair}: {network.passed(pair)} bytes, expected {size}"
        time.sleep(0.02)
