"""A worker's readiness, and why it is not ready."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from sluice.runtime import open_files
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_rollout.__main__ import Readiness, request_slots
from sluice_rollout.worker import Worker


def make_worker(
    latest: pb.ServerMessage | None, *, connected: bool = True, unhealthy: str = ""
) -> Worker:
    joined = asyncio.Event()
    if connected:
        joined.set()
    membership = cast("Any", SimpleNamespace(latest=latest, connected=joined))
    nothing = cast("Any", None)
    make = cast(
        "Any",
        SimpleNamespace(generator=SimpleNamespace(health=SimpleNamespace(unhealthy=unhealthy))),
    )
    return Worker(nothing, nothing, make, nothing, nothing, membership)


ADMITTED = pb.ServerMessage(admitted=True, version=3)


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (make_worker(ADMITTED), ""),
        (make_worker(None, connected=False), "not joined: the rendezvous does not answer"),
        (make_worker(ADMITTED, connected=False), "not joined: the rendezvous does not answer"),
        (make_worker(pb.ServerMessage(version=-1)), "the engine holds no weights that may be used"),
        (
            make_worker(pb.ServerMessage(dropped="hung")),
            "the engine holds no weights that may be used (hung)",
        ),
        (
            make_worker(ADMITTED, unhealthy="/health answered 503"),
            "the engine is not healthy: /health answered 503",
        ),
    ],
    ids=["admitted", "never joined", "connection lost", "no weights", "dropped", "unhealthy"],
)
def test_an_engine_is_ready_while_it_holds_weights_that_may_be_used(
    worker: Worker, expected: str
) -> None:
    assert worker.unready() == expected


def test_before_the_engine_has_started_nothing_is_ready() -> None:
    assert Readiness().check() == "the engine has not started yet"


@pytest.mark.parametrize(
    ("limit", "expected"), [(1 << 16, 256), (180, 80), (50, 1)], ids=["room", "less", "none"]
)
def test_a_worker_has_no_more_requests_under_way_than_it_may_open_files(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    monkeypatch.setattr(open_files, "raise_limit", lambda: limit)
    with capture_logs() as lines:
        assert request_slots(256) == expected
    assert [line["requests"] for line in lines] == ([] if expected == 256 else [expected])


def test_an_engine_that_fails_its_checks_is_not_counted_as_generating() -> None:
    worker = make_worker(ADMITTED, unhealthy="/health: no answer after 5 s")
    worker.leased_groups["lease"] = cast("Any", None)
    assert worker.state == "unresponsive"
    worker.health.unhealthy = ""
    assert worker.state == "generating"
