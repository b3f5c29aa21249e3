"""Sandboxes that tools run programs in, several at a time in a worker."""

from __future__ import annotations

import os
import queue
from typing import Any

from sluice.rewards import RewardError
from sluice.rewards.sandbox import ProgramRun, Sandbox, hide
from sluice_rollout.toolbox.base import ToolUnavailableError

_FREE_SECONDS = 60.0


def half_of_the_cores() -> int:
    return max((os.cpu_count() or 2) // 2, 1)


class Sandboxes:
    """A number of sandboxes, started when they are first needed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: queue.LifoQueue[Sandbox | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    def run(self, **request: Any) -> ProgramRun:
        """Run a program in a free sandbox: see `Sandbox.run`.

        Raises ToolUnavailableError if no sandbox is available.
        """
        try:
            sandbox = self._free.get(timeout=_FREE_SECONDS)
        except queue.Empty:
            raise ToolUnavailableError(
                f"no sandbox was free in {_FREE_SECONDS:g} s: sandboxes=... sets their number"
            ) from None
        try:
            if sandbox is None:
                hide()  # this process's memory has labels and keys
                sandbox = Sandbox()
            return sandbox.run(**request)
        except RewardError as error:
            raise ToolUnavailableError(str(error)) from error
        finally:
            self._free.put(sandbox)

    def close(self) -> None:
        """End the sandboxes that are free."""
        for _ in range(self._count):
            if sandbox := self._free.get(timeout=_FREE_SECONDS):
                sandbox.close()
            self._free.put(None)
