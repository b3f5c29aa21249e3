"""A Kubernetes node on this machine: kubelet, containerd, real pods. It comes from a directory
next to the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.tools import ROOT, missing, tool

Object = dict[str, Any]
NODE_UP_SECONDS, LOAD_SECONDS = 240, 600


class Node:
    """The node through kubectl, as its user has it. lasts: it was there before the tests, and
    stays."""

    def __init__(self, exports: dict[str, str], script: Path, *, lasts: bool) -> None:
        self._script, self.lasts = script, lasts
        self.environment = os.environ | exports

    def kubectl(
        self, *words: str, text: str | None = None, check: bool = True, seconds: float = 60
    ) -> str:
        """Return the command's output. check: raise with that output if it fails."""
        return self.call(str(tool("kubectl")), *words, text=text, check=check, seconds=seconds)

    def call(
        self, *words: str, text: str | None = None, check: bool = True, seconds: float = 60
    ) -> str:
        done = subprocess.run(
            words, env=self.environment, input=text, text=True, capture_output=True, timeout=seconds
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout if check else done.stdout + done.stderr

    def apply(self, *objects: Object) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", text=json.dumps(items))

    def get(self, *words: str) -> Object:
        """`kubectl get WORDS`; empty if it does not exist."""
        output = self.kubectl("get", *words, "-o", "json", "--ignore-not-found")
        return dict(json.loads(output)) if output.strip() else {}

    def images(self) -> list[str]:
        return subprocess.run(
            [self._script, "images"], check=True, text=True, capture_output=True
        ).stdout.split()

    def load(self, archive: Path, instead_of: list[str]) -> None:
        """Bring an image in, and remove others."""
        subprocess.run([self._script, "load-tar", archive], check=True, timeout=LOAD_SECONDS)
        if instead_of:
            self.call(
                "ctr",
                "--namespace",
                "k8s.io",
                "images",
                "rm",
                "--sync",
                *instead_of,
                seconds=LOAD_SECONDS,
            )


@contextmanager
def running_node() -> Iterator[Node]:
    """The node of KUBECONFIG, which is left as it is; or one that is started, and ended again."""
    scripts = sorted(ROOT.parent.glob("*/kube/kube"))
    if not scripts or os.geteuid() != 0:
        missing(
            "needs root, and a directory beside the checkout that starts a Kubernetes node: "
            "*/kube/kube"
        )
    if os.environ.get("KUBECONFIG"):
        yield Node({}, scripts[0], lasts=True)
        return
    try:
        up = subprocess.run(
            [scripts[0], "node-up"],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=NODE_UP_SECONDS,
        )
        exports = dict(
            line[7:].split("=", 1) for line in up.stdout.splitlines() if line.startswith("export ")
        )
        variables = {
            name: exports[name].strip("'\"") for name in ("KUBECONFIG", "CONTAINERD_ADDRESS")
        }
        yield Node(variables, scripts[0], lasts=False)
    finally:
        subprocess.run([scripts[0], "down", "--name", "node"], check=True, timeout=NODE_UP_SECONDS)


T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float, pause: float = 0.5) -> T:
    """Wait until the condition holds; what it answered."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(pause)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def process_of(pod: Object, program: str) -> int | None:
    """Pid, on this machine, of the process of a pod that has the program as a word of its command
    line."""
    uid = pod["metadata"]["uid"]
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            inside = uid in (directory / "cgroup").read_text()
            if inside and program in (directory / "cmdline").read_bytes().decode().split("\0"):
                return int(directory.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None
