"""A pod of an episode, or of its verifier, as its two containers run it: as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice.runtime.pod_env import free_port
from sluice.samples.episode_protocol import ARTIFACTS, EPISODE, ROW, SHELL
from sluice_rollout.gateway.server import LOOPBACK

TOKEN = "the-token-of-this-job"
SECONDS = 30.0


@dataclass
class Pod:
    """A pod's containers as processes."""

    directory: Path
    worker: str
    command: Sequence[str]
    role: str = EPISODE
    image: str = ""  # of the row
    model: int = field(default_factory=free_port)

    @property
    def name(self) -> str:
        return f"job-{self.role}-0-1-0-1"

    def __enter__(self) -> Pod:
        self.directory.mkdir()
        env = {
            "SLUICE_EPISODE": str(self.directory),
            "SLUICE_ARTIFACTS": str(self.directory / ARTIFACTS),
            "PYTHONPATH": os.getcwd(),
        }
        self.sidecar = subprocess.Popen(
            [sys.executable, "-m", "sluice_rollout.environments.sidecar"],
            env=os.environ
            | env
            | {
                "SLUICE_WORKER": self.worker,
                "SLUICE_EPISODE_TOKEN": TOKEN,
                "SLUICE_POD": self.name,
                "SLUICE_ROLE": self.role,
                "SLUICE_PORT_MODEL": str(self.model),
                "SLUICE_IMAGE": self.image,
            },
        )
        base = f"http://{LOOPBACK}:{self.model}/v1"
        self.program = subprocess.Popen(
            ["/bin/sh", "-c", SHELL, "sh", *self.command],
            env=os.environ | env | {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": "episode"},
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.sidecar.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.program.pid, signal.SIGKILL)

    async def ends(self) -> int:
        """The exit code of the sidecar, which ends with the episode."""
        return await asyncio.to_thread(self.sidecar.wait, SECONDS)

    async def plays(self) -> None:
        while not (self.directory / ROW).exists():
            await asyncio.sleep(0.05)
