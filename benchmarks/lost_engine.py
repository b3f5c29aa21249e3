"""How long an engine that is frozen, dead or cut off pauses the others in weight updates.

    python benchmarks/lost_engine.py [--engines 8] [--updates 20] [--rounds 3] [--late 2.0]
        [--megabytes 24]

Engines are SGLang servers with our plugin and a tiny model on the CPU; sender, control protocol,
communicators (gloo) and the rendezvous process are a job's. The last engine runs in a network
namespace (root; iproute2): a cut drops every packet between it and all others, without a reset. Its
membership goes on, so the rendezvous tells nobody that it is gone: the worst case, in which time
alone tells.

For each fault the engine fails between two updates, and in a transfer, after the others have been
paused. Printed are the pauses of the other engines, of all rounds: usual ones, those of the update
in which the fault is met, and those of the updates that follow while it lasts; and for how long the
trainer was held. A fault between two updates should cost the others nothing; one in a transfer
costs them `--late` seconds at most.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.weight_sync_engines import CPU_ARGUMENTS, engine_member, rendezvous
from sluice.api import WeightSync
from sluice.engines.sglang import Sglang
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.layout import Layout
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import save_model, tensors

NAMESPACE, OURS, THEIRS = "sluice-lost", "sluice-lost0", "sluice-lost1"
HOST, GUEST = "10.77.0.1", "10.77.0.2"
READY_SECONDS = 900.0


def ip(*arguments: str) -> str:
    """Run `ip`, of iproute2. Raises CalledProcessError."""
    command = ["ip", *" ".join(arguments).split()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def namespace() -> Iterator[None]:
    """A network namespace with one link to ours."""
    subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)
    ip("netns add", NAMESPACE)
    try:
        ip("link add", OURS, "type veth peer name", THEIRS)
        ip("link set", THEIRS, "netns", NAMESPACE)
        ip("addr add", f"{HOST}/24", "dev", OURS)
        ip("link set", OURS, "up")
        ip("-n", NAMESPACE, "addr add", f"{GUEST}/24", "dev", THEIRS)
        ip("-n", NAMESPACE, "link set lo up")
        connect()
        yield
    finally:
        ip("netns del", NAMESPACE)


def connect() -> None:
    """Let packets pass."""
    ip("-n", NAMESPACE, "link set", THEIRS, "up")
    # Without entries in the tables of neighbours the kernel says after 3 s that nobody is there.
    for where, device, peer, other in (
        ([], OURS, GUEST, ["-n", NAMESPACE]),
        (["-n", NAMESPACE], THEIRS, HOST, []),
    ):
        link = ip(*other, "-brief link show dev", THEIRS if device == OURS else OURS)
        ip(*where, "neigh replace", peer, "lladdr", link.split()[2], "dev", device, "nud permanent")


def cut() -> None:
    """Drop all packets between the namespace and us."""
    ip("-n", NAMESPACE, "link set", THEIRS, "down")


class Engine:
    """An SGLang server, with all its processes in a session of its own."""

    def __init__(self, model: Path, log: Path, *, apart: bool) -> None:
        """Apart: in the namespace."""
        host, device = (GUEST, THEIRS) if apart else (HOST, OURS)
        self.address = f"{host}:{free_port()}"
        self._apart = apart
        command = (
            f"{sys.executable} {PATH}/launch_server.py --model-path {model} --host {host} "
            f"--port {self.address.rpartition(':')[2]} --skip-tokenizer-init "
            f"--skip-server-warmup {CPU_ARGUMENTS}"
        )
        inside = ["ip", "netns", "exec", NAMESPACE] if apart else []
        environment = os.environ | {
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": device,
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*inside, *command.split()],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait()


@dataclass
class Pauses:
    """Seconds for which each engine was paused, by its address, in the order of the updates."""

    begun: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)


class Timed(Sglang):
    """SGLang, with its pauses measured from the request for one to the answer to its end."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses

    def control(self, address: str, *rest: Any) -> Any:
        control: Any = super().control(address, *rest)
        pauses = self._pauses
        pause, resume = type(control).pause, type(control).resume

        class Measured(type(control)):  # type: ignore[misc]
            async def pause(self, mode: str) -> None:
                pauses.begun[address] = time.monotonic()
                await pause(self, mode)

            async def resume(self) -> None:
                await resume(self)
                seconds = time.monotonic() - pauses.begun[address]
                pauses.seconds.setdefault(address, []).append(seconds)

        return Measured(control.address, control.session, control.timeout, control.source)


