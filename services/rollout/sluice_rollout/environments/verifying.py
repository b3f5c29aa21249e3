"""Runs the verifier of an environment: a program that judges what an episode's program has left.

It starts after that program has ended, in a place that the program could not reach. It gets the
program's `artifacts` and the row with its label, which only the verifier sees. It has no access to
the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.api.groups.environment import Verifier
from sluice.samples.episode_protocol import ROW
from sluice.samples.sample import Prompt
from sluice.telemetry import tracing
from sluice_rollout import metrics
from sluice_rollout.environments import artifacts, directories, inputs, process, result
from sluice_rollout.environments.artifacts import Artifact, ArtifactsError
from sluice_rollout.environments.containers import Containers
from sluice_rollout.environments.episode_result import apply_result
from sluice_rollout.environments.orphan_reaper import SurvivorError
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.episode import Episode, PlayFailedError

REASON = "verifier"
Run = Callable[[Sequence[str], str, Mapping[str, str]], Awaitable[ProgramExit]]
_WHO = "has a verifier that"


def artifacts_refused(reason: object) -> PlayFailedError:
    """Make the failure of a sample whose artifacts cannot be handed to the verifier."""
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
        """Read the rules from a job."""
        hidden = frozenset(verifier.hidden_metadata)
        return cls(verifier.timeout_seconds, hidden, spec.reward is None)

    def visible(self, prompt: Prompt) -> Prompt:
        """Return the row as the judged program may see it."""
        metadata = {k: value for k, value in prompt.metadata.items() if k not in self.hidden}
        return replace(prompt, label=None, metadata=metadata)

    @asynccontextmanager
    async def limited(self, episode: Episode) -> AsyncIterator[None]:
        """Limit the time of a verifier. Raises PlayFailedError if it takes longer."""
        try:
            with (
                tracing.span("verify", sample=episode.sample.index),
                metrics.VERIFIER_SECONDS.time(),
                episode.time_limit.stopped(),
            ):
                async with asyncio.timeout(self.seconds):
                    yield
        except TimeoutError as error:
            limit = "rollout.environment.verifier.timeoutSeconds"
            text = f"{_WHO} took more than {self.seconds:g} s ({limit})"
            raise PlayFailedError(REASON, text) from error

    def apply_verdict(
        self, episode: Episode, ended: ProgramExit, read: Callable[[], result.Result]
    ) -> None:
        """Apply a verifier's result. Raises PlayFailedError if the verifier failed."""
        if ended.status:
            raise PlayFailedError(REASON, f"{_WHO} {ended.failure}")
        apply_result(episode, read, REASON, _WHO)
        if self.must_reward and episode.sample.reward is None:
            raise PlayFailedError(
                REASON, f"{_WHO} left no reward in result.json, and the job has no spec.reward"
            )


@dataclass(frozen=True, slots=True)
class VerifierProcess:
    """A verifier that runs on the worker's machine."""

    command: Sequence[str]
    variables: Mapping[str, str]  # of every episode
    rules: VerifierRules
    containers: Containers | None = None  # None: it runs as a process

    async def __call__(self, episode: Episode, files: Sequence[Artifact], directory: str) -> None:
        """Judge an episode, in a new directory inside `directory`. Raises PlayFailedError."""
        name = f"{episode.prompt.group_id}.{episode.sample.index}-verifier-"
        workspace = tempfile.mkdtemp(prefix=name, dir=directory)
        try:
            variables = await asyncio.to_thread(self._prepare, workspace, episode, files)
            run = await self._runner(episode, directory)
            async with self.rules.limited(episode):
                ended = await run(self.command, workspace, variables)
            self.rules.apply_verdict(episode, ended, lambda: result.read(workspace))
        except (OSError, ArtifactsError, SurvivorError) as error:
            raise PlayFailedError(REASON, f"{_WHO} cannot be run here: {error}") from error
        finally:
            with episode.time_limit.stopped():
                await asyncio.shield(asyncio.to_thread(directories.remove, workspace))

    async def _runner(self, episode: Episode, directory: str) -> Run:
        """Return the function that runs the verifier, in a container of the row's image."""
        if self.containers is None:
            return process.run
        with episode.time_limit.stopped():
            return (await self.containers.for_row(episode.prompt, directory)).run

    def _prepare(
        self, workspace: str, episode: Episode, files: Sequence[Artifact]
    ) -> dict[str, str]:
        os.mkdir(f"{workspace}/{inputs.TEMPORARY}")
        artifacts.prepare(workspace, files)
        row = inputs.row(episode.prompt, episode.sample.index, episode.seats, episode.images)
        Path(workspace, ROW).write_text(json.dumps(row))
        return {
            **self.variables,
            **inputs.prompt_variables(episode.prompt),
            **inputs.directory_variables(workspace),
        }
