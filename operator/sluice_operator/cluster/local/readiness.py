"""Readiness probes of a laptop's pods: as for a kubelet, a container is ready while they succeed.

Start-up and liveness probes are ignored on purpose. A process that ends is noticed at once, a hang
is found by the progress deadline, and a laptop should not kill what a person wants to look at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from sluice_operator.cluster.local.translate import LOOPBACK, PodError

# Longest time between two probes: the jobs of a laptop are small, and people watch them.
PERIOD_SECONDS = 1.0


def url(container: Mapping[str, Any], ports: Mapping[str, int]) -> str:
    """Return the URL of a container's readiness probe; empty if it has none.

    ports: ports of this machine by the names of container ports.
    """
    if "readinessProbe" not in container:
        return ""
    action = container["readinessProbe"].get("httpGet")
    if action is None:
        raise PodError("a readinessProbe needs httpGet on a laptop")
    if action["port"] not in ports:
        raise PodError(f"readinessProbe: {action['port']!r} is not the name of a container port")
    return f"http://{LOOPBACK}:{ports[action['port']]}{action.get('path', '/')}"


async def answers(probe: Mapping[str, Any], url: str) -> AsyncIterator[bool]:
    """Yield the container's readiness each time that it changes; it is False at first."""
    ready, failures = False, 0
    timeout = aiohttp.ClientTimeout(total=float(probe.get("timeoutSeconds", 1)))
    period = min(float(probe.get("periodSeconds", 10)), PERIOD_SECONDS)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)
    ) as session:
        while True:
            good = await _is_good(session, url)
            failures = 0 if good else failures + 1
            if good != ready and (good or failures >= int(probe.get("failureThreshold", 3))):
                ready = good
                yield ready
            await asyncio.sleep(period)


async def _is_good(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, allow_redirects=False) as answer:
            return 200 <= answer.status < 400
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
