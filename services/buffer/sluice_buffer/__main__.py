"""Run the buffer of one job until SIGTERM: `python -m sluice_buffer`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import signal
import socket
from collections.abc import Sequence
from typing import Any

import grpc.aio

from sluice.api import quantity_value
from sluice.api.schema.capacity_rules import budget_bytes
from sluice.data import chat
from sluice.runtime import pod_env
from sluice.runtime.pod_env import Environment
from sluice.telemetry import endpoints, logs, tracing
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc
from sluice.wire.v1 import rendezvous_pb2 as rendezvous
from sluice_buffer.core import Buffer, open_buffer
from sluice_buffer.serving import metrics
from sluice_buffer.serving.budget import Budget
from sluice_buffer.serving.committer import Committer, durable
from sluice_buffer.serving.service import Service

_GRACE_SECONDS = 2.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class LatestStats:
    """The newest statistics, for threads that must not read the buffer's memory."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.refresh()

    def refresh(self) -> None:
        self._stats = self._service.stats()

    def get(self) -> buffer_pb2.BufferStats:
        return self._stats

    def heartbeat(self) -> rendezvous.Heartbeat:
        stats = self._stats
        gauges = {
            "depth": float(stats.depth),
            "leases": float(stats.leases),
            "step": float(stats.step),
        }
        return rendezvous.Heartbeat(state="serving", version=stats.version, gauges=gauges)


async def serve(env: Environment, buffer: Buffer) -> None:
    """Serve until SIGTERM or SIGINT.

    It ends earlier if the storage fails (StorageError) or the rendezvous refuses this process.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    committer, server = Committer(buffer), rpc.server()
    budget = Budget(budget_bytes(int(quantity_value(str(buffer.job.spec.buffer.memory)))))
    service = Service(committer, budget)
    snapshot = LatestStats(service)
    buffer_pb2_grpc.add_BufferServicer_to_server(service, server)
    port = rpc.bind(server, f"{env.bind}:{env.port('grpc')}")
    await server.start()
    address = f"{env.advertise}:{port}"
    logs.get().info(
        "serving", address=address, step=buffer.memory.progress.step, lost=buffer.memory.lost
    )
    pulse = endpoints.LoopWatchdog()
    endpoints.serve(
        env, ready=endpoints.healthy, alive=pulse.check, registry=metrics.registry(snapshot.get)
    )
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(_expire(service, snapshot))]
    async with _joined(env, address, snapshot) as membership, pulse.running():
        if membership:
            tasks.append(asyncio.create_task(membership.until_refused()))
        ends: list[asyncio.Future[Any]] = [committer.broken, *tasks]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await _shut_down(server, committer, tasks)
    for finished in done:
        finished.result()


def _joined(
    env: Environment, address: str, snapshot: LatestStats
) -> contextlib.AbstractAsyncContextManager[Membership | None]:
    """Join the rendezvous for the time of the context, if the job has one."""
    if not env.rendezvous:
        return contextlib.nullcontext()
    member = rendezvous.Member(
        role="buffer",
        name=env.name,
        attempt=env.attempt,
        address=address,
        info={"host": socket.gethostname()},
    )
    return Membership(env.rendezvous, lambda: member, snapshot.heartbeat)


async def _shut_down(
    server: grpc.aio.Server, committer: Committer, tasks: Sequence[asyncio.Task[Any]]
) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    await server.stop(_GRACE_SECONDS)
    if not committer.broken.done():
        await committer.close()
    committer.buffer.close()
    logs.get().info("stopped")


async def _expire(service: Service, snapshot: LatestStats) -> None:
    """Take back expired leases every second, and wake calls that wait for free space."""
    committer = service.committer
    pause = min(1.0, committer.buffer.job.spec.buffer.lease_seconds / 4)
    while True:
        await asyncio.sleep(pause)
        expired = await committer.run(committer.buffer.expire)
        if expired:
            logs.get().warning("leases ran out", groups=expired)
        service.lease_queue.call_up()
        snapshot.refresh()


def _keep_memory() -> None:
    """Tune allocator and collector for groups that come and go by the hundred.

    The collector leaves objects alone that were loaded at the start. If glibc is the allocator, the
    process keeps freed blocks of up to 32 MiB: by default glibc returns them to the kernel, and
    each page that is taken anew costs as much as the copying itself.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 20)


async def main() -> int:
    env = pod_env.read("buffer")
    logs.configure(env.role, name=env.name, attempt=env.attempt)
    tracing.configure(env)
    job = env.job()
    if job.spec.algorithm.offline:  # answers are encoded here
        chat.leave_torch_out()
    buffer = open_buffer(job, env.directory("storage"))
    durable(buffer)
    _keep_memory()
    await serve(env, buffer)
    return 128 + signal.SIGTERM


if __name__ == "__main__":
    logs.run("buffer", main)
