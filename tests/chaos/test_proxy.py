"""Each harm does its own to a connection of its caller; others never notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.chaos.proxy import SLOW_SECONDS, Harm, Proxy

BLINK, DEADLINE = 0.3, 10.0


class Pair:
    """A proxy before a server that answers each line with the same line.

    Callers are identified by their ports.
    """

    def __init__(self, proxy: Proxy, port: int) -> None:
        self.proxy = proxy
        self._port = port
        self.heard: list[bytes] = []
        self.names: dict[int, str] = {}

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.heard.append(line)
            writer.write(line)
        writer.close()

    async def call(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection of `name`, which has been answered once."""
        self.proxy.caller_of = lambda peer, port: name
        reader, writer = await asyncio.open_connection(self.proxy.host, self._port)
        assert await exchange(reader, writer, b"hello\n") == b"hello\n"
        return reader, writer


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes
) -> bytes:
    writer.write(line)
    return await asyncio.wait_for(reader.readline(), DEADLINE)


async def silent(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), BLINK)
    except TimeoutError:
        return True
    return False


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with Proxy("127.77.0.2", lambda peer, port: "") as proxy:
        ends = Pair(proxy, 0)
        server = await asyncio.start_server(ends.echo, "127.0.0.1", 0)
        ends._port = server.sockets[0].getsockname()[1]
        await proxy.listen(ends._port)
        yield ends
    server.close()


async def test_a_partition_holds_both_directions_and_loses_nothing(pair: Pair) -> None:
    reader, writer = await pair.call("worker")
    pair.proxy.inflict("worker", Harm.PARTITION)
    writer.write(b"held\n")
    assert await silent(reader)
    assert b"held\n" not in pair.heard
    pair.proxy.heal("worker")
    assert await asyncio.wait_for(reader.readline(), DEADLINE) == b"held\n"


async def test_a_connection_that_ends_in_a_partition_ends_for_the_server_when_it_heals(
    pair: Pair,
) -> None:
    reader, writer = await pair.call("worker")
    pair.proxy.inflict("worker", Harm.PARTITION)
    writer.write(b"last\n")
    writer.write_eof()
    assert await silent(reader)
    pair.proxy.heal("worker")
    assert await asyncio.wait_for(reader.read(), DEADLINE) == b"last\n"


async def test_who_is_not_harmed_is_answered(pair: Pair) -> None:
    worker, trainer = await pair.call("worker"), await pair.call("trainer")
    pair.proxy.inflict("worker", Harm.PARTITION)
    assert await exchange(*trainer, b"mine\n") == b"mine\n"
    worker[1].write(b"held\n")
    assert await silent(worker[0])


async def test_a_slow_link_holds_each_piece_for_a_while(pair: Pair) -> None:
    reader, writer = await pair.call("worker")
    pair.proxy.inflict("worker", Harm.SLOW)
    loop = asyncio.get_running_loop()
    start = loop.time()
    assert await exchange(reader, writer, b"slow\n") == b"slow\n"
    assert (
        loop.time() - start >= 2 * SLOW_SECONDS
    )  # there and back; never less, whatever the machine does


async def test_a_lost_answer_is_never_given_and_its_connection_is_reset(pair: Pair) -> None:
    reader, writer = await pair.call("worker")
    pair.proxy.inflict("worker", Harm.LOST_ANSWERS)
    writer.write(b"lost\n")
    assert await silent(reader)
    assert b"lost\n" in pair.heard
    pair.proxy.heal("worker")
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), DEADLINE)


async def test_a_half_closed_connection_ends_for_the_caller_whose_requests_still_arrive(
    pair: Pair,
) -> None:
    reader, writer = await pair.call("worker")
    pair.proxy.inflict("worker", Harm.HALF_CLOSE)
    assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
    writer.write(b"unanswered\n")
    async with asyncio.timeout(DEADLINE):
        while b"unanswered\n" not in pair.heard:
            await asyncio.sleep(0.01)


async def test_a_reset_ends_connections_and_new_ones_until_it_heals(pair: Pair) -> None:
    reader, _ = await pair.call("worker")
    pair.proxy.inflict("worker", Harm.RESET)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), DEADLINE)
    with pytest.raises(ConnectionResetError):
        await pair.call("worker")
    pair.proxy.heal("worker")
    await pair.call("worker")
