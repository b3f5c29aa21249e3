"""The trainer does not wait for unreachable services once it was told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.runtime import pod_env
from sluice.runtime.pod_env import free_port
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.clients import background as background_module
from sluice_trainer.clients.background import Stopped
from sluice_trainer.loop.clients import Clients, connect
from tests.unit.buffer.buffer_tools import make_job


@pytest.fixture
def stopped_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    """Clients of a rendezvous that is unreachable, after SIGTERM."""
    monkeypatch.setattr(background_module, "STOP_SECONDS", 0.1)
    env = pod_env.read("trainer", {"SLUICE_RENDEZVOUS": f"127.0.0.1:{free_port()}"})
    stop = threading.Event()
    stop.set()
    with connect(env, make_job(tmp_path).spec, stop) as clients:
        yield clients


def prepare(clients: Clients) -> None:
    """Begin an update of an engine that is away, too: its failure is reported."""
    gone = pb.Member(
        role="rollout", name="rollout-0", attempt=1, address=f"127.0.0.1:{free_port()}"
    )
    clients.engines.prepare(1, [pb.EngineMember(member=gone, generation=1)]).result(timeout=30)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            lambda clients: clients.engines.plan(1, joiners_only=False), id="begin an update"
        ),
        pytest.param(prepare, id="report what an update came to"),
        pytest.param(lambda clients: clients.engines.rest(), id="take a turn"),
        pytest.param(lambda clients: clients.engines.joiners(), id="look for joiners"),
    ],
)
def test_calls_do_not_wait_for_an_unreachable_rendezvous_after_sigterm(
    stopped_clients: Clients, call: Callable[[Clients], object]
) -> None:
    with pytest.raises(Stopped):
        call(stopped_clients)