@dataclass
class Trainer:
    """A trainer that publishes one version after the other."""

    source: WeightSender
    buckets: Sequence[Bucket]
    version: int = 0
    held: float = 0.0

    async def publish(self, fault: Callable[[], None] | None = None) -> None:
        """Publish; `fault` comes in the middle of the transfer. `held`: the seconds of it all."""
        self.version += 1
        started = time.monotonic()
        plan = await self.source.plan(self.version, joiners_only=False)
        await self.source.prepare(self.version, plan.engines)
        await self.source.pause()
        for number, bucket in enumerate(self.buckets):
            if fault and number == len(self.buckets) // 2:
                fault()
            await self.source.send(bucket)
        await self.source.finish()
        self.held = time.monotonic() - started


async def measure(options: argparse.Namespace, directory: Path) -> None:
    model = save_model(directory / "model", seed=1)
    engines = [
        Engine(model, directory / f"engine-{n}.log", apart=n == options.engines - 1)
        for n in range(options.engines)
    ]
    with ExitStack() as processes:
        for engine in engines:
            processes.callback(engine.kill)
        address = processes.enter_context(rendezvous(directory))
        async with AsyncExitStack() as stack:
            for number, engine in enumerate(engines):
                async with Client(f"http://{engine.address}") as client:
                    await client.wait_ready(READY_SECONDS)
                member = engine_member(number, engine.address, 1)
                membership = Membership(address, lambda member=member: member)  # type: ignore[misc]
                await stack.enter_async_context(membership)
                await membership.connected.wait()
            channel = await stack.enter_async_context(rpc.channel(address))
            stub, pauses = rendezvous_pb2_grpc.RendezvousStub(channel), Pauses()
            sync = WeightSync.model_validate(
                {"transport": "gloo", "lateSeconds": options.late, "pauseMode": "in_place"}
            )
            transport = Collective("gloo", HOST, sync.timeout_seconds, "trainer-0-1")
            source = WeightSender(stub, ("trainer-0", 1), sync, transport, Timed(pauses))
            stack.push_async_callback(source.close)
            size = (options.megabytes << 20) // 8
            update = list(buckets(repeated(model, options.megabytes << 20), size, Layout()))
            await faults(Trainer(source, update), engines, pauses, options)


def repeated(model: Path, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors again and again, until they are so many bytes: more of an update."""
    sent = 0
    while sent < size:
        for name, tensor in tensors(model):
            yield name, tensor
            sent += tensor.nbytes


async def faults(
    trainer: Trainer, engines: Sequence[Engine], pauses: Pauses, options: argparse.Namespace
) -> None:
    *others, last = engines

    def taken() -> list[float]:
        """Pauses of the other engines since the last call."""
        return sorted(s for engine in others for s in pauses.seconds.pop(engine.address, []))

    await trainer.publish()  # communicators are made
    taken()
    for _ in range(options.updates):
        await trainer.publish()
    usual = taken()
    print(f"{'fault':<28} {'p50':>8} {'p99':>8} {'longest':>8}  {'of usual p99':>12}  trainer held")
    row("none", usual, usual, trainer.held)
    heal: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "frozen": (last.freeze, last.thaw),
        "cut off": (cut, connect),
        "dead": (last.kill, lambda: None),
    }
    for name, (fault, cure) in heal.items():
        for place in ("between", "in transfer"):
            if name == "dead" and place == "between":
                continue  # the updates that follow its death show that
            met, followed, held, later = list[float](), list[float](), 0.0, 0.0
            for _ in range(1 if name == "dead" else options.rounds):
                if place == "between":
                    fault()
                await trainer.publish(None if place == "between" else fault)
                met, held = met + taken(), max(held, trainer.held)
                for _ in range(options.after):
                    await trainer.publish()
                    later = max(later, trainer.held)
                followed += taken()
                cure()
                if name != "dead":
                    await asyncio.sleep(2.0)
                    await trainer.publish()  # it comes back
                    await trainer.publish()
                    taken()
            row(f"{name}, {place}", sorted(met), usual, held)
            row("  updates that follow", sorted(followed), usual, later)


def row(name: str, seconds: Sequence[float], usual: Sequence[float], held: float) -> None:
    def at(values: Sequence[float], share: float) -> float:
        return values[min(int(share * len(values)), len(values) - 1)]

    p50, p99 = at(seconds, 0.5), at(seconds, 0.99)
    times = p99 / at(usual, 0.99)
    print(
        f"{name:<28} {1000 * p50:>5.0f} ms {1000 * p99:>5.0f} ms {1000 * seconds[-1]:>5.0f} ms "
        f"{times:>12.2f}  {held:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--updates", type=int, default=20, help="without a fault")
    parser.add_argument("--after", type=int, default=3, help="updates while a fault lasts")
    parser.add_argument("--rounds", type=int, default=3, help="faults of each kind and place")
    parser.add_argument("--late", type=float, default=2.0, help="weightSync.lateSeconds")
    parser.add_argument("--megabytes", type=int, default=24, help="of an update")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = OURS
    print(f"{options.engines} engines on {platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as directory, namespace():
        asyncio.run(measure(options, Path(directory)))


if __name__ == "__main__":
    main()
