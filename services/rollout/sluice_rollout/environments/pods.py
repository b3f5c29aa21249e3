"""Plays episodes in pods, and runs verifiers in pods as well.

A pod joins the worker over a WebSocket, plays one episode and ends. The worker sends one message
with the episode, and the pod sends one message with what its program left. The connection is also
the sign of life: if it breaks early, the pod is lost; if the worker closes it, the episode is over.
"""

from __future__ import annotations

import hmac
import json
import signal
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from sluice.samples import episode_protocol as wire
from sluice.samples.sample import Prompt
from sluice_rollout.environments import inputs, result, verifying
from sluice_rollout.environments.episode_result import apply_result, finish
from sluice_rollout.environments.pod_pool import PodPool
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.environments.verifying import VerifierRules
from sluice_rollout.episode import Episode, PlayFailedError
from sluice_rollout.gateway.interfaces.errors import refused_key


@dataclass(frozen=True, slots=True)
class EpisodePods:
    """The episode pods and verifier pods of a worker."""

    token: str  # pods join with it
    episodes: PodPool
    verifiers: PodPool
    rules: VerifierRules | None = None  # None: the job has no verifier

    @classmethod
    def create(
        cls, token: str, seconds: float, command: str, rules: VerifierRules | None = None
    ) -> EpisodePods:
        """Make empty pools.

        Parameters
        ----------
        token
            The token with which pods join.
        seconds
            How long an episode waits for a pod.
        command
            Command that lists the pods, for messages.
        rules
            Rules of the job's verifier, or None.

        """
        episodes, verifiers = (PodPool(r, seconds, command) for r in (wire.EPISODE, wire.VERIFIER))
        return cls(token, episodes, verifiers, rules)

    async def join(self, request: web.Request) -> web.StreamResponse:
        """Check the token of a pod and serve it until it ends. Raises GatewayError."""
        header = request.headers.get("Authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode()):
            raise refused_key("expected the token of the job's episode pods")
        pools = {pool.role: pool for pool in (self.episodes, self.verifiers)}
        pool = pools.get(request.query.get("role", wire.EPISODE))
        if pool is None:
            raise web.HTTPBadRequest(text=f"role: expected one of {', '.join(pools)}")
        return await pool.serve_pod(request.query.get("pod", "?"), request)

    async def __call__(self, episode: Episode) -> None:
        """Play an episode in the next free pod. Waiting for a pod does not count as its time."""
        prompt = self.rules.visible(episode.prompt) if self.rules else episode.prompt
        key_and_files: dict[str, Any] = {
            "key": episode.gateway.api_key,
            "artifacts": [] if self.rules else None,
        }
        assignment = _assignment(episode, prompt, key_and_files)
        with episode.time_limit.stopped():
            pod = await self.episodes.next_free()
        left = await self.episodes.run(pod, assignment)
        await finish(episode, _program_exit(left), lambda: self._judge(episode, left))

    async def _judge(self, episode: Episode, left: dict[str, Any]) -> None:
        if self.rules is None:
            apply_result(episode, lambda: _result(left))
            return
        if left["artifacts_refused"] is not None:
            raise verifying.artifacts_refused(left["artifacts_refused"])
        key_and_files = {"key": "", "artifacts": left["artifacts"]}
        assignment = _assignment(episode, episode.prompt, key_and_files)
        with episode.time_limit.stopped():
            pod = await self.verifiers.next_free()
        async with self.rules.limited(episode):
            verdict = await self.verifiers.run(pod, assignment)
        self.rules.apply_verdict(episode, _program_exit(verdict), lambda: _result(verdict))


def _assignment(episode: Episode, prompt: Prompt, key_and_files: dict[str, Any]) -> str:
    """Make the message that tells a pod what to play.

    Parameters
    ----------
    episode
        The episode.
    prompt
        The row as this pod may see it.
    key_and_files
        `key`: the key of the model. `artifacts`: the files in the pod's directory; None: the pod
        neither gets nor leaves artifacts.

    Raises
    ------
    PlayFailedError
        The row is too large.

    """
    variables = list(inputs.prompt_variables(prompt).items())
    row = inputs.row(prompt, episode.sample.index, episode.seats, episode.images)
    text = json.dumps({**key_and_files, "variables": variables, "row": row})
    if len(text) > wire.MOST_BYTES:  # json.dumps writes ASCII
        limit = f"at most {wire.MOST_BYTES} can be sent to a pod"
        message = f"cannot have its row of {len(text)} bytes: {limit}"
        raise PlayFailedError("row", message)
    return text


def _program_exit(left: dict[str, Any]) -> ProgramExit:
    killed = left["status"] is None
    return ProgramExit(
        -signal.SIGKILL if killed else int(left["status"]), "", left["errors"].strip()
    )


def _result(left: dict[str, Any]) -> result.Result:
    if left["refused"] is not None:
        raise result.ResultError(left["refused"])
    return result.parse_text(left["result"])
