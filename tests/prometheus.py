"""The real Prometheus: Debian's package, or one that is on the PATH."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest

from sluice.runtime.pod_env import free_port
from tests.helm import load

CACHE = Path.home() / ".cache" / "sluice-prometheus"
FETCH_SECONDS = 60
# The longest that a fault may take to show, or its end.
ALERT_SECONDS = 120.0
Labels = dict[str, str]


def program(name: str) -> Path:
    """`prometheus` or `promtool`. Skips if there is none and apt cannot fetch Debian's: no
    registry of Python packages has it.
    """
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    problem = _unpack_debians()
    if problem:
        pytest.skip(f"needs {name} on the PATH, or apt to fetch Debian's package: {problem}")
    return CACHE / "usr" / "bin" / name


@cache
def _unpack_debians() -> str:
    """The reason that it is not there; empty: it is. Two sessions may do it at once: the first
    rename wins."""
    if (CACHE / "usr").exists():
        return ""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return "no apt-get on the PATH"
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as directory:
        try:
            fetched = subprocess.run(
                ["apt-get", "download", "prometheus"],
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=FETCH_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get has not fetched it within {FETCH_SECONDS} s"
        packages = list(Path(directory).glob("prometheus_*.deb"))
        if not packages:
            return fetched.stderr.strip().splitlines()[-1] if fetched.stderr else "no package"
        unpacked = Path(directory) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", packages[0], unpacked], check=True, timeout=120)
        try:
            unpacked.rename(CACHE)
        except OSError:
            if not (CACHE / "usr").exists():
                raise
    return ""


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)


def hastened(text: str, *, waits: str, windows: Mapping[str, str]) -> str:
    """Rules with shorter times, so that a fault of seconds is one of minutes to them.

    waits: replaces each `for`. windows: replaces times in expressions, such as {"30m": "5s"}.
    """
    text = re.sub(r"^(\s+for: ).*$", rf"\g<1>{waits}", text, flags=re.MULTILINE)
    times = "|".join(re.escape(window) for window in windows)
    return re.sub(rf"(?<=[\[ :])({times})(?=[\]: )])", lambda match: windows[match[1]], text)


class Prometheus:
    """A server with a configuration. Use with `with`."""

    def __init__(self, directory: Path, configuration: dict[str, Any]) -> None:
        self.port = free_port()
        self._directory = directory
        self._file = directory / "prometheus.yml"
        self._file.write_text(json.dumps(configuration))  # JSON is YAML

    def __enter__(self) -> Self:
        self._log = (self._directory / "prometheus.log").open("ab")
        self._server = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={self._file}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        self.until(self._ready, "ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()
        self._log.close()

    def _ready(self) -> bool:
        assert self._server.poll() is None, (self._directory / "prometheus.log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            result = condition()
            if result:
                return result
            time.sleep(0.2)
        raise AssertionError(f"Prometheus: not {what} after {seconds:.0f} s")

    def get(self, path: str, **parameters: str | float) -> Any:
        """The `data` of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[tuple[Labels, float]]:
        """(labels, value) of each series now; NaN is left out, because a graph does not show it."""
        result = self.get("query", query=expr)["result"]
        pairs = [(sample["metric"], float(sample["value"][1])) for sample in result]
        return [(labels, value) for labels, value in pairs if value == value]

    def firing(self) -> dict[str, Labels]:
        """Alert -> labels of its series, of those that fire."""
        alerts = self.get("alerts")["alerts"]
        return {
            alert["labels"]["alertname"]: alert["labels"]
            for alert in alerts
            if alert["state"] == "firing"
        }

    def until_firing(self, alert: str) -> Labels:
        """Labels of one of its series."""
        labels: Labels = self.until(
            lambda: self.firing().get(alert), f"firing {alert}", ALERT_SECONDS
        )
        return labels

    def until_quiet(self, *alerts: str) -> None:
        self.until(
            lambda: self.firing().keys().isdisjoint(alerts), f"quiet {alerts}", ALERT_SECONDS
        )

    def targets(self) -> list[dict[str, Any]]:
        active: list[dict[str, Any]] = self.get("targets", state="active")["activeTargets"]
        return active


def rule_groups(text: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = load(text)["groups"]
    return groups
