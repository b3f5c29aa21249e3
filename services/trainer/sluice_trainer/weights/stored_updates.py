"""Weight updates through a store: written to files, published, and announced to the rendezvous.

The trainer waits for the store, for `weightSync.timeoutSeconds` at most, and for no engine. A
version that the store has not taken is published while the trainer waits for samples, or never: the
next one depends on the last version in the store alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from sluice.runtime.pod_env import ConfigurationError
from sluice.stores import StoreError
from sluice.telemetry import logs
from sluice.weight_store.manifest import VersionId
from sluice.weight_store.publisher import PERMANENT, Publisher
from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.disk import VersionDirectories
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.transport import Transport

CALL_SECONDS = 30.0
PATIENCE_SECONDS = 600.0
# Name under which a failure of the store is counted.
STORE = "store"


class StoredUpdates:
    """The updates of one attempt of a trainer, on its rank 0."""

    def __init__(
        self,
        stub: rendezvous_pb2_grpc.RendezvousStub,
        caller: tuple[str, int],
        versions: VersionDirectories,
        files: Transport,
        publisher: Publisher,
        timeout: float,
    ) -> None:
        """Begin without a version.

        Parameters
        ----------
        stub
            Client of the rendezvous.
        caller
            Name and attempt of the trainer.
        versions
            Directories of this machine, in which versions are written before they are published.
        files
            Transport that writes them there.
        publisher
            Publishes them.
        timeout
            Time after which a store that fails is given up, in seconds.

        """
        self._stub, self._caller = stub, caller
        self._versions, self._files, self._publisher = versions, files, publisher
        self._timeout = timeout
        self._started = 0.0

    async def write(self, bucket: Bucket, version: int) -> None:
        if bucket.number == 0:
            self._started = time.monotonic()
        await self._files.stage(bucket, version)

    async def publish(self, version: int, base_digest: str) -> UpdateOutcome:
        """Publish the version that was written, and announce it.

        `base_digest` is that of the model that an adapter belongs to; empty for all weights. Raises
        ConfigurationError if the store refuses the first version for good.
        """
        written = time.monotonic()
        ledger = await self._ledger(pb.GetLedgerRequest())
        read, damaged = (ids(ledger.entries, f"weights_{name}") for name in ("reading", "damaged"))
        try:
            published = await asyncio.to_thread(
                self._publisher.publish,
                self._versions.path(version),
                version,
                base_digest=base_digest,
                read=read,
                damaged=damaged,
                seconds=self._timeout,
            )
        except StoreError as error:
            if self._publisher.newest is None and error.kind in PERMANENT:
                raise ConfigurationError(f"weightSync.store: {error}") from error
            logs.get().warning("cannot publish weights", version=version, reason=str(error))
            return UpdateOutcome((), {STORE: str(error)}, self._seconds(written), 0)
        await self._announce(version)
        return UpdateOutcome(
            (),
            {},
            self._seconds(written),
            published.bytes,
            full_bytes=published.full_bytes,
            delta_bytes=published.delta_bytes or 0,
        )

    def _seconds(self, written: float) -> dict[str, float]:
        return {"write": written - self._started, "publish": time.monotonic() - written}

    async def announced(self, version: int) -> bool:
        """Return True if `version` is in the store.

        A rendezvous that has restarted is told again.
        """
        newest = self._publisher.newest
        if newest is None or newest.version != version:
            return False
        if (await self._ledger(pb.GetLedgerRequest(joiners_to=version))).version != version:
            await self._announce(version)
        return True

    async def _announce(self, version: int) -> None:
        name, attempt = self._caller
        request = pb.BeginUpdateRequest(
            source=name, attempt=attempt, version=version, published=True
        )

        async def call() -> None:
            await self._stub.BeginUpdate(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)

        await rpc.retrying(call, what="BeginUpdate at the rendezvous", seconds=PATIENCE_SECONDS)

    async def _ledger(self, request: pb.GetLedgerRequest) -> pb.Ledger:
        async def call() -> pb.Ledger:
            ledger: pb.Ledger = await self._stub.GetLedger(
                request, metadata=rpc.metadata(), timeout=CALL_SECONDS
            )
            return ledger

        return await rpc.retrying(
            call, what="GetLedger at the rendezvous", seconds=PATIENCE_SECONDS
        )


def ids(entries: Iterable[pb.LedgerEntry], gauge: str) -> set[VersionId]:
    """Return the versions that engines report under the name of a gauge."""
    return {id_ for entry in entries if (id_ := _id(entry.gauges, gauge)) is not None}


def _id(gauges: Mapping[str, float], gauge: str) -> VersionId | None:
    version, attempt = gauges.get(gauge), gauges.get(f"{gauge}_attempt")
    # Doubles of another process: anything but whole numbers is no version.
    if version is None or attempt is None or not (version.is_integer() and attempt.is_integer()):
        return None
    return VersionId(int(version), int(attempt))
