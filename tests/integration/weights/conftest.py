from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sluice.api import WeightSync
from sluice.engines.sglang import Sglang as SglangEngine
from sluice.wire.membership import Membership
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.sender import WeightSender
from sluice_trainer.weights.transport import Transport
from tests.integration.engines import backend, engine_environment, with_us
from tests.integration.rendezvous_server import Rendezvous, engine_member
from tests.integration.weights.tools import Joined

ROOT = Path(__file__).parents[3]
# NCCL creates its communicator in the first transfer
TIMEOUT = 4.0 if backend() == "gloo" else 20.0
# Seconds for an update of healthy engines, and for a heartbeat: a machine that stalls for a while
# is not a failure.
PATIENCE = 90.0
_trainers = itertools.count(1)
# Seconds by which a busy machine may be late.
SLACK = 20.0


class FakeEngine:
    """An engine without a model, in a separate process."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            with_us(sys.executable, "-m", "tests.integration.weights.fake_engine"), cwd=ROOT,
            env=engine_environment() | environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout
        self.address = f"127.0.0.1:{int(self.process.stdout.readline())}"
        self.url = f"http://{self.address}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.kill()


@pytest.fixture
def mismatched_engine() -> Iterator[FakeEngine]:
    """Start an engine whose NCCL allocates memory differently from the trainer's."""
    engine = FakeEngine(NCCL_CUMEM_ENABLE="1")
    yield engine
    engine.kill()


@pytest.fixture
async def rendezvous() -> AsyncIterator[Rendezvous]:
    async with Rendezvous(member_timeout=PATIENCE) as service:
        yield service


@pytest.fixture
async def join_engine(rendezvous: Rendezvous) -> AsyncIterator[Callable[..., Awaitable[Joined]]]:
    """Join an engine to the rendezvous, as the rollout worker next to it does."""
    async with AsyncExitStack() as stack:

        async def make(name: str, address: str, world_size: int = 1) -> Joined:
            member = engine_member(name, address, world_size=world_size)
            membership = Membership(rendezvous.address, lambda: member)
            await stack.enter_async_context(membership)
            await membership.connected.wait()
            return Joined(name, membership)

        yield make


@pytest.fixture
async def make_sender(
    rendezvous: Rendezvous, request: pytest.FixtureRequest
) -> AsyncIterator[Callable[..., WeightSender]]:
    """Make senders over gloo (NCCL on GPUs), unless another transport is given.

    `sync` holds fields of WeightSync. The senders speak to the kind of engine that is the test's
    `server`, otherwise to SGLang. They are attempts of one trainer, whose name differs in each
    test, because engines that tests share remember attempts.
    """
    senders: list[WeightSender] = []
    kind = (
        request.getfixturevalue("server").engine
        if "server" in request.fixturenames
        else SglangEngine()
    )
    name = f"trainer-{next(_trainers)}"

    def make(
        transport: Transport | None = None,
        /,
        attempt: int = 1,
        colocated: bool = False,
        **sync: object,
    ) -> WeightSender:
        settings = WeightSync.model_validate(
            {
                "transport": backend(),
                "timeoutSeconds": PATIENCE,
                "lateSeconds": PATIENCE,
                **sync,
            }
        )
        transport = transport or Collective(
            backend(), "127.0.0.1", settings.timeout_seconds, f"trainer-0-{attempt}"
        )
        caller = (name, attempt)
        senders.append(
            WeightSender(rendezvous.stub, caller, settings, transport, kind, colocated=colocated)
        )
        return senders[-1]

    yield make
    for sender in senders:
        await sender.close()
