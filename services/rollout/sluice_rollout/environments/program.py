"""A program that plays episodes (`rollout.environment`): it is started for each, with the gateway's
address and a key of its own, in a directory that is gone with it.
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

from sluice.api import RLJobSpec
from sluice.api.groups.environment import RolloutEnvironment
from sluice.api.schema.paths import command_word
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.episode_protocol import ROW
from sluice.telemetry import logs
from sluice_rollout import metrics
from sluice_rollout.environments import (
    artifacts,
    home,
    inputs,
    of_gym,
    of_verifiers,
    orphan_reaper,
    process,
    result,
    verifying,
)
from sluice_rollout.environments.containers import Containers, of_machine
from sluice_rollout.environments.episode_result import conclude, take
from sluice_rollout.environments.fork_server_process import NurseryLostError
from sluice_rollout.environments.forking import Forking, Run
from sluice_rollout.environments.process import Ended
from sluice_rollout.environments.verifying import Terms, VerifierProcess
from sluice_rollout.episode import Episode, PlayFailedError

_FIELD = "spec.rollout.environment"
_LONGEST_NAME = 200


@dataclass(slots=True)
class Program:
    """Plays each episode with a program.

    name: for messages. command: its words. variables: those of every episode. model: its name.
    side_by_side: episodes that a worker has in work. forking: plays them in the command's place.
    verifier: judges what it has left; None: its own result does. containers: it runs in those;
    None: as a process. must_reward: nobody else gives its samples a reward.
    """

    name: str
    command: Sequence[str]
    variables: Mapping[str, str]
    model: str
    side_by_side: int
    forking: Forking | None = None
    verifier: VerifierProcess | None = None
    containers: Containers | None = None
    must_reward: bool = False
    _directory: str = ""
    _held: ExitStack = field(default_factory=ExitStack)

    async def check(self) -> None:
        """Make room for the episodes, and try the program. Raises ConfigurationError."""
        self.open()
        for containers in (self.containers, self.verifier and self.verifier.containers):
            if containers:
                await containers.check(self._directory)
        if self.forking:
            try:
                await self.forking.ready(self._directory)
            except NurseryLostError as error:
                raise ConfigurationError(f"{_FIELD}: {error}") from error

    def open(self) -> None:
        """Take a directory for the episodes, and remove those of workers that were killed."""
        if not self._directory:
            engine = self.containers.engine if self.containers else None
            self._directory = self._held.enter_context(home.opened(self.side_by_side, engine))

    def close(self) -> None:
        """End all programs, and remove what they have left."""
        if self.forking:
            self.forking.close()
        self._held.close()
        self._directory = ""

    async def __call__(self, episode: Episode) -> None:
        """Run the program, and take its result. Raises PlayFailedError, or GatewayError where it
        failed because its history was too long.
        """
        self.open()
        name = f"{episode.prompt.group_id}.{episode.sample.index}-"
        directory = tempfile.mkdtemp(prefix=name, dir=self._directory)
        try:
            with metrics.EPISODE_PROGRAMS.track_inprogress():
                ended = await self._run(episode, directory)
            await conclude(episode, ended, lambda: self._judge(episode, directory))
            if self.must_reward and episode.sample.reward is None:
                raise PlayFailedError("result", "gave no reward, and the job has no spec.reward")
        finally:
            with episode.clock.stopped():  # however much it has left
                await asyncio.shield(asyncio.to_thread(home.remove, directory))

    async def _judge(self, episode: Episode, directory: str) -> None:
        if self.verifier is None:
            take(episode, lambda: result.read(directory))
            return
        try:
            files = await asyncio.to_thread(artifacts.collect, directory)
        except artifacts.ArtifactsError as error:
            raise verifying.refused(error) from error
        await self.verifier(episode, files, self._directory)

    async def _run(self, episode: Episode, directory: str) -> Ended:
        prompt = episode.prompt
        os.mkdir(f"{directory}/{inputs.TEMPORARY}")
        if self.verifier:
            prompt = self.verifier.terms.shown(prompt)
            artifacts.prepare(directory)
        Path(directory, ROW).write_text(
            json.dumps(inputs.row(prompt, episode.sample.index, episode.seats))
        )
        ours = inputs.of_episode(prompt, episode.gateway, directory, self.model)
        try:
            run = await self._way(episode)
            ended = await run(directory, {**self.variables, **ours})
        except (OSError, orphan_reaper.SurvivorError) as error:
            raise PlayFailedError("start", f"cannot be run here: {error}") from error
        logs.get().debug(
            "a program has ended", how=ended.how, index=episode.sample.index,
            stdout=ended.out, stderr=ended.err,
        )  # fmt: skip
        return ended

    async def _way(self, episode: Episode) -> Run:
        """The way to run the program. Its time starts behind this."""
        if self.forking is None:
            run = self.containers.run if self.containers else process.run
            return partial(run, self.command)
        with episode.clock.stopped():
            return await self.forking.ready(self._directory)


def program_of(environment: RolloutEnvironment, spec: RLJobSpec) -> Program:
    """The program of a job. Raises ConfigurationError where there is none of its name here."""
    if containers := of_machine(environment.image):
        return _in_containers(containers, environment, spec)
    variables = inputs.inherited(os.environ, environment.env)
    forking = _forking(environment, variables)
    words = environment.command or []
    return Program(
        forking.name if forking else shlex.join([Path(words[0]).name, *words[1:]])[:_LONGEST_NAME],
        forking.alone if forking else _checked(words, variables, "command"),
        variables,
        Path(spec.model.path).name,
        spec.rollout.concurrency,
        forking,
        _verifier(environment, spec),
        must_reward=environment.gives_rewards and spec.reward is None,
    )


def _in_containers(
    containers: Containers, environment: RolloutEnvironment, spec: RLJobSpec
) -> Program:
    """The program of a job in its image, and so its verifier. The images have what they need."""
    command, judge, verifier = environment.command or [], environment.verifier, None
    if judge:
        judges = replace(containers, image=judge.image or containers.image)
        variables = inputs.own(os.environ, {})
        verifier = VerifierProcess(judge.command, variables, Terms.of(judge, spec), judges)
    return Program(
        shlex.join(command)[:_LONGEST_NAME],
        command,
        inputs.own(os.environ, environment.env),
        Path(spec.model.path).name,
        spec.rollout.concurrency,
        verifier=verifier,
        containers=containers,
    )


def _forking(environment: RolloutEnvironment, variables: Mapping[str, str]) -> Forking | None:
    """The interpreter of an environment that is a package; None for a command."""
    if verifiers := environment.verifiers:
        python = _python(verifiers.python, variables, "verifiers.python")
        return of_verifiers.forking(verifiers, python, variables)
    if gym := environment.gym:
        return of_gym.forking(gym, _python(gym.python, variables, "gym.python"), variables)
    return None


def _python(named: str | None, variables: Mapping[str, str], field: str) -> str:
    (python,) = _checked([named or sys.executable], variables, field)
    return python


def _verifier(environment: RolloutEnvironment, spec: RLJobSpec) -> VerifierProcess | None:
    if environment.verifier is None:
        return None
    variables = inputs.inherited(os.environ, {})
    words = _checked(environment.verifier.command, variables, "verifier.command")
    return VerifierProcess(words, variables, Terms.of(environment.verifier, spec))


def _checked(words: Sequence[str], variables: Mapping[str, str], field: str) -> list[str]:
    """The words of a command whose first one can be run. Raises ConfigurationError."""
    command = _here(words)
    if shutil.which(command[0], path=variables.get("PATH", os.defpath)) is None:
        raise ConfigurationError(
            f"{_FIELD}.{field}: there is no program {command[0]!r} that can be run here: expected "
            "one on the PATH of the worker's image, or a file beside the manifest"
        )
    return command


def _here(words: Sequence[str]) -> list[str]:
    """The words, with files of the working directory for those that name one."""
    return [command_word(word, Path.cwd()) for word in words]
