"""Runs programs that nobody has read: confined, limited, and without the answers that they are judged by.

`Sandbox` starts a clean interpreter (`zygote`) that forks one confined process (`confine`) for each test.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sluice.rewards.types import RewardError

# The zygote must not import what `import sluice` imports (numpy starts threads): it gets the package's folders alone.
_BOOT = """
import sys, types
for name, path in zip(("sluice", "sluice.rewards", "sluice.rewards.sandbox"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from sluice.rewards.sandbox.zygote import main
main()
"""
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Ran:
    """How one test went. status: ok, error, timeout, output (too much of it). error: the end of what went to stderr."""

    status: str
    output: str
    error: str


class Sandbox:
    """One zygote. Use it from one thread."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _BOOT, str(here.parents[1]), str(here.parent), str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_ENVIRONMENT,
        )
        self.isolation: str = self._answer()["isolation"]
        if self.isolation.startswith("none"):
            self.close()
            raise RewardError(
                f"code: programs cannot be confined on this machine ({self.isolation}); "
                "use a sandbox service of your own, through reward.url",
                "unavailable",
            )

    def run(self, **request: Any) -> Ran:
        """Run one test: see zygote._run."""
        body = json.dumps(request).encode()
        stream = self._stream(self._process.stdin)
        stream.write(struct.pack("<I", len(body)) + body)
        stream.flush()
        return Ran(**self._answer())

    def _answer(self) -> dict[str, Any]:
        stream = self._stream(self._process.stdout)
        header = stream.read(4)
        if len(header) < 4:
            raise RewardError("code: the sandbox's process is gone", "died")
        answer: dict[str, Any] = json.loads(stream.read(*struct.unpack("<I", header)))
        return answer

    @staticmethod
    def _stream(stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None
        return stream

    def close(self) -> None:
        self._stream(self._process.stdin).close()
        self._stream(self._process.stdout).close()
        self._process.kill()
        self._process.wait()


def isolation() -> str:
    """Which layers confine programs on this machine, as `+`-joined names. Raises RewardError where they may not run."""
    sandbox = Sandbox()
    sandbox.close()
    return sandbox.isolation
