"""Batched requests to SGLang: the client, and the plugin's middleware that answers each."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import uvicorn

from sluice.engines.protocol import EngineError
from sluice.engines.sglang import request_batching
from sluice.engines.sglang.request_batching import RequestBatcher
from sluice.runtime.pod_env import free_port
from tests.unit.engines.conftest import Plugin

DEADLINE = 20.0


class Server:
    """The plugin's door with an engine behind it that says a request's prompt again.

    portions: names of the requests that came together; begun: in the order in which they began.
    """

    def __init__(self, plugin: Plugin) -> None:
        self.portions: list[list[str]] = []
        self.begun: list[str] = []
        self.paused = False
        # `held` in a request's body waits for it.
        self.held = asyncio.Event()
        # Held requests whose client has left.
        self.left: set[str] = set()
        turns = plugin("http.control_priority").RequestQueue(lambda: self.paused)
        self.door = plugin("http.request_batching").RequestBatching(
            self.other, turns, self.generate
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []

        async def noted() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message["body"])
                if not message["more_body"]:
                    self._note(b"".join(parts))
            return message

        await self.door(scope, noted, send)

    def _note(self, body: bytes) -> None:
        self.portions.append([request["rid"] for request in json.loads(body)])

    async def other(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"no such path"})

    async def generate(
        self, request: dict[str, Any], _: Any, receive: Any, send_part: Any
    ) -> tuple[int, bytes]:
        for part in request.get("parts", ()):
            send_part(part.encode())
            await asyncio.sleep(0)
        self.begun.append(request["rid"])
        if request.get("held"):
            gone = asyncio.create_task(receive())
            held = asyncio.create_task(self.held.wait())
            await asyncio.wait({gone, held}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left.add(request["rid"])
            gone.cancel()
        if "raises" in request:
            raise KeyError(request["raises"])
        if "size" in request:
            return 200, b"x" * request["size"]
        return request.get("status", 200), json.dumps(request["input_ids"]).encode()


@pytest.fixture
async def server(plugin: Plugin) -> Server:
    return Server(plugin)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="warning", lifespan="off", interface="asgi3")
    http = uvicorn.Server(config)
    task = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        http.should_exit = http.force_exit = True
        await asyncio.wait_for(task, DEADLINE)


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[RequestBatcher]:
    async with aiohttp.ClientSession() as session, asyncio.timeout(DEADLINE):
        requests = RequestBatcher(session, url)
        yield requests
        await requests.close()


def body(name: Any, *prompt: int, **more: Any) -> dict[str, Any]:
    return {"rid": str(name), "input_ids": list(prompt), **more}


async def test_requests_of_one_turn_are_sent_together_and_answered_separately(
    server: Server,
) -> None:
    async with serving(server) as url, asking(url) as engine:
        answers = await asyncio.gather(*(engine.ask(body(n, n, n + 1)) for n in range(100)))
        assert answers == [(200, f"[{n}, {n + 1}]") for n in range(100)]
        assert sorted(map(len, server.portions)) == [4, 32, 32, 32]
        await asyncio.gather(*(engine.ask(body(n)) for n in range(3)))
        assert server.portions[4:] == [["0", "1", "2"]]


def test_long_prompts_are_sent_with_fewer_others() -> None:
    half = request_batching._MOST_TOKENS // 2
    lengths = [half, half, 1, 3 * half, 1, 1]
    requests: Any = [SimpleNamespace(body={"input_ids": range(length)}) for length in lengths]
    portions = [
        [len(request.body["input_ids"]) for request in some]
        for some in request_batching.portions(requests)
    ]
    assert portions == [[half, half], [1], [3 * half], [1, 1]]


async def test_a_slow_request_does_not_hold_others_up(server: Server) -> None:
    async with serving(server) as url, asking(url) as engine:
        slow = asyncio.create_task(engine.ask(body("slow", 1, held=True)))
        quick = [asyncio.create_task(engine.ask(body(n, n))) for n in range(5)]
        assert await asyncio.gather(*quick) == [(200, f"[{n}]") for n in range(5)]
        assert len(server.portions) == 1
        assert not slow.done()
        server.held.set()
        assert await slow == (200, "[1]")


async def test_parts_of_an_answer_come_before_it_and_belong_to_its_request(
    server: Server,
) -> None:
    parts: dict[str, list[str]] = {"held": [], "quick": []}
    async with serving(server) as url, asking(url) as engine:
        held = body("held", 1, parts=["a", "b"], held=True)
        waiting = asyncio.create_task(engine.ask(held, parts["held"].append))
        quick = await engine.ask(body("quick", 2, parts=["c"]), parts["quick"].append)
        while parts["held"] != ["a", "b"]:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        server.held.set()
        assert (await waiting, quick) == ((200, "[1]"), (200, "[2]"))
    assert parts["quick"] == ["c"]


async def test_a_part_that_cannot_be_read_fails_its_request_alone(server: Server) -> None:
    def refuse(text: str) -> None:
        raise EngineError(f"not a part: {text}")

    async with serving(server) as url, asking(url) as engine:
        other = asyncio.create_task(engine.ask(body("other", 2)))
        with pytest.raises(EngineError, match="not a part: x"):
            await engine.ask(body("bad", 1, parts=["x"]), refuse)
        assert await other == (200, "[2]")


async def test_a_refusal_or_an_error_concerns_one_request(server: Server) -> None:
    async with serving(server) as url, asking(url) as engine:
        answers = await asyncio.gather(
            engine.ask(body("fine", 1)),
            engine.ask(body("refused", 2, status=400)),
            engine.ask(body("broken", 3, raises="x")),
        )
    assert list(answers) == [(200, "[1]"), (400, "[2]"), (500, "KeyError: 'x'")]


async def test_no_request_begins_in_a_pause(server: Server) -> None:
    server.paused = True
    async with serving(server) as url, asking(url) as engine:
        tasks = [asyncio.create_task(engine.ask(body(n, n))) for n in range(40)]
        while len(server.portions) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not server.begun
        server.paused = False
        await asyncio.gather(*tasks)
    assert len(server.begun) == 40


async def test_the_connection_is_closed_once_all_its_requests_are_cancelled(server: Server) -> None:
    async with serving(server) as url, asking(url) as engine:
        tasks = [asyncio.create_task(engine.ask(body(n, n, held=True))) for n in range(3)]
        while len(server.begun) < 3:
            await asyncio.sleep(0.01)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.sleep(0.05)
        assert not server.left
        tasks[2].cancel()
        while server.left != {"0", "1", "2"}:
            await asyncio.sleep(0.01)
        assert not engine._sent


async def test_a_cancelled_request_leaves_the_others_their_answers(server: Server) -> None:
    async with serving(server) as url, asking(url) as engine:
        tasks = [asyncio.create_task(engine.ask(body(n, n, held=True))) for n in range(3)]
        never_sent = asyncio.create_task(engine.ask(body("never", 1)))
        await asyncio.sleep(0)
        never_sent.cancel()
        while len(server.begun) < 3:
            await asyncio.sleep(0.01)
        tasks[1].cancel()
        server.held.set()
        assert list(await asyncio.gather(tasks[0], tasks[2])) == [(200, "[0]"), (200, "[2]")]
    assert server.portions == [["0", "1", "2"]]


async def test_a_large_answer_is_read(server: Server) -> None:
    long = list(range(1_000_000))
    async with serving(server) as url, asking(url) as engine:
        (_, text), other = await asyncio.gather(
            engine.ask(body("long", *long)), engine.ask(body("short", 1))
        )
    assert json.loads(text) == long
    assert other == (200, "[1]")


async def test_an_answer_is_not_kept_until_the_last_one_is_there(server: Server) -> None:
    size = 70_000_000  # more than 64 MiB
    async with serving(server) as url, asking(url) as engine:
        held = asyncio.create_task(engine.ask(body("held", 1, held=True)))
        tracemalloc.start()
        _, text = await engine.ask(body("long", 1, size=size))
        assert len(text) == size
        del text
        await asyncio.sleep(0.05)
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert server.portions == [["long", "held"]]
        server.held.set()
        await held
    assert kept < size / 4


async def test_the_servers_refusal_of_all_is_the_answer_to_each(server: Server) -> None:
    async with serving(server.other) as url, asking(url) as engine:
        answers = await asyncio.gather(*(engine.ask(body(n)) for n in range(2)))
    assert answers == [(404, "no such path")] * 2


@pytest.mark.parametrize("sent", [b"{", b"{}", b"[1]"], ids=["no JSON", "an object", "a number"])
async def test_a_body_that_is_not_a_list_of_requests_is_refused(
    server: Server, sent: bytes
) -> None:
    assert await posted(server, sent) == (400, b"/sluice_generate: expected a JSON list of objects")


async def test_a_server_answers_an_empty_list_to_tell_that_it_takes_batches(server: Server) -> None:
    assert await posted(server, b"[]") == (200, b'{"parts": true}')


async def posted(server: Server, sent: bytes) -> tuple[int, bytes]:
    async with (
        serving(server.door) as url,
        aiohttp.ClientSession() as session,
        session.post(url + request_batching.PATH, data=sent) as answer,
    ):
        return answer.status, await answer.read()


@asynccontextmanager
async def saying(words: bytes) -> AsyncIterator[str]:
    """A server that says these words to whoever asks, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(words)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(HEAD + chunk(b"1 200 2\n[]"), id="between two answers"),
        pytest.param(HEAD + chunk(b"1 200 2\n[]0 200 9\n[1"), id="in an answer"),
        pytest.param(HEAD + chunk(b"1 200 2\n[]") + chunk(b""), id="as if it were all"),
        pytest.param(HEAD + chunk(b"1 200 2\n[]0 200 9\n[1") + chunk(b""), id="too short"),
    ],
)
async def test_a_connection_that_ends_fails_the_requests_without_an_answer(words: bytes) -> None:
    async with saying(words) as url, asking(url) as engine:
        lost, answered = await asyncio.gather(
            engine.ask(body(0)), engine.ask(body(1)), return_exceptions=True
        )
    assert answered == (200, "[]")
    assert isinstance(lost, aiohttp.ServerDisconnectedError)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"hello\n", id="no numbers"),
        pytest.param(b"7 200 2\n[]", id="no such request"),
        pytest.param(b"x" * 1_000_000, id="no line"),
    ],
)
async def test_an_answer_that_is_not_the_plugins_is_an_error(answer: bytes) -> None:
    async with saying(HEAD + chunk(answer) + chunk(b"")) as url, asking(url) as engine:
        with pytest.raises(EngineError, match="not an answer of sluice's plugin"):
            await engine.ask(body(0))


async def test_a_lost_engine_is_reported_to_each_request() -> None:
    async with asking(f"http://127.0.0.1:{free_port()}") as engine:
        errors = await asyncio.gather(
            *(engine.ask(body(n)) for n in range(2)), return_exceptions=True
        )
    assert [type(error) for error in errors] == [aiohttp.ClientConnectorError] * 2
