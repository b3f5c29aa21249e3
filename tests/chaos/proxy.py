"""A TCP proxy before a real server, which harms the connections of one caller on command.

    async with Proxy("127.77.1.2", caller_of) as proxy:
        await proxy.listen(7700)  # 127.77.1.2:7700 -> 127.0.0.1:7700
        proxy.inflict("worker", Harm.PARTITION)
        proxy.heal("worker")

It knows only bytes and connections. The proxy of an engine's HTTP (tests/integration/proxy.py)
knows requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

CHUNK_BYTES = 64 << 10
SLOW_SECONDS = 0.2
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


class Harm(StrEnum):
    """A fault of a network.

    Bytes that TCP would repeat are held; a stream that has lost some is reset.
    """

    # No byte passes in either direction until it heals, not even the end of a connection.
    PARTITION = "partition"
    # Each piece of at most 64 KiB takes `SLOW_SECONDS` more, one after the other.
    SLOW = "slow link"
    # Requests arrive and answers are lost: connections that lost some are reset when it heals.
    LOST_ANSWERS = "lost answers"
    # Callers read the end of the stream, once; what they still send arrives, unanswered.
    HALF_CLOSE = "half-close"
    # New connections are reset as they open, and open ones at once.
    RESET = "reset"


class Proxy:
    """A proxy of one address.

    `caller_of` maps (address and port of a connection's other end, port of the proxy) to the
    caller's name.
    """

    def __init__(
        self, host: str, caller_of: Callable[[tuple[str, int], int], str], target: str = "127.0.0.1"
    ) -> None:
        self.host = host
        self.target = target
        self.caller_of = caller_of
        self.harms: dict[str, Harm] = {}
        # Bytes that reached the other side, by caller.
        self.passed: dict[str, int] = {}
        self._connections: set[_Connection] = set()
        self._servers: dict[int, asyncio.Server] = {}
        self._change = asyncio.Event()

    async def __aenter__(self) -> Proxy:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()
        tasks = [connection.task for connection in self._connections]
        for connection in list(self._connections):
            connection.reset()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def listen(self, port: int, target_port: int | None = None) -> None:
        """Pass connections on to `target_port` of the target; by default the same number."""
        if port in self._servers:
            return
        where = port if target_port is None else target_port

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(reader, writer, port, where)

        self._servers[port] = await asyncio.start_server(serve, self.host, port)

    def inflict(self, caller: str, harm: Harm) -> None:
        self.harms[caller] = harm
        for connection in self._of(caller):
            connection.suffer(harm)
        self._changed()

    def heal(self, caller: str) -> None:
        self.harms.pop(caller, None)
        for connection in self._of(caller):
            if connection.torn:
                connection.reset()
        self._changed()

    async def changed(self) -> None:
        await self._change.wait()

    def _of(self, caller: str) -> list[_Connection]:
        return [connection for connection in self._connections if connection.caller == caller]

    def _changed(self) -> None:
        """Wake all waiting tasks, each of which has its event."""
        self._change.set()
        self._change = asyncio.Event()

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        port: int,
        target_port: int,
    ) -> None:
        connection = _Connection(
            self, self.caller_of(writer.get_extra_info("peername"), port), reader, writer
        )
        self._connections.add(connection)
        try:
            await connection.run(target_port)
        except (OSError, asyncio.CancelledError):
            connection.reset()  # what broke one side breaks the other
        finally:
            self._connections.discard(connection)


class _Connection:
    """A caller's connection, and the proxy's connection to the target."""

    def __init__(
        self, proxy: Proxy, caller: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.caller = caller
        # Bytes of an answer are lost, so that the stream can no longer be parsed.
        self.torn = False
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._target: asyncio.StreamWriter | None = None

    async def run(self, target_port: int) -> None:
        if self._harm is Harm.RESET:
            raise ConnectionResetError
        await self._free()
        answers, self._target = await asyncio.open_connection(self._proxy.target, target_port)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(
                self._ending_quietly(self._pump(self._reader, self._target, answers=False))
            )
            pumps.create_task(self._ending_quietly(self._pump(answers, self._writer, answers=True)))
        for writer in (self._target, self._writer):
            writer.close()

    def suffer(self, harm: Harm) -> None:
        """Apply a harm that begins to an open connection."""
        if harm is Harm.RESET:
            self.reset()
        elif harm is Harm.HALF_CLOSE and not self.torn:
            self.torn = True
            with contextlib.suppress(OSError):  # the caller has just gone
                self._writer.write_eof()

    def reset(self) -> None:
        for writer in (self._writer, self._target):
            if writer is not None and not writer.transport.is_closing():
                peer: socket.socket = writer.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                writer.transport.abort()
        if self.task is not asyncio.current_task():
            self.task.cancel()

    @property
    def _harm(self) -> Harm | None:
        return self._proxy.harms.get(self.caller)

    async def _free(self) -> None:
        while self._harm is Harm.PARTITION:
            await self._proxy.changed()

    async def _ending_quietly(self, pump: Coroutine[Any, Any, None]) -> None:
        """Reset both sides if one was reset, without an exception group from the task group."""
        try:
            await pump
        except OSError:
            self.reset()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        while data := await source.read(CHUNK_BYTES):
            if await self._passes(answers=answers):
                sink.write(data)
                await sink.drain()
                self._proxy.passed[self.caller] = self._proxy.passed.get(self.caller, 0) + len(data)
        if await self._passes(answers=answers):
            sink.write_eof()

    async def _passes(self, *, answers: bool) -> bool:
        """Wait as long as the network holds a piece; False if the piece is lost."""
        await self._free()
        if self._harm is Harm.SLOW:
            await asyncio.sleep(SLOW_SECONDS)
            await self._free()
        if answers and self._harm is Harm.LOST_ANSWERS:
            self.torn = True
        return not (answers and self.torn)
