"""The network of a real `sluice run`: a proxy before each server, set up by the manifest.

All of 127.0.0.0/8 is this machine. Servers listen on 127.0.0.1. The addresses that their pods
report, and that of the rendezvous, are others with the same port, on which a proxy listens. The
kernel knows which process opened a connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.chaos.proxy import Harm, Proxy

# SLUICE_ROLE of a process that calls -> its name in a pair. An engine does not call any service.
CALLERS = {"rollout": "worker", "trainer": "trainer", "buffer": "buffer"}
# Name in a pair -> SLUICE_ROLE of its pod, and the variable with its port.
SERVERS = {
    "rendezvous": ("rendezvous", "SLUICE_PORT_GRPC"),
    "buffer": ("buffer", "SLUICE_PORT_GRPC"),
    "engine": ("rollout", "SLUICE_PORT_HTTP"),
}
# (caller, server) of each connection of a run (docs/contracts.md).
PAIRS = (
    ("worker", "buffer"),
    ("worker", "rendezvous"),
    ("worker", "engine"),
    ("trainer", "buffer"),
    ("trainer", "rendezvous"),
    ("trainer", "engine"),
    ("buffer", "rendezvous"),
)
LOOK_SECONDS = 0.2
DEADLINE_SECONDS = 10.0


class Network:
    """The proxies of one run directory.

    They run in another thread, so that faults do not wait for a test's checks.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        net = f"127.77.{random.SystemRandom().randrange(256)}"
        self.addresses = {name: f"{net}.{number}" for number, name in enumerate(SERVERS, 2)}
        self._proxies = {
            name: Proxy(address, self._caller) for name, address in self.addresses.items()
        }
        self._owners: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    def __enter__(self) -> Network:
        self._thread.start()
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.cancel()
        for proxy in self._proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.__aexit__(), self._loop).result(DEADLINE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def overrides(self) -> list[str]:
        """Return `--set` arguments for a run whose calls go through these proxies."""
        return [f"podTemplateOverrides={json.dumps(self._templates())}"]

    def inflict(self, pair: tuple[str, str], harm: Harm) -> None:
        self._call(lambda: self._proxies[pair[1]].inflict(pair[0], harm))

    def heal(self, pair: tuple[str, str]) -> None:
        self._call(lambda: self._proxies[pair[1]].heal(pair[0]))

    def passed(self, pair: tuple[str, str]) -> int:
        """Return the bytes between the two so far, in both directions."""
        return self._proxies[pair[1]].passed.get(pair[0], 0)

    def check(self) -> None:
        """Raise the error that ended the proxies, if any."""
        if self._watching.done():
            self._watching.result()

    def _call(self, action: Callable[[], None]) -> None:
        self.check()

        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(DEADLINE_SECONDS)

    def _templates(self) -> list[dict[str, Any]]:
        rendezvous = self.addresses["rendezvous"]
        through = f"export SLUICE_RENDEZVOUS={rendezvous}:${{SLUICE_RENDEZVOUS##*:}}"
        engine = f"SLUICE_ENGINE_URL=http://{self.addresses['engine']}:$SLUICE_PORT_HTTP"
        return [
            _template("trainer", "trainer", "sluice_trainer.launch", through),
            _template(
                "buffer",
                "buffer",
                "sluice_buffer",
                f"{through} SLUICE_ADVERTISE={self.addresses['buffer']}",
            ),
            _template(
                "rollout",
                "worker",
                "sluice_rollout",
                f"{through} {engine} SLUICE_ADVERTISE={self.addresses['engine']}",
            ),
        ]

    async def _watch(self) -> None:
        """Listen at the ports of pods as they start."""
        while True:
            for _, environment in self._processes():
                for name, (role, port) in SERVERS.items():
                    if environment.get("SLUICE_ROLE") == role and port in environment:
                        await self._proxies[name].listen(int(environment[port]))
            await asyncio.sleep(LOOK_SECONDS)

    def _processes(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield pids and environments of the run's pods.

        They are read anew each time, as a process gets its environment only by exec.
        """
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            if environment := _environment(pid, self._run_dir):
                yield pid, environment

    def _caller(self, peer: tuple[str, int], port: int) -> str:
        """Name of the caller that connected from `peer` to `port`, empty if it is foreign."""
        inode = _inode(peer, port)
        if inode not in self._owners:
            self._owners = {
                socket_inode: CALLERS.get(environment.get("SLUICE_ROLE", ""), "")
                for pid, environment in self._processes()
                for socket_inode in _sockets(pid)
            }
        return self._owners.get(inode, "")


def _template(role: str, container: str, module: str, settings: str) -> dict[str, Any]:
    command = ["sh", "-c", f'{settings}; exec "$@"', "sh", sys.executable, "-m", module]
    return {
        "roles": [role],
        "template": {"spec": {"containers": [{"name": container, "command": command}]}},
    }


def _environment(pid: int, run_dir: Path) -> dict[str, str]:
    """Environment of a process, if it belongs to a pod of this run; else empty."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}  # it has ended, or belongs to another user
    pairs = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    return pairs if pairs.get("SLUICE_JOB_FILE", "").startswith(f"{run_dir.resolve()}/") else {}


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _inode(peer: tuple[str, int], port: int) -> str:
    """Return the inode of the socket at the other end; empty if it is unknown.

    The table of TCP sockets has addresses in the machine's byte order.
    """
    local = "".join(f"{int(part):02X}" for part in reversed(peer[0].split("."))) + f":{peer[1]:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # gRPC's sockets are of both families
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(local) and fields[2].endswith(f":{port:04X}"):
                return fields[9]
    return ""
