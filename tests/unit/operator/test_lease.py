"""The lock that makes a leader, in plain data, over an API of the test's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.lease import Lease, Timing, elect

TIMING = Timing(3)


class Leases:
    """A store for one Lease, with versions as an API server keeps them.

    broken: the store cannot be reached.
    """

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.broken = False
        self.version = 0

    async def get(self, path: str) -> dict[str, Any]:
        self._check()
        if self.stored is None:
            raise errors.NotFoundError("no such lease", 404)
        return self.stored

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.stored is not None:
            raise errors.AlreadyExistsError("there", 409)
        return self._store(body)

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise errors.ConflictError("changed", 409)
        return self._store(body)

    @property
    def holder(self) -> str:
        return str(self.stored["spec"]["holderIdentity"]) if self.stored else ""

    def _check(self) -> None:
        if self.broken:
            raise errors.UnavailableError("no answer")

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.stored = {
            **body,
            "metadata": body["metadata"] | {"resourceVersion": str(self.version)},
        }
        return self.stored


@pytest.fixture
def leases() -> Leases:
    return Leases()


def candidate(leases: Leases, name: str) -> tuple[Lease, asyncio.Task[None], asyncio.Event]:
    """(lock, its election, set while it leads)."""
    leading = asyncio.Event()

    async def lead() -> None:
        leading.set()

    lease = Lease(leases, "n", "operator", name, TIMING)  # type: ignore[arg-type]
    return lease, asyncio.create_task(elect(lease, TIMING, lead)), leading


async def test_one_of_two_leads_and_hands_over_when_it_ends(leases: Leases) -> None:
    first, running, leads = candidate(leases, "a")
    await asyncio.wait_for(leads.wait(), 20)
    _, other, other_leads = candidate(leases, "b")
    await asyncio.sleep(0.2)
    assert not other_leads.is_set()
    running.cancel()
    await first.release()
    assert leases.holder == ""
    await asyncio.wait_for(other_leads.wait(), 20)
    assert leases.holder == "b"
    assert leases.stored is not None
    assert leases.stored["spec"]["leaseTransitions"] == 2
    other.cancel()


async def test_a_moment_without_an_api_server_costs_no_lease(leases: Leases) -> None:
    _, running, leads = candidate(leases, "a")
    await asyncio.wait_for(leads.wait(), 20)
    leases.broken = True
    await asyncio.sleep(1.2)
    leases.broken = False
    await asyncio.sleep(1.2)
    assert not running.done()
    running.cancel()


async def test_a_leader_who_cannot_renew_gives_up_before_the_lease_runs_out(leases: Leases) -> None:
    _, running, leads = candidate(leases, "a")
    await asyncio.wait_for(leads.wait(), 20)
    leases.broken = True
    await asyncio.wait_for(running, TIMING.lease + 1.5)


async def test_nobody_releases_what_is_not_his(leases: Leases) -> None:
    _, running, leads = candidate(leases, "a")
    await asyncio.wait_for(leads.wait(), 20)
    await Lease(leases, "n", "operator", "b", TIMING).release()  # type: ignore[arg-type]
    assert leases.holder == "a"
    running.cancel()


async def test_of_two_who_write_at_once_one_loses(leases: Leases) -> None:
    locks = [Lease(leases, "n", "operator", name, TIMING) for name in "ab"]  # type: ignore[arg-type]
    record = type("Record", (), {"holder_identity": "a"})()
    await locks[0].create("operator", "n", record)
    for lock in locks:
        await lock.get("operator", "n")
    assert [await lock.update("operator", "n", record) for lock in locks] == [True, False]
