"""No process of a run on one machine accepts connections from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from socket import AF_INET

import psutil
import pytest

from tests.integration.run.laptop import PROGRAMS, Laptop
from tests.integration.run.listeners import Listeners, watching

pytestmark = pytest.mark.timeout(600)
SHORT = ("trainer.steps=2", "checkpoint.everySteps=1", "rollout.batchSize=8")


def listeners_of(run: Laptop) -> Listeners:
    """Sockets seen from the start of the run, over its weight updates and checkpoints,
    to its end.
    """
    run.start()
    assert run.process is not None
    with watching(run.process.pid) as listeners:
        assert run.wait(400) == 0, run.text()[-3000:]
    assert run.summary()["state"] == "Succeeded"
    return listeners


def open_to_others(listeners: Listeners) -> set[tuple[str, str, int]]:
    return {each for each in listeners.seen if not is_loopback(each[1])}


def is_loopback(text: str) -> bool:
    """gRPC's sockets are of IPv6 and have IPv4's loopback as ::ffff:127.0.0.1."""
    address = ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.fixture
def clusters_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a cluster's node: gloo on the machine's own network."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == AF_INET and not is_loopback(each.address) for each in addresses):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)


@pytest.mark.usefixtures("clusters_environment")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="one rank", marks=pytest.mark.long),
        pytest.param(("trainer.processesPerNode=2",), id="two ranks"),
    ],
)
def test_every_process_of_a_run_listens_on_the_loopback_alone(
    laptop: Callable[..., Laptop], overrides: tuple[str, ...]
) -> None:
    listeners = listeners_of(laptop(*SHORT, *overrides))
    expected = PROGRAMS | {"scheduler": "sglang::scheduler"}
    for role, program in expected.items():
        assert listeners.of(program), f"{role} was never seen to listen: {sorted(listeners.seen)}"
    assert open_to_others(listeners) == set()
