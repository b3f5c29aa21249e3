"""No process of a run on one machine accepts connections from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from socket import AF_INET

import psutil
import pytest

from tests.integration.run.laptop import PROGRAMS, Laptop, values
from tests.integration.run.listeners import Listeners, watching
from tests.integration.run.test_run import check_sound

pytestmark = pytest.mark.timeout(600)
Make = Callable[..., Laptop]
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
    return {listener for listener in listeners.seen if not is_loopback(listener[1])}


def is_loopback(text: str) -> bool:
    """Tell whether an address is a loopback; gRPC shows 127.0.0.1 as ::ffff:127.0.0.1."""
    address = ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.fixture
def clusters_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set gloo's network interface as on a node of a cluster."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(
            address.family == AF_INET and not is_loopback(address.address) for address in addresses
        ):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)


def check_loopback(listeners: Listeners) -> None:
    expected = PROGRAMS | {"scheduler": "sglang::scheduler"}
    for role, program in expected.items():
        assert listeners.of_program(program), (
            f"{role} was never seen to listen: {sorted(listeners.seen)}"
        )
    assert open_to_others(listeners) == set()


@pytest.mark.long
@pytest.mark.usefixtures("clusters_environment")
def test_every_process_of_a_run_listens_on_the_loopback_alone(laptop: Make) -> None:
    check_loopback(listeners_of(laptop(*SHORT)))


@pytest.mark.usefixtures("clusters_environment")
def test_two_trainer_processes_and_several_optimizer_steps(laptop: Make) -> None:
    """They train as one does, and listen on the loopback alone."""
    run = laptop(
        "trainer.steps=3",
        "trainer.processesPerNode=2",
        "trainer.stepsPerBatch=2",
        "trainer.maxTokensPerGpu=256",
        "rollout.batchSize=8",
        "algorithm.kl={lossCoef: 0.001, type: low_var_kl}",
        "algorithm.normalizeAdvantages=true",
    )
    check_loopback(listeners_of(run))
    check_sound(run, 3, groups=8)
    records = list(run.steps().values())
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert values(records, "train/kl_loss")[-1] > 0
