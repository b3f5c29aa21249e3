"""Tokens that the engines of pools generate per second, from the counters of their /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import KubeObject, PoolKey, uid

SECONDS = 3.0
AT_ONCE = 32
_COUNTER = "sglang:generation_tokens_total"

# Returns the tokens that an engine has generated since its start; None without an answer.
Ask = Callable[[str], Awaitable[float | None]]


async def generated_tokens(url: str) -> float | None:
    """Ask an engine. url: http://host:port."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session,
            session.get(f"{url}/metrics") as response,
        ):
            if response.status != 200:
                return None
            return counted(await response.text())
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def counted(text: str) -> float:
    """Return the sum of the counter over all series of an engine; 0 before the first token."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == _COUNTER
    )


class TokenMeter:
    """Asks engines from time to time, and remembers the last answer of each."""

    def __init__(
        self, ask: Ask = generated_tokens, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock = ask, clock
        # Time and number of tokens of the last answer, by the uid of the pod.
        self._counts: dict[str, tuple[float, float]] = {}
        self._rates: dict[PoolKey, float] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    def rate(self, pool: PoolKey) -> float | None:
        """Return tokens per second; None if no engine has answered twice."""
        return self._rates.get(pool)

    async def measure(self, pools: Mapping[PoolKey, Sequence[KubeObject]]) -> list[PoolKey]:
        """Ask all engines that are ready, and return the pools whose rate has changed.

        pools: the pods of each pool.
        """
        before, counts = self._rates, self._counts
        self._rates, self._counts = {}, {}
        await asyncio.gather(
            *(
                self._measure(pool, pod, counts.get(uid(pod)))
                for pool, pods in pools.items()
                for pod in pods
                if podstate.is_ready(pod) and podstate.address(pod)
            )
        )
        return [pool for pool in pools if self.rate(pool) != before.get(pool)]

    async def _measure(
        self, pool: PoolKey, pod: KubeObject, last: tuple[float, float] | None
    ) -> None:
        address = podstate.address(pod)
        host = f"[{address}]" if ":" in address else address
        async with self._limit:
            tokens = await self._ask(f"http://{host}:{names.PORTS['http']}")
        if tokens is None:
            return
        now = self._clock()
        self._counts[uid(pod)] = (now, tokens)
        # A counter starts from 0 again when its container does.
        if last is not None and tokens >= last[1] and now > last[0]:
            rate = (tokens - last[1]) / (now - last[0])
            self._rates[pool] = self._rates.get(pool, 0.0) + rate
