"""The sidecar container (`python -m sluice_rollout.environments.sidecar`) of an episode pod.

It runs in pods of episodes and of verifiers. It joins a worker once the user's container has
started, and waits for an episode: such pods are the warm pool. Then it writes the row, for which
the shell of the user's container waits. The program finds its model at an address that only this
pod can reach. The sidecar adds the episode's key to its requests, so that the program never holds
the key. When the program ends, the sidecar sends what it left, and ends as well. It also ends when
the worker says that the episode is over; the operator then deletes the pod.

It does not use the Kubernetes API, and needs no service account.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from sluice.samples import episode_protocol as wire
from sluice.wire.http_relay import relay
from sluice_rollout.environments import artifacts, result

JOIN_SECONDS = 1800.0  # a worker listens once its engine has started
RETRY_SECONDS = 1.0
LOOK_SECONDS = 0.1
TAKEN_SECONDS = 1.0
MOST_STATUS = 256
SHOWN_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the sidecar, from its environment variables."""

    worker: str  # address of the worker's gateway
    token: str
    pod: str
    role: str  # episode or verifier
    directory: Path  # shared with the user's container
    port: int | None  # of the model, on the pod's loopback; None for a verifier
    image: str = ""  # of the row; empty if the job names the image

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Settings:
        """Read the settings. Raises KeyError if a variable is missing."""
        role = variables["SLUICE_ROLE"]
        return cls(
            variables["SLUICE_WORKER"],
            variables["SLUICE_EPISODE_TOKEN"],
            variables["SLUICE_POD"],
            role,
            Path(variables["SLUICE_EPISODE"]),
            int(variables["SLUICE_PORT_MODEL"]) if role == wire.EPISODE else None,
            variables.get("SLUICE_IMAGE", ""),
        )


@dataclass(slots=True)
class Sidecar:
    """Plays one episode in its pod."""

    settings: Settings
    session: aiohttp.ClientSession
    key: str = ""  # of the episode
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set by SIGTERM

    async def run(self) -> None:
        """Play one episode. Raises OSError or ClientError if the worker cannot be joined."""
        # The image of the user's container may still be pulled, for as long as that takes.
        started = self._until_exists(self.settings.directory / wire.STARTED)
        await self._unless_stopped(started)
        if self.stop.is_set():
            return
        async with await self._join() as socket:
            if assignment := await self._next(socket):
                await self._play(socket, assignment)

    async def _join(self) -> aiohttp.ClientWebSocketResponse:
        """Join the worker, waiting until it listens."""
        end = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                return await self.session.ws_connect(
                    f"{self.settings.worker}{wire.PATH}",
                    params={
                        "pod": self.settings.pod,
                        "role": self.settings.role,
                        "image": self.settings.image,
                    },
                    headers={"Authorization": f"Bearer {self.settings.token}"},
                    heartbeat=wire.HEARTBEAT_SECONDS,
                    max_msg_size=wire.MOST_BYTES,
                )
            except (aiohttp.ClientConnectionError, TimeoutError):
                if time.monotonic() > end or self.stop.is_set():
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def _next(self, socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any] | None:
        """Wait for an episode. Returns None if the pod or the worker ends first."""
        message = await self._unless_stopped(socket.receive())
        if message is None or message.type is not aiohttp.WSMsgType.TEXT:
            return None
        assignment: dict[str, Any] = json.loads(message.data)
        return assignment

    async def _play(
        self, socket: aiohttp.ClientWebSocketResponse, assignment: dict[str, Any]
    ) -> None:
        """Let the program play, then send what it left to the worker."""
        directory, self.key = self.settings.directory, assignment["key"]
        lines = [f"export {name}={shlex.quote(text)}\n" for name, text in assignment["variables"]]
        (directory / wire.VARIABLES).write_text("".join(lines))
        files = assignment["artifacts"]
        if files is not None:
            await asyncio.to_thread(artifacts.prepare, str(directory), artifacts.from_json(files))
        new = directory / f"{wire.ROW}.new"
        new.write_text(json.dumps(assignment["row"]))
        new.rename(directory / wire.ROW)  # atomic, because the shell may look at any time
        ended = asyncio.create_task(self._until_exists(directory / wire.STATUS))
        # The worker sends `wire.OVER` or closes the connection: both are the end.
        over = asyncio.create_task(socket.receive())
        await self._unless_stopped(asyncio.wait({ended, over}, return_when="FIRST_COMPLETED"))
        for task in (ended, over):
            task.cancel()
        if self.stop.is_set() and await self._is_taken(directory / wire.TAKEN):
            return  # the pod is lost; the program did not fail
        judged = files is not None and self.settings.role == wire.EPISODE
        left = await asyncio.to_thread(_left, directory, judged)
        with contextlib.suppress(ConnectionError):
            await socket.send_json(left)

    async def _until_exists(self, file: Path) -> None:
        while not file.exists():
            await asyncio.sleep(LOOK_SECONDS)

    async def _is_taken(self, file: Path) -> bool:
        """Wait a moment to see whether the program was told to end as well.

        This is so if the pod is deleted. If the program was killed alone, for example for its
        memory, only this container is told to end.
        """
        end = time.monotonic() + TAKEN_SECONDS
        while not file.exists() and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)
        return file.exists()

    async def _unless_stopped(self, awaitable: Any) -> Any:
        """Wait for an awaitable. Returns None if SIGTERM comes first."""
        task, stop = asyncio.ensure_future(awaitable), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when="FIRST_COMPLETED")
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stop.cancel()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward a request of the program to the gateway, with the episode's key."""
        url = f"{self.settings.worker}{request.path_qs}"
        body = request.content if request.can_read_body else None
        return await relay(
            self.session, request, url, {"Authorization": f"Bearer {self.key}"}, body
        )


