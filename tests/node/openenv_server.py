"""A server of OpenEnv that pays for copying: the observation is a digit, the action an answer. Any
digit is paid a quarter and the right one half, in each of two turns.

It fails if it sees anything of the job, and at start-up prints whom it runs as.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Environment
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.types import Action, Observation, State

TURNS, SESSIONS, PORT = 2, 64, 8000


class Answer(Action):
    """An action: what the model says."""

    message: str


class Observed(Observation):
    """An observation: a digit for the model."""

    digit: str = ""


class Copying(Environment):
    """Two digits, one after the other, from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.seed, self.turns = 0, 0

    def reset(self, seed: int | None = None, **_: Any) -> Observed:
        self.seed, self.turns = seed or 0, 0
        return Observed(digit=self._digit())

    def step(self, action: Answer, **_: Any) -> Observed:
        said, right = action.message.strip(), self._digit()
        paid = 0.5 if said == right else 0.25 if said.isdigit() else 0.0
        self.turns += 1
        return Observed(digit=self._digit(), reward=paid, done=self.turns == TURNS)

    def _digit(self) -> str:
        return str((self.seed + self.turns) % 10)

    @property
    def state(self) -> State:
        return State(step_count=self.turns)


def main() -> None:
    account = Path("/var/run/secrets/kubernetes.io/serviceaccount").exists()
    ours = [name for name in os.environ if name.startswith("SLUICE") or "TOKEN" in name]
    if account or ours:
        sys.exit(f"account: {account}, variables: {ours}")
    app = create_fastapi_app(Copying, Answer, Observed, max_concurrent_envs=SESSIONS)
    print(f"serves as {os.getuid()}:{os.getgid()}", flush=True)
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")


if __name__ == "__main__":
    main()
