"""Plays episodes with a program (`rollout.environment`).

The program is started for each episode, with the gateway's address and a new key, in a directory
that is removed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from sluice.api import RLJobSpec
from sluice.api.groups.environment import RolloutEnvironment
from sluice.api.schema.paths import command_word
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.episode_protocol import ROW
from sluice.telemetry import logs
from sluice_rollout import metrics
from sluice_rollout.environments import (
    artifacts,
    directories,
    inputs,
    orphan_reaper,
    package_environments,
    process,
    result,
    verifying,
)
from sluice_rollout.environments.containers import Containers, local_containers
from sluice_rollout.environments.episode_result import apply_result, finish
from sluice_rollout.environments.fork_server_process import ForkServerLostError
from sluice_rollout.environments.fork_server_supervisor import ForkServerSupervisor, Run
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.environments.verifying import VerifierProcess, VerifierRules
from sluice_rollout.episode import Episode, EpisodeTimeError, PlayFailedError

_FIELD = "spec.rollout.environment"
_LONGEST_NAME = 200


@dataclass(slots=True)
class Program:
    """Plays each episode with a program.

    Parameters
    ----------
    name
        Name of the program in messages.
    command
        The command line.
    variables
        Environment variables of every episode's program.
    model
        Name of the model.
    side_by_side
        Number of episodes that the worker plays at once.
    fork_server
        Forks a process for each episode. None: `command` starts one.
    verifier
        Judges what the program leaves. None: the program writes its own result.
    containers
        Runs the program in a container. None: as a process.
    must_reward
        True if the job has no other source of rewards.

    """

    name: str
    command: Sequence[str]
    variables: Mapping[str, str]
    model: str
    side_by_side: int
    fork_server: ForkServerSupervisor | None = None
    verifier: VerifierProcess | None = None
    containers: Containers | None = None
    must_reward: bool = False
    # An episode whose time has passed is judged by what its program has left.
    judges_after_time: ClassVar[bool] = True
    _directory: str = ""
    _held: ExitStack = field(default_factory=ExitStack)

    async def check(self) -> None:
        """Open the directory, pull images and start the fork server. Raises ConfigurationError."""
        self.open()
        for containers in (self.containers, self.verifier and self.verifier.containers):
            if containers:
                await containers.check(self._directory)
        if self.fork_server:
            try:
                await self.fork_server.ready(self._directory)
            except ForkServerLostError as error:
                raise ConfigurationError(f"{_FIELD}: {error}") from error

    def open(self) -> None:
        """Make the directory for episodes, and remove those of workers that were killed."""
        if not self._directory:
            engine = self.containers.engine if self.containers else None
            self._directory = self._held.enter_context(
                directories.open_root(self.side_by_side, engine)
            )

    def close(self) -> None:
        """End all programs and remove their directories."""
        if self.fork_server:
            self.fork_server.close()
        self._held.close()
        self._directory = ""

    async def __call__(self, episode: Episode) -> None:
        """Play an episode.

        Raises
        ------
        PlayFailedError
            The program or its verifier failed.
        GatewayError
            The program failed because its history was too long.

        """
        self.open()
        name = f"{episode.prompt.group_id}.{episode.sample.index}-"
        directory = tempfile.mkdtemp(prefix=name, dir=self._directory)
        try:
            with metrics.EPISODE_PROGRAMS.track_inprogress():
                try:
                    ended = await episode.in_time(self._run(episode, directory))
                except EpisodeTimeError:
                    ended = process.KILLED
            await finish(episode, ended, lambda: self._judge(episode, directory))
            if self.must_reward and episode.sample.reward is None:
                raise PlayFailedError("result", "gave no reward, and the job has no spec.reward")
        finally:
            with episode.time_limit.stopped():  # a large directory takes time
                await asyncio.shield(asyncio.to_thread(directories.remove, directory))

    async def _judge(self, episode: Episode, directory: str) -> None:
        if self.verifier is None:
            apply_result(episode, lambda: result.read(directory))
            return
        try:
            files = await asyncio.to_thread(artifacts.collect, directory)
        except artifacts.ArtifactsError as error:
            raise verifying.artifacts_refused(error) from error
        await self.verifier(episode, files, self._directory)

    async def _run(self, episode: Episode, directory: str) -> ProgramExit:
        prompt = episode.prompt
        os.mkdir(f"{directory}/{inputs.TEMPORARY}")
        if self.verifier:
            prompt = self.verifier.rules.visible(prompt)
            artifacts.prepare(directory)
        Path(directory, ROW).write_text(
            json.dumps(inputs.row(prompt, episode.sample.index, episode.seats, episode.images))
        )
        variables = inputs.episode_variables(prompt, episode.gateway, directory, self.model)
        try:
            run = await self._runner(episode)
            ended = await run(directory, {**self.variables, **variables})
        except (OSError, orphan_reaper.SurvivorError) as error:
            raise PlayFailedError("start", f"cannot be run here: {error}") from error
        logs.get().debug(
            "a program has ended", how=ended.how, index=episode.sample.index,
            stdout=ended.out, stderr=ended.err,
        )  # fmt: skip
        return ended

    async def _runner(self, episode: Episode) -> Run:
        """Return the function that runs the program. This does not count as the program's time."""
        if self.containers:
            with episode.time_limit.stopped():
                containers = await self.containers.for_row(episode.prompt, self._directory)
            return partial(containers.run, self.command)
        if self.fork_server is None:
            return partial(process.run, self.command)
        with episode.time_limit.stopped():
            return await self.fork_server.ready(self._directory)


