"""`sluice pool list`: the pools of this machine, with the engines that answer."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from sluice.engines import pool_launch
from sluice_cli.output import Format, written
from sluice_operator.cluster.local import pools
from sluice_operator.cluster.local.pools import RunningPool

_ANSWER_SECONDS = 3.0


def list_text(form: Format) -> str:
    """Return the pools that run on this machine, by name."""
    entries = asyncio.run(_entries(pools.running()))
    if form is not Format.TEXT:
        return written(entries, form)
    if not entries:
        return "no pool runs on this machine; sluice pool up starts one"
    return "\n".join(
        f"{entry['name']}: {entry['model']}, {entry['ready']} of {len(entry['engines'])} engine(s) "
        f"answer ({', '.join(entry['engines'])}), process {entry['pid']}, logs in {entry['logs']}"
        for entry in entries
    )


async def _entries(found: list[RunningPool]) -> list[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return [await _entry(pool, session) for pool in found]


async def _entry(pool: RunningPool, session: aiohttp.ClientSession) -> dict[str, Any]:
    health = pool_launch(pool.spec).health
    urls = [f"http://{address}" for address in pool.addresses]
    answers = await asyncio.gather(*(_answers(session, f"{url}{health}") for url in urls))
    return {
        "name": pool.name,
        "model": pool.spec.model.path,
        "engines": urls,
        "ready": sum(answers),
        "pid": pool.pid,
        "logs": str(pools.directory(pool.name) / "logs"),
    }


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
