"""Weights for an engine on the same machine, which opens the bucket's memory and copies from it.

On GPUs the handle is a CUDA IPC handle with the UUID of the GPU, which the engine must see too:
trainer and engine may number their devices differently, and engine ranks on other GPUs copy across.
On the CPU it is a file of shared memory. SGLang accepts either as a pickle in
`/update_weights_from_tensor`; the pickle refers to no class of SGLang.
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

# Index of the device number in the arguments of torch's `rebuild_cuda_tensor`. SGLang accepts a
# UUID instead.
_DEVICE = 6


class Ipc(Transport):
    """Hands out handles of a bucket, which stays unchanged until the engine has answered.

    By then the engine has copied it.
    """

    in_session = True

    def __init__(self) -> None:
        # The other strategy passes open file descriptors over a socket.
        set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    async def prepare(self, peer: Peer) -> None:
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        if bucket.data.is_cuda:
            await asyncio.to_thread(torch.cuda.synchronize, bucket.data.device)

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        # torch counts the openings of a handle: each rank needs one.
        handles = [handle(bucket) for _ in range(peer.world_size)]
        await peer.control.open(
            handles, version=version if bucket.last else None, flush=flush and bucket.last
        )
        if bucket.data.is_cuda:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def abandon(self, name: str) -> None:
        return


def handle(bucket: Bucket) -> str:
    """Return a handle that opens the bucket in another process.

    It is the base64 encoding of a pickle of SGLang's `flattened_bucket`.
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
    """torch's pickler of shared tensors, with the UUID of the GPU instead of its number."""

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
    """Return the engines whose first GPU is that of trainer rank `rank`.

    Engine i runs on the GPUs of the ranks from i * `gpus_per_replica` on.
    """
    indices = (int(engine.member.name.rpartition("-")[2]) for engine in engines)
    return [
        e for e, index in zip(engines, indices, strict=True) if index * gpus_per_replica == rank
    ]
