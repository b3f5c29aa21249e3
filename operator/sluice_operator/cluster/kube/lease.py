"""Leader election: one of several operators works, the others watch and wait.

It uses the election of the Kubernetes client with another lock. The client's own lock loads the
generated models, gives up if the API server cannot be reached for a moment, and does not hand the
lease over at a clean exit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.baselock import BaseLock

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import KubeObject

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations of an election, in seconds.

    lease: after this time a silent leader is replaced. It gives up after two thirds of it.
    """

    lease: float = 15.0

    @property
    def renew_deadline(self) -> float:
        return self.lease * 2 / 3

    @property
    def retry(self) -> float:
        return max(1.0, self.lease * 2 / 15)


class Lease(BaseLock):  # type: ignore[misc]
    """The lock: a Lease of coordination.k8s.io, read and written as plain data."""

    def __init__(self, api: Api, namespace: str, name: str, identity: str, timing: Timing) -> None:
        super().__init__(name, namespace, identity)
        self._api, self._timing = api, timing
        self._stored: KubeObject | None = None

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        try:
            async with asyncio.timeout(self._timing.retry * 2):
                self._stored = await self._api.get(path("Lease", namespace, name))
        except errors.NotFoundError as error:
            return False, _client_error(404, str(error))
        except (errors.ApiError, TimeoutError) as error:
            return False, _client_error(
                getattr(error, "status", 0), str(error) or type(error).__name__
            )
        spec = self._stored.get("spec") or {}
        values = (
            spec.get(key)
            for key in ("holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime")
        )
        return True, LeaderElectionRecord(*(str(value) if value else None for value in values))

    async def create(
        self, name: str, namespace: str, election_record: LeaderElectionRecord
    ) -> bool:
        return await self._write(election_record.holder_identity or "")

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        return await self._write(updated_record.holder_identity or "")

    async def release(self) -> None:
        """Give the lease up if this process holds it, so that others need not wait for its end."""
        exists, record = await self.get(self.name, self.namespace)
        if exists and record.holder_identity == self.identity:
            await self._write("")

    async def _write(self, holder: str) -> bool:
        # The write carries the version that was read, so the server accepts only one of two
        # candidates.
        try:
            async with asyncio.timeout(self._timing.retry * 2):
                if self._stored is None:
                    body = self._body(holder, {}, None)
                    self._stored = await self._api.create(collection("Lease", self.namespace), body)
                else:
                    body = self._body(
                        holder, self._stored["spec"], self._stored["metadata"]["resourceVersion"]
                    )
                    self._stored = await self._api.replace(
                        path("Lease", self.namespace, self.name), body
                    )
        except (errors.ApiError, TimeoutError) as error:
            self._stored = None
            log.warning("lease not written", error=str(error) or type(error).__name__)
            return False
        return True

    def _body(self, holder: str, spec: KubeObject, version: str | None) -> KubeObject:
        now = clock.micro_text(datetime.now(UTC))
        same = spec.get("holderIdentity") == holder
        changes = int(spec.get("leaseTransitions") or 0) + int(bool(holder) and not same)
        body: KubeObject = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": round(self._timing.lease),
                "acquireTime": spec["acquireTime"] if same and spec.get("acquireTime") else now,
                "renewTime": now,
                "leaseTransitions": changes,
            },
        }
        if version is not None:
            body["metadata"]["resourceVersion"] = version
        return body


async def elect(
    lease: Lease, timing: Timing, lead: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Wait for the lease, run `lead` while it is held, and return when it is lost."""

    async def lost() -> None:
        log.error("lost the lease", lease=lease.name)

    config = Config(lease, round(timing.lease), timing.renew_deadline, timing.retry, lead, lost)
    await LeaderElection(config).run()


def _client_error(status: int, message: str) -> ApiException:
    """Return an error of the client's type."""
    error = ApiException(status=status, reason=message)
    # The election creates the lease only if the code in the body is 404.
    error.body = json.dumps({"code": status})
    return error
