"""A fake SGLang server without a model, for engines that die or misbehave in an update.

`python -m tests.integration.weights.fake_engine` prints its port. GET /received returns the bytes
it got and the seconds of its pauses.
"""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

groups: dict[str, Any] = {}
one_by_one = asyncio.Lock()
state: dict[str, Any] = {"weight_version": "default", "bytes": 0, "sum": 0, "calls": []}
state["pauses"] = []
paused_at = 0.0


def join(body: dict[str, Any]) -> None:
    rank, size, name = body["rank_offset"], body["world_size"], body["group_name"]
    timeout = timedelta(seconds=60)
    store = TCPStore(
        body["master_address"], body["master_port"], size, is_master=False, timeout=timeout
    )
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(body["backend"]),
        PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    groups[name] = group


def receive(body: dict[str, Any]) -> None:
    sizes = [
        getattr(torch, d).itemsize * torch.Size(s).numel()
        for d, s in zip(body["dtypes"], body["shapes"], strict=True)
    ]
    data = torch.empty(
        sum(sizes), dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    dist.broadcast(data, src=0, group=groups[body["group_name"]])
    state["bytes"] += data.numel()
    state["sum"] += int(data.sum())
    state["weight_version"] = body.get("weight_version", state["weight_version"])


async def answer(request: web.Request) -> web.Response:
    global paused_at
    path, body = request.path, json.loads(await request.text() or "{}")
    state["calls"].append(path)
    if path == "/pause_generation":
        paused_at = time.monotonic()
    if path == "/continue_generation":
        state["pauses"].append(time.monotonic() - paused_at)
    if path == "/init_weights_update_group":
        await asyncio.to_thread(join, body)
    if path == "/update_weights_from_distributed":
        # As SGLang's scheduler does; the next request arrives while this bucket is on its way.
        async with one_by_one:
            await asyncio.to_thread(receive, body)
    return web.json_response({"success": True})


async def main() -> None:
    app = web.Application()
    app.router.add_get(
        "/openapi.json", lambda _: answer_json({"paths": {"/begin_weight_update": {}}})
    )
    app.router.add_get(
        "/model_info", lambda _: answer_json({"weight_version": state["weight_version"]})
    )
    app.router.add_get("/received", lambda _: answer_json(state))
    app.router.add_post("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def answer_json(value: Any) -> web.Response:
    return web.json_response(value)


if __name__ == "__main__":
    asyncio.run(main())
