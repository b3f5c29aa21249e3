"""Sandbox: run untrusted programs, confined, limited, and without the expected answers.

`Sandbox` starts a clean interpreter (`zygote`) that forks one confined process (`confine`) for each
test.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from sluice.rewards.sandbox.client import EndedError, Zygote
from sluice.rewards.sandbox.confine import hide
from sluice.rewards.types import RewardError

__all__ = ["Isolation", "ProgramRun", "Sandbox", "hide", "isolation"]

log = logging.getLogger(__name__)

_TRIES = 2
_WITHOUT = {
    "uid": "programs run as the pod's user; polling, not the kernel, limits their threads",
    "namespaces": "programs write to the pod's temporary directory, where polling, not the kernel, "
    "limits their files; only seccomp keeps them from the network",
    "landlock": "programs can read every file that their user may read",
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """Confinement of programs on this machine: the active layers, and why others are missing."""

    layers: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "+".join(self.layers)

    def warning(self, layer: str) -> str:
        """Return one line about a missing layer: its name, the cause and the consequence."""
        return (
            f"code: the sandbox has no layer {layer!r} on this machine ({self.missing[layer]}): "
            f"{_WITHOUT[layer]}; see docs/security.md"
        )


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """Result of one test.

    Attributes
    ----------
    status
        ok, error, timeout, output (too much of it), limit (too many threads or files), or
        refused (a command that cannot be confined on this machine).
    output
        Output of the program.
    error
        End of stderr, the exceeded limit, or why the command was refused.

    """

    status: str
    output: str
    error: str


class Sandbox:
    """A zygote that is replaced if it ends. Not thread-safe."""

    def __init__(self) -> None:
        self._zygote = _start()
        self.isolation = _isolation(self._zygote)

    def run(self, **request: Any) -> ProgramRun:
        """Run one test; `zygote._run` lists the fields of a request.

        A test at which the sandbox itself fails is run once more, in a new zygote. Raises
        RewardError if the test cannot be run through no fault of the program.
        """
        for _ in range(_TRIES):
            self._replace_if_ended()
            try:
                answer = self._zygote.ask(request)
            except TimeoutError:
                self._zygote.kill()
                raise RewardError(
                    "code: the sandbox did not answer and was replaced", "timeout"
                ) from None
            except EndedError as error:
                cause = f"its process ended: {error}"
            else:
                if answer["status"] != "failed":
                    return ProgramRun(**answer)
                cause = answer["error"]
                self._zygote.close()
            log.warning("code: the sandbox failed at a test (%s) and is replaced", cause)
        raise RewardError(f"code: the sandbox failed twice at one test ({cause})", "died")

    def _replace_if_ended(self) -> None:
        if self._zygote.alive:
            return
        self._zygote = _start()
        before, self.isolation = self.isolation, _isolation(self._zygote)
        for layer in self.isolation.missing.keys() - before.missing.keys():
            log.warning(self.isolation.warning(layer))

    def close(self) -> None:
        self._zygote.close()


def _start() -> Zygote:
    try:
        zygote = Zygote()
    except EndedError as error:
        raise RewardError(f"code: the sandbox does not start ({error})", "unavailable") from error
    if refused := zygote.hello["refused"]:
        zygote.close()
        raise RewardError(
            f"code: programs cannot be confined on this machine ({refused}); "
            "use a separate sandbox service through reward.url",
            "unavailable",
        )
    return zygote


def _isolation(zygote: Zygote) -> Isolation:
    return Isolation(tuple(zygote.hello["layers"]), zygote.hello["missing"])


def isolation() -> Isolation:
    """Return the confinement of programs on this machine.

    Raises RewardError if they may not run.
    """
    sandbox = Sandbox()
    sandbox.close()
    return sandbox.isolation
