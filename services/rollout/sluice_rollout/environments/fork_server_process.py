"""The worker's handle on a fork server, whose interpreter runs fork_server.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice.engines.protocol import EngineError
from sluice_rollout.environments import directories, orphan_reaper, process
from sluice_rollout.environments.process import ChildProcess, OutputPipe, ProgramExit

_END_SECONDS = 10.0
_FULL_SECONDS = 0.01
_GRACE_SECONDS = 2.0
_MESSAGE_BYTES = 4096


class ForkServerLostError(EngineError):
    """The fork server has died, or cannot be started.

    This is not an episode's fault, so its group is played again.
    """


class ForkServerProcess(ChildProcess):
    """A fork server that is running.

    Attributes
    ----------
    directory
        The fork server's working directory.
    ready
        "" once the play module has loaded, or the reason why it cannot be forked. Cancelled if the
        process ends before that.
    lost
        True if the process has ended or was killed.

    """

    def __init__(self, directory: str, channel: socket.socket) -> None:
        super().__init__()
        self.directory = directory
        self.started, self.lost = time.monotonic(), False
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channel = channel
        self._transport: asyncio.SubprocessTransport | None = None
        self._numbers: Iterator[int] = itertools.count()
        self._children: dict[int, asyncio.Future[int]] = {}
        self._groups: dict[int, int] = {}

    @classmethod
    async def start(
        cls, words: Sequence[str], directory: str, variables: Mapping[str, str]
    ) -> ForkServerProcess:
        """Start a fork server in a directory. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                _, server = await asyncio.get_running_loop().subprocess_exec(
                    lambda: cls(directory, ours),
                    *words,
                    stdin=theirs.fileno(),
                    cwd=directory,
                    env=variables,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        if not server.lost:  # it may have ended already
            asyncio.get_running_loop().add_reader(ours, server._receive)
        return server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def process_exited(self) -> None:
        super().process_exited()
        self._receive()  # its last messages
        self._mark_lost()

    def kill(self) -> None:
        """Kill the process. Its running episodes are lost."""
        self._mark_lost()
        if not self.exited.is_set():
            assert self._transport
            # transport.kill() may take the exit status away from the code that waits for it.
            process.kill_group(self._transport.get_pid())

    def _mark_lost(self) -> None:
        if self.lost:
            return
        self.lost = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel)
        self._channel.close()
        loop.call_later(_GRACE_SECONDS, self.kill)  # it ends by itself, with a status
        if not self.ready.done():
            self.ready.cancel()
        for child in self._children.values():
            if not child.done():
                child.set_exception(ForkServerLostError("the fork server of the episode has died"))
                child.exception()  # retrieved, so that asyncio does not warn about it

    async def end(self) -> ProgramExit:
        """Wait until the process and all that it has started have ended.

        Raises ForkServerLostError if the process does not end.
        """
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self.exited.wait()
        except TimeoutError:
            raise ForkServerLostError("the fork server does not end") from None
        await asyncio.to_thread(orphan_reaper.end_processes, self.directory)
        assert self._transport
        ended = await self.ended(self._transport)
        await asyncio.to_thread(directories.remove, self.directory)
        return ended

    async def run(self, directory: str, variables: Mapping[str, str]) -> ProgramExit:
        """Play an episode in a child until the child ends or this task is cancelled.

        All processes that the child has started are ended as well.

        Raises
        ------
        OSError
            The child cannot be forked.
        ForkServerLostError
            The fork server has died.
        SurvivorError
            A process of the episode does not end.

        """
        async with OutputPipe.open() as out, OutputPipe.open() as err:
            number = next(self._numbers)
            ended = self._children[number] = asyncio.get_running_loop().create_future()
            try:
                with _request(directory, variables) as request:
                    await self._send({"play": number}, [request, out.end, err.end])
                for output in (out, err):
                    output.hand_over()
                status = await asyncio.shield(ended)  # `_end` waits for it as well
            finally:
                await asyncio.shield(self._end(number, directory))
            await process.wait_closed(out.closed, err.closed)
            return ProgramExit(status, out.tail.text, err.tail.text)

    async def _end(self, number: int, directory: str) -> None:
        ended = self._children[number]
        try:
            async with asyncio.timeout(_END_SECONDS):
                if not ended.done():
                    await self._send({"end": number})
                    await asyncio.wait([ended])
        except (TimeoutError, ForkServerLostError):
            self.kill()  # it hangs
        del self._children[number]
        if group := self._groups.pop(number, None):
            process.kill_group(group)  # the fork server died before it could
        await asyncio.to_thread(orphan_reaper.end_processes, directory)

    async def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        while not self.lost:
            try:
                socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)
            except BlockingIOError:
                await asyncio.sleep(_FULL_SECONDS)
            except ConnectionError:
                self._mark_lost()
            else:
                return
        raise ForkServerLostError("the fork server has died")

    def _receive(self) -> None:
        """Handle the messages that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while not self.lost:
                try:
                    text = self._channel.recv(_MESSAGE_BYTES)
                except ConnectionError:
                    text = b""
                if not text:
                    self._mark_lost()
                else:
                    self._handle(json.loads(text))

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.ready.set_result(message["ready"])
            return
        if "pid" in message:
            self._groups[message["forked"]] = message["pid"]
            return
        self._groups.pop(message["ended"], None)
        child = self._children.get(message["ended"])
        if child is None or child.done():
            return
        if "error" in message:
            child.set_exception(OSError(message["error"]))
        else:
            child.set_result(message["status"])


@contextlib.contextmanager
def _request(directory: str, variables: Mapping[str, str]) -> Iterator[int]:
    """Open a descriptor with a child's request.

    Only the child reads it, so an episode's keys are never in the memory of the fork server.
    """
    descriptor = os.memfd_create("episode")
    try:
        with open(descriptor, "w", closefd=False) as file:
            json.dump({"directory": directory, "variables": dict(variables)}, file)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
