"""Weights for an engine on the same machine: it opens the bucket's own memory, and copies out of it
what it needs.

On GPUs that is a CUDA IPC handle with the GPU's uuid, which the engine must see too (trainer and
engine may count their devices differently; ranks of the engine on its other GPUs copy across). On
the CPU it is a file of shared memory. SGLang takes either as a pickle in
`/update_weights_from_tensor`, and the pickle names nothing of SGLang.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions, set_sharing_strategy

from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.transport import Peer, Transport

_DEVICE = 6
"""Index of the device's number in the arguments of torch's `rebuild_cuda_tensor`; SGLang takes a
uuid in its place."""


class Ipc(Transport):
    """A bucket stays as it is until the engine has answered, and by then the engine
    has copied it.
    """

    in_session = True

    def __init__(self) -> None:
        # The other strategy passes open files over a socket, to whoever asks in time.
        set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    async def prepare(self, peer: Peer) -> None:
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        if bucket.data.is_cuda:
            await asyncio.to_thread(torch.cuda.synchronize, bucket.data.device)

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        handles = [
            handle(bucket) for _ in range(peer.world_size)
        ]  # torch counts who opens one: each is for one rank
        await peer.control.open(
            handles, version=version if bucket.last else None, flush=flush and bucket.last
        )
        if bucket.data.is_cuda:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def abandon(self, name: str) -> None:
        return


def handle(bucket: Bucket) -> str:
    """A handle that opens the bucket in another process: base64 of a pickle, SGLang's
    `flattened_bucket`.
    """
    start, metadata = 0, []
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        end = start + count * kind.itemsize
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=torch.Size(shape),
                dtype=kind,
                start_idx=start,
                end_idx=end,
                numel=count,
            )
        )
        start = end
    file = io.BytesIO()
    _Pickler(file).dump({"flattened_tensor": bucket.data, "metadata": metadata})
    return base64.b64encode(file.getvalue()).decode()


class _Pickler(ForkingPickler):
    """torch's route to hand a tensor to another process, with the GPU's uuid in place of
    its number.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = {**self.dispatch_table, Tensor: _reduce}


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


def colocated_with(
    engines: Sequence[pb.EngineMember], rank: int, gpus_per_replica: int
) -> list[pb.EngineMember]:
    """The engines whose first GPU is trainer rank `rank`'s: engine i has those from rank i *
    gpus_per_replica on.
    """
    return [e for e in engines if int(e.member.name.rpartition("-")[2]) * gpus_per_replica == rank]
