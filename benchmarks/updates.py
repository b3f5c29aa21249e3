"""An engine with random weights and updates of them, for several benchmarks.

The trainer has only tensors. With two GPUs the engine has the first one.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.processes import small_engine
from sluice.api import WeightSync
from sluice.engines.sglang import Sglang
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.layout import Layout
from sluice.runtime.pod_env import free_port
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_rendezvous.service import RendezvousService
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.sender import WeightSender

# As in every engine and trainer: NCCL cannot share memory between processes that differ in it.
NVLINK = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
GRAPHS = "--disable-piecewise-cuda-graph --cuda-graph-max-bs {}"


class Probe(Client):
    """Asks whether a server answers, and nothing that a pool tells only its jobs."""

    async def learn(self) -> None: ...


@asynccontextmanager
async def random_engine(
    model: Path,
    requests: int,
    tokens: int,
    *arguments: str,
    way: str,
    variables: Mapping[str, str],
) -> AsyncIterator[int]:
    """Run SGLang with random weights on the first GPU, or on the CPU; yield its port.

    Parameters
    ----------
    model
        Directory with the model's config.
    requests, tokens
        Number of requests at a time, and of the tokens of each, prompt included.
    arguments
        More of the server's arguments.
    way
        How Python starts the server.
    variables
        More of its environment.

    """
    gpus = torch.cuda.is_available()
    port = free_port()
    room = str(2 * requests * tokens)
    own = dict(os.environ)
    os.environ |= ({"CUDA_VISIBLE_DEVICES": "0", **NVLINK} if gpus else {}) | dict(variables)
    try:
        server = small_engine(
            model,
            port,
            *("--load-format", "dummy", "--max-total-tokens", room, "--skip-tokenizer-init"),
            *(GRAPHS.format(requests).split() if gpus else []),
            *arguments,
            way=way,
            cpu=not gpus,
        )
    finally:
        os.environ.clear()
        os.environ |= own
    try:
        async with Probe(f"http://127.0.0.1:{port}") as probe:
            await server.ready(probe, 400)
        yield port
    finally:
        server.terminate()
        server.wait(60)


@asynccontextmanager
async def update_sender(
    port: int, weight_sync: dict[str, str], source: str, tag: str = ""
) -> AsyncIterator[WeightSender]:
    """Join a trainer and the engine at this port by a rendezvous service; yield the trainer's side.

    Parameters
    ----------
    port
        Port of the engine's server on this machine.
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
