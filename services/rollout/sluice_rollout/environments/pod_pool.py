"""A pool of pods that have joined a worker. Each pod runs one program for one episode."""

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
    """An episode could not get a pod, or has lost it.

    This is not the program's fault, so the group is played again.
    """


@dataclass(slots=True, eq=False)
class EpisodePod:
    """A pod that has joined."""

    name: str
    socket: web.WebSocketResponse
    # What the program has left, as the sidecar sends it.
    outcome: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def run(self, assignment: str) -> dict[str, Any]:
        """Run the pod's program. Raises EpisodePodError if the pod is lost."""
        try:
            await self.socket.send_str(assignment)
        except ConnectionError as error:
            raise EpisodePodError(f"{self.name} was lost: {error}") from error
        return await self.outcome

    async def listen(self) -> None:
        """Receive messages until the connection ends. Cancelled if it breaks."""
        try:
            async for message in self.socket:
                if message.type is WSMsgType.TEXT and not self.outcome.done():
                    self.outcome.set_result(json.loads(message.data))
        finally:
            if not self.outcome.done():
                text = f"{self.name} was lost before its program had ended"
                self.outcome.set_exception(EpisodePodError(text))
                self.outcome.exception()  # retrieved, so that asyncio does not warn about it


@dataclass(slots=True)
class PodPool:
    """Pods of one role that wait for an episode."""

    role: str  # episode or verifier
    seconds: float  # how long an episode waits for a pod
    command: str  # lists the pods, for messages
    _free: list[EpisodePod] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def waiting(self) -> int:
        """The number of pods without an episode."""
        return len(self._free)

    async def serve_pod(self, name: str, request: web.Request) -> web.StreamResponse:
        """Serve a pod from its joining to its end."""
        socket = web.WebSocketResponse(
            timeout=CLOSE_SECONDS, heartbeat=wire.HEARTBEAT_SECONDS, max_msg_size=wire.MOST_BYTES
        )
        await socket.prepare(request)
        pod = EpisodePod(name, socket)
        async with self._changed:
            self._free.append(pod)
            self._changed.notify()
        self._count()
        try:
            await pod.listen()
        finally:
            if pod in self._free:
                self._free.remove(pod)
            self._count()
        return socket

    async def next_free(self) -> EpisodePod:
        """Take a free pod, waiting if necessary. Raises EpisodePodError."""
        try:
            async with asyncio.timeout(self.seconds), self._changed:
                await self._changed.wait_for(lambda: self._free)
                pod = self._free.pop(0)
        except TimeoutError:
            raise EpisodePodError(
                f"no {self.role} pod was free within {self.seconds:g} s; `{self.command},"
                f"sluice.dev/role={self.role}` says why"
            ) from None
        self._count()
        return pod

    async def run(self, pod: EpisodePod, assignment: str) -> dict[str, Any]:
        """Run a pod's program, then end the pod. Returns what it left. Raises EpisodePodError."""
        try:
            with metrics.EPISODE_PODS.labels(self.role, "playing").track_inprogress():
                return await pod.run(assignment)
        finally:
            await pod.socket.close()

    def _count(self) -> None:
        metrics.EPISODE_PODS.labels(self.role, "waiting").set(self.waiting)
