"""The operator in a separate process, as a Deployment runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from sluice.runtime.pod_env import free_port

READY_SECONDS = 30
# Lease of operators that have names: another one is waiting for it. A shorter one would be lost by
# a single write that the API server's disk holds up for two seconds.
RIVALS = "6"
# Lease of an operator without a successor: a disk that stalls for seconds must not end it.
ALONE = "30"


class Operator:
    """A replica of the operator. Replicas with the same namespace share the lease."""

    def __init__(self, kubeconfig: str, namespace: str, log: Path, **variables: str) -> None:
        self.port = int(variables.get("SLUICE_HTTP_PORT") or free_port())
        self.identity = variables.get("SLUICE_IDENTITY", "one")
        settings = {
            "KUBECONFIG": kubeconfig,
            "SLUICE_WATCH_NAMESPACES": namespace,
            "SLUICE_NAMESPACE": namespace,
            "SLUICE_IDENTITY": self.identity,
            "SLUICE_LEASE_SECONDS": RIVALS if "SLUICE_IDENTITY" in variables else ALONE,
            "SLUICE_HTTP_PORT": str(self.port),
            "SLUICE_BIND": "127.0.0.1",
            "SLUICE_PROBE_SECONDS": "3600",  # these pods have no servers
        }
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")
        }
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluice_operator"],
                env=environment | settings | variables,
                stderr=file,
            )

    async def ready(self) -> Operator:
        async with asyncio.timeout(READY_SECONDS):
            while self.get("/readyz")[0] != 200:
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.1)
        return self

    def get(self, path: str) -> tuple[int, str]:
        """Return code and text of an answer; the code is 0 without an answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, urllib.error.URLError):
            return 0, ""

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of its log. It has to be started with SLUICE_LOG_FORMAT=json."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition("{")[0].partition(" ")[0] == name
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
