"""Programs of episodes in containers of podman or docker, on a machine without a cluster
(`sluice run --containers`). On a cluster their image is a pod's.

A container sees its episode's directory at the directory's own path, and this machine's network,
on whose loopback the gateway is. It has none of the machine's files besides, no variables of the
worker, and no capabilities; it runs as the worker's user, who can remove what it leaves.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.api.groups.environment import OURS
from sluice.runtime.pod_env import ConfigurationError
from sluice_rollout.environments import inputs, orphan_reaper, process
from sluice_rollout.environments.process import ProgramExit

ENGINE = "SLUICE_CONTAINERS"
"""The worker's variable that names podman or docker."""
_PULL_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Containers:
    """Runs programs of an image. engine: `podman` or `docker`."""

    engine: str
    image: str

    async def check(self, directory: str) -> None:
        """Pull the image, if it is not there. Raises ConfigurationError."""
        if not (await self._call(directory, "image", "inspect", self.image)).status:
            return
        try:
            async with asyncio.timeout(_PULL_SECONDS):
                pulled = await self._call(directory, "pull", self.image)
        except TimeoutError:
            raise ConfigurationError(
                f"{self._failed} within {_PULL_SECONDS:g} s: pull it, then run the job again"
            ) from None
        if pulled.status:
            raise ConfigurationError(f"{self._failed}: `{self.engine} pull` {pulled.failure}")

    async def run(
        self, command: Sequence[str], directory: str, variables: Mapping[str, str]
    ) -> ProgramExit:
        """Run a program for the episode of a directory until it ends, or this is cancelled.

        Raises OSError where it cannot be started, SurvivorError where something does not end.
        """
        hidden = {name: value for name, value in variables.items() if _is_ours(name)}
        try:
            words = self.command_line(command, directory, variables)
            ended = await process.run(words, directory, inputs.engine_variables() | hidden)
            return replace(ended, err=_without_hint(ended.err))
        finally:
            # Mostly it has gone with its program.
            remove = asyncio.to_thread(
                orphan_reaper.run_engine, self.engine, "rm", "--force", container_name(directory)
            )
            await asyncio.shield(remove)

    def command_line(
        self, command: Sequence[str], directory: str, variables: Mapping[str, str]
    ) -> list[str]:
        """The engine's words.

        Every user of this machine can read them, so of ours (a key, a label) they have the names
        alone, and the engine has the values among its own variables. The user's would be settings
        of the engine itself there (PATH, HOME, DOCKER_HOST).
        """
        named = [
            word
            for name, value in sorted(variables.items())
            for word in ("--env", name if _is_ours(name) else f"{name}={value}")
        ]
        keep = ["--userns=keep-id"] if self.engine == "podman" and os.geteuid() else []
        return [
            *(self.engine, "run", "--rm", "--name", container_name(directory)),
            *("--label", f"{orphan_reaper.LABEL}={Path(directory).parent}"),
            *("--network=host", "--user", f"{os.geteuid()}:{os.getegid()}", *keep),
            *("--cap-drop=all", "--security-opt=no-new-privileges"),
            *("--volume", f"{directory}:{directory}"),
            *named,
            self.image,
            *command,
        ]

    async def _call(self, directory: str, *words: str) -> ProgramExit:
        return await process.run([self.engine, *words], directory, inputs.engine_variables())

    @property
    def _failed(self) -> str:
        return f"spec.rollout.environment: {self.engine} has not got the image {self.image}"


def _without_hint(errors: str) -> str:
    """Errors of a program without docker's last line, which would be told as their reason."""
    return re.sub(r"^(See|Run) 'docker run --help'.*$", "", errors, flags=re.MULTILINE).rstrip()


def local_containers(image: str | None) -> Containers | None:
    """Containers for the programs of an image, where this machine is to run them so; else None."""
    engine = os.environ.get(ENGINE)
    return Containers(engine, image) if engine and image else None


def _is_ours(name: str) -> bool:
    """A variable that no user sets. Not the mark: what carries it is killed, the container's
    processes, and the engine's own shall clear away behind them.
    """
    return name in OURS or (name.startswith("SLUICE_") and name != orphan_reaper.MARK)


def container_name(directory: str) -> str:
    """The name of the container of an episode's directory."""
    at = Path(directory)
    return f"{at.parent.name}.{at.name}"
