"""Our container (`python -m sluice_rollout.environments.sidecar`) in an episode's pod, or its
verifier's.

It joins a worker as soon as it runs, and waits for an episode: such pods are the warm pool. Then it
writes the row for the user's container, whose shell has waited for it. The program there finds its
model at an address that only this pod can reach: the episode's key is put in here, so that no
program ever holds it. When the program has ended, this sends what it left behind, and ends too; as
it does when the worker says that the episode is over, and whoever made the pod takes it away.

It knows nothing of Kubernetes, and needs no account.
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
from sluice_rollout.environments import artifacts, result
from sluice_rollout.relay import relay

JOIN_SECONDS = 1800.0
"""A worker listens once its engine has started."""
RETRY_SECONDS = 1.0
LOOK_SECONDS = 0.1
TAKEN_SECONDS = 1.0
MOST_STATUS = 256
SHOWN_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """worker: the address of its gateway. role: episode, verifier. directory: what is shared with
    the user's container. port: of the model, on the pod's loopback; None: a verifier has none.
    """

    worker: str
    token: str
    pod: str
    role: str
    directory: Path
    port: int | None

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Settings:
        role = variables["SLUICE_ROLE"]
        return cls(
            variables["SLUICE_WORKER"],
            variables["SLUICE_EPISODE_TOKEN"],
            variables["SLUICE_POD"],
            role,
            Path(variables["SLUICE_EPISODE"]),
            int(variables["SLUICE_PORT_MODEL"]) if role == wire.EPISODE else None,
        )


@dataclass(slots=True)
class Sidecar:
    """key: of the episode, once there is one. stop: set by SIGTERM."""

    settings: Settings
    session: aiohttp.ClientSession
    key: str = ""
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Play one episode. Raises OSError or ClientError where the worker cannot be joined."""
        async with await self._join() as socket:
            if assignment := await self._next(socket):
                await self._play(socket, assignment)

    async def _join(self) -> aiohttp.ClientWebSocketResponse:
        """Try until the worker listens."""
        end = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                return await self.session.ws_connect(
                    f"{self.settings.worker}{wire.PATH}",
                    params={"pod": self.settings.pod, "role": self.settings.role},
                    headers={"Authorization": f"Bearer {self.settings.token}"},
                    heartbeat=wire.HEARTBEAT_SECONDS,
                    max_msg_size=wire.MOST_BYTES,
                )
            except (aiohttp.ClientConnectionError, TimeoutError):
                if time.monotonic() > end or self.stop.is_set():
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def _next(self, socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any] | None:
        """The episode; None where the pod or the worker ends before there is one."""
        message = await self._unless_stopped(socket.receive())
        if message is None or message.type is not aiohttp.WSMsgType.TEXT:
            return None
        assignment: dict[str, Any] = json.loads(message.data)
        return assignment

    async def _play(
        self, socket: aiohttp.ClientWebSocketResponse, assignment: dict[str, Any]
    ) -> None:
        """Let the program play; then send what it left, unless nobody listens any more."""
        directory, self.key = self.settings.directory, assignment["key"]
        lines = [f"export {name}={shlex.quote(text)}\n" for name, text in assignment["variables"]]
        (directory / wire.VARIABLES).write_text("".join(lines))
        files = assignment["artifacts"]
        if files is not None:
            await asyncio.to_thread(artifacts.prepare, str(directory), artifacts.from_json(files))
        new = directory / f"{wire.ROW}.new"
        new.write_text(json.dumps(assignment["row"]))
        new.rename(directory / wire.ROW)  # the shell may look at any time
        ended = asyncio.create_task(self._until_status(directory / wire.STATUS))
        over = asyncio.create_task(socket.receive())  # nothing more is said: it is the end
        await self._unless_stopped(asyncio.wait({ended, over}, return_when="FIRST_COMPLETED"))
        for task in (ended, over):
            task.cancel()
        if self.stop.is_set() and await self._is_taken(directory / wire.TAKEN):
            return  # the pod is lost, and nobody at fault
        judged = files is not None and self.settings.role == wire.EPISODE
        left = await asyncio.to_thread(_left, directory, judged)
        with contextlib.suppress(ConnectionError):
            await socket.send_json(left)

    async def _until_status(self, file: Path) -> None:
        while not file.exists():
            await asyncio.sleep(LOOK_SECONDS)

    async def _is_taken(self, file: Path) -> bool:
        """The program was told to end too, as all of a pod is that is deleted. Where it was killed
        alone, for its memory say, only this container is.
        """
        end = time.monotonic() + TAKEN_SECONDS
        while not file.exists() and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)
        return file.exists()

    async def _unless_stopped(self, wanted: Any) -> Any:
        """The outcome; None where SIGTERM comes first."""
        task, stop = asyncio.ensure_future(wanted), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when="FIRST_COMPLETED")
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stop.cancel()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """A request of the program's, with the episode's key."""
        url = f"{self.settings.worker}{request.path_qs}"
        body = request.content if request.can_read_body else None
        return await relay(
            self.session, request, url, {"Authorization": f"Bearer {self.key}"}, body
        )


def _left(directory: Path, judged: bool) -> dict[str, Any]:
    """The remains of a program. status: None where it was killed. refused: why its result was not
    read. judged: they are artifacts, in place of a result.
    """
    status = _end_of(directory / wire.STATUS, len("255\n"))
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
        "errors": _end_of(directory / wire.ERRORS, SHOWN_BYTES) or "",
        "result": text,
        "refused": refused,
        "artifacts": files,
        "artifacts_refused": unread,
    }


def _status_of(text: str | None) -> int | None:
    """The exit status in its file. A program may write there too: what is none is a failure."""
    if not text:
        return None
    status = int(text) if re.fullmatch(r"[0-9]+\n?", text) else 1
    return status if status < MOST_STATUS else 1


def _end_of(path: Path, most: int) -> str | None:
    """The last bytes of a plain file, as text; None where there is none."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
            return file.read(most).decode(errors="replace")
    except OSError:
        return None


async def serve(variables: Mapping[str, str]) -> None:
    """Play one episode. Raises KeyError for a variable that is missing; else as Sidecar.run."""
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
    try:
        asyncio.run(serve(os.environ))
    except (OSError, aiohttp.ClientError) as error:
        print(f"error: the worker cannot be reached: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