def _left(directory: Path, judged: bool) -> dict[str, Any]:
    """Collect what a program has left.

    Parameters
    ----------
    directory
        The directory that the pod's containers share.
    judged
        True if a verifier judges the program: collect artifacts, not a result.

    Returns
    -------
    `status` is None if the program was killed. `refused` and `artifacts_refused` say why the result
    or the artifacts could not be read.

    """
    status = _tail(directory / wire.STATUS, len("255\n"))
    text, refused, files, unread = None, None, None, None
    try:
        if judged:
            files = artifacts.to_json(artifacts.collect(str(directory)))
        else:
            text = result.read_text(directory / wire.RESULT)
    except artifacts.ArtifactsError as error:
        unread = str(error)
    except result.ResultError as error:
        refused = str(error)
    return {
        "status": _status_of(status),
        "errors": _tail(directory / wire.ERRORS, SHOWN_BYTES) or "",
        "result": text,
        "refused": refused,
        "artifacts": files,
        "artifacts_refused": unread,
    }


def _status_of(text: str | None) -> int | None:
    """Parse the file of the exit status. Other contents, written by the program, are a failure."""
    if not text:
        return None
    status = int(text) if re.fullmatch(r"[0-9]+\n?", text) else 1
    return status if status < MOST_STATUS else 1


def _tail(path: Path, most: int) -> str | None:
    """Return the last bytes of a plain file as text, or None if there is no such file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
            return file.read(most).decode(errors="replace")
    except OSError:
        return None


async def serve(variables: Mapping[str, str]) -> None:
    """Play one episode. Raises KeyError if a variable is missing; else as Sidecar.run."""
    settings = Settings.read(variables)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        sidecar = Sidecar(settings, session)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, sidecar.stop.set)
        model = web.Application()
        model.router.add_route("*", "/{path:.*}", sidecar.forward)
        runner = web.AppRunner(model, handler_cancellation=True, access_log=None)
        await runner.setup()
        if settings.port is not None:
            await web.TCPSite(runner, "127.0.0.1", settings.port).start()
        try:
            await sidecar.run()
        finally:
            await runner.cleanup()


def main() -> int:
    """Run the sidecar. Returns the exit status."""
    try:
        asyncio.run(serve(os.environ))
    except (OSError, aiohttp.ClientError) as error:
        print(f"error: the worker cannot be reached: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
