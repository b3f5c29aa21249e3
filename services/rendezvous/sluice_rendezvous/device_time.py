"""Seconds that a job's devices have spent in each state, as its members report them.

A gang's first pod reports for all devices of the gang. A gang that left and came again was
`restarting` in between, and until a later attempt has started.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sluice_rendezvous.registry import MemberEntry

STARTING, RESTARTING, SYNCHRONISING = "starting", "restarting", "synchronising"
DRAINING = "draining"
# (role, state)
StateKey = tuple[str, str]


@dataclass(slots=True)
class _DeviceState:
    """The state of one member's devices, counted until `until`."""

    role: str
    attempt: int
    state: str
    devices: int
    until: float


@dataclass(slots=True)
class DeviceTime:
    """Counter of device seconds.

    Times are seconds of any monotonic clock, given by the caller.
    """

    _seconds: defaultdict[StateKey, float] = field(default_factory=lambda: defaultdict(float))
    _running: dict[str, _DeviceState] = field(default_factory=dict)
    _gone: dict[str, _DeviceState] = field(default_factory=dict)

    def join(self, entry: MemberEntry, now: float) -> None:
        """Count the member's devices from now on."""
        if entry.index or not entry.devices:
            return
        before = self._running.pop(entry.name, None) or self._gone.pop(entry.name, None)
        state = RESTARTING if entry.attempt > 1 else STARTING
        if before:
            # A member of the same attempt has only lost its stream, and kept working.
            away = before.state if before.attempt == entry.attempt else RESTARTING
            self._seconds[entry.role, away] += (now - before.until) * before.devices
            state = away
        else:
            self._seconds[entry.role, state] += entry.starting_seconds * entry.devices
        self._running[entry.name] = _DeviceState(
            entry.role, entry.attempt, state, entry.devices, now
        )

    def state(self, entry: MemberEntry, now: float) -> None:
        """Count up to now; `entry.state` holds from here on."""
        clock = self._running.get(entry.name)
        if clock is None or entry.index:
            return
        self._count(clock, now)
        state = SYNCHRONISING if entry.synchronising else entry.state or clock.state
        clock.state = RESTARTING if state == STARTING and entry.attempt > 1 else state

    def leave(self, entry: MemberEntry, now: float) -> None:
        """Count up to now, when the member's stream ended."""
        if entry.index == 0 and (clock := self._running.pop(entry.name, None)):
            self._count(clock, now)
            if clock.state != DRAINING:  # a draining gang is meant to end
                self._gone[entry.name] = clock

    def seconds(self, now: float) -> dict[StateKey, float]:
        """Return device seconds by role and state until now."""
        total = self._seconds.copy()
        for clock in list(self._running.values()):
            total[clock.role, clock.state] += (now - clock.until) * clock.devices
        return dict(total)

    def _count(self, clock: _DeviceState, now: float) -> None:
        self._seconds[clock.role, clock.state] += (now - clock.until) * clock.devices
        clock.until = now
