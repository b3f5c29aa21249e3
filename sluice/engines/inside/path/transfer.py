"""A bucket of weights is received into one buffer, from a trainer that may die meanwhile.

This file stands in the processes of every engine (a link from each plugin), with nothing of ours
beside it but that plugin. NCCL does not notice that a sender on the same machine is gone: the
engine would hang until torch's watchdog ends it after ten minutes.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

LOOK_SECONDS = 1.0
"""Time after which a receiver looks whether its sender lives. Most transfers have ended before."""
GROUP_PREFIX = "sluice-"
"""Of the names that our trainers give their communicators."""
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
Named = list[tuple[str, torch.Tensor]]
log = logging.getLogger(__name__)


def receive(names: Any, dtypes: Any, shapes: Any, group: Any, device: Any) -> Named:
    """Take part in the broadcast of a bucket; its tensors, as views of the one buffer."""
    _tell()
    kinds = [_kind(kind) for kind in dtypes]
    data = torch.empty(sum(_sizes(kinds, shapes)), dtype=torch.uint8, device=device)
    # NCCL: queued, and so is the loading that follows; gloo: waited for
    dist.broadcast(data, src=0, group=group)
    if data.is_cuda:
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        threading.Thread(target=watch, args=(arrived, group), name="sender", daemon=True).start()
    return unpack(data, names, kinds, shapes)


@cache
def _tell() -> None:
    log.info("weights are received into one buffer")


def unpack(data: torch.Tensor, names: Any, dtypes: Any, shapes: Any) -> Named:
    """The tensors of a bucket, as views of its bytes. data: 1-D uint8, without padding."""
    kinds = [_kind(kind) for kind in dtypes]
    pieces = torch.split(data, _sizes(kinds, shapes))
    tensors = (_as(*what) for what in zip(pieces, kinds, shapes, strict=True))
    return list(zip(names, tensors, strict=True))


def _kind(dtype: Any) -> torch.dtype:
    kind: torch.dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    return kind


def _sizes(kinds: list[torch.dtype], shapes: Any) -> list[int]:
    """Bytes of each tensor."""
    return [k.itemsize * torch.Size(shape).numel() for k, shape in zip(kinds, shapes, strict=True)]


def _as(piece: torch.Tensor, kind: torch.dtype, shape: Any) -> torch.Tensor:
    aligned = piece if piece.storage_offset() % kind.itemsize == 0 else piece.clone()
    return aligned.view(kind).view(torch.Size(shape))


def watch(arrived: torch.cuda.Event, group: Any) -> None:
    """Abort the communicator if the sender dies before the broadcast ends, which holds its store.

    NCCL alone: gloo notices by itself. Then the weights are partly the new ones, though the request
    has been answered; the engine stays paused, as it is out of the update, and the sender's
    successor brings it all weights over a communicator of its own.
    """
    store = group.get_group_store()
    while not arrived.query():  # type: ignore[no-untyped-call]
        time.sleep(LOOK_SECONDS)
        try:
            store.check(["sender"])
        except RuntimeError as error:
            log.error("the trainer is gone in the middle of an update: aborting it (%s)", error)
            group._get_backend(torch.device("cuda")).abort()
            return


def release(group: Any) -> None:
    """Give up a communicator whose sender was replaced, without waiting for that sender."""
    log.info("the older communicator %s is released", group.group_name)
    dist.distributed_c10d._world.pg_group_ranks.pop(group, None)
    for table in ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag"):
        getattr(dist.distributed_c10d._world, table).pop(group, None)
    for groups in dist.distributed_c10d._world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    torch._C._distributed_c10d._unregister_process_group(group.group_name)
    if dist.distributed_c10d.is_nccl_available() and torch.cuda.is_available():
        backend = group._get_backend(torch.device("cuda"))
        threading.Thread(target=backend.abort, name="release", daemon=True).start()


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Torch's watchdog ends the process when a collective fails: right for the engine's own groups.

    Not for this one. The setting is read when a group is made. (The sender has the same; nothing of
    it is beside this file.)
    """
    before = os.environ.get(_ASYNC_ERRORS)
    os.environ[_ASYNC_ERRORS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_ASYNC_ERRORS)
        if before is not None:
            os.environ[_ASYNC_ERRORS] = before
