"""Machines that give a sandbox more or fewer layers: users, capabilities and calls as pods and
older kernels have them.

The sandbox is not told which layers to use. A launcher takes away what such a machine would
lack, then starts the script: it changes the user, empties the capability bounding set, and installs
a filter under which calls fail.
"""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ACCOUNT = 65532

_LAUNCH = """
import ctypes, json, os, platform, struct, sys
from sluice.rewards.sandbox import seccomp
machine = json.loads(sys.argv[1])
if not machine["capabilities"]:
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
if machine["user"] and os.geteuid() == 0:
    os.setgroups([]); os.setresgid(*[machine["user"]] * 3); os.setresuid(*[machine["user"]] * 3)
code = [(0x20, 0, 0, 0)]
for number, error in machine["denied"]:
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
code += [(0x06, 0, 0, 0x7FFF0000)]
seccomp.forbid_new_privileges()
seccomp.apply(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_UNSHARE = {"x86_64": 272, "aarch64": 97}.get(os.uname().machine, 0)
_NO_NAMESPACES = (_UNSHARE, errno.EPERM)  # as Kubernetes' RuntimeDefault profile answers
_NO_LANDLOCK = (444, errno.ENOSYS)  # as Linux 5.10 answers


@dataclass(frozen=True, slots=True)
class Machine:
    """user: 0 is root. denied: (number of a call, errno that it fails with). layers: what a sandbox
    has there."""

    layers: str
    user: int = 0
    capabilities: bool = True
    denied: tuple[tuple[int, int], ...] = ()

    def command(self, *arguments: str) -> list[str]:
        """The command that runs Python with `arguments` on this machine. Skips the test if that
        is not possible."""
        import json

        if os.geteuid() != 0 and self.user == 0:
            pytest.skip("needs root")
        text = json.dumps(
            {"user": self.user, "capabilities": self.capabilities, "denied": self.denied}
        )
        return [python(), "-c", _LAUNCH, text, *arguments]


MACHINES = {
    "root": Machine("uid+namespaces+landlock+seccomp"),
    "root, RuntimeDefault": Machine("uid+landlock+seccomp", denied=(_NO_NAMESPACES,)),
    "root, Linux 5.10": Machine("uid+namespaces+seccomp", denied=(_NO_LANDLOCK,)),
    "root, RuntimeDefault, Linux 5.10": Machine(
        "uid+seccomp", denied=(_NO_NAMESPACES, _NO_LANDLOCK)
    ),
    "root without capabilities, RuntimeDefault": Machine(
        "landlock+seccomp", capabilities=False, denied=(_NO_NAMESPACES,)
    ),
    "restricted pod": Machine(
        "landlock+seccomp", user=ACCOUNT, capabilities=False, denied=(_NO_NAMESPACES,)
    ),
    "account": Machine("namespaces+landlock+seccomp", user=ACCOUNT),
    "account, RuntimeDefault": Machine("landlock+seccomp", user=ACCOUNT, denied=(_NO_NAMESPACES,)),
    "account, Linux 5.10": Machine("namespaces+seccomp", user=ACCOUNT, denied=(_NO_LANDLOCK,)),
    "account, RuntimeDefault, Linux 5.10": Machine(
        "seccomp", user=ACCOUNT, denied=(_NO_NAMESPACES, _NO_LANDLOCK)
    ),
}


def environment() -> dict[str, str]:
    """With the packages of this environment, for an interpreter that is not its own."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))}


@functools.cache
def python() -> str:
    """An interpreter of this version whose files every user may read. Skips the test if there
    is none."""
    if os.geteuid() != 0:
        return sys.executable
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        try:
            done = subprocess.run(
                [path, "-c", "import sluice.rewards"],
                user=ACCOUNT,
                group=ACCOUNT,
                extra_groups=[],
                env=environment(),
                capture_output=True,
                timeout=60,
            )
        except OSError:
            continue
        if done.returncode == 0:
            return path
    pytest.skip(f"no Python {version} here that every user may read")
