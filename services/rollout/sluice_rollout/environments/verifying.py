"""The verifier of an environment: a program that judges what an episode's program has left.

It starts when that has ended, in a place that it could not reach, with what it has left in
`artifacts` and with the row's label, which only the verifier is shown. It has no way to the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.api.groups.environment import Verifier
from sluice.samples.episode_protocol import ROW
from sluice.samples.sample import Prompt
from sluice_rollout import metrics
from sluice_rollout.environments import artifacts, directories, inputs, process, result
from sluice_rollout.environments.artifacts import Artifact, ArtifactsError
from sluice_rollout.environments.containers import Containers
from sluice_rollout.environments.episode_result import apply_result
from sluice_rollout.environments.orphan_reaper import SurvivorError
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.episode import Episode, PlayFailedError

REASON = "verifier"
_WHO = "has a verifier that"


def artifacts_refused(reason: object) -> PlayFailedError:
    """The failure of a sample whose program has left what no verifier is given."""
    return PlayFailedError("artifacts", f"left artifacts that cannot be handed on: {reason}")


@dataclass(frozen=True, slots=True)
class VerifierRules:
    """Rules of a job's verifier, whether it runs as a process or in a pod."""

    seconds: float  # time limit
    # Keys of the rows' metadata that only the verifier sees.
    hidden: frozenset[str] = field(default=frozenset())
    must_reward: bool = True  # the job has no other source of rewards

    @classmethod
    def for_job(cls, verifier: Verifier, spec: RLJobSpec) -> VerifierRules:
        hidden = frozenset(verifier.hidden_metadata)
        return cls(verifier.timeout_seconds, hidden, spec.reward is None)

    def shown(self, prompt: Prompt) -> Prompt:
        """The row as the program that is judged may see it."""
        metadata = {k: value for k, value in prompt.metadata.items() if k not in self.hidden}
        return replace(prompt, label=None, metadata=metadata)

    @asynccontextmanager
    async def limited(self, episode: Episode) -> AsyncIterator[None]:
        """The time in which a verifier is at work. Raises PlayFailedError once it is over."""
        try:
            with metrics.VERIFIER_SECONDS.time(), episode.clock.stopped():
                async with asyncio.timeout(self.seconds):
                    yield
        except TimeoutError as error:
            limit = "rollout.environment.verifier.timeoutSeconds"
            text = f"{_WHO} took more than {self.seconds:g} s ({limit})"
            raise PlayFailedError(REASON, text) from error

    def take(self, episode: Episode, ended: ProgramExit, read: Callable[[], result.Result]) -> None:
        """Give the sample what its verifier says. Raises PlayFailedError where that failed."""
        if ended.status:
            raise PlayFailedError(REASON, f"{_WHO} {ended.failure}")
        apply_result(episode, read, REASON, _WHO)
        if self.must_reward and episode.sample.reward is None:
            raise PlayFailedError(
                REASON, f"{_WHO} left no reward in result.json, and the job has no spec.reward"
            )


@dataclass(frozen=True, slots=True)
class VerifierProcess:
    """A verifier that runs beside the worker. variables: those of every episode. containers: it
    runs in those; None: as a process.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    rules: VerifierRules
    containers: Containers | None = None

    async def __call__(self, episode: Episode, files: Sequence[Artifact], directory: str) -> None:
        """Judge an episode, in a directory of its own in this one. Raises PlayFailedError."""
        name = f"{episode.prompt.group_id}.{episode.sample.index}-verifier-"
        own = tempfile.mkdtemp(prefix=name, dir=directory)
        try:
            variables = await asyncio.to_thread(self._prepare, own, episode, files)
            run = self.containers.run if self.containers else process.run
            async with self.rules.limited(episode):
                ended = await run(self.command, own, variables)
            self.rules.take(episode, ended, lambda: result.read(own))
        except (OSError, ArtifactsError, SurvivorError) as error:
            raise PlayFailedError(REASON, f"{_WHO} cannot be run here: {error}") from error
        finally:
            with episode.clock.stopped():
                await asyncio.shield(asyncio.to_thread(directories.remove, own))

    def _prepare(self, own: str, episode: Episode, files: Sequence[Artifact]) -> dict[str, str]:
        os.mkdir(f"{own}/{inputs.TEMPORARY}")
        artifacts.prepare(own, files)
        row = inputs.row(episode.prompt, episode.sample.index, episode.seats)
        Path(own, ROW).write_text(json.dumps(row))
        return {
            **self.variables,
            **inputs.prompt_variables(episode.prompt),
            **inputs.directory_variables(own),
        }
