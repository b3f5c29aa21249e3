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
from typing import Any, Protocol

import torch
import torch.distributed as dist

LOOK_SECONDS = 1.0
"""Time after which a receiver looks whether its sender lives. Most transfers have ended before."""
GROUP_PREFIX = "sluice-"
"""Of the names that our trainers give their communicators."""
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_settings = threading.Lock()
_making = 0
"""Groups that are being made without torch's watchdog."""
_before: str | None = None
"""Its setting as it was before the first of them."""
Named = list[tuple[str, torch.Tensor]]


class Onward(Protocol):
    """The way to the next engine, which gets every piece of a bucket as soon as it is here."""

    def start(self) -> None: ...
    def send(self, piece: torch.Tensor) -> None: ...
    def finish(self, data: torch.Tensor) -> None: ...


log = logging.getLogger(__name__)


def receive(names: Any, dtypes: Any, shapes: Any, group: Any, device: Any) -> Named:
    """Take part in the broadcast of a bucket; its tensors, as views of the one buffer."""
    data = memory(dtypes, shapes, device)
    take(data, group)
    look_after(group, data)
    return unpack(data, names, dtypes, shapes)


def memory(dtypes: Any, shapes: Any, device: Any) -> torch.Tensor:
    """One buffer for a bucket: 1-D uint8."""
    _tell()
    size = sum(_sizes([_kind(kind) for kind in dtypes], shapes))
    return torch.empty(size, dtype=torch.uint8, device=device)


def take(data: torch.Tensor, group: Any, piece: int = 0, onward: Onward | None = None) -> None:
    """Take part in the broadcast of a bucket, piece by piece (0: in one), each of which goes onward
    at once. NCCL: queued, and so is the loading that follows; gloo: waited for.
    """
    if onward:
        onward.start()
    for part in pieces(data, piece):
        dist.broadcast(part, src=0, group=group)
        if onward:
            onward.send(part)
    if onward:
        onward.finish(data)


def pieces(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Views of a bucket's bytes, each of `size` but the last; 0: one of all."""
    step = size or max(len(data), 1)
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]


def look_after(group: Any, data: torch.Tensor) -> None:
    """Watch the sender until what the current stream has been told to receive has come."""
    if data.is_cuda:
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        threading.Thread(target=watch, args=(arrived, group), name="sender", daemon=True).start()


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


def release(group: Any) -> threading.Thread | None:
    """Give up a communicator without waiting for its other end. The thread that aborts it, on
    GPUs: once it has ended, nothing of the communicator runs.
    """
    log.info("the communicator %s is released", group.group_name)
    dist.distributed_c10d._world.pg_group_ranks.pop(group, None)
    for table in ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag"):
        getattr(dist.distributed_c10d._world, table).pop(group, None)
    for groups in dist.distributed_c10d._world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    torch._C._distributed_c10d._unregister_process_group(group.group_name)
    if dist.distributed_c10d.is_nccl_available() and torch.cuda.is_available():
        backend = group._get_backend(torch.device("cuda"))
        aborting = threading.Thread(target=backend.abort, name="release", daemon=True)
        aborting.start()
        return aborting
    return None


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Torch's watchdog ends the process when a collective fails: right for the engine's own groups.

    Not for this one. The setting is read when a group is made, and groups may be made side by side:
    the last one puts it back. (The sender has the same; nothing of it is beside this file.)
    """
    global _making, _before
    with _settings:
        _before = _before if _making else os.environ.get(_ASYNC_ERRORS)
        _making += 1
        os.environ[_ASYNC_ERRORS] = "0"
    try:
        yield
    finally:
        with _settings:
            _making -= 1
            if not _making:
                os.environ.pop(_ASYNC_ERRORS)
            if not _making and _before is not None:
                os.environ[_ASYNC_ERRORS] = _before
