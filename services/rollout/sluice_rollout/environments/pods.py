"""Plays episodes in pods, and runs verifiers in pods as well.

A pod joins the worker over a WebSocket, plays one episode and ends. The worker sends one message
with the episode, and the pod sends one message with what its program left. The connection is also
the sign of life: if it breaks early, the pod is lost; if the worker closes it, the episode is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from sluice.api.groups.environment import RolloutEnvironment
from sluice.container_images import RowImageError, image_of_row, is_from_row
from sluice.samples import episode_protocol as wire
from sluice.samples.sample import Prompt
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_rollout.environments import inputs, result, verifying
from sluice_rollout.environments.episode_result import apply_result, finish
from sluice_rollout.environments.pod_pool import PodPool
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.environments.verifying import VerifierRules
from sluice_rollout.episode import Episode, PlayFailedError
from sluice_rollout.gateway.interfaces.errors import refused_key

# Least time between two reports of the demand.
REPORT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RowImages:
    """Images that rows name, with references to the row. Empty: the job names the image."""

    episode: str = ""
    verifier: str = ""
    allowed: Sequence[str] = ()
    seconds: float = 0.0  # time to pull an image

    @classmethod
    def for_job(cls, environment: RolloutEnvironment) -> RowImages:
        """Read the images from a job."""
        episode, verifier = (
            image if image and is_from_row(image) else ""
            for image in (environment.image, environment.verifier_image)
        )
        seconds = environment.image_timeout_seconds
        return cls(episode, verifier, environment.allowed_images, seconds)


@dataclass(frozen=True, slots=True)
class EpisodePods:
    """The episode pods and verifier pods of a worker."""

    token: str  # pods join with it
    episodes: PodPool
    verifiers: PodPool
    rules: VerifierRules | None = None  # None: the job has no verifier
    images: RowImages = RowImages()
    # An episode whose time has passed is judged by what its program has left.
    judges_after_time: ClassVar[bool] = True

    @classmethod
    def create(
        cls,
        token: str,
        seconds: float,
        command: str,
        rules: VerifierRules | None = None,
        images: RowImages | None = None,
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
        images
            Images that rows name, or None.

        """
        images = images or RowImages()
        changed = asyncio.Event()
        episodes, verifiers = (
            PodPool(role, seconds, command, images.seconds, changed)
            for role in (wire.EPISODE, wire.VERIFIER)
        )
        return cls(token, episodes, verifiers, rules, images)

    def demand(self) -> pb.EpisodePodDemand | None:
        """Return the pods that episodes wait for; None unless rows name their images."""
        if not (self.images.episode or self.images.verifier):
            return None
        demands = [pool.demand() for pool in (self.episodes, self.verifiers)]
        return pb.EpisodePodDemand(
            waiting=[image for waiting, _ in demands for image in waiting if image.image],
            joined=[name for _, joined in demands for name in joined],
        )

    async def follow(self, membership: Membership) -> None:
        """Tell the rendezvous when the demand changes, and hear what becomes of it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_demand(membership))
            tasks.create_task(self._hear_states(membership))

    async def _report_demand(self, membership: Membership) -> None:
        while True:
            await self.episodes.demand_changed.wait()
            self.episodes.demand_changed.clear()
            membership.beat()
            await asyncio.sleep(REPORT_SECONDS)

    async def _hear_states(self, membership: Membership) -> None:
        seen = 0
        while True:
            seen = await membership.news(seen)
            states = membership.latest.episode_pods if membership.latest else ()
            for pool in (self.episodes, self.verifiers):
                await pool.note_states(states)

    async def join(self, request: web.Request) -> web.StreamResponse:
        """Check the token of a pod and serve it until it ends. Raises GatewayError."""
        header = request.headers.get("Authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode()):
            raise refused_key("expected the token of the job's episode pods")
        pools = {pool.role: pool for pool in (self.episodes, self.verifiers)}
        pool = pools.get(request.query.get("role", wire.EPISODE))
        if pool is None:
            raise web.HTTPBadRequest(text=f"role: expected one of {', '.join(pools)}")
        name, image = (request.query.get(key, "") for key in ("pod", "image"))
        return await pool.serve_pod(name or "?", image, request)

    async def __call__(self, episode: Episode) -> None:
        """Play an episode in the next free pod. Waiting for a pod does not count as its time."""
        prompt = self.rules.visible(episode.prompt) if self.rules else episode.prompt
        key_and_files: dict[str, Any] = {
            "key": episode.gateway.api_key,
            "artifacts": [] if self.rules else None,
        }
        assignment = _assignment(episode, prompt, key_and_files)
        left = await self._run(self.episodes, self.images.episode, episode, assignment)
        await finish(episode, _program_exit(left), lambda: self._judge(episode, left))

    async def _run(
        self,
        pool: PodPool,
        image: str,
        episode: Episode,
        assignment: str,
        limit: AbstractAsyncContextManager[None] | None = None,
    ) -> dict[str, Any]:
        """Run an assignment in the next free pod, within a limit. Returns what it left.

        Waiting for the pod does not count as the episode's time.
        """
        image = self._image(image, episode.prompt)
        with episode.time_limit.stopped():
            pod = await pool.next_free(image)
        async with limit or contextlib.nullcontext():
            left = await pool.run(pod, assignment, None if limit else episode)
        if image:
            with episode.time_limit.stopped():
                episode.metadata[wire.IMAGE_KEYS[pool.role]] = await pool.image_id(pod)
        return left

    def _image(self, image: str, prompt: Prompt) -> str:
        """Return the row's image; empty if the job names it. Raises PlayFailedError."""
        if not image:
            return ""
        try:
            return image_of_row(image, prompt.metadata, self.images.allowed)
        except RowImageError as error:
            raise PlayFailedError("image", f"cannot have its image: {error}") from error

    async def _judge(self, episode: Episode, left: dict[str, Any]) -> None:
        if self.rules is None:
            apply_result(episode, lambda: _result(left))
            return
        if left["artifacts_refused"] is not None:
            raise verifying.artifacts_refused(left["artifacts_refused"])
        key_and_files = {"key": "", "artifacts": left["artifacts"]}
        assignment = _assignment(episode, episode.prompt, key_and_files)
        pool, limit = self.verifiers, self.rules.limited(episode)
        verdict = await self._run(pool, self.images.verifier, episode, assignment, limit)
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
