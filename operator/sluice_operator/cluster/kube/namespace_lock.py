"""Locks of the namespaces that an installation works in, so that two never run the same jobs.

A lock is a Lease in the namespace that names the installation (its namespace and its election
Lease) and that the installation's leader renews. It is in the namespace of the jobs because that is
the only place that two operators can both see, whatever each of them watches. An operator that
watches all namespaces also holds `default`, so that a second such operator meets it before there is
a job. Another installation can take a namespace over after the Lease has run out: when its holder
is gone, or has no jobs there and no longer renews it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime

import structlog

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import KubeObject

NAME = "rljobs.sluice.dev"
SECONDS = 45
RENEW_SECONDS = 15.0
# Fewer than the API client has connections, so that passes over jobs do not wait for renewals.
RENEWALS_AT_ONCE = 16
AGAIN_SECONDS = 3.0
ALWAYS = "default"  # a namespace that every cluster has

log = structlog.get_logger(__name__)


class HeldError(Exception):
    """Another installation works in a namespace. The text says which one, and what to do."""

    def __init__(self, namespace: str, holder: str) -> None:
        super().__init__(
            f"namespace {namespace} belongs to another operator of RLJobs, {holder} "
            f"(namespace/lease), which renews the Lease {NAME} there: two would run the same jobs. "
            "Uninstall one of them, or give them different namespaces (watchNamespaces)"
        )


class NamespaceLocks:
    """The locks of one installation."""

    def __init__(
        self,
        api: Api,
        installation: str,
        occupied: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the locks without taking any of them.

        Parameters
        ----------
        api
            The API server.
        installation
            Name that all replicas of an installation share.
        occupied
            Returns the namespaces that have jobs.
        clock
            Monotonic seconds.

        """
        self._api, self._installation, self._clock = api, installation, clock
        self._occupied = occupied
        self._settled: frozenset[str] = frozenset()
        self._held: set[str] = set()
        # The holder and renewal time of foreign Leases, and when this process first saw them.
        self._others: dict[str, tuple[str, float]] = {}
        # Why this operator does not work; empty if no other installation is in its way.
        self.refusal = ""

    async def settle(self, namespaces: Iterable[str]) -> None:
        """Wait until all these namespaces are locked. They stay locked even without jobs."""
        self._settled = frozenset(namespaces)
        while True:
            try:
                for namespace in sorted(self._settled):
                    await self._take(namespace)
            except HeldError as error:
                if self.refusal != str(error):
                    log.error("cannot start", error=str(error))
                self.refusal = str(error)
            except errors.ApiError as error:
                log.warning("cannot read the locks of namespaces", error=str(error))
            else:
                self.refusal = ""
                return
            await asyncio.sleep(AGAIN_SECONDS)

    async def may_work_in(self, namespace: str) -> bool:
        """Return True if this installation holds the namespace; lock it if it is free."""
        if namespace in self._held:
            return True
        is_new = namespace not in self._others
        try:
            await self._take(namespace)
        except HeldError as error:
            if is_new:
                log.warning("ignoring a namespace", error=str(error))
            return False
        return True

    async def keep(self) -> None:
        """Renew for ever. Raises HeldError if another installation has taken a namespace over."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Renew each Lease once, and give up namespaces that are gone or have no jobs.

        Raises HeldError.
        """
        self._held &= self._settled | set(self._occupied())
        limit = asyncio.Semaphore(RENEWALS_AT_ONCE)
        renewals = (self._renew(namespace, limit) for namespace in sorted(self._held))
        for result in await asyncio.gather(*renewals, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _renew(self, namespace: str, limit: asyncio.Semaphore) -> None:
        async with limit:
            try:
                await self._write(namespace, await self._read(namespace))
            except errors.NotFoundError:
                # The namespace is gone.
                self._held.discard(namespace)
            except errors.ApiError as error:
                log.warning(
                    "a namespace's lease is not renewed", namespace=namespace, error=str(error)
                )

    async def _take(self, namespace: str) -> None:
        """Write the Lease if it is free: absent, held by this installation, or run out.

        Raises HeldError.
        """
        try:
            await self._write(namespace, await self._read(namespace))
        except (errors.ForbiddenError, errors.NotFoundError) as error:
            # A namespace that is being deleted accepts no Lease, but its jobs still have to end.
            if namespace not in self._held:
                log.warning(
                    "working in a namespace without a lock", namespace=namespace, error=str(error)
                )
        self._held.add(namespace)
        self._others.pop(namespace, None)

    async def _read(self, namespace: str) -> KubeObject | None:
        try:
            return await self._api.get(path("Lease", namespace, NAME))
        except errors.NotFoundError:
            return None

    async def _write(self, namespace: str, stored: KubeObject | None) -> None:
        now = clock.micro_text(datetime.now(UTC))
        spec = {
            "holderIdentity": self._installation,
            "leaseDurationSeconds": SECONDS,
            "renewTime": now,
        }
        lease: KubeObject = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        if stored is None:
            metadata = {"name": NAME, "namespace": namespace}
            await self._api.create(collection("Lease", namespace), lease | {"metadata": metadata})
            return
        self._check_silent(namespace, stored.get("spec") or {})
        # If two installations take the Lease at once, the server refuses one of them.
        version = stored["metadata"]["resourceVersion"]
        metadata = {"name": NAME, "namespace": namespace, "resourceVersion": version}
        await self._api.replace(path("Lease", namespace, NAME), lease | {"metadata": metadata})

    def _check_silent(self, namespace: str, spec: KubeObject) -> None:
        """Raise HeldError unless this installation holds the Lease or the Lease has run out.

        It has run out if it did not change for its duration, measured with this process's clock.
        """
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._installation):
            return
        seen, since = self._others.get(namespace, ("", 0.0))
        text = f"{holder} {spec.get('renewTime')}"
        if text != seen:
            self._others[namespace] = (text, self._clock())
            raise HeldError(namespace, holder)
        if self._clock() - since < (spec.get("leaseDurationSeconds") or SECONDS):
            raise HeldError(namespace, holder)
