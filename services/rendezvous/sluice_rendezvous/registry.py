"""Who is there and which weights they hold: the rendezvous' decisions, without I/O and without a clock.

The membership **epoch** is a number that grows whenever somebody comes, goes or is dropped. An engine's **generation**
numbers its communicator with the trainer: it changes whenever the old one cannot be used any more, so that a
communicator never outlives either of its ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class StaleAttemptError(Exception):
    """A call by an attempt of a gang that a newer one has replaced."""


@dataclass(slots=True)
class Entry:
    """One member. `connection` tells its present stream from one that it has lost."""

    role: str
    name: str
    attempt: int
    index: int
    address: str
    devices: tuple[str, ...] = ()
    world_size: int = 1
    version: int = -1
    info: dict[str, str] = field(default_factory=dict)
    connection: int = 0
    generation: int = 0
    admitted: bool = False
    state: str = ""
    gauges: dict[str, float] = field(default_factory=dict)
    last_heartbeat: float = 0.0
    dropped: str = ""
    last_error: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return (self.name, self.index)


class Registry:
    """All members. Times are seconds of any monotonic clock, given by the caller."""

    def __init__(self, first_generation: int) -> None:
        """first_generation: larger than any that an earlier process has given out (the wall clock in milliseconds)."""
        self.epoch = 0
        self.version = -1
        self.entries: dict[tuple[str, int], Entry] = {}
        self._attempts: dict[str, int] = {}
        self._generation = first_generation
        self._connection = 0

    def fence(self, name: str, attempt: int) -> None:
        """Refuse a caller whose gang has a newer attempt."""
        newest = self._attempts.get(name, 0)
        if attempt < newest:
            raise StaleAttemptError(f"{name}: attempt {attempt} was replaced by attempt {newest}")
        self._attempts[name] = attempt

    def join(self, entry: Entry, now: float) -> Entry:
        """A member comes, or comes again. An engine that holds our weights keeps working: the ledger is soft state."""
        self.fence(entry.name, entry.attempt)
        self._connection += 1
        entry.connection = self._connection
        entry.generation = self._next_generation()
        entry.last_heartbeat = now
        entry.admitted = entry.role != "rollout" or (entry.version >= 0 and entry.version >= self.version)
        self.entries[entry.key] = entry
        self.epoch += 1
        return entry

    def leave(self, key: tuple[str, int], connection: int) -> bool:
        """A stream has ended. True where it was the member's present one."""
        entry = self.entries.get(key)
        if entry is None or entry.connection != connection:
            return False
        del self.entries[key]
        self.epoch += 1
        return True

    def heartbeat(
        self, key: tuple[str, int], connection: int, now: float, state: str, version: int, gauges: dict[str, float]
    ) -> None:
        entry = self.entries.get(key)
        if entry is None or entry.connection != connection:
            return
        entry.last_heartbeat, entry.state, entry.gauges = now, state, gauges
        if entry.role != "rollout":
            entry.version = version

    def expire(self, now: float, timeout: float) -> list[Entry]:
        """Drop who has been silent for `timeout` seconds. Returns them."""
        silent = [e for e in self.entries.values() if now - e.last_heartbeat > timeout]
        for entry in silent:
            self._drop(entry, f"no heartbeat for {now - entry.last_heartbeat:.0f} s")
            del self.entries[entry.key]
        return silent

    def members(self, role: str = "", attempt: int = 0) -> list[Entry]:
        chosen = [e for e in self.entries.values() if (not role or e.role == role) and attempt in (0, e.attempt)]
        return sorted(chosen, key=lambda e: e.key)

    def engines(self) -> list[Entry]:
        """One entry for each rollout engine: its first pod, which serves HTTP."""
        return [e for e in self.members("rollout") if e.index == 0]

    def begin_update(self, source: str, attempt: int, version: int, *, joiners_only: bool) -> list[Entry]:
        """Fix who takes part in the update to `version`."""
        self.fence(source, attempt)
        self.version = version
        return [e for e in self.engines() if not joiners_only or not e.admitted or e.version != version]

    def report(self, engine: tuple[str, int], attempt: int, generation: int, error: str) -> bool:
        """A phase of the update passed or failed at an engine. False where that engine is not there any more."""
        entry = self.entries.get(engine)
        if entry is None or entry.attempt != attempt or entry.generation != generation:
            return False
        if error:
            self._drop(entry, error)
            return False
        return True

    def serve(self, engine: tuple[str, int], version: int) -> None:
        """The engine passed the last phase: it serves `version`."""
        entry = self.entries[engine]
        entry.version, entry.admitted, entry.dropped = version, True, ""

    def in_sync(self) -> list[str]:
        return [e.name for e in self.engines() if e.admitted and e.version == self.version]

    def _drop(self, entry: Entry, reason: str) -> None:
        """Out of the epoch. What the engine holds is unknown from here on, and its communicator is gone."""
        entry.admitted, entry.dropped, entry.last_error = False, reason, reason
        entry.version = -1
        entry.generation = self._next_generation()
        self.epoch += 1

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation
