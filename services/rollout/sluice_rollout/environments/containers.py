"""Runs programs of episodes in containers of podman or docker (`sluice run --containers`).

This is for a machine without a cluster. On a cluster, the program's image is that of a pod.

A container sees its episode's directory, at the same path, and this machine's network, because the
gateway listens on its loopback. It sees no other files of the machine and no variables of the
worker, and has no capabilities. It runs as the worker's user, who can then remove its files.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.api.groups.environment import GATEWAY_VARIABLES, RolloutEnvironment
from sluice.container_images import RowImageError, image_of_row, is_from_row
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt
from sluice_rollout.environments import inputs, orphan_reaper, process
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.episode import PlayFailedError

ENGINE = "SLUICE_CONTAINERS"  # variable of the worker that names podman or docker
_PULL_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Containers:
    """Runs programs of an image."""

    engine: str  # "podman" or "docker"
    image: str  # may refer to the row
    allowed: Sequence[str] = ()  # images that rows may name
    seconds: float = _PULL_SECONDS  # time to pull an image

    async def for_row(self, prompt: Prompt, directory: str) -> Containers:
        """Return containers of the row's image, which is pulled if it is missing.

        Raises PlayFailedError if the row names no image that can be used.
        """
        if not is_from_row(self.image):
            return self
        try:
            image = image_of_row(self.image, prompt.metadata, self.allowed)
            containers = replace(self, image=image)
            await containers.check(directory)
        except (RowImageError, ConfigurationError) as error:
            raise PlayFailedError("image", f"cannot have its image: {error}") from error
        return containers

    async def check(self, directory: str) -> None:
        """Pull the image if it is missing. Raises ConfigurationError.

        An image that rows name is pulled for its first episode.
        """
        if is_from_row(self.image):
            return
        if not (await self._call(directory, "image", "inspect", self.image)).status:
            return
        try:
            async with asyncio.timeout(self.seconds):
                pulled = await self._call(directory, "pull", self.image)
        except TimeoutError:
            raise ConfigurationError(
                f"{self._failed} within {self.seconds:g} s: pull it, then run the job again"
            ) from None
        if pulled.status:
            raise ConfigurationError(f"{self._failed}: `{self.engine} pull` {pulled.failure}")

    async def run(
        self, command: Sequence[str], directory: str, variables: Mapping[str, str]
    ) -> ProgramExit:
        """Run a program in an episode's directory until it ends or this task is cancelled.

        Raises
        ------
        OSError
            The program cannot be started.
        SurvivorError
            A process of the program does not end.

        """
        hidden = {name: value for name, value in variables.items() if _is_internal(name)}
        try:
            words = self.command_line(command, directory, variables)
            ended = await process.run(words, directory, inputs.engine_variables() | hidden)
            return replace(ended, err=_without_hint(ended.err))
        finally:
            # In most cases, the container has ended with its program.
            remove = asyncio.to_thread(
                orphan_reaper.run_engine, self.engine, "rm", "--force", container_name(directory)
            )
            await asyncio.shield(remove)

    def command_line(
        self, command: Sequence[str], directory: str, variables: Mapping[str, str]
    ) -> list[str]:
        """Return the command line of the container engine.

        All users of this machine can read a command line. So sluice's variables (a key, a label)
        are passed by name, and the engine finds the values among its own variables. The user's
        variables are passed with their values, because in the engine's environment some would be
        settings of the engine (PATH, HOME, DOCKER_HOST).
        """
        named = [
            word
            for name, value in sorted(variables.items())
            for word in ("--env", name if _is_internal(name) else f"{name}={value}")
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
        return f"spec.rollout.environment: {self.engine} does not have the image {self.image}"


def _without_hint(errors: str) -> str:
    """Remove docker's hint, which would otherwise be reported as the reason."""
    return re.sub(r"^(See|Run) 'docker run --help'.*$", "", errors, flags=re.MULTILINE).rstrip()


def local_containers(environment: RolloutEnvironment) -> Containers | None:
    """Return containers for programs if `sluice run --containers` asks for them, else None."""
    engine, image = os.environ.get(ENGINE), environment.image
    if not engine or not image:
        return None
    allowed, seconds = environment.allowed_images, environment.image_timeout_seconds
    return Containers(engine, image, allowed, seconds if is_from_row(image) else _PULL_SECONDS)


def _is_internal(name: str) -> bool:
    """True for a variable that sluice sets, other than the mark.

    The engine must not carry the mark: the reaper kills all processes that do, and the engine has
    to remove the container afterwards.
    """
    return name in GATEWAY_VARIABLES or (name.startswith("SLUICE_") and name != orphan_reaper.MARK)


def container_name(directory: str) -> str:
    """Return the name of the container for an episode's directory."""
    path = Path(directory)
    return f"{path.parent.name}.{path.name}"
