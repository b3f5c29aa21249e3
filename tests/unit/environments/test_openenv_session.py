"""What a server of OpenEnv answers is checked before an episode uses it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from sluice_rollout.environments.openenv_session import (
    OpenEnvSession,
    RefusedActionError,
    ServerError,
    StepResult,
    open_session,
)

# What the server answers to a request for its schema, and to each message after the first.
SCHEMAS = web.AppKey("schemas", list[str])
ANSWERS = web.AppKey("answers", list[str])


async def _schema(request: web.Request) -> web.Response:
    return web.Response(text=request.app[SCHEMAS][-1], content_type="application/json")


async def _session(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    answers = iter(['{"type": "state", "data": {}}', *request.app[ANSWERS]])
    async for message in socket:
        if message.type is not WSMsgType.TEXT or json.loads(message.data)["type"] == "close":
            break
        await socket.send_str(next(answers))
    return socket


@pytest_asyncio.fixture
async def server() -> AsyncIterator[TestServer]:
    app = web.Application()
    app[SCHEMAS], app[ANSWERS] = ['{"action": {}}'], []
    app.add_routes([web.get("/schema", _schema), web.get("/ws", _session)])
    server = TestServer(app)
    async with server:
        yield server


async def _step(server: TestServer, answer: str) -> StepResult:
    server.app[ANSWERS].append(answer)
    async with open_session(str(server.make_url("")).rstrip("/"), 5.0) as (session, _):
        assert isinstance(session, OpenEnvSession)
        return await session.step({"message": "hi"})


def _observation(**fields: Any) -> str:
    return json.dumps({"type": "observation", "data": fields})


@pytest.mark.parametrize(
    ("fields", "reward"),
    [({"reward": None}, 0.0), ({"reward": 2}, 2.0), ({"reward": True, "done": True}, 1.0)],
)
async def test_an_answer_is_a_step(
    server: TestServer, fields: dict[str, Any], reward: float
) -> None:
    step = await _step(server, _observation(observation={"text": "a"}, **fields))
    assert step == StepResult({"text": "a"}, reward, bool(fields.get("done")))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("no JSON", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a message of OpenEnv"),
        ('{"type": "observation", "data": "text"}', "not a message of OpenEnv"),
        ('{"type": "error", "data": null}', "not a message of OpenEnv"),
        ('{"type": "error", "data": {"code": [], "message": "odd"}}', r"odd \(\[\]\)"),
        (_observation(observation="a"), "observation: expected an object"),
        (_observation(observation={}, reward="1"), "reward is str '1', expected a number"),
        (_observation(observation={}, reward=float("nan")), "reward is nan"),
        (_observation(observation={}, reward=[0.5]), "reward is list"),
    ],
)
async def test_any_other_answer_is_an_error_of_the_server(
    server: TestServer, answer: str, reason: str
) -> None:
    with pytest.raises(ServerError, match=reason):
        await _step(server, answer)


async def test_a_refused_action_is_for_the_model(server: TestServer) -> None:
    error = {"code": "VALIDATION_ERROR", "message": "no such move", "errors": ["x"]}
    with pytest.raises(RefusedActionError, match=r'no such move: \["x"\]'):
        await _step(server, json.dumps({"type": "error", "data": error}))


@pytest.mark.parametrize("schema", ["[]", "{", '{"action": []}'])
async def test_a_server_without_a_schema_of_actions_is_refused(
    server: TestServer, schema: str
) -> None:
    server.app[SCHEMAS].append(schema)
    with pytest.raises(ServerError, match=r"schema|JSON"):
        await _step(server, _observation(observation={}))
