"""Locks of the namespaces that an installation works in, so that two never run the same jobs.

Each such namespace holds a Lease that names the installation (its namespace and the Lease of its
election) and that its leader renews. It lies where the jobs are, because that is the one place that
both of two operators can see, whatever each of them watches. One that watches all namespaces holds
`default` besides those with jobs, so that a second one of its kind meets it before there is a job.
An installation that is gone is followed after the Lease has run out; so is one that has no jobs in
a namespace any more, and renews its Lease there no longer.
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
RENEWALS_AT_ONCE = 16
"""Fewer than the API client has connections, so that passes over jobs do not wait for renewals."""
AGAIN_SECONDS = 3.0
ALWAYS = "default"
"""Namespace that every cluster has."""

log = structlog.get_logger(__name__)


class HeldError(Exception):
    """Another installation works in a namespace. The text says which, and what to do."""

    def __init__(self, namespace: str, holder: str) -> None:
        super().__init__(
            f"namespace {namespace} belongs to another operator of RLJobs, {holder} "
            f"(namespace/lease), which renews the Lease {NAME} there: two would run the same jobs. "
            "Uninstall one of them, or give them different namespaces (watchNamespaces)"
        )


class NamespaceLocks:
    """installation: what all replicas of one release call themselves. occupied: namespaces that
    have jobs. clock: seconds that only go forward.
    """

    def __init__(
        self,
        api: Api,
        installation: str,
        occupied: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._installation, self._clock = api, installation, clock
        self._occupied = occupied
        self._settled: frozenset[str] = frozenset()
        self._held: set[str] = set()
        self._others: dict[str, tuple[str, float]] = {}
        self.refusal = ""
        """Why this operator does not work; empty: nobody is in its way."""

    async def settle(self, namespaces: Iterable[str]) -> None:
        """Wait until all these namespaces are ours. They stay so, with jobs and without."""
        self._settled = frozenset(namespaces)
        while True:
            try:
                for namespace in sorted(self._settled):
                    await self._take(namespace)
            except HeldError as error:
                if self.refusal != str(error):
                    log.error("does not start", error=str(error))
                self.refusal = str(error)
            except errors.ApiError as error:
                log.warning("cannot see whose the namespaces are", error=str(error))
            else:
                self.refusal = ""
                return
            await asyncio.sleep(AGAIN_SECONDS)

    async def is_ours(self, namespace: str) -> bool:
        """True where we may work; takes a namespace that is nobody's."""
        if namespace in self._held:
            return True
        known = self._others.get(namespace)
        try:
            await self._take(namespace)
        except HeldError as error:
            if known is None:
                log.warning("leaves a namespace alone", error=str(error))
            return False
        return True

    async def keep(self) -> None:
        """Renew for ever. Raises HeldError if another has come while we were away."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Renew each Lease once, some at a time; give up namespaces that are gone or have no jobs.

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
            except errors.NotFoundError:  # the namespace is gone
                self._held.discard(namespace)
            except errors.ApiError as error:
                log.warning(
                    "a namespace's lease is not renewed", namespace=namespace, error=str(error)
                )

    async def _take(self, namespace: str) -> None:
        """Write the Lease: where there is none, where it is ours,
        or where its holder has long been silent.
        """
        try:
            await self._write(namespace, await self._read(namespace))
        except (errors.ForbiddenError, errors.NotFoundError) as error:
            # A namespace that is being deleted takes nothing new, but what is in it must still be
            # ended.
            if namespace not in self._held:
                log.warning(
                    "nothing keeps another operator out", namespace=namespace, error=str(error)
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
        version = stored["metadata"][
            "resourceVersion"
        ]  # of two that take it at once, one is refused
        metadata = {"name": NAME, "namespace": namespace, "resourceVersion": version}
        await self._api.replace(path("Lease", namespace, NAME), lease | {"metadata": metadata})

    def _check_silent(self, namespace: str, spec: KubeObject) -> None:
        """Raise HeldError unless the Lease is ours, or did not change for as long as it lasts, by
        our own clock.
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
