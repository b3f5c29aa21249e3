"""Pools of engines in short, as `Client.list_pools` gives them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sluice.engines import pool_launch
from sluice_operator.cluster.local.pools import RunningPool

_ANSWER_SECONDS = 3.0
_NOT_SEEN = "the operator has not seen the newest spec yet: is it running?"


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """A pool in short, with what `kubectl get rlenginepools` shows.

    `where` is `namespace/name` for a pool of a cluster, and the directory of its logs for a pool of
    this machine. `engines` are those that answer, of all, such as `4/6`. `message` says why they do
    not answer. `created` is an ISO 8601 time. This machine does not tell `jobs`,
    `tokens_per_second` and `created`.
    """

    name: str
    where: str
    model: str
    engines: str
    ready: bool
    message: str = ""
    jobs: int | None = None
    tokens_per_second: float | None = None
    created: str | None = None


def cluster_pool(stored: dict[str, Any]) -> PoolSummary:
    """Summarize an RLEnginePool object as the API server returns it."""
    metadata, status = stored["metadata"], stored.get("status") or {}
    conditions = status.get("conditions") or []
    condition: dict[str, Any] = next(
        (entry for entry in conditions if entry["type"] == "Ready"), {}
    )
    seen = status.get("observedGeneration") == metadata.get("generation") and bool(condition)
    rate = status.get("tokensPerSecond")
    return PoolSummary(
        metadata["name"],
        f"{metadata['namespace']}/{metadata['name']}",
        stored["spec"]["model"]["path"],
        status.get("engines", ""),
        ready=seen and condition["status"] == "True",
        message=condition.get("message", "") if seen else _NOT_SEEN,
        jobs=status.get("jobs", 0),
        tokens_per_second=float(rate) if rate else None,
        created=metadata.get("creationTimestamp"),
    )


def local_pool(pool: RunningPool, answering: int) -> PoolSummary:
    """Summarize a pool of this machine, so many of whose engines answer."""
    total, logs = len(pool.addresses), str(pool.logs)
    ready = answering == total
    message = "" if ready else f"{answering} of {total} engines answer; see the logs in {logs}"
    return PoolSummary(
        pool.name, logs, pool.spec.model.path, f"{answering}/{total}", ready=ready, message=message
    )


async def answering_engines(pools: Sequence[RunningPool]) -> list[int]:
    """Ask the engines of this machine's pools, and return how many of each pool answer."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(*(_answering(pool, session) for pool in pools))


async def _answering(pool: RunningPool, session: aiohttp.ClientSession) -> int:
    health = pool_launch(pool.spec).health
    return sum(await asyncio.gather(*(_answers(session, f"{url}{health}") for url in pool.urls)))


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
