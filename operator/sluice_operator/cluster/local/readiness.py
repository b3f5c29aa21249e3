"""Readiness probes of a laptop's pods, with a kubelet's meaning: a container is ready while its
probe succeeds.

Start-up and liveness probes are left to a cluster on purpose: here a process that ends is seen at
once, and one that hangs is the progress deadline's matter; nobody is helped by a laptop that kills
what a person wants to look at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from sluice_operator.cluster.local.translate import LOOPBACK, PodError

PERIOD_SECONDS = 1.0
"""At most, between two looks: a laptop's jobs are small, and their users watch."""


def url(container: Mapping[str, Any], ports: Mapping[str, int]) -> str:
    """Where to ask; empty: the container has no probe.

    ports: container port's name -> port of this machine.
    """
    if "readinessProbe" not in container:
        return ""
    action = container["readinessProbe"].get("httpGet")
    if action is None:
        raise PodError("a readinessProbe needs httpGet on a laptop")
    if action["port"] not in ports:
        raise PodError(f"readinessProbe: {action['port']!r} is not the name of a container port")
    return f"http://{LOOPBACK}:{ports[action['port']]}{action.get('path', '/')}"


async def answers(probe: Mapping[str, Any], where: str) -> AsyncIterator[bool]:
    """The container's readiness, each time that it changes. It begins with False."""
    ready, failures = False, 0
    timeout = aiohttp.ClientTimeout(total=float(probe.get("timeoutSeconds", 1)))
    period = min(float(probe.get("periodSeconds", 10)), PERIOD_SECONDS)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)
    ) as session:
        while True:
            good = await _is_good(session, where)
            failures = 0 if good else failures + 1
            if good != ready and (good or failures >= int(probe.get("failureThreshold", 3))):
                ready = good
                yield ready
            await asyncio.sleep(period)


async def _is_good(session: aiohttp.ClientSession, where: str) -> bool:
    try:
        async with session.get(where, allow_redirects=False) as answer:
            return 200 <= answer.status < 400
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
