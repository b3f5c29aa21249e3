"""Programs that are not of Python and that tests call: helm, kubectl, etcd, kube-apiserver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
# An interpreter that has verifiers (`make agents`).
VERIFIERS_PYTHON = Path(
    os.environ.get("SLUICE_VERIFIERS_PYTHON")
    or Path(sys.prefix).parent / ".venv-verifiers/bin/python"
)


def missing(what: str) -> NoReturn:
    """Skip, and say what is missing; but fail if everything must be there
    (SLUICE_TESTS_MUST_RUN)."""
    if os.environ.get("SLUICE_TESTS_MUST_RUN"):
        pytest.fail(f"SLUICE_TESTS_MUST_RUN is set, but this {what}", pytrace=False)
    pytest.skip(what)


def tool(name: str) -> Path:
    """A program on the PATH, else among the tools of a checkout's neighbour; skips without one."""
    path = shutil.which(name) or shutil.which(name, path=str(neighbour_tools()))
    if path is None:
        missing(f"needs {name} on the PATH")
    return Path(path)


@cache
def neighbour_tools() -> Path | None:
    """Binaries of a Kubernetes release that a directory next to the checkout brings: its `kube
    install` unpacks them."""
    scripts = sorted(ROOT.parent.glob("*/kube/kube"))
    if not scripts:
        return None
    subprocess.run([scripts[0], "install"], check=True)
    return Path(os.environ.get("KUBE_HOME") or Path.home() / ".cache" / "sluice-kube") / "bin"
