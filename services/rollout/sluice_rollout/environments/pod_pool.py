"""A pool of pods that have joined a worker. Each pod runs one program for one episode.

If rows name the images of pods, an episode waits for a pod of its image. What episodes wait for is
the demand that the operator fills (`demand`), and what the cluster says of the pods that it makes
comes back (`note_state`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from sluice.engines.protocol import EngineError
from sluice.samples import episode_protocol as wire
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_rollout import metrics
from sluice_rollout.episode import Episode, EpisodeTimeError, PlayFailedError

CLOSE_SECONDS = 2.0
# How long an episode whose time has passed waits for what its program has left.
LEFT_SECONDS = 60.0
# How long an episode that has ended waits to hear the digest of its image.
IMAGE_ID_SECONDS = 2.0
# Errors that another try does not remove: of the kubelet, and of registries.
_LASTING = re.compile(r"^(InvalidImageName|ErrImageNeverPull)\b|\bnot found\b|\bNotFound\b")


class EpisodePodError(EngineError):
    """An episode could not get a pod, or has lost it.

    This is not the program's fault, so the group is played again.
    """


@dataclass(slots=True, eq=False)
class EpisodePod:
    """A pod that has joined."""

    name: str
    socket: web.WebSocketResponse
    image: str = ""  # of the row; empty if the job names the image
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
        return await asyncio.shield(self.outcome)

    async def end(self) -> dict[str, Any]:
        """Tell the pod that its episode is over. Returns what its program has left so far.

        Raises EpisodePodError if the pod is lost.
        """
        try:
            await self.socket.send_str(wire.OVER)
            async with asyncio.timeout(LEFT_SECONDS):
                return await self.outcome
        except (ConnectionError, TimeoutError) as error:
            text = f"{self.name} did not send what its program had left at the end of its time"
            raise EpisodePodError(text) from error

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
    image_seconds: float = 0.0  # how long an episode waits for its row's image to be pulled
    # Set when the demand may have changed.
    demand_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _free: list[EpisodePod] = field(default_factory=list)
    _joined: set[str] = field(default_factory=set)
    _waiting: Counter[str] = field(default_factory=Counter)  # episodes without a pod, by image
    _states: dict[str, pb.EpisodePodState] = field(default_factory=dict)  # by pod
    _image_ids: dict[str, str] = field(default_factory=dict)  # by image
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def waiting(self) -> int:
        """The number of pods without an episode."""
        return len(self._free)

    def demand(self) -> tuple[list[pb.ImageDemand], list[str]]:
        """Return the images that episodes wait for, and the names of the pods that have joined."""
        waiting = [
            pb.ImageDemand(role=self.role, image=image, pods=count)
            for image, count in self._waiting.items()
        ]
        return waiting, sorted(self._joined)

    async def note_states(self, states: Iterable[pb.EpisodePodState]) -> None:
        """Note what the cluster says of this worker's pods."""
        async with self._changed:
            self._states = {state.pod: state for state in states}
            self._image_ids |= {s.image: s.image_id for s in self._states.values() if s.image_id}
            self._changed.notify_all()

    async def serve_pod(self, name: str, image: str, request: web.Request) -> web.StreamResponse:
        """Serve a pod from its joining to its end."""
        socket = web.WebSocketResponse(
            timeout=CLOSE_SECONDS, heartbeat=wire.HEARTBEAT_SECONDS, max_msg_size=wire.MOST_BYTES
        )
        await socket.prepare(request)
        pod = EpisodePod(name, socket, image)
        async with self._changed:
            self._free.append(pod)
            self._joined.add(name)
            self._changed.notify_all()
        self._count()
        try:
            await pod.listen()
        finally:
            self._joined.discard(name)
            if pod in self._free:
                self._free.remove(pod)
            self._count()
        return socket

    async def next_free(self, image: str = "") -> EpisodePod:
        """Take a free pod of an image, waiting if necessary.

        Raises
        ------
        EpisodePodError
            There is none after `seconds`.
        PlayFailedError
            The image of the row cannot be pulled.

        """
        self._waiting[image] += 1
        self.demand_changed.set()
        try:
            await self._retire_other(image)
            pod = await self._await_free(image)
        except TimeoutError:
            raise EpisodePodError(
                f"no {self.role} pod was free within {self.seconds:g} s; `{self.command},"
                f"sluice.dev/role={self.role}` says why"
            ) from None
        finally:
            self._waiting[image] -= 1
            if not self._waiting[image]:
                del self._waiting[image]
            self._count()
        return pod

    async def _await_free(self, image: str) -> EpisodePod:
        """Wait for a pod of an image. Raises TimeoutError or PlayFailedError."""
        try:
            async with asyncio.timeout(self.image_seconds if image else self.seconds):
                return await self._take(image)
        except TimeoutError:
            if not image:
                raise
        if error := self._image_error(image):
            raise _image_failure(image, f"after {self.image_seconds:g} s: {error}")
        # Something else is in the way, such as a full cluster, which is no fault of the row.
        async with asyncio.timeout(max(self.seconds - self.image_seconds, 0.0)):
            return await self._take(image)

    async def _take(self, image: str) -> EpisodePod:
        """Take the next free pod of an image. Raises PlayFailedError if there cannot be one."""
        async with self._changed:
            while True:
                for pod in self._free:
                    if pod.image == image:
                        self._free.remove(pod)
                        return pod
                error = self._image_error(image) if image else ""
                if _LASTING.search(error):
                    raise _image_failure(image, error)
                await self._changed.wait()

    async def _retire_other(self, image: str) -> None:
        """End a pod that waits for an image that no episode waits for, to make room for this one.

        Only the operator makes pods, and an engine has a fixed number of them.
        """
        if any(pod.image == image for pod in self._free):
            return
        unused = next((pod for pod in self._free if not self._waiting[pod.image]), None)
        if unused:
            self._free.remove(unused)
            await unused.socket.close()

    def _image_error(self, image: str) -> str:
        """Return why pods of an image do not start, as the cluster last said; empty if unknown."""
        errors = (s.error for s in self._states.values() if s.image == image and s.error)
        return next(errors, "")

    async def image_id(self, pod: EpisodePod) -> str:
        """Return the image of a pod with its digest, or as the row names it if none is known."""

        def reported() -> str:
            state = self._states.get(pod.name)
            return state.image_id if state else ""

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IMAGE_ID_SECONDS), self._changed:
                return await self._changed.wait_for(reported)
        # The pod has come and gone between two reports.
        return self._image_ids.get(pod.image, pod.image)

    async def run(
        self, pod: EpisodePod, assignment: str, episode: Episode | None = None
    ) -> dict[str, Any]:
        """Run a pod's program, within the time of an episode, then end the pod.

        Returns what it left. Raises EpisodePodError.
        """
        try:
            with metrics.EPISODE_PODS.labels(self.role, "playing").track_inprogress():
                playing = pod.run(assignment)
                return await (episode.in_time(playing) if episode else playing)
        except EpisodeTimeError:
            return await pod.end()
        finally:
            await pod.socket.close()

    def _count(self) -> None:
        metrics.EPISODE_PODS.labels(self.role, "waiting").set(self.waiting)
        self.demand_changed.set()


def _image_failure(image: str, error: str) -> PlayFailedError:
    return PlayFailedError("image", f"cannot have its image {image}: {error}")
