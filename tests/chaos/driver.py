"""Applies faults to real runs of the quickstart, and checks recovery and group counts.

Some faults come before the run has recovered from the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc.aio
import psutil

from sluice.telemetry.group_accounting import GroupCounts
from sluice.wire import rpc
from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc
from sluice_cli.exits import Exit
from sluice_operator.cluster.local import run_state
from tests.chaos.faults import KILL, LEAVE, LEAVE_AT_ONCE, STOP, Fault
from tests.chaos.network import PAIRS, Network
from tests.chaos.proxy import Harm
from tests.integration.run.laptop import Laptop, processes_of

BATCH, EVERY, STEPS = 8, 5, 120
SMALL = (
    f"rollout.batchSize={BATCH}",
    "rollout.samplesPerPrompt=4",
    f"checkpoint.everySteps={EVERY}",
    "evaluation.everySteps=40",
    "weightSync.timeoutSeconds=15",
    "failurePolicy.maxRestarts=1000",
    "failurePolicy.rolloutBackoffSeconds=1",
)
MODES = (
    ("rollout.mode=async", "rollout.maxStaleness=2"),
    ("rollout.mode=sync", "rollout.replicas=2"),
)
START_SECONDS = 180.0
# Seconds until a run that was told to stop has ended, if no process of it is frozen.
LEAVE_SECONDS = 60.0
# Exit codes of `sluice run`, and Python's if its last lines could not be written.
STOPPED = (Exit.STOPPED, -signal.SIGINT)
# Seconds until another step is committed after a fault, on a machine that is busy with other tests
# too.
RECOVERY_SECONDS = 200.0
ASK_SECONDS = 0.2


class Ended(Exception):
    """The run has done its steps."""


def inflict_all(
    faults: Sequence[Fault], example: Path, directory: Path, *, seed: int, steps: int = STEPS
) -> None:
    """Run as many jobs as the faults need, asynchronous and synchronous in turn."""
    left, number = list(faults), 0
    while left:
        name, mode = f"run{number}", MODES[(seed + number) % len(MODES)]
        print(f"{name}: {mode[0]}, {len(left)} of {len(faults)} faults left", flush=True)
        left = _one_run(left, example, directory / name, steps, mode)
        number += 1


def _one_run(
    faults: list[Fault], example: Path, directory: Path, steps: int, mode: tuple[str, ...]
) -> list[Fault]:
    """Inflict faults until the run has done its steps; return the faults that are left."""
    with Network(directory) as network:
        laptop = Laptop(
            example, directory, *SMALL, f"trainer.steps={steps}", *mode, *network.overrides()
        )
        run = Victim(laptop, network)
        laptop.start()
        try:
            run.until_step(2, START_SECONDS)
            while faults:
                fault, *faults = faults
                run.suffer(fault)
                if not (faults and faults[0].hasty):
                    run.recover(str(fault))
            run.until_end()
        except Ended:
            pass
        finally:
            laptop.stop()
        check_end(laptop, steps)
        unused = [pair for pair in PAIRS if not network.passed(pair)]
        assert not unused, f"calls that went past the proxies: {unused}"
    return faults


class Victim:
    """A run under faults."""

    def __init__(self, laptop: Laptop, network: Network) -> None:
        self.laptop = laptop
        self.network = network
        self._committed = 0

    def suffer(self, fault: Fault) -> None:
        """Inflict a fault. Raises Ended if the run ends before it."""
        self._sleep(fault.after)
        if not fault.hasty:
            self.until_step(0, RECOVERY_SECONDS)
        print(f"  step {self._last_step()}: {fault}", flush=True)
        # A run may well do its last steps with one link down.
        with contextlib.suppress(Ended), self._harmed(fault):
            time.sleep(fault.seconds)

    def recover(self, why: str) -> None:
        """Wait for a step and check the group counts. Raises Ended if the run ends instead."""
        start = time.monotonic()
        stats = self.until_step(self._last_step() + 1, RECOVERY_SECONDS, why)
        print(f"    step {stats.step} after {time.monotonic() - start:.1f} s", flush=True)

    def _last_step(self) -> int:
        return max(self._committed, self.laptop.step())

    def until_step(self, step: int, seconds: float, why: str = "start") -> buffer_pb2.BufferStats:
        """Wait until the buffer has committed a step, and return its statistics.

        Group counts are checked each time the buffer answers.
        """
        end = time.monotonic() + seconds
        while True:
            stats = self._ask()
            if stats:
                check_counts(stats, why)
                self._committed = max(self._committed, stats.step)
                if stats.step >= step:
                    return stats
            if time.monotonic() > end:
                raise AssertionError(
                    f"{why}: no step {step} after {seconds:.0f} s\n{self.laptop.text()[-3000:]}"
                )
            time.sleep(ASK_SECONDS)

    def until_end(self) -> None:
        self.until_step(1 << 30, START_SECONDS + RECOVERY_SECONDS, "the end")

    @contextlib.contextmanager
    def _harmed(self, fault: Fault) -> Iterator[None]:
        if isinstance(fault.target, tuple):
            self.network.inflict(fault.target, Harm(fault.kind))
            try:
                yield
            finally:
                self.network.heal(fault.target)
        elif fault.kind == KILL:
            self._kill(fault.target, fault.part)
            yield
        elif fault.kind in (LEAVE, LEAVE_AT_ONCE):
            self._leave(fault)
            yield
        else:
            assert fault.kind == STOP
            stopped = self._family(fault.target)
            _signal(stopped, signal.SIGSTOP)
            try:
                yield
            finally:
                _signal(stopped, signal.SIGCONT)

    def _kill(self, role: str, part: float) -> None:
        if role == "run":
            self.laptop.kill("run")
            self.laptop.start()
        else:
            family = self._family(role)
            _signal([family[int(part * len(family))]], signal.SIGKILL)

    def _leave(self, fault: Fault) -> None:
        """End the run as a user does, and start it again. Raises Ended if it was just over."""
        self.laptop.kill("run", signal.SIGINT)
        if fault.kind == LEAVE_AT_ONCE:
            time.sleep(fault.part)
            self.laptop.kill("run", signal.SIGINT)
        code = self.laptop.wait(LEAVE_SECONDS)
        if code == 0:
            raise Ended
        assert code in STOPPED, f"{fault}: exit code {code}\n{self.laptop.text()[-3000:]}"
        self.laptop.start()

    def _family(self, role: str) -> list[psutil.Process]:
        """Return a role's processes, its first process first.

        For `sluice run` only the first, because its children are the roles.
        """
        first = psutil.Process(self.laptop.find(role))
        return (
            [first]
            if role == "run"
            else [first, *sorted(first.children(recursive=True), key=lambda p: p.pid)]
        )

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._ended()

    def _ended(self) -> None:
        process = self.laptop.process
        assert process is not None
        if process.poll() is not None:
            assert process.returncode == 0, (
                f"exit code {process.returncode}\n{self.laptop.text()[-3000:]}"
            )
            raise Ended

    def _ask(self) -> buffer_pb2.BufferStats | None:
        self._ended()
        self.network.check()
        return asyncio.run(stats(self.laptop.directory))


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced in the meantime
            process.send_signal(number)


async def stats(directory: Path) -> buffer_pb2.BufferStats | None:
    """Ask a run's buffer for its statistics, without a proxy; None if it does not answer now."""
    state = run_state.StateFile(directory).load()
    port = next(iter(state.ports.values()), 0)
    tokens = [
        secret["stringData"]["token"]
        for key, secret in state.objects.items()
        if key.endswith("-token")
    ]
    if not port or not tokens:
        return None
    metadata = rpc.metadata(tokens[0])
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            request = rendezvous_pb2.AddressBookRequest(role="buffer")
            stub = rendezvous_pb2_grpc.RendezvousStub(channel)
            book = await stub.AddressBook(request, metadata=metadata, timeout=3.0)
        if not book.members:
            return None
        port = int(book.members[0].address.rpartition(":")[2])
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            answer: buffer_pb2.BufferStats = await buffer_pb2_grpc.BufferStub(channel).Stats(
                buffer_pb2.StatsRequest(), metadata=metadata, timeout=3.0
            )
            return answer
    except grpc.aio.AioRpcError:
        return None


def check_counts(stats: buffer_pb2.BufferStats, why: str) -> None:
    """Check that no group failed: no prompt is at fault."""
    counts = GroupCounts.from_counters(stats.counters, stats.failed)
    assert (counts.lost, counts.twice, counts.failed) == (0, 0, 0), (
        f"{why}, step {stats.step}: {list(counts.warnings())}"
    )


def check_end(laptop: Laptop, steps: int) -> None:
    summary = laptop.summary()
    assert summary["state"] == "Succeeded", laptop.text()[-3000:]
    assert summary["steps"] == steps
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    ), summary
    assert summary["groups_trained"] == steps * BATCH, summary
    assert sorted(laptop.steps()) == list(range(1, steps + 1))
    kinds = {warning["kind"] for warning in summary["warnings"]}
    assert not kinds & {"unbalanced groups", "failed groups", "stale groups"}, summary["warnings"]
    for step, records in laptop.replayed().items():
        seen = {(r["train/loss"], r["train/grad_norm"], r["rollout/raw_reward"]) for r in records}
        assert len(seen) == 1, f"step {step} was replayed differently: {records}"
    assert processes_of(laptop.directory) == []
