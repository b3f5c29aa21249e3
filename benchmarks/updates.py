"""Weight updates to one engine by a trainer of nothing but tensors, for several benchmarks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from sluice.api import WeightSync
from sluice.engines.sglang import Sglang
from sluice.engines.sglang.layout import Layout
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_rendezvous.service import RendezvousService
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.sender import WeightSender


@asynccontextmanager
async def update_sender(
    port: int, weight_sync: dict[str, str], source: str, tag: str = ""
) -> AsyncIterator[WeightSender]:
    """Join a trainer and the engine at this port by a rendezvous service; yield the trainer's side.

    Parameters
    ----------
    port
        Of the engine's server, on this machine.
    weight_sync
        The job's `weightSync`, but its transport: NCCL, or gloo without GPUs.
    source
        Name of the trainer.
    tag
        What the pool's engines call the job; empty without a pool.

    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    sync = WeightSync.model_validate(weight_sync | {"transport": backend})
    service, server = RendezvousService(), rpc.server("")
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(service, server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
    await server.start()
    channel = rpc.channel(address)
    stub = rendezvous_pb2_grpc.RendezvousStub(channel)
    member = pb.Member(
        role="rollout",
        name="rollout-0",
        attempt=1,
        address=f"127.0.0.1:{port}",
        world_size=1,
        version=-1,
    )
    transport = Collective(backend, "127.0.0.1", 120.0, source, tag=tag)
    sender = WeightSender(stub, ("trainer-0", 1), sync, transport, Sglang())
    try:
        async with Membership(address, lambda: member) as membership:
            await membership.connected.wait()
            yield sender
    finally:
        await sender.close()
        await channel.close()
        await server.stop(grace=None)


async def update(
    sender: WeightSender, version: int, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> int:
    """Send tensors to the engine as a version; return their bytes."""
    sent = 0
    plan = await sender.plan(version, joiners_only=False)
    await sender.prepare(version, plan.engines)
    await sender.pause()
    for bucket in buckets(tensors, bucket_bytes, Layout()):
        sent += bucket.data.nbytes
        await sender.send(bucket)
    outcome = await sender.finish()
    if outcome.failed:
        raise SystemExit(f"error: {outcome.failed}")
    return sent
