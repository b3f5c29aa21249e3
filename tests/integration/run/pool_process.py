"""A real `sluice pool up` as a subprocess, and ways to disturb it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.integration.run.laptop import PROGRAMS

NAME = "shared"


def write_manifest(file: Path, model: Path, *, replicas: int = 1, max_rank: int = 8) -> Path:
    """Write a pool of engines on CPUs, and return the file."""
    file.write_text(
        "apiVersion: sluice.dev/v1alpha1\n"
        "kind: RLEnginePool\n"
        f"metadata: {{name: {NAME}}}\n"
        "spec:\n"
        f"  model: {{path: {model}}}\n"
        "  gpusPerReplica: 0\n"
        f"  replicas: {replicas}\n"
        f"  maxRank: {max_rank}\n"
        "  maxAdapters: 4\n"
    )
    return file


class PoolProcess:
    """The process of `sluice pool up`. XDG_STATE_HOME of the test's environment names its state."""

    def __init__(self, manifest: Path, output: Path, *overrides: str) -> None:
        self.output = output
        command = [sys.executable, "-m", "sluice_cli", "pool", "up", str(manifest)]
        command += [word for override in overrides for word in ("--set", override)]
        with output.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.output.read_text()

    def until(self, text: str, seconds: float = 180.0, times: int = 1) -> None:
        """Wait until the process has printed a text this many times."""
        end = time.monotonic() + seconds
        while self.text().count(text) < times:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.text()}"
            assert time.monotonic() < end, f"no {text!r} after {seconds:.0f} s:\n{self.text()}"
            time.sleep(0.05)

    def engines(self) -> list[psutil.Process]:
        """Return the main processes of the engines that run."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(PROGRAMS["engine"] in word for word in process.cmdline()[1:3]):
                    found.append(process)
        return found

    def kill_engine(self) -> None:
        """Kill the main process of the first engine, as the kernel does if memory is short."""
        self.engines()[0].send_signal(signal.SIGKILL)

    def stop(self, number: int = signal.SIGINT, seconds: float = 60.0) -> int:
        """End the pool as Ctrl-C does, and return its exit code."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
