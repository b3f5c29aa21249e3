"""A real API server: the one of KUBECONFIG, or one that is started from ../shared/kube."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KUBE = ROOT.parent / "shared" / "kube" / "kube"


@dataclass(frozen=True)
class ControlPlane:
    """kubeconfig: for an administrator. directory: of an instance that is ours to break; None: it is not ours."""

    kubeconfig: str
    directory: Path | None = None

    async def stop_api_server(self) -> list[str]:
        """Kill it; the command that starts it again."""
        assert self.directory is not None
        process = int((self.directory / "pid" / "apiserver").read_text().split()[0])
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")[1:-1]
        command = [os.readlink(f"/proc/{process}/exe"), *arguments]
        os.kill(process, signal.SIGKILL)
        while _alive(process):
            await asyncio.sleep(0.05)
        return command

    def start_api_server(self, command: list[str]) -> None:
        """In the way that `kube` started it, so that `kube down` ends it."""
        assert self.directory is not None
        with (self.directory / "log" / "apiserver.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        began = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        (self.directory / "pid" / "apiserver").write_text(f"{process.pid} {began}\n")


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def control_plane() -> Iterator[ControlPlane]:
    if os.environ.get("KUBECONFIG"):
        yield ControlPlane(os.environ["KUBECONFIG"])
        return
    if not KUBE.exists():
        pytest.skip("needs a Kubernetes API server: set KUBECONFIG, or put a control plane at ../shared/kube")
    name = f"t-{uuid.uuid4().hex[:8]}"
    try:
        lines = subprocess.run([KUBE, "up", "--name", name], check=True, text=True, stdout=subprocess.PIPE).stdout
        exports = dict(line[7:].split("=", 1) for line in lines.splitlines() if line.startswith("export "))
        kubeconfig = exports["KUBECONFIG"].strip("'\"")
        yield ControlPlane(kubeconfig, Path(kubeconfig).parent)
    finally:
        subprocess.run([KUBE, "down", "--name", name], check=True, stdout=subprocess.DEVNULL)
