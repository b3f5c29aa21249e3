"""Leases of the namespaces that an installation works in, over an API of the test's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.namespace_lock import (
    ALWAYS,
    NAME,
    RENEWALS_AT_ONCE,
    HeldError,
    NamespaceLocks,
)

NAMESPACES = [f"team-{number}" for number in range(5000)]
Lease = dict[str, Any]


class Leases:
    """The Leases of all namespaces but of those in `gone`. peak: most requests at a time."""

    def __init__(self) -> None:
        self.stored: dict[str, Lease] = {}
        self.gone: set[str] = set()
        self.written: list[str] = []
        self.running = self.peak = 0

    async def get(self, path: str) -> Lease:
        namespace = await self._reached(path)
        if namespace not in self.stored or namespace in self.gone:
            raise errors.NotFoundError("no such lease", 404)
        return self.stored[namespace]

    async def create(self, path: str, body: Lease) -> Lease:
        namespace = await self._reached(path)
        if namespace in self.gone:
            raise errors.NotFoundError("no such namespace", 404)
        return self._store(namespace, body)

    async def replace(self, path: str, body: Lease) -> Lease:
        return self._store(await self._reached(path), body)

    async def _reached(self, path: str) -> str:
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return path.split("/namespaces/")[1].split("/")[0]

    def _store(self, namespace: str, body: Lease) -> Lease:
        assert body["metadata"]["name"] == NAME
        self.written.append(namespace)
        self.stored[namespace] = {**body, "metadata": body["metadata"] | {"resourceVersion": "1"}}
        return self.stored[namespace]


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
def occupied() -> set[str]:
    """The namespaces that have jobs."""
    return set(NAMESPACES)


@pytest.fixture
async def territory(leases: Leases, occupied: set[str]) -> NamespaceLocks:
    """An installation for all namespaces that works in 5,000 of them."""
    mine = NamespaceLocks(leases, "sluice-system/sluice", lambda: occupied)  # type: ignore[arg-type]
    await mine.settle([ALWAYS])
    for namespace in NAMESPACES:
        assert await mine.may_work_in(namespace)
    leases.written.clear()
    leases.peak = 0
    return mine


async def test_many_namespaces_are_renewed_side_by_side(
    territory: NamespaceLocks, leases: Leases
) -> None:
    """Renewing one Lease after the other would take longer than a Lease lasts."""
    await territory.renew()
    assert sorted(leases.written) == sorted([ALWAYS, *NAMESPACES])
    assert leases.peak == RENEWALS_AT_ONCE


async def test_a_namespace_without_jobs_is_given_up_and_taken_again(
    territory: NamespaceLocks, leases: Leases, occupied: set[str]
) -> None:
    occupied -= set(NAMESPACES[10:])
    await territory.renew()
    assert sorted(leases.written) == sorted([ALWAYS, *NAMESPACES[:10]])
    occupied.add(NAMESPACES[11])
    assert await territory.may_work_in(NAMESPACES[11])
    await territory.renew()
    assert leases.written.count(NAMESPACES[11]) == 2


async def test_a_namespace_that_is_gone_is_asked_for_once(
    territory: NamespaceLocks, leases: Leases
) -> None:
    """The jobs of the namespace are not known yet, because a watch may report them late."""
    leases.gone = set(NAMESPACES[10:])
    await territory.renew()
    assert sorted(leases.written) == sorted([ALWAYS, *NAMESPACES[:10]])
    leases.peak = 0
    await territory.renew()
    assert leases.peak == len([ALWAYS, *NAMESPACES[:10]])


async def test_a_namespace_that_another_has_taken_ends_the_work(
    territory: NamespaceLocks, leases: Leases
) -> None:
    leases.stored[NAMESPACES[7]]["spec"]["holderIdentity"] = "elsewhere/other"
    with pytest.raises(HeldError, match=r"namespace team-7 belongs to .* elsewhere/other"):
        await territory.renew()
