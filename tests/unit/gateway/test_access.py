"""Connections without a key are bounded, and closed after a while."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sluice_rollout.episode import Episode
from sluice_rollout.gateway import access
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.gateway.server import LOOPBACK, Server
from tests.unit.gateway.gateway_tools import open_registry, play_episode, token_ids
from tests.unit.rollout.scripted_engine import Script

MODELS = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n"
POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
PROMPT = '{"prompt": "hi"}'
COMPLETION = POST + "Authorization: Bearer {}\r\nContent-Length: 16\r\n\r\n"


async def connected(
    registry: EpisodeRegistry, said: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(LOOPBACK, registry.server.port)
    writer.write(said.encode())
    await writer.drain()
    return reader, writer


async def closed(reader: asyncio.StreamReader) -> bool:
    """True if the other side closes the connection within a second."""
    try:
        async with asyncio.timeout(1):
            await reader.read()
    except TimeoutError:
        return False
    except ConnectionError:
        pass  # closed without more ado
    return True


@pytest.mark.parametrize(
    "said",
    [
        pytest.param("", id="nothing"),
        pytest.param(POST, id="half of a header"),
        pytest.param(MODELS.format("sk-0.0.0-x"), id="a wrong key"),
        pytest.param(POST + "Content-Length: 9\r\n\r\n", id="a body that does not come"),
    ],
)
async def test_a_connection_without_a_key_is_closed(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "UNAUTHENTICATED_SECONDS", 0.1)

    async def play(episode: Episode) -> None:
        reader, writer = await connected(registry, said)
        assert await closed(reader)
        writer.close()
        kept, writer = await connected(registry, MODELS.format(episode.gateway.api_key))
        assert not await closed(kept), "a key keeps it open"
        writer.close()

    async with open_registry(tmp_path) as registry:
        assert "before the model generated" in (await play_episode(registry, play, Script())).error


async def test_a_request_may_take_longer_than_the_limit_for_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "UNAUTHENTICATED_SECONDS", 0.1)

    class Slow(Script):
        async def generate(self, *arguments: object, **options: object) -> object:  # type: ignore[override]
            await asyncio.sleep(0.5)
            return await super().generate(*arguments, **options)  # type: ignore[arg-type]

    async def play(episode: Episode) -> None:
        reader, writer = await connected(
            registry, COMPLETION.format(episode.gateway.api_key) + PROMPT
        )
        assert b"200 OK" in await reader.readline()
        writer.close()

    async with open_registry(tmp_path) as registry:
        assert (await play_episode(registry, play, Slow(token_ids("hello")))).response == "hello"


async def test_connections_without_a_key_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "MAX_UNAUTHENTICATED", 4)
    monkeypatch.setattr(access, "UNAUTHENTICATED_SECONDS", 600)

    async def play(episode: Episode) -> None:
        kept, _ = await connected(registry, MODELS.format(episode.gateway.api_key))
        await kept.readline()
        most = access.MAX_UNAUTHENTICATED + access.MAX_UNAUTHENTICATED_PER_KEY
        strangers = [await connected(registry, "") for _ in range(most + 3)]
        ended = [await closed(reader) for reader, _ in strangers[:4]]
        assert ended == [True, True, True, False]
        assert not await closed(kept)
        for _, writer in strangers:
            writer.close()

    async with open_registry(tmp_path) as registry:
        assert "before the model generated" in (await play_episode(registry, play, Script())).error


async def test_the_connection_of_a_pod_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "UNAUTHENTICATED_SECONDS", 0.1)

    async def join(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(str(message.data))
        return socket

    server = Server("model", join=("/join", join))
    await server.start()
    try:
        url = f"http://{LOOPBACK}:{server.port}/join"
        async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
            await asyncio.sleep(0.5)
            await socket.send_str("there")
            assert (await socket.receive()).data == "there"
    finally:
        await server.close()
