"""Episode pods, as the worker has them: each joins, plays one episode and ends; and so do the pods
of a verifier.

Over a pod's WebSocket come, each once: what to play (to the pod), and what the program left (from
it). The connection is also the sign of life, both ways: where it ends too early the pod is lost,
and where the worker ends it the episode is over.
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
    """The pods of a worker.

    token: what a pod joins with. rules: of the verifier, which has pods of its own; None: there is
    none.
    """

    token: str
    episodes: PodPool
    verifiers: PodPool
    rules: VerifierRules | None = None

    @classmethod
    def create(
        cls, token: str, seconds: float, where: str, rules: VerifierRules | None = None
    ) -> EpisodePods:
        """seconds, where: as the pools have them."""
        episodes, verifiers = (PodPool(r, seconds, where) for r in (wire.EPISODE, wire.VERIFIER))
        return cls(token, episodes, verifiers, rules)

    async def join(self, request: web.Request) -> web.StreamResponse:
        """A pod's whole life at this worker."""
        header = request.headers.get("Authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode()):
            raise refused_key("expected the token of the job's episode pods")
        pools = {pool.role: pool for pool in (self.episodes, self.verifiers)}
        pool = pools.get(request.query.get("role", wire.EPISODE))
        if pool is None:
            raise web.HTTPBadRequest(text=f"role: expected one of {', '.join(pools)}")
        return await pool.serve_pod(request.query.get("pod", "?"), request)

    async def __call__(self, episode: Episode) -> None:
        """Play an episode in the next pod that is free. The program's time starts with it."""
        prompt = self.rules.shown(episode.prompt) if self.rules else episode.prompt
        own: dict[str, Any] = {
            "key": episode.gateway.api_key,
            "artifacts": [] if self.rules else None,
        }
        assignment = _assignment(episode, prompt, own)
        with episode.clock.stopped():
            pod = await self.episodes.next_free()
        left = await self.episodes.run(pod, assignment)
        await finish(episode, _ended(left), lambda: self._judge(episode, left))

    async def _judge(self, episode: Episode, left: dict[str, Any]) -> None:
        if self.rules is None:
            apply_result(episode, lambda: _result(left))
            return
        if left["artifacts_refused"] is not None:
            raise verifying.artifacts_refused(left["artifacts_refused"])
        own = {"key": "", "artifacts": left["artifacts"]}
        assignment = _assignment(episode, episode.prompt, own)
        with episode.clock.stopped():
            pod = await self.verifiers.next_free()
        async with self.rules.limited(episode):
            verdict = await self.verifiers.run(pod, assignment)
        self.rules.take(episode, _ended(verdict), lambda: _result(verdict))


def _assignment(episode: Episode, prompt: Prompt, own: dict[str, Any]) -> str:
    """The message that tells a pod what to play. Raises PlayFailedError for a row too large.

    prompt: as this pod may see it. own: the key of the model, and the artifacts that its directory
    begins with; None: it has none, and none are read at its end.
    """
    variables = list(inputs.prompt_variables(prompt).items())
    row = inputs.row(prompt, episode.sample.index, episode.seats)
    text = json.dumps({**own, "variables": variables, "row": row})
    if len(text) > wire.MOST_BYTES:  # json.dumps writes ASCII
        message = f"cannot have its row of {len(text)} bytes: at most {wire.MOST_BYTES} reach a pod"
        raise PlayFailedError("row", message)
    return text


def _ended(left: dict[str, Any]) -> ProgramExit:
    killed = left["status"] is None
    return ProgramExit(
        -signal.SIGKILL if killed else int(left["status"]), "", left["errors"].strip()
    )


def _result(left: dict[str, Any]) -> result.Result:
    if left["refused"] is not None:
        raise result.ResultError(left["refused"])
    return result.parse_text(left["result"])