def program_of(environment: RolloutEnvironment, spec: RLJobSpec) -> Program:
    """Make the program of a job. Raises ConfigurationError if it cannot be run here."""
    if containers := local_containers(environment):
        return _in_containers(containers, environment, spec)
    variables = inputs.inherited_variables(os.environ, environment.env)
    fork_server = _fork_server(environment, spec, variables)
    words = environment.command or []
    if fork_server:
        name, command = fork_server.name, fork_server.single_episode_command
    else:
        name = shlex.join([Path(words[0]).name, *words[1:]])[:_LONGEST_NAME]
        command = _checked_command(words, variables, "command")
    return Program(
        name,
        command,
        variables,
        Path(spec.model.path).name,
        spec.rollout.concurrency,
        fork_server,
        _verifier(environment, spec),
        must_reward=environment.command is None and spec.reward is None,
    )


def _in_containers(
    containers: Containers, environment: RolloutEnvironment, spec: RLJobSpec
) -> Program:
    """Make the program of a job that runs in its image, as does its verifier."""
    command, settings, verifier = environment.command or [], environment.verifier, None
    if settings:
        verifier_containers = replace(containers, image=settings.image or containers.image)
        variables = inputs.image_variables(os.environ, {})
        rules = VerifierRules.for_job(settings, spec)
        verifier = VerifierProcess(settings.command, variables, rules, verifier_containers)
    return Program(
        shlex.join(command)[:_LONGEST_NAME],
        command,
        inputs.image_variables(os.environ, environment.env),
        Path(spec.model.path).name,
        spec.rollout.concurrency,
        verifier=verifier,
        containers=containers,
    )


def _fork_server(
    environment: RolloutEnvironment, spec: RLJobSpec, variables: Mapping[str, str]
) -> ForkServerSupervisor | None:
    """Make the fork server of an environment that is a package. None for a command."""
    if verifiers := environment.verifiers:
        python = _python(verifiers.python, variables, "verifiers.python")
        return package_environments.verifiers_fork_server(verifiers, python, variables)
    if gym := environment.gym:
        python = _python(gym.python, variables, "gym.python")
        images = spec.data.images is not None
        return package_environments.gym_fork_server(gym, python, variables, images=images)
    return None


def _python(name: str | None, variables: Mapping[str, str], field: str) -> str:
    (python,) = _checked_command([name or sys.executable], variables, field)
    return python


def _verifier(environment: RolloutEnvironment, spec: RLJobSpec) -> VerifierProcess | None:
    if environment.verifier is None:
        return None
    variables = inputs.inherited_variables(os.environ, {})
    words = _checked_command(environment.verifier.command, variables, "verifier.command")
    return VerifierProcess(words, variables, VerifierRules.for_job(environment.verifier, spec))


def _checked_command(words: Sequence[str], variables: Mapping[str, str], field: str) -> list[str]:
    """Resolve the words of a command. Raises ConfigurationError if its program is missing."""
    command = _resolve_words(words)
    if shutil.which(command[0], path=variables.get("PATH", os.defpath)) is None:
        raise ConfigurationError(
            f"{_FIELD}.{field}: cannot run {command[0]!r} here: expected a program "
            "on the PATH of the worker's image, or a file in the folder of the manifest"
        )
    return command


def _resolve_words(words: Sequence[str]) -> list[str]:
    """Replace words that name a file of the working directory by its path."""
    return [command_word(word, Path.cwd()) for word in words]
