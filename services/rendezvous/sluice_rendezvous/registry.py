"""Decisions of the rendezvous, without I/O and without a clock.

The registry knows the members and the weights that they hold. The membership **epoch** is a number
that grows whenever a member comes, leaves or is dropped. An engine's **generation** numbers its
communicator with the trainer: it changes whenever the old one cannot be used any more, so that a
communicator never outlives either of its ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.weight_store.manifest import VersionId
from sluice.wire.membership import HEARTBEAT_SECONDS
from sluice.wire.v1 import rendezvous_pb2 as pb

# Limit for all members together. A heartbeat costs the service 0.2 ms.
HEARTBEATS_PER_SECOND = 64.0


class StaleAttemptError(Exception):
    """A call by an attempt of a gang that a newer one has replaced."""


@dataclass(slots=True)
class MemberEntry:
    """A member, for as long as it keeps the stream that it joined with."""

    role: str
    name: str
    attempt: int
    index: int
    address: str
    world_size: int = 1
    version: int = -1
    info: dict[str, str] = field(default_factory=dict)
    protocol: int = 0
    devices: int = 0
    starting_seconds: float = 0.0
    generation: int = 0
    admitted: bool = False
    state: str = ""
    gauges: Mapping[str, float] = field(default_factory=dict)
    last_heartbeat: float = 0.0
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    dropped: str = ""
    last_error: str = ""
    # True in a weight update, between its phases prepare and resume.
    synchronising: bool = False
    # Weights from the store that the worker has loaded into its engine; None: none.
    loaded: VersionId | None = None
    # Pods that the worker's episodes wait for; None unless rows name the images of pods.
    episode_pods: pb.EpisodePodDemand | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.name, self.index)

    def lacks(self, version: int) -> bool:
        """True if this engine does not serve `version`."""
        return not self.admitted or self.version != version


class Registry:
    """All members.

    Times are seconds of any monotonic clock, given by the caller. `sources` has the newest attempt
    of each gang that has begun a weight update.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.version = -1
        # Newest weights in the store, which engines fetch; None without a store.
        self.published: VersionId | None = None
        self.entries: dict[tuple[str, int], MemberEntry] = {}
        self.sources: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        # Numbers of an earlier process must not come again, whatever the clock says: communicators
        # are named by them, and an engine remembers the names of dead senders.
        self._generation = secrets.randbits(31) << 32

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats of a member; they grow with the number of members."""
        seconds = HEARTBEAT_SECONDS
        while len(self.entries) > HEARTBEATS_PER_SECOND * seconds:
            seconds *= 2
        return seconds

    def fence(self, name: str, attempt: int) -> None:
        """Refuse a caller whose gang has a newer attempt."""
        newest = self._attempts.get(name, 0)
        if attempt < newest:
            raise StaleAttemptError(f"{name}: attempt {attempt} was replaced by attempt {newest}")
        self._attempts[name] = attempt

    def join(
        self, entry: MemberEntry, now: float, sources: Mapping[str, int] | None = None
    ) -> MemberEntry:
        """Add a member that joins, perhaps not for the first time.

        An engine that holds current weights keeps working: the ledger is soft state. `sources` are
        attempts that the member has heard of, perhaps from an earlier process of this service.
        Every engine that takes part in an update has reported them before, so an update of an older
        source reaches none.
        """
        self.fence(entry.name, entry.attempt)
        for name, attempt in (sources or {}).items():
            self.sources[name] = max(attempt, self.sources.get(name, 0))
            self._attempts[name] = max(attempt, self._attempts.get(name, 0))
        entry.generation = self._next_generation()
        entry.last_heartbeat = now
        entry.admitted = entry.role != "rollout" or (
            entry.version >= 0 and entry.version >= self.version
        )
        self.entries[entry.key] = entry
        self.epoch += 1
        return entry

    def leave(self, entry: MemberEntry) -> bool:
        """Remove a member whose stream has ended; False if it has joined again since."""
        if self.entries.get(entry.key) is not entry:
            return False
        del self.entries[entry.key]
        self.epoch += 1
        return True

    def expire(self, now: float, timeout: float) -> list[MemberEntry]:
        """Drop the members that are silent, and return them.

        `timeout` is for a member that sends a heartbeat every HEARTBEAT_SECONDS, and grows in
        proportion if it was told to send fewer.
        """
        silent = [
            entry
            for entry in self.entries.values()
            if now - entry.last_heartbeat > timeout * entry.heartbeat_seconds / HEARTBEAT_SECONDS
        ]
        for entry in silent:
            self._drop(entry, f"no heartbeat for {now - entry.last_heartbeat:.0f} s")
            del self.entries[entry.key]
        return silent

    def members(self, role: str = "", attempt: int = 0) -> list[MemberEntry]:
        chosen = [
            entry
            for entry in self.entries.values()
            if (not role or entry.role == role) and attempt in (0, entry.attempt)
        ]
        return sorted(chosen, key=lambda e: e.key)

    def engines(self) -> list[MemberEntry]:
        """Return an entry for each rollout engine: its first pod, which serves HTTP."""
        return [e for e in self.members("rollout") if e.index == 0]

    def joiners(self, version: int) -> list[MemberEntry]:
        """Return engines that do not serve `version`."""
        return [e for e in self.engines() if e.lacks(version)]

    def begin_update(
        self, source: str, attempt: int, version: int, *, joiners_only: bool
    ) -> list[MemberEntry]:
        """Fix the engines that take part in the update to `version`."""
        self.fence(source, attempt)
        self.sources[source] = attempt
        self.version = version
        return self.joiners(version) if joiners_only else self.engines()

    def publish(self, source: str, attempt: int, version: int) -> None:
        """Note that `version` is in the store, for engines to fetch.

        Engines with weights of another attempt, which the trainer has forgotten, get no more work.
        """
        self.fence(source, attempt)
        self.sources[source] = attempt
        self.version, self.published = version, VersionId(version, attempt)
        for entry in self.engines():
            if entry.loaded is not None:
                self.load(entry, entry.loaded)

    def load(self, entry: MemberEntry, loaded: VersionId) -> None:
        """Note the weights that an engine's worker has loaded from the store; version -1: none.

        An engine with older weights of the same attempt works on: the buffer decides by their age.
        """
        entry.loaded = loaded
        if self.published is None:  # this service has restarted, and the trainer has not told yet
            return
        if loaded.version >= 0 and loaded.attempt == self.published.attempt:
            self.serve(entry, loaded.version)
        else:
            entry.version, entry.admitted = -1, False

    def report(self, name: str, attempt: int, generation: int, error: str) -> MemberEntry | None:
        """Drop an engine that failed in a phase.

        Returns the entry of an engine that passed; None if it is out of the update.
        """
        entry = self.entries.get((name, 0))
        if entry is None or entry.attempt != attempt or entry.generation != generation:
            return None
        if error:
            self._drop(entry, error)
            return None
        return entry

    def serve(self, entry: MemberEntry, version: int) -> None:
        """Note that the engine passed the last phase and serves `version`."""
        entry.version, entry.admitted, entry.dropped = version, True, ""

    def _drop(self, entry: MemberEntry, reason: str) -> None:
        """Take a member out of the epoch.

        Its weights are unknown from here on, and its communicator is gone.
        """
        entry.admitted, entry.dropped, entry.last_error = False, reason, reason
        entry.version = -1
        entry.generation = self._next_generation()
        self.epoch += 1

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation
