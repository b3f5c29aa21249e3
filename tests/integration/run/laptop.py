"""A real `sluice run` of the quickstart as a subprocess, and ways to disturb it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from sluice.telemetry import run_directory

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples/quickstart"
# The module, or file, that the process of each role runs.
PROGRAMS = {
    "engine": "/launch_server.py",
    "worker": "sluice_rollout",
    "buffer": "sluice_buffer",
    "rendezvous": "sluice_rendezvous",
    "trainer": "sluice_trainer",
}


class Laptop:
    """A run directory and the `sluice run` process that works on it."""

    def __init__(self, example: Path, directory: Path, *overrides: str) -> None:
        self.directory = directory
        self.output = directory.with_suffix(".out")
        self._command = [
            sys.executable,
            "-m",
            "sluice_cli",
            "run",
            str(example / "job.yaml"),
            "--plain",
        ]
        self._command += ["--run-dir", str(directory)]
        self._command += [part for override in overrides for part in ("--set", override)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, cwd=self.directory.parent
            )

    def run(self, seconds: float = 400.0) -> int:
        self.start()
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Return the exit code. A run that hangs is killed, and the test fails."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(
                f"no end after {seconds:.0f} s; the last lines were\n{self.text()[-2000:]}"
            ) from None

    def run_through_a_killed_trainer(self, step: int, seconds: float = 280.0) -> dict[str, Any]:
        """Run it, kill the trainer after this step, and return the summary of the run's success."""
        self.start()
        self.until_step(step)
        self.kill("trainer")
        assert self.wait(seconds) == 0, self.text()[-3000:]
        summary = self.summary()
        assert summary["state"] == "Succeeded", self.text()[-2000:]
        return summary

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a role's process; return its pid."""
        assert self.process is not None
        pid = self.find(role)
        os.kill(pid, number)
        if role == "run" and number == signal.SIGKILL:
            self.process.wait()
        return pid

    def find(self, role: str) -> int:
        """Wait for a role's process and return its pid; `run` is `sluice run` itself."""
        assert self.process is not None
        if role == "run":
            return self.process.pid
        return self.until_process(
            lambda process: _runs(process, PROGRAMS[role]), f"process {role}", 60
        )

    def until_process(
        self, is_it: Callable[[psutil.Process], bool], what: str, seconds: float
    ) -> int:
        """Wait for a process of this run that meets a condition, and return its pid."""
        assert self.process is not None
        host = psutil.Process(self.process.pid)

        def look() -> int | None:
            for process in host.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if is_it(process):
                        return int(process.pid)
            return None

        return int(self.until(look, what, seconds))

    def engine(self, name: str) -> list[psutil.Process]:
        """Return all processes of the engine of a replica, such as rollout-1."""

        def is_it(process: psutil.Process) -> bool:
            supervisor = process.parent()  # an engine has a title in the place of its environment
            return (
                supervisor is not None
                and _runs(process, PROGRAMS["engine"])
                and f"-{name}-" in supervisor.environ().get("SLUICE_POD_ID", "")
            )

        engine = psutil.Process(self.until_process(is_it, f"engine of {name}", 60))
        return [engine, *engine.children(recursive=True)]

    @contextlib.contextmanager
    def slowed(self, name: str, share: float) -> Iterator[None]:
        """Give the engine of a replica, such as rollout-1, only a share of the time.

        All its processes are stopped and continued five times a second, as on a throttled device.
        """
        processes, over = self.engine(name), threading.Event()

        def hold_back() -> None:
            while not over.is_set():
                send_signal(processes, signal.SIGSTOP)
                over.wait(0.2 * (1 - share))
                send_signal(processes, signal.SIGCONT)
                over.wait(0.2 * share)

        thread = threading.Thread(target=hold_back)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def step(self) -> int:
        return max(self.steps(), default=0)

    def steps(self) -> dict[int, dict[str, Any]]:
        return run_directory.by_step(self.directory / run_directory.METRICS)

    def until_step(self, step: int, seconds: float = 300.0) -> None:
        self.until(lambda: self.step() >= step, f"step {step}", seconds)

    def until(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            result = condition()
            if result:
                return result
            assert self.process is not None
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()[-2000:]}"
            time.sleep(0.05)
        raise AssertionError(f"no {what} after {seconds:.0f} s:\n{self.text()[-2000:]}")

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def replayed(self) -> dict[int, list[dict[str, Any]]]:
        """Return all records of the steps that were trained more than once."""
        by_step: dict[int, list[dict[str, Any]]] = {}
        for record in run_directory.records(self.directory / run_directory.METRICS):
            by_step.setdefault(record["step"], []).append(record)
        return {step: records for step, records in by_step.items() if len(records) > 1}


def _runs(process: psutil.Process, program: str) -> bool:
    return any(
        program in word for word in process.cmdline()[1:3]
    )  # python FILE, or python -m MODULE


def send_signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            process.send_signal(number)


def processes_of(directory: Path) -> list[str]:
    """Return the command lines of living processes that belong to a run directory."""
    marker = str(directory.resolve()).encode()
    commands = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if (
                marker in environment
                and process.status() != psutil.STATUS_ZOMBIE
                and process.pid != os.getpid()
            ):
                commands.append(" ".join(process.cmdline())[:120])
        except (OSError, psutil.Error):
            continue
    return commands


def values(records: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records]
