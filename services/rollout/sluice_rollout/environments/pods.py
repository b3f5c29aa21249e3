"""Episode pods, as the worker has them: each joins, plays one episode and ends.

Over a pod's WebSocket come, each once: what to play (to the pod), and what the program left (from
it). The connection is also the sign of life, both ways: where it ends too early the pod is lost,
and where the worker ends it the episode is over.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from sluice import episodes as wire
from sluice.engines.base import EngineError
from sluice_rollout import metrics
from sluice_rollout.environments import inputs, result
from sluice_rollout.environments.ending import conclude
from sluice_rollout.environments.process import Ended
from sluice_rollout.episode import Episode, PlayFailedError
from sluice_rollout.gateway.errors import refused_key

CLOSE_SECONDS = 2.0


class EpisodePodError(EngineError):
    """An episode has no pod, or has lost it. That is no fault of its program's: its group is played
    again.
    """


@dataclass(slots=True, eq=False)
class EpisodePod:
    """A pod that has joined. left: what its program left behind, as the sidecar sends it."""

    name: str
    socket: web.WebSocketResponse
    left: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def play(self, assignment: str) -> dict[str, Any]:
        """Have it play. Raises EpisodePodError where it is lost."""
        try:
            await self.socket.send_str(assignment)
        except ConnectionError as error:
            raise EpisodePodError(f"episode pod {self.name} was lost: {error}") from error
        return await self.left

    async def listen(self) -> None:
        """Until the connection ends; where it breaks, this is cancelled."""
        try:
            async for message in self.socket:
                if message.type is WSMsgType.TEXT and not self.left.done():
                    self.left.set_result(json.loads(message.data))
        finally:
            if not self.left.done():
                text = f"episode pod {self.name} was lost before its program had ended"
                self.left.set_exception(EpisodePodError(text))
                self.left.exception()  # a pod that nobody waits for may go without a word


@dataclass(slots=True)
class EpisodePods:
    """The pods of a worker.

    token: what a pod joins with. seconds: how long an episode waits for a pod. where: how a person
    finds the pods, for messages.
    """

    token: str
    seconds: float
    where: str
    _free: list[EpisodePod] = field(default_factory=list)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def join(self, request: web.Request) -> web.StreamResponse:
        """A pod's whole life at this worker."""
        header = request.headers.get("Authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode()):
            raise refused_key("expected the token of the job's episode pods")
        socket = web.WebSocketResponse(
            timeout=CLOSE_SECONDS, heartbeat=wire.HEARTBEAT_SECONDS, max_msg_size=wire.MOST_BYTES
        )
        await socket.prepare(request)
        pod = EpisodePod(request.query.get("pod", "?"), socket)
        async with self._news:
            self._free.append(pod)
            self._news.notify()
        self._count()
        try:
            await pod.listen()
        finally:
            if pod in self._free:
                self._free.remove(pod)
            self._count()
        return socket

    async def __call__(self, episode: Episode) -> None:
        """Play an episode in the next pod that is free. The program's time starts with it."""
        assignment = _assignment(episode)
        with episode.clock.at_engine():
            pod = await self._next()
        try:
            with metrics.EPISODE_PODS.labels(state="playing").track_inprogress():
                left = await pod.play(assignment)
        finally:
            await pod.socket.close()
        killed = left["status"] is None
        status = -signal.SIGKILL if killed else int(left["status"])
        ended = Ended(status, "", str(left["errors"]).strip())
        conclude(episode, ended, lambda: _result(left))

    async def _next(self) -> EpisodePod:
        try:
            async with asyncio.timeout(self.seconds), self._news:
                await self._news.wait_for(lambda: self._free)
                pod = self._free.pop(0)
        except TimeoutError:
            raise EpisodePodError(
                f"no episode pod was free within {self.seconds:g} s; {self.where} says why"
            ) from None
        self._count()
        return pod

    def _count(self) -> None:
        metrics.EPISODE_PODS.labels(state="waiting").set(len(self._free))


def _assignment(episode: Episode) -> str:
    """The message that tells a pod what to play. Raises PlayFailedError for a row too large."""
    text = json.dumps(
        {
            "key": episode.gateway.api_key,
            "variables": list(inputs.of_prompt(episode.prompt).items()),
            "row": inputs.row(episode),
        }
    )
    if len(text) > wire.MOST_BYTES:  # json.dumps writes ASCII
        message = f"cannot have its row of {len(text)} bytes: at most {wire.MOST_BYTES} reach a pod"
        raise PlayFailedError("row", message)
    return text


def _result(left: dict[str, Any]) -> result.Result:
    if left["refused"] is not None:
        raise result.ResultError(left["refused"])
    return result.of_text(left["result"])
