"""The facts of a leased group."""

from __future__ import annotations

import time

import pytest

from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.leased_group import LeasedGroup
from sluice_rollout.load import GroupLoad, Load


def test_the_busy_fraction_is_cpu_time_by_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leased = LeasedGroup.from_message(pb.LeasedGroup(), GroupLoad(Load()))
    leased.started_at, leased.cpu_started_at = 100.0, 7.0
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    monkeypatch.setattr(time, "thread_time", lambda: 9.5)
    assert (leased.seconds, leased.busy_fraction) == (10.0, 0.25)
    monkeypatch.setattr(time, "thread_time", lambda: 17.5)
    assert leased.busy_fraction == 1.0, "two clocks, which need not agree"
