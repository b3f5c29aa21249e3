"""Weights from a store (`weightSync.transport: store`), which the worker brings to its engine.

The rendezvous says which version is the newest. The worker fetches it while the engine generates,
and pauses the engine only to load it from the local disk. So an engine needs no connection from the
trainer. While the store does not answer, the engine works on with what it has, and the buffer
decides about samples by their weight version, as always.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sluice.api.groups.weight_sync import WeightSync
from sluice.engines.protocol import Control, EngineRefusedError
from sluice.stores import StoreError
from sluice.telemetry import logs
from sluice.weight_store.local_copy import LocalCopy
from sluice.weight_store.manifest import VersionError, VersionId
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_rollout import metrics

_LONGEST_BACK_OFF = 30.0
NOTHING = VersionId(-1, 0)


@dataclass(slots=True)
class StoredWeights:
    """Keeps one engine at the newest weights in the store."""

    sync: WeightSync
    control: Control
    copy: LocalCopy
    membership: Membership
    # What the engine serves; NOTHING after a failure that may have left a mixture; None at first.
    loaded: VersionId | None = None
    # Why the newest weights have not come; empty if they have, or are on their way.
    problem: str = ""
    _failures: int = 0
    # The newest version that could be reached only in part, or not at all.
    _unreachable: VersionId | None = None
    _same_model: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Follow the store for ever."""
        try:
            while True:
                seen = self.membership.news_count
                newest = self._newest()
                if newest is None or newest in (self.loaded, self._unreachable):
                    await self.membership.news(seen)
                elif not await self._follow(newest):
                    self._failures += 1
                    await asyncio.sleep(min(2.0**self._failures / 2, _LONGEST_BACK_OFF))
                else:
                    self._failures = 0
        finally:
            self.copy.stopped.set()

    def report(self, heartbeat: pb.Heartbeat) -> None:
        """Add to a heartbeat what the engine serves, and what the trainer must keep or send whole.

        The trainer reads the gauges in the ledger.
        """
        if self.loaded is not None:
            version, attempt = self.loaded
            heartbeat.loaded.CopyFrom(pb.StoredWeights(version=version, attempt=attempt))
        damaged = max((step.of for step in self.copy.damaged if not step.whole), default=None)
        for name, id_ in (("reading", self.copy.reading), ("damaged", damaged)):
            if id_ is not None:
                heartbeat.gauges[f"weights_{name}"] = id_.version
                heartbeat.gauges[f"weights_{name}_attempt"] = id_.attempt

    def _newest(self) -> VersionId | None:
        latest = self.membership.latest
        if latest is None or not latest.HasField("published"):
            return None
        return VersionId(latest.published.version, latest.published.attempt)

    async def _follow(self, newest: VersionId) -> bool:
        """Bring the engine as near to `newest` as possible. Returns False to be called again."""
        started, bytes_before = time.monotonic(), self.copy.fetched_bytes
        damaged = len(self.copy.damaged)
        try:
            held = await asyncio.to_thread(self.copy.update, newest)
        except (OSError, StoreError, VersionError) as error:
            metrics.STORE_FAILURES.labels("fetch").inc()
            self.problem = f"cannot fetch weights: {error}"
            logs.get().warning("cannot fetch weights", version=newest.version, reason=str(error))
            return False
        fetched = time.monotonic()
        metrics.STORE_BYTES.inc(self.copy.fetched_bytes - bytes_before)
        metrics.STORE_SECONDS.labels("fetch").observe(fetched - started)
        if len(self.copy.damaged) > damaged:
            metrics.STORE_FAILURES.labels("damaged").inc()
            logs.get().warning(
                "weights in the store were refused",
                steps=[
                    f"{s.of.directory} {'whole' if s.whole else 'delta'}" for s in self.copy.damaged
                ],
            )
        self._unreachable = newest if held != newest else None
        if held is not None and is_newer(held, self.loaded):
            try:
                await self._load(held)
            except EngineRefusedError as error:
                metrics.STORE_FAILURES.labels("load").inc()
                logs.get().warning("cannot load weights", version=held.version, reason=str(error))
                self.problem = f"cannot load weights: {error}"
                self.loaded, self._unreachable = NOTHING, None
                self.membership.beat()
                return False
            metrics.STORE_SECONDS.labels("load").observe(time.monotonic() - fetched)
            self.loaded = held
        self.problem = ""
        # Says also what was refused.
        self.membership.beat()
        return True

    async def _load(self, version: VersionId) -> None:
        """Load the copy into the engine, which stays paused if it raises EngineRefusedError."""
        control, mode = self.control, self.sync.pause_mode
        await control.learn()
        await self._compare_models()
        # An engine that holds several versions gets another one, which interrupts nothing.
        pauses = mode != "versions"
        flush = control.may_flush(mode)
        if pauses:
            await control.pause(mode)
        await control.load_from_disk(str(self.copy.path), version.version, flush=flush)
        if pauses and not flush:
            await control.try_flush()
        served = await control.version() if self.sync.verify else str(version.version)
        if served != str(version.version):
            raise EngineRefusedError(
                f"the engine says that it serves weight version {served}, expected "
                f"{version.version}"
            )
        if pauses:
            await control.resume()

    async def _compare_models(self) -> None:
        """Check that an engine that gets an adapter alone has read the trainer's model."""
        if not self.copy.base or self.copy.base in self._same_model:
            return
        model = await self.control.base_model()
        if model.digest != self.copy.base:
            raise EngineRefusedError(
                f"the adapter is of a model with the digest {self.copy.base[:12]}, and the engine "
                f"has read other tensors from {model.path} (digest {model.digest[:12]}): give both "
                "the same files, or set weightSync.lora: merged",
                answered=True,
            )
        self._same_model.add(self.copy.base)


def is_newer(held: VersionId, loaded: VersionId | None) -> bool:
    """Return True if the engine should load what the copy holds.

    The way round a damaged delta may end at an older version than the engine has already.
    """
    return loaded is None or held.attempt != loaded.attempt or held > loaded
