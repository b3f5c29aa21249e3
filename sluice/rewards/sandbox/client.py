"""A zygote, seen from the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sluice.runtime.cpu_threads import ONE_THREAD

# The zygote must not import what `import sluice` imports (numpy starts threads): it gets the
# package's folders alone.
_BOOT = """
import sys, types
for name, path in zip(("sluice", "sluice.rewards", "sluice.rewards.sandbox"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from sluice.rewards.sandbox.zygote import main
main()
"""
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | ONE_THREAD
_START_SECONDS = 60.0
# Time for a zygote to fork before a test and to clean up after it.
_GRACE_SECONDS = 10.0
_END_SECONDS = 5.0
_PIECE = 1 << 16


class EndedError(Exception):
    """The zygote has ended. The message says how."""


class Zygote:
    """A zygote process and its pipes.

    `hello` is its first message: {layers: active layers, missing: {layer: cause}, refused: why
    programs may not run, or ""}.
    """

    def __init__(self) -> None:
        folder = Path(__file__).parent
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-X",
                "utf8",
                "-c",
                _BOOT,
                str(folder.parents[1]),
                str(folder.parent),
                str(folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_ENVIRONMENT,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        try:
            self.hello: dict[str, Any] = self._answer(time.monotonic() + _START_SECONDS)
        except TimeoutError:
            self.kill()
            raise EndedError(f"it was not ready after {_START_SECONDS:g} s") from None

    @property
    def alive(self) -> bool:
        return not self._stdin.closed and self._process.poll() is None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises EndedError, or TimeoutError: then kill the zygote.
        """
        end = time.monotonic() + request["seconds"] + _GRACE_SECONDS
        body = json.dumps(request).encode()
        data = memoryview(struct.pack("<I", len(body)) + body)
        while data:
            _wait(self._stdin, select.POLLOUT, end)
            try:
                data = data[os.write(self._stdin.fileno(), data[:_PIECE]) :]
            except BrokenPipeError:
                raise self._ended() from None
        return self._answer(end)

    def _answer(self, end: float) -> dict[str, Any]:
        (size,) = struct.unpack("<I", self._exactly(4, end))
        answer: dict[str, Any] = json.loads(self._exactly(size, end))
        return answer

    def _exactly(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._stdout, select.POLLIN, end)
            part = os.read(self._stdout.fileno(), size - len(data))
            if not part:
                raise self._ended()
            data += part
        return bytes(data)

    def _ended(self) -> EndedError:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return EndedError("it closed its output")
        finally:
            self.kill()
        return EndedError(
            f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        )

    def close(self) -> None:
        """Let the zygote clean up and end."""
        self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the zygote; the next one cleans up after it."""
        self._stdin.close()
        self._stdout.close()
        self._process.kill()
        self._process.wait(_END_SECONDS)


def _wait(file: Any, event: int, end: float) -> None:
    """Wait until a pipe is ready. Raises TimeoutError at `end`.

    `select.select` would fail for descriptors above 1,023, and a worker with a thousand requests
    has more.
    """
    poll = select.poll()
    poll.register(file, event)
    if not poll.poll(max(end - time.monotonic(), 0) * 1000):
        raise TimeoutError
