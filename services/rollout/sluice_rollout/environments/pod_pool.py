"""A warm pool: pods that have joined a worker, each of which runs one program for one episode."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from sluice.engines.protocol import EngineError
from sluice.samples import episode_protocol as wire
from sluice_rollout import metrics

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
    outcome: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def run(self, assignment: str) -> dict[str, Any]:
        """Have it run its program. Raises EpisodePodError where it is lost."""
        try:
            await self.socket.send_str(assignment)
        except ConnectionError as error:
            raise EpisodePodError(f"{self.name} was lost: {error}") from error
        return await self.outcome

    async def listen(self) -> None:
        """Until the connection ends; where it breaks, this is cancelled."""
        try:
            async for message in self.socket:
                if message.type is WSMsgType.TEXT and not self.outcome.done():
                    self.outcome.set_result(json.loads(message.data))
        finally:
            if not self.outcome.done():
                text = f"{self.name} was lost before its program had ended"
                self.outcome.set_exception(EpisodePodError(text))
                self.outcome.exception()  # a pod that nobody waits for may go without a word


@dataclass(slots=True)
class PodPool:
    """Pods of one role that wait for an episode.

    role: episode, verifier. seconds: how long an episode waits for one. where: how a person finds
    the pods, for messages.
    """

    role: str
    seconds: float
    where: str
    _free: list[EpisodePod] = field(default_factory=list)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def waiting(self) -> int:
        """Pods that have no episode yet."""
        return len(self._free)

    async def serve_pod(self, name: str, request: web.Request) -> web.StreamResponse:
        """A pod's whole life in this pool."""
        socket = web.WebSocketResponse(
            timeout=CLOSE_SECONDS, heartbeat=wire.HEARTBEAT_SECONDS, max_msg_size=wire.MOST_BYTES
        )
        await socket.prepare(request)
        pod = EpisodePod(name, socket)
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

    async def next_free(self) -> EpisodePod:
        """A pod that is free, for the one who asks. Raises EpisodePodError."""
        try:
            async with asyncio.timeout(self.seconds), self._news:
                await self._news.wait_for(lambda: self._free)
                pod = self._free.pop(0)
        except TimeoutError:
            raise EpisodePodError(
                f"no {self.role} pod was free within {self.seconds:g} s; `{self.where},"
                f"sluice.dev/role={self.role}` says why"
            ) from None
        self._count()
        return pod

    async def run(self, pod: EpisodePod, assignment: str) -> dict[str, Any]:
        """Have a pod run its program, and end the pod: the remains. Raises EpisodePodError."""
        try:
            with metrics.EPISODE_PODS.labels(self.role, "playing").track_inprogress():
                return await pod.run(assignment)
        finally:
            await pod.socket.close()

    def _count(self) -> None:
        metrics.EPISODE_PODS.labels(self.role, "waiting").set(self.waiting)
